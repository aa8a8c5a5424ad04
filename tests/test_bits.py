"""What must not change a single bit: repeating a run, when communication happens, the transport, the bucket size."""

import contextlib

import fakes
import pytest
import ranks
import torch
from torch import nn

pytestmark = pytest.mark.timeout(60)

STEPS, K, BATCH = 15, 3, 4
MAX_NORM = 0.02  # below every norm of these runs, so that clipping always acts


class Network(nn.Module):
    """A channels_last convolution, a scalar, a tied weight, and sizes that no segment divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(5 * 3 * 3, 61)
        self.tied = nn.Linear(61, 61)
        self.again = nn.Linear(61, 61)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(61, 7)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = torch.tanh(self.hidden(torch.tanh(self.convolution(x)).flatten(1)))
        return self.scale * self.head(torch.tanh(self.again(torch.tanh(self.tied(x)))))


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9, nesterov=True),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
}


def backward(model, x, y):
    ((model(x) - y).square().mean() / K).backward()


# How the K backwards of a window are told when to communicate. All but the first begin in the last backward at most.


def under_no_sync(model, batches):
    for i, batch in enumerate(batches):
        with model.no_sync() if i + 1 < K else contextlib.nullcontext():
            backward(model, *batch)


def by_requires_sync(model, batches):
    for i, batch in enumerate(batches):
        model.set_requires_gradient_sync(i + 1 == K)
        backward(model, *batch)


def by_last_backward(model, batches):
    for i, batch in enumerate(batches):
        model.set_is_last_backward(i + 1 == K)
        backward(model, *batch)


def by_accumulate(model, batches):
    for batch in batches:
        backward(model, *batch)


def never(model, batches):
    with model.no_sync():
        for batch in batches:
            backward(model, *batch)


def train(rank, world, how=under_no_sync, name="adamw", norm_type=2.0, **arguments):
    """All parameters and all norms of a run, as lists."""
    model = Network()
    arguments = {"transport": "shm", "bucket_cap_mb": 0.004, **arguments}
    model, optimizer = fakes.wrap(rank, model, OPTIMIZERS[name](model.parameters()), **arguments)
    norms = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * world + rank)
        batches = [
            (torch.randn(BATCH, 3, 5, 5, generator=generator), torch.randn(BATCH, 7, generator=generator) * 3)
            for _ in range(K)
        ]
        how(model, batches)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type).clone())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > MAX_NORM, norms
    result = [p.detach().clone() for p in model.parameters()] + norms
    overlapped = model.stats()["total"]["launched_early"]
    buckets = model.stats()["buckets"]
    model.unwrap()
    return result, overlapped, buckets


def several(rank, world, variants):
    return [train(rank, world, **variant) for variant in variants]


def run(world, variants):
    """Runs every variant; all must end in the same bits, on every rank. Returns (launched early, buckets) of each."""
    results = ranks.run(world, several, variants)
    expected = results[0][0][0]
    assert all(bool(torch.isfinite(t).all()) for t in expected)
    for rank, found in enumerate(results):
        for variant, (tensors, _, _) in zip(variants, found, strict=True):
            for i, (a, b) in enumerate(zip(tensors, expected, strict=True)):
                assert torch.equal(a, b), f"rank {rank}, {variant}: tensor {i} differs by {float((a - b).abs().max())}"
    return [(early, buckets) for _, early, buckets in results[0]]


@pytest.mark.parametrize("transport", ["shm", "c10d", "nccl"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_same_run_twice(world, transport):
    run(world, [dict(transport=transport)] * 2)


@pytest.mark.parametrize("transport", ["shm", "c10d", "nccl"])
@pytest.mark.parametrize("world", [2, 3])
def test_when_communication_happens(world, transport):
    hows = [under_no_sync, by_requires_sync, by_last_backward, never]
    variants = [dict(how=how, transport=transport) for how in hows]
    variants.append(dict(how=by_accumulate, accumulate=K, transport=transport))
    early = [early for early, _ in run(world, variants)]
    assert early[hows.index(never)] == 0
    assert all(count > 0 for how, count in zip([*hows, by_accumulate], early) if how is not never), early


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_transport_of_two_ranks(name, norm_type):
    run(2, [dict(transport=transport, name=name, norm_type=norm_type) for transport in ("shm", "c10d", "auto")])


@pytest.mark.parametrize("name", ["adamw", "radam"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_size_of_a_bucket(world, name):
    sizes = [1e-6, 0.003, 0.011, 25.0]
    counts = [buckets for _, buckets in run(world, [dict(bucket_cap_mb=size, name=name) for size in sizes])]
    assert counts[0] > counts[1] > counts[-1] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_size_of_a_bucket_in_low_precision(dtype):
    run(2, [dict(bucket_cap_mb=size, param_dtype=dtype) for size in (1e-6, 0.004, 25.0)])


def test_guarding_foreign_segments_with_nan():
    run(2, [dict(debug=debug) for debug in (False, True)])
