"""One rank of one part of update.py."""

import argparse
import contextlib
import copy
import os
import time

import common
import native
import torch
from models import WORKLOADS, Workload
from torch import nn

WINDOW = 4  # micro-batches


class Tensors(nn.Module):
    """As many tensors as another model has, and next to nothing to compute: what hooks cost does not drown in it."""

    def __init__(self, count: int = 2000):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(16) for _ in range(count))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale * torch.stack(list(self.parts)).sum(0)


TENSORS = Workload(
    build=Tensors,
    units=lambda model: iter(()),
    micro_batch=lambda: (torch.randn(16), torch.randn(16)),
    loss=nn.functional.mse_loss,
)
WORKLOADS = {**WORKLOADS, "tensors": TENSORS}


def update(args: argparse.Namespace) -> dict:
    """Seconds of one AdamW update of ``args.elements`` by each implementation, and of the streaming loop."""
    library = native.load(args.library)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = native.Ranks(library, os.environ["BENCH_NONCE"], rank, world, 1, 1.0, False)  # for its barrier
    n, steps = args.elements, 0
    ours, plain = [native.Array(n) for _ in range(4)], [native.Array(n) for _ in range(4)]

    def by_torch(**options: bool):
        parameters = [nn.Parameter(torch.zeros(n // 8)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return torch.optim.AdamW(parameters, **options).step

    def by_shardstep() -> None:
        nonlocal steps
        steps += 1
        library.bench_adam(*(array.address for array in ours), float(steps), n)

    calls = {
        "shardstep": by_shardstep,
        "torch fused": by_torch(fused=True),
        "torch foreach": by_torch(foreach=True),
        "limit": lambda: library.bench_stream_update(*(array.address for array in plain), n),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(args.repetitions + 2):
        for name, call in calls.items():
            ranks("barrier")
            started = time.perf_counter()
            call()
            if repetition >= 2:
                times[name].append(time.perf_counter() - started)
    ranks.close()
    return times


def micro_batches(args: argparse.Namespace) -> dict:
    """CPU seconds of a micro-batch (mean over a window) of the bare module, of one with an empty Python hook per parameter,
    and of one that is wrapped, under no_sync. What ends the window is not measured. One thread computes, so its CPU time is
    the time that it takes where nobody else wants the core."""
    import shardstep

    workload = WORKLOADS[args.model]
    bare = workload.build()
    hooked, wrapped = copy.deepcopy(bare), copy.deepcopy(bare)
    for parameter in hooked.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    shardstep.wrap(wrapped, torch.optim.AdamW(wrapped.parameters()))
    batches = [workload.micro_batch() for _ in range(WINDOW)]
    variants = {
        "bare": (bare, contextlib.nullcontext, lambda: bare.zero_grad()),
        "hooked in Python": (hooked, contextlib.nullcontext, lambda: hooked.zero_grad()),
        "wrapped": (wrapped, wrapped.no_sync, wrapped.abort_window),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(args.repetitions + 2):
        for name, (model, context, drop) in variants.items():
            started = time.process_time()
            for inputs, targets in batches:
                with context():
                    workload.loss(model(inputs), targets).backward()
            seconds = (time.process_time() - started) / WINDOW
            drop()
            if repetition >= 2:
                times[name].append(seconds)
    return {"seconds": times, "parameters": len(list(bare.parameters()))}


def wrap(args: argparse.Namespace) -> dict:
    """Time and memory of wrap() for ``args.elements`` parameters of 16 elements each."""
    import shardstep

    small = nn.Linear(2, 2)
    shardstep.wrap(small, torch.optim.AdamW(small.parameters(), fused=True))  # imports
    model = nn.Module()
    parts = range(args.elements // 50)
    model.parts = nn.ModuleList(nn.ParameterList(torch.zeros(16) for _ in range(50)) for _ in parts)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before, started = common.pss(), time.perf_counter()
    shardstep.wrap(model, optimizer)
    return {"seconds": time.perf_counter() - started, "bytes": common.pss() - before}


PARTS = {"update": update, "micro_batches": micro_batches, "wrap": wrap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--library", help="native.py's")
    parser.add_argument("--elements", type=int)
    parser.add_argument("--model", choices=WORKLOADS)
    parser.add_argument("--repetitions", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    common.report(PARTS[args.part](args))


if __name__ == "__main__":
    main()
