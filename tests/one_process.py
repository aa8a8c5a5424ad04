"""The same training sharded over ranks and in one process: what the tests of optimizers compare."""

import shardstep
import torch
from torch import nn

WORLDS = [1, 2, 3]
STEPS = 12


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(11, 23), nn.Tanh(), nn.Linear(23, 17), nn.Tanh(), nn.Linear(17, 3))


def batch(step, rank, world):
    """This rank's part of the 12 samples of a step; all of them for rank None."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 11, generator=generator), torch.randn(12, 3, generator=generator) + 2.0
    return (x, y) if rank is None else (x.chunk(world)[rank], y.chunk(world)[rank])


def loss_of(model, step, rank, world):
    x, y = batch(step, rank, world)
    return (model(x) - y).square().mean()


def wrap(model, optimizer, **arguments):
    return shardstep.wrap(model, optimizer, bucket_cap_mb=0.002, timeout=20, **arguments)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_close(got, expected, bound=1e-5):
    """Relative to each tensor's largest element, or to 1e-2 where all are smaller."""
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        worst = float((a - b).abs().max() / b.abs().max().clamp_min(1e-2))
        assert worst <= bound, f"tensor {i} differs by {worst}"


def assert_bits(got, expected):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by {float((a - b).abs().max())}"


def both(rank, world, scenario, *args):
    """``scenario(model, attach, loss, ...)`` once sharded and once in one process, to equal weights; both results."""
    results = []
    for sharded in (True, False):
        attach = wrap if sharded else lambda model, optimizer, **_: (model, optimizer)
        who = (rank, world) if sharded else (None, 1)
        model = network()
        results.append(scenario(model, attach, lambda model, step, who=who: loss_of(model, step, *who), *args))
        results.append(weights(model))
    (got, got_weights), (expected, expected_weights) = results[:2], results[2:]
    assert_close(got_weights, expected_weights)
    assert not all(torch.equal(a, b) for a, b in zip(expected_weights, weights(network())))
    return got, expected


def train(model, optimizer, loss, steps=range(STEPS), after=None):
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)


KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, weight_decay=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-3),  # run by torch
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.02, t0=3),  # run by torch, with tensors of one number as state
}
