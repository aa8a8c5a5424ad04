"""One rank of one part of gpu.py. ``--device cpu`` is for trying the program: what it measures then says nothing about GPUs."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ROOT, report
from torch import nn

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
from cuda_kernels import CudaKernels, adam_tail, build_for_host  # noqa: E402, F401
from gpt import GPT, GPTConfig  # noqa: E402

LIBRARY = ROOT / "python/shardstep/_cuda.so"
WARM_UP = 3
ADAMW = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

#: GPT-2's shapes, with its tied head. The vocabulary is rounded up to a multiple of 128, as is usual. tiny: for the tests.
GPT2 = {
    "124M": GPTConfig(vocabulary=50304, context=1024, layers=12, width=768, heads=12),
    "350M": GPTConfig(vocabulary=50304, context=1024, layers=24, width=1024, heads=16),
    "1.3B": GPTConfig(vocabulary=50304, context=1024, layers=24, width=2048, heads=16),
    "tiny": GPTConfig(vocabulary=256, context=16, layers=2, width=32, heads=2),
}


class Clock:
    """Seconds of work on a device: by its events, so that the host's time is not counted where it runs ahead."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"

    def __call__(self, work: Callable[[], None]) -> float:
        if not self.gpu:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


# -- the update ---------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Parameters as an optimizer sees them: FP32 masters, their gradients, and low-precision weights or None."""

    masters: list[torch.Tensor]
    grads: list[torch.Tensor]
    low: list[torch.Tensor | None]


PIECE = 1 << 20  # elements of a parameter


def make_weights(elements: int, low: bool, device: torch.device) -> Weights:
    sizes = [min(PIECE, elements - begin) for begin in range(0, elements, PIECE)]
    masters = [torch.randn(n, device=device) for n in sizes]
    grads = [torch.randn(n, device=device) for n in sizes]
    return Weights(masters, grads, [m.bfloat16() if low else None for m in masters])


def by_shardstep(kernels: CudaKernels, w: Weights) -> Callable[[], None]:
    states = [[torch.zeros_like(m) for _ in range(2)] for m in w.masters]
    steps = torch.zeros(len(w.masters), device=kernels.device)
    workspace = torch.empty(len(w.masters), 64, dtype=torch.uint8, device=kernels.device)
    skip, clip = kernels.scalar(0, torch.int32), kernels.scalar(1.0)
    beta1, beta2 = ADAMW["betas"]
    options = {**{k: v for k, v in ADAMW.items() if k != "betas"}, "beta1": beta1, "beta2": beta2, "decoupled": 1}
    pieces = [
        {"param": m, "grad": g, "low": low, "state": s, "step": step, "tail": adam_tail(m.numel(), 0, m.numel())}
        for m, g, low, s, step in zip(w.masters, w.grads, w.low, states, steps)
    ]
    return lambda: kernels.update("adam", pieces, [options], clip=clip, skip=skip, workspace=workspace)


def by_torch(w: Weights) -> Callable[[], None]:
    """Fused AdamW on the masters, and a copy of them into the low-precision weights."""
    parameters = [nn.Parameter(m) for m in w.masters]
    for parameter, grad in zip(parameters, w.grads):
        parameter.grad = grad
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

    def update() -> None:
        optimizer.step()
        if w.low[0] is not None:
            with torch.no_grad():
                torch._foreach_copy_(w.low, parameters)

    return update


def update(args: argparse.Namespace, device: torch.device) -> dict:
    """Seconds of one AdamW update, and of a copy of as many bytes as it has to move."""
    kernels = CudaKernels(args.library, str(device))
    found = {}
    for name, low in (("float32", False), ("bfloat16", True)):
        moved = (32 if low else 28) * args.elements  # weights and two moments read and written, gradient read; bf16: as well
        source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
        calls = {
            "shardstep": by_shardstep(kernels, make_weights(args.elements, low, device)),
            "torch fused": by_torch(make_weights(args.elements, low, device)),
            "copy": lambda source=source, target=target: target.copy_(source),
        }
        clock = Clock(device)
        times: dict[str, list[float]] = {call: [] for call in calls}
        for repetition in range(args.repetitions + WARM_UP):
            for call, work in calls.items():
                seconds = clock(work)
                if repetition >= WARM_UP:
                    times[call].append(seconds)
        found[name] = {"bytes": moved, "seconds": times}
    return found


# -- steps --------------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def shardstep_peer(model: GPT, device: torch.device) -> tuple[Any, Any]:
    import shardstep

    return shardstep.wrap(model, adamw(model), param_dtype=torch.bfloat16)


def ddp_peer(model: GPT, device: torch.device) -> tuple[Any, Any]:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, adamw(model)


def fsdp2_peer(model: GPT, device: torch.device) -> tuple[Any, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model, adamw(model)


#: With FP32 master weights and computing in bf16, each by the means it offers; DDP by autocast.
PEERS = {"shardstep": shardstep_peer, "ddp": ddp_peer, "fsdp2": fsdp2_peer}


def build(config: GPTConfig, device: torch.device) -> GPT:
    with device:
        model = GPT(config)
    model.head.weight = model.token.weight
    return model


def steps(args: argparse.Namespace, device: torch.device) -> dict:
    """Seconds of whole steps, and the most memory that the peer had."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    config = GPT2[args.model]
    torch.manual_seed(0)
    model, optimizer = PEERS[args.peer](build(config, device), device)
    tokens = torch.randint(config.vocabulary, (args.accumulate, args.batch, config.context + 1), device=device)

    def context(last: bool) -> contextlib.AbstractContextManager:
        if hasattr(model, "no_sync"):
            return contextlib.nullcontext() if last else model.no_sync()
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def step() -> None:
        for i, micro_batch in enumerate(tokens, start=1):
            with context(last=i == args.accumulate):
                with torch.autocast(device.type, torch.bfloat16, enabled=args.peer == "ddp"):
                    logits = model(micro_batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), micro_batch[:, 1:].flatten())
                (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    clock = Clock(device)
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.repetitions):
        dist.barrier()
        seconds.append(clock(step))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": seconds, "peak_bytes": peak, "tokens": args.accumulate * args.batch * config.context}


PARTS = {"update": update, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="the CUDA kernels")
    parser.add_argument("--elements", type=int)
    parser.add_argument("--model", choices=GPT2)
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--accumulate", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repetitions", type=int)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    report(PARTS[args.part](args, device))


if __name__ == "__main__":
    main()
