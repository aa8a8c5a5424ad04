"""Trains a byte-level GPT on the Python standard library's sources, on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_text.py
    python examples/train_text.py --nproc-per-node 2 --impl ddp        (starts torchrun by itself)

``--impl`` trains the same model on the same bytes in the same order with shardstep, torch's DistributedDataParallel
or torch's FSDP2, so the three can be laid side by side. With ``--dtype bfloat16`` each does what its users do:
shardstep and FSDP2 keep FP32 master weights, compute in bfloat16 and reduce in FP32; DDP runs under torch.autocast.

With ``--save-every`` a run outlives its processes: torchrun starts the ranks again, and they go on where they were.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_text.py --save-every 50 --resume auto

It may go on with another number of ranks; as long as ranks times ``--accumulate`` is the same, so are its batches.
"""

import argparse
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus, baselines, load_corpus
from gpt import GPT, GPTConfig
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from tqdm import tqdm

PROMPT = b"class Reader:\n    def __init__(self, "


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=["shardstep", "ddp", "fsdp2"], default="shardstep")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks to start, when not under torchrun")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per step and rank")
    parser.add_argument("--batch", type=int, default=4, help="windows of text per micro-batch")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/train_text"), help="folder for the loss curve")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (shardstep only); 0: none")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while the training goes on")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--resume", choices=["no", "auto"], default="no", help="auto: go on from the newest, if there is one")
    args = parser.parse_args()
    if args.impl != "shardstep" and (args.save_every or args.resume != "no"):
        parser.error("--save-every and --resume are for --impl shardstep")
    if args.device == "cuda":
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", args.nproc_per_node)), torch.cuda.device_count()
        if gpus == 0:
            built = "" if torch.version.cuda else ", built without CUDA,"
            parser.error(f"--device cuda: torch {torch.__version__}{built} finds no GPU here; use --device cpu")
        if ranks > gpus:
            parser.error(f"--device cuda: {ranks} ranks need a GPU each, and there are {gpus}; use --nproc-per-node {gpus}")
    return args


def relaunch_through_torchrun(ranks: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def start_ranks(args: argparse.Namespace) -> torch.device:
    """Joins the process group and gives this rank's device."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if args.impl == "shardstep":
        import shardstep

        shardstep.init()
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def distribute(model: GPT, args: argparse.Namespace, device: torch.device):
    """The only part that depends on the implementation."""

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    low_precision = torch.bfloat16 if args.dtype == "bfloat16" else None
    if args.impl == "shardstep":
        import shardstep

        return shardstep.wrap(model, adamw(model), param_dtype=low_precision)

    if args.impl == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, adamw(model)

    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model, adamw(model)


def synchronise_only(model, last_micro_batch: bool):
    """Round each micro-batch: gradients go over the wire after the last one of a step only."""
    if hasattr(model, "no_sync"):
        return nullcontext() if last_micro_batch else model.no_sync()
    model.set_requires_gradient_sync(last_micro_batch)  # FSDP2's spelling
    return nullcontext()


def cosine_schedule(optimizer, steps: int):
    warm_up = max(1, min(30, steps // 4))
    rise = LinearLR(optimizer, start_factor=0.1, total_iters=warm_up)
    fall = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up))
    return SequentialLR(optimizer, [rise, fall], milestones=[warm_up])


class Batches:
    """One seeded stream of micro-batches for all ranks, of which this rank takes its part."""

    def __init__(self, corpus: Corpus, args: argparse.Namespace, device: torch.device):
        self.corpus, self.args, self.device = corpus, args, device
        self.generator = torch.Generator().manual_seed(args.seed)

    def next_step(self):
        args = self.args
        last_start = len(self.corpus.train) - args.context - 1
        shape = (args.accumulate, dist.get_world_size(), args.batch)
        starts = torch.randint(last_start, shape, generator=self.generator)[:, dist.get_rank()]
        for micro_batch in starts:
            inputs, targets = self.corpus.windows(micro_batch, args.context)
            yield inputs.to(self.device), targets.to(self.device)


@dataclass
class Progress:
    """Where the run is, besides the weights and the optimizer."""

    step: int = 0
    losses: list[float] = field(default_factory=list)  # bits per byte, rank 0
    held_out: dict[int, float] = field(default_factory=dict)  # step: bits per byte
    training_seconds: float = 0.0


class Checkpoints:
    """Saves and restores all that the next step depends on."""

    def __init__(self, args: argparse.Namespace, model, optimizer, scheduler, batches: Batches, progress: Progress):
        self.args, self.folder = args, args.out / "checkpoints"
        self.pair, self.scheduler, self.batches, self.progress = (model, optimizer), scheduler, batches, progress

    def restore(self) -> bool:
        from shardstep import checkpoint

        if self.args.resume == "no" or checkpoint.latest(self.folder) is None:
            return False
        extra = checkpoint.load(self.folder, *self.pair).extra
        self.scheduler.load_state_dict(extra["scheduler"])
        self.batches.generator.set_state(extra["batches"])
        vars(self.progress).update(extra["progress"])
        return True

    def save(self) -> None:
        """After the steps that are to be saved."""
        step, args = self.progress.step, self.args
        if not args.save_every or (step % args.save_every and step != args.steps):
            return
        from shardstep import checkpoint

        extra = {
            "scheduler": self.scheduler.state_dict(),
            "batches": self.batches.generator.get_state(),
            "progress": vars(self.progress),
        }
        saved = checkpoint.save(self.folder, *self.pair, step=step, extra=extra, keep=args.keep, async_=args.async_save)
        if step == args.steps:
            saved.result()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_bits(model, inputs: torch.Tensor, targets: torch.Tensor, batch: int, autocast) -> float:
    """Bits per byte over all windows; each rank measures its part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=inputs.device)
    batches = range(0, len(inputs) // world, batch)
    inputs, targets = inputs[rank::world], targets[rank::world]
    for start in batches:  # as many on every rank: FSDP2 communicates in forward
        with autocast():
            logits = model(inputs[start : start + batch])
        total += cross_entropy(logits, targets[start : start + batch]).double()
    dist.all_reduce(total)
    return total.item() / (len(batches) * world) / math.log(2)


@torch.no_grad()
def sample(model, prompt: bytes, length: int, context: int, device: torch.device, seed: int) -> bytes:
    """Continues the prompt. All ranks draw the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        tokens = torch.tensor([text[-context:]], device=device)
        probabilities = torch.softmax(model(tokens)[0, -1].float().cpu() / 0.8, dim=0)
        text.append(torch.multinomial(probabilities, 1, generator=generator).item())
    return bytes(text)


def printable(text: bytes) -> str:
    """Bytes that a model made up, safe to show on a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.decode(errors="replace"))


