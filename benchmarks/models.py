"""The models that compare.py trains, with a micro-batch and a loss for each."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT, GPTConfig  # noqa: E402


@dataclass(frozen=True)
class Workload:
    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], Iterator[nn.Module]]  # what FSDP2 shards one by one
    micro_batch: Callable[[], "tuple[torch.Tensor, torch.Tensor]"]  # inputs, targets
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _gpt(config: GPTConfig, batch: int) -> Workload:
    def micro_batch():
        tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(
        build=lambda: GPT(config),
        units=lambda model: iter(model.blocks),
        micro_batch=micro_batch,
        loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()),
    )


def _layers(build: Callable[[], nn.Sequential], width: int, batch: int) -> Workload:
    return Workload(
        build=build,
        units=lambda model: model.children(),
        micro_batch=lambda: (torch.randn(batch, width), torch.randn(batch, width)),
        loss=lambda output, targets: F.mse_loss(output.float(), targets),
    )


def _mlp(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(depth)])


def _many(width: int, blocks: int, depth: int) -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())])

    return nn.Sequential(*[block() for _ in range(blocks)])


#: gpt: 27 M parameters, compute and communication of one order. mlp: 17 M parameters in four matrices and next to no
#: compute. many: 2,000 tensors, 2 M parameters. tiny: for the tests.
#: A micro-batch of the GPT is 64 tokens: a step's communication is not to drown in the noise of its computing.
WORKLOADS = {
    "gpt": _gpt(GPTConfig(context=32, layers=8, width=528, heads=8), batch=2),
    "mlp": _layers(lambda: _mlp(2048, 4), width=2048, batch=4),
    "many": _layers(lambda: _many(44, 20, 50), width=44, batch=4),
    "tiny": _gpt(GPTConfig(context=16, layers=2, width=32, heads=2), batch=1),
}
