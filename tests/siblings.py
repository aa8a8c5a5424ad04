"""What the tests of siblings (test_siblings.py, test_siblings_edits.py) have in common.

A scenario runs twice with the same code: over two ranks, in each form, and alone in one process that sees both ranks' data.
Results agree between the two and between ranks. ``Side`` is what tells the two runs apart.
"""

import contextlib
import warnings

import pytest
import ranks
import shardstep
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

FORMS = ["wrap", "class", "replicated"]
SHARDED = ["wrap", "class"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


class Side:
    def __init__(self, rank, world, form, transport="auto"):
        self.rank, self.world, self.form, self.alone = rank, world, form, form == "alone"
        self.transport = transport

    def make(self, model, optimizer=sgd, **options):
        """(what is called, the user's module, the optimizer)"""
        optimizer = optimizer(model.parameters())
        if self.alone:
            return model, model, optimizer
        options = {"timeout": 20.0, "bucket_cap_mb": 0.002, "transport": self.transport, **options}
        if self.form == "wrap":
            called, optimizer = shardstep.wrap(model, optimizer, **options)
            return called, called, optimizer
        ddp = shardstep.DistributedDataParallel(model, **options)
        return ddp, model, shardstep.ShardedOptimizer(optimizer, ddp) if self.form == "class" else optimizer

    def no_sync(self, called):
        return contextlib.nullcontext() if self.alone else called.no_sync()

    def each(self, run):
        """``run(rank, scale)`` for this rank, or for every rank with its share of the mean."""
        for rank in range(self.world) if self.alone else [self.rank]:
            run(rank, 1 / self.world if self.alone else 1.0)

    def backward(self, loss, *args):
        """Of ``loss(rank, ...)``; None is a rank that has none."""

        def run(rank, scale):
            value = loss(rank, *args)
            if value is not None:
                (value * scale).backward()

        self.each(run)


def data(rank, step, *shape):
    return torch.randn(*(shape or (4, 3)), generator=torch.Generator().manual_seed(100 * step + rank))


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        t = torch.tanh(self.trunk(x))
        return self.first(t), self.second(t)


def square(outputs):
    return sum(o.pow(2).mean() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))


def train(side, called, module, optimizer, steps=2, loss=None, first=0):
    """Windows of two micro-batches, clipped."""
    loss = loss or (lambda rank, step: square(called(data(rank, step))))
    for step in range(first, first + steps):
        with side.no_sync(called):
            side.backward(loss, 2 * step)
        side.backward(loss, 2 * step + 1)
        clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def step_once(side, called, optimizer, step):
    side.backward(lambda rank: square(called(data(rank, step))))
    optimizer.step()
    optimizer.zero_grad()


class Scenarios(dict):
    """Those of one file: {name: (function, forms)}."""

    def __call__(self, forms=FORMS):
        def register(function):
            self[function.__name__] = function, forms
            return function

        return register

    def cases(self):
        return [(name, form) for name, (_, forms) in self.items() for form in forms]


def check(scenarios, name, form, world=2, transport="auto"):
    first, *others = ranks.run(world, body, scenarios[name][0], form, transport)
    for other in others:
        assert_equal(other, first, f"{name}, between ranks")


def body(rank, world, function, form, transport):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = function(Side(rank, world, "alone"))
        got = function(Side(rank, world, form, transport))
    assert_equal(got, expected, function.__name__)
    return got


def assert_equal(got, expected, where):
    if isinstance(expected, dict):
        got, expected = list(got.items()), list(expected.items())
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for k, (a, b) in enumerate(zip(got, expected)):
            assert_equal(a, b, f"{where}[{k}]")
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, msg=lambda text: f"{where}: {text}")
    else:
        assert got == (pytest.approx(expected, rel=2e-5) if isinstance(expected, float) else expected), where