def plot(path: Path, title: str, losses: list[float], held_out: dict[int, float], known: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.6, linewidth=1, label="train, rank 0")
    axes.plot(list(held_out), list(held_out.values()), "o-", color="tab:red", markersize=4, label="held-out")
    for (name, bits), style in zip(known.items(), (":", "--"), strict=True):
        axes.axhline(bits, color="0.35", linestyle=style, label=f"byte {name}, {bits:.2f}")
    axes.set(xlabel="optimizer step", ylabel="bits per byte", title=title, ylim=(0, 8.2))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    args = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        relaunch_through_torchrun(args.nproc_per_node)
    device = start_ranks(args)
    rank, world = dist.get_rank(), dist.get_world_size()

    def say(*words):
        if rank == 0:
            tqdm.write(" ".join(map(str, words)))

    def autocast():
        enabled = args.impl == "ddp" and args.dtype == "bfloat16"
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)

    corpus = load_corpus()
    windows = 512 // (world * args.batch) * world * args.batch
    held_out_inputs, held_out_targets = corpus.held_out_windows(windows, args.context)
    known = baselines(corpus.train, held_out_inputs, held_out_targets)
    held_out_inputs, held_out_targets = held_out_inputs.to(device), held_out_targets.to(device)

    torch.manual_seed(args.seed)
    plain = GPT(GPTConfig(context=args.context, layers=args.layers, width=args.width, heads=args.heads)).to(device)
    parameters = sum(p.numel() for p in plain.parameters())
    model, optimizer = distribute(plain, args, device)
    scheduler = cosine_schedule(optimizer, args.steps)
    batches = Batches(corpus, args, device)
    step_bytes = world * args.accumulate * args.batch * args.context
    say(f"{args.impl}, W = {world}, {args.dtype}, {parameters:,} parameters, {step_bytes:,} bytes of text per step")
    say(f"text: {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")

    run = Progress()
    checkpoints = Checkpoints(args, model, optimizer, scheduler, batches, run)
    if checkpoints.restore():
        say(f"going on after step {run.step}")
    steps = range(run.step + 1, args.steps + 1)
    progress = tqdm(steps, initial=run.step, total=args.steps, disable=rank != 0, unit="step", mininterval=0.5)
    for step in progress:
        started = time.perf_counter()
        total = torch.zeros((), device=device)
        for i, (inputs, targets) in enumerate(batches.next_step(), start=1):
            with synchronise_only(model, last_micro_batch=i == args.accumulate):
                with autocast():
                    logits = model(inputs)
                loss = cross_entropy(logits, targets) / args.accumulate
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.step = step
        run.losses.append(total.item() / math.log(2))
        seconds = time.perf_counter() - started
        run.training_seconds += seconds

        postfix = {"bits/byte": f"{run.losses[-1]:.3f}", "tokens/s": f"{step_bytes / seconds:,.0f}"}
        if args.impl == "shardstep":
            last = model.stats()["step"]
            postfix["wire MB"] = f"{last['wire_bytes'] / 1e6:.2f}"
            postfix["exposed ms"] = f"{last['exposed_seconds'] * 1e3:.2f}"
        progress.set_postfix(postfix, refresh=False)
        if step % max(1, args.steps // 10) == 0 or step == args.steps:
            run.held_out[step] = held_out_bits(model, held_out_inputs, held_out_targets, args.batch, autocast)
            say(f"step {step:5d}: held-out {run.held_out[step]:.3f} bits per byte")
        checkpoints.save()

    with autocast():
        text = sample(model, PROMPT, 400, args.context, device, args.seed)
    if rank == 0:
        curve = args.out / f"{args.impl}-{args.dtype}.png"
        plot(curve, f"{args.impl}, W = {world}, {args.dtype}, {parameters:,} parameters", run.losses, run.held_out, known)
        say(f"\nA continuation of {PROMPT!r}:\n\n{printable(text)}\n")
        say(f"held-out bits per byte: {run.held_out[args.steps]:.3f}")
        for name, bits in known.items():
            say(f"    byte {name:8s} {bits:.3f}")
        mean_step = run.training_seconds / args.steps
        speed = f"{mean_step * 1e3:.1f} ms per step, {step_bytes / mean_step:,.0f} tokens/s"
        say(f"{run.training_seconds:.1f} s of training, {speed}")
        say(f"loss curve: {curve}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
