"""Every implementation that compare.py measures, as its users would set it up for this job.

A peer is used so: ``micro_batch`` K times, then ``end_step``, for any K; ``close`` at the end. ``updating()`` are the
seconds spent in the update of weights itself, ``wire_bytes()`` what this rank has received from others, both since the
beginning.

bfloat16 means for all of them: micro-batches computed in bf16, FP32 master weights and state, each by the means it
offers. shardstep, FSDP2 and DeepSpeed hold and gather bf16 weights; DDP and ZeroRedundancyOptimizer hold FP32 weights
and compute under autocast. Gradients are summed over micro-batches and ranks in FP32, but for DeepSpeed's, which by its
default are bf16 and half the bytes: to its advantage. ``local`` is a bf16 model without masters.
"""

import os
import socket
import struct
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from models import Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LR = 1e-4


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def received_over_tcp() -> int:
    """Bytes that this process has received over the TCP connections it has open, Gloo's among them."""
    received_offset, struct_bytes = 128, 232  # of tcpi_bytes_received in struct tcp_info
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, struct_bytes)
        except OSError:  # closed meanwhile, or not TCP
            continue
        if len(info) >= received_offset + 8:
            total += struct.unpack_from("Q", info, received_offset)[0]
    return total


class Peer:
    """What most peers have in common: a torch optimizer that is timed by hooks, and Gloo over TCP."""

    model: Any
    optimizer: Any

    @staticmethod
    def prepare() -> None:
        """What belongs to no one model: before memory is looked at."""

    def __init__(self, workload: Workload, dtype: torch.dtype):
        self.workload, self.dtype = workload, dtype
        self.low = dtype != torch.float32
        self.update_seconds = 0.0

    def time_update(self, optimizer: torch.optim.Optimizer) -> None:
        def begins(*_: Any) -> None:
            self.update_seconds -= time.perf_counter()

        def ends(*_: Any) -> None:
            self.update_seconds += time.perf_counter()

        optimizer.register_step_pre_hook(begins)
        optimizer.register_step_post_hook(ends)

    def around(self, last: bool) -> AbstractContextManager:
        return nullcontext()

    def micro_batch(self, inputs: torch.Tensor, targets: torch.Tensor, last: bool) -> None:
        with self.around(last):
            self.workload.loss(self.model(inputs), targets).backward()

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Gives up what would outlive the peer."""

    def updating(self) -> float:
        return self.update_seconds

    def wire_bytes(self) -> int:
        return received_over_tcp()

    def cast(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs


class Local(Peer):
    """The same micro-batches, gradients dropped as the others drop them, and one barrier: no communication, no
    update."""

    def __init__(self, workload: Workload, dtype: torch.dtype):
        super().__init__(workload, dtype)
        self.model = workload.build().to(self.dtype)

    def micro_batch(self, inputs: torch.Tensor, targets: torch.Tensor, last: bool) -> None:
        super().micro_batch(self.cast(inputs), targets, last)

    def end_step(self) -> None:
        self.model.zero_grad()
        dist.barrier()


class Shardstep(Peer):
    def __init__(self, workload: Workload, dtype: torch.dtype):
        import shardstep

        super().__init__(workload, dtype)
        model = workload.build()
        low = self.dtype if self.low else None
        self.model, self.optimizer = shardstep.wrap(model, adamw(model), param_dtype=low)

    def around(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.model.no_sync()

    def close(self) -> None:
        self.model.unwrap()

    def updating(self) -> float:
        return self.model.stats()["total"]["update_seconds"]

    def wire_bytes(self) -> int:
        return self.model.stats()["total"]["wire_bytes"] + super().wire_bytes()


class DDP(Peer):
    def __init__(self, workload: Workload, dtype: torch.dtype):
        super().__init__(workload, dtype)
        self.model = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True)
        self.make_optimizer()

    def make_optimizer(self) -> None:
        self.optimizer = adamw(self.model)
        self.time_update(self.optimizer)

    def around(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.model.no_sync()

    def micro_batch(self, inputs: torch.Tensor, targets: torch.Tensor, last: bool) -> None:
        with self.around(last):
            with torch.autocast("cpu", self.dtype, enabled=self.low):
                output = self.model(inputs)
            self.workload.loss(output, targets).backward()


class ZeRO(DDP):
    """DDP's gradients, torch's ZeroRedundancyOptimizer."""

    def make_optimizer(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
        )
        self.time_update(self.optimizer.optim)


class FSDP2(Peer):
    """As torch's tutorial has it: every micro-batch gathers and reduces."""

    options: dict[str, Any] = {}

    def __init__(self, workload: Workload, dtype: torch.dtype):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(workload, dtype)
        self.model = workload.build()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype if self.low else None, reduce_dtype=torch.float32)
        for unit in (*self.workload.units(self.model), self.model):
            fully_shard(unit, mesh=mesh, mp_policy=policy, **self.options)
        self.optimizer = adamw(self.model)
        self.time_update(self.optimizer)


class FSDP2Best(FSDP2):
    """Weights stay whole from the first forward on, gradients until the last backward."""

    options = {"reshard_after_forward": False}

    def around(self, last: bool) -> AbstractContextManager:
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        return nullcontext()


class DeepSpeed(Peer):
    """Communication in buckets that overlaps with the backward, where the device lets it; all-reduce, which Gloo does
    faster than DeepSpeed's reductions to one rank each: the best of what was tried here."""

    options = {"overlap_comm": True, "reduce_scatter": False, "reduce_bucket_size": 6_000_000}
    stage: int

    @staticmethod
    def prepare() -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    def __init__(self, workload: Workload, dtype: torch.dtype):
        import deepspeed

        super().__init__(workload, dtype)
        model = workload.build()
        config = {
            "train_micro_batch_size_per_gpu": 1,  # it only counts samples
            "zero_optimization": {"stage": self.stage, **self.options},
            "bf16": {"enabled": self.low},
            "steps_per_print": 2**31,
        }
        self.model, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
        self.time_update(self.optimizer.optimizer)

    def micro_batch(self, inputs: torch.Tensor, targets: torch.Tensor, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(self.workload.loss(self.model(self.cast(inputs)), targets))

    def end_step(self) -> None:
        self.model.step()  # and zero_grad

    def close(self) -> None:
        self.model.destroy()


class DeepSpeed1(DeepSpeed):
    stage = 1


class DeepSpeed2(DeepSpeed):
    stage = 2


PEERS: dict[str, type[Peer]] = {
    "local": Local,
    "shardstep": Shardstep,
    "ddp": DDP,
    "zero": ZeRO,
    "fsdp2": FSDP2,
    "fsdp2-best": FSDP2Best,
    "deepspeed-1": DeepSpeed1,
    "deepspeed-2": DeepSpeed2,
}
