"""One rank of one peer, started by compare.py: the times of its steps, or its peak memory."""

import argparse
import importlib
import threading
import time

import torch
import torch.distributed as dist
from common import pss, report
from models import WORKLOADS
from peers import PEERS, Peer
from torch import nn

WARM_UP = 3


def step(peer: Peer, batches: list) -> None:
    for i, (inputs, targets) in enumerate(batches, start=1):
        peer.micro_batch(inputs, targets, last=i == len(batches))
    peer.end_step()


def measure(peer: Peer, batches: list, steps: int) -> dict:
    for _ in range(WARM_UP):
        step(peer, batches)
    wire = peer.wire_bytes()
    seconds, updates = [], []
    for _ in range(steps):
        dist.barrier()
        updated, started = peer.updating(), time.perf_counter()
        step(peer, batches)
        seconds.append(time.perf_counter() - started)
        updates.append(peer.updating() - updated)
    return {"seconds": seconds, "update_seconds": updates, "wire_bytes": (peer.wire_bytes() - wire) / steps}


def import_what_torch_imports_late() -> None:
    """An ordinary step of a small model, so that modules and caches are not taken for the peer's memory."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
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


def peak_memory(make_peer, batches: list) -> dict:
    import_what_torch_imports_late()
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
    return {"peak_bytes": highest.value - before, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--accumulate", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if args.peer.startswith("deepspeed"):
        import deepspeed  # noqa: F401 - before memory is looked at
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload = WORKLOADS[args.model]

    def make_peer() -> Peer:
        return PEERS[args.peer](workload, args.accumulate, getattr(torch, args.dtype))

    batches = [workload.micro_batch() for _ in range(args.accumulate)]
    if args.memory:  # next to no activations: one sample of few tokens
        small = [tuple(t[:1, :8] if t.dtype == torch.int64 else t[:1] for t in batch) for batch in batches]
        result = peak_memory(make_peer, small)
    else:
        result = measure(make_peer(), batches, args.steps)
    report(result)


if __name__ == "__main__":
    main()
