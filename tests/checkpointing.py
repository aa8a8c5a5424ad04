"""A model with every kind of parameter, trained on the same data at any number of ranks: what the checkpoint tests save."""

import shardstep
import torch
from torch import nn


class Odd(nn.Module):
    """Odd shapes, fewer elements than ranks, frozen, tied, 0-dim, empty and complex parameters, and one in channels_last. The
    last four are nothing for FSDP2; ``plain`` has others in their place."""

    def __init__(self, seed, plain=False):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 53)
        self.frozen = nn.Linear(53, 5)
        self.second = nn.Linear(53, 7, bias=False)
        self.tied = nn.Linear(7, 53, bias=False)
        self.tied_again = nn.Linear(7, 53, bias=False)
        self.tied_again.weight = self.tied.weight
        self.conv = nn.Conv2d(3, 11, 3)
        if not plain:
            self.conv.to(memory_format=torch.channels_last)
        self.pair = nn.Parameter(torch.randn(2))
        self.scale = nn.Parameter(torch.tensor([1.5] if plain else 1.5))
        self.empty = nn.Parameter(torch.ones(1, 3) if plain else torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(5, 3, dtype=torch.float32 if plain else torch.complex64))
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        hidden = self.first(x).tanh()
        out = self.second(hidden) * self.scale + self.frozen(hidden).sum(1, keepdim=True)
        out = self.second(self.tied(out).tanh() + self.tied_again(x))
        image = self.conv(out[:, :3, None, None].expand(-1, 3, 3, 3).contiguous())
        turned = (x[:, :3].to(self.phase.dtype) @ self.phase.t()).abs()
        out = torch.cat([out, turned], 1)
        return out.square().mean() + image.square().mean() + self.pair.prod() ** 2 + self.empty.square().sum()


def optimizer_over(model):
    """Two groups that differ in one option."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)], lr=1e-2)


def start(form, seed, optimizer_over=optimizer_over, plain=False, **options):
    model = Odd(seed, plain)
    options = dict(bucket_cap_mb=0.002, **options)
    if form == "wrap":
        return shardstep.wrap(model, optimizer_over(model), **options)
    model = shardstep.DistributedDataParallel(model, **options)
    return model, shardstep.ShardedOptimizer(optimizer_over(model), model)


def train(model, optimizer, steps, rank, world):
    for step in steps:
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def assert_same(got, expected, exactly):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value) if exactly else torch.allclose(got[name], value, rtol=1e-6, atol=1e-6), name
