"""One rank of one peer, started by compare.py: the times of its steps at several points, or its peak memory there."""

import argparse
import functools
import gc
import importlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import pss, release_memory, report
from models import WORKLOADS, Workload
from peers import PEERS, Peer
from torch import nn

WARM_UP = 3  # steps of a new model, of one micro-batch: state is allocated, buckets are settled
MOST = 10  # measured steps of a point

Batches = "list[tuple[torch.Tensor, torch.Tensor]]"


def step(peer: Peer, batches: Batches) -> None:
    for i, (inputs, targets) in enumerate(batches, start=1):
        peer.micro_batch(inputs, targets, last=i == len(batches))
    peer.end_step()


def timed(peer: Peer, batches: Batches) -> tuple[float, float]:
    """Seconds of a step, and of the update in it."""
    dist.barrier()
    updated, started = peer.updating(), time.perf_counter()
    step(peer, batches)
    return time.perf_counter() - started, peer.updating() - updated


def affordable_steps(seconds: float, one: float) -> int:
    """How many steps fit into so many seconds; the same on every rank."""
    slowest = torch.tensor(one)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return min(MOST, max(1, math.floor(seconds / slowest.item())))


def measure(peer: Peer, batches: Batches, seconds: float) -> dict:
    warm_up, _ = timed(peer, batches)
    steps = affordable_steps(seconds, warm_up)
    wire = peer.wire_bytes()
    times, updates = zip(*(timed(peer, batches) for _ in range(steps)))
    return {"seconds": times, "update_seconds": updates, "wire_bytes": (peer.wire_bytes() - wire) / steps}


def measure_model(make_peer: Callable[[], Peer], workload, accumulates: list[int], seconds: float) -> list[dict]:
    peer = make_peer()
    for _ in range(WARM_UP):
        step(peer, [workload.micro_batch()])
    found = [measure(peer, [workload.micro_batch() for _ in range(k)], seconds) for k in accumulates]
    peer.close()
    return found


def import_what_torch_imports_late() -> None:
    """Ordinary steps of a small model, so that modules and caches are not taken for the peer's memory."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(64, 64).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.randn(2, 64, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    importlib.import_module("torch._dynamo")


class Highest:
    """The highest of ``pss()`` while the block runs."""

    def __enter__(self) -> "Highest":
        self.value, self._over = pss(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.value = max(self.value, pss())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def peak_memory(make_peer: Callable[[], Peer], batches: Batches) -> dict:
    dist.barrier()
    before = pss()
    peer = make_peer()
    parameters = sum(p.numel() for p in peer.model.parameters())
    for _ in range(2):  # the optimizer's state exists from the first step on
        step(peer, batches)
    dist.barrier()
    with Highest() as highest:
        for _ in range(3):
            step(peer, batches)
    dist.barrier()
    peer.close()
    return {"peak_bytes": highest.value - before, "parameters": parameters}


def activations(workload: Workload, dtype: torch.dtype, batches: Batches) -> int:
    """The most that forward and backward of the bare module need for a moment, each gradient freed as soon as it is made."""
    model = workload.build().to(dtype)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    release_memory()
    dist.barrier()
    before = pss()
    with Highest() as highest:
        for _ in range(2):
            for inputs, targets in batches:
                inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
                workload.loss(model(inputs), targets).backward()
    dist.barrier()
    return highest.value - before


def memory_of_model(make_peer: Callable[[], Peer], workload: Workload, dtype: torch.dtype) -> dict:
    """Beyond activations, of which there are next to none: two micro-batches of one sample of few tokens."""
    batches = [workload.micro_batch() for _ in range(2)]
    batches = [tuple(t[:1, :8] if t.dtype == torch.int64 else t[:1] for t in batch) for batch in batches]
    transient = activations(workload, dtype, batches)
    gc.collect()
    release_memory()
    found = peak_memory(make_peer, batches)
    return {**found, "peak_bytes": found["peak_bytes"] - transient, "activation_bytes": transient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--points", type=json.loads, required=True, help="[[model, dtype, micro-batches], ...]")
    parser.add_argument("--seconds", type=float, required=True, help="of measured steps of a point, about")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    peer = PEERS[args.peer]
    dist.init_process_group("gloo")
    peer.prepare()
    if args.memory:
        import_what_torch_imports_late()
    found = []
    for (model, dtype), points in itertools.groupby(args.points, key=lambda point: point[:2]):
        workload = WORKLOADS[model]
        torch.manual_seed(0)
        make_peer = functools.partial(peer, workload, getattr(torch, dtype))
        if args.memory:
            found.append(memory_of_model(make_peer, workload, getattr(torch, dtype)))
        else:
            found += measure_model(make_peer, workload, [k for _, _, k in points], args.seconds)
        gc.collect()
        release_memory()
    report({"points": found})


if __name__ == "__main__":
    main()
