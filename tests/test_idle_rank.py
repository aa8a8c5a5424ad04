"""A rank that skips a whole window finds no gradients to clip, edit or drop; its step follows what the others did to theirs."""

import pytest
import ranks
import shardstep
import torch
from one_process import KINDS, assert_close, batch, network, weights, wrap
from shardstep._gradient import HANDLERS, _elementwise
from torch import nn

pytestmark = pytest.mark.timeout(60)
STEPS = 6


def clip_value(model, foreach=True):
    if any(p.grad is not None for p in model.parameters()):  # torch raises where there are none
        nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)


def clip_value_one_by_one(model):
    clip_value(model, foreach=False)


def value_then_norm(model):
    clip_value(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def norm_then_value(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    clip_value(model)


def twice_with_scales(model):
    for p in (p for p in model.parameters() if p.grad is not None):
        p.grad.mul_(3.0).clamp_(max=torch.tensor(0.1))
        p.grad /= -2.0
    clip_value(model)


def numbers(model):
    for p in (p for p in model.parameters() if p.grad is not None):
        p.grad.nan_to_num_(nan=0.0).add_(0.01, alpha=2)
        p.grad += 0.01


def read_between(model):
    clip_value(model)
    sum(p.grad.norm() for p in model.parameters() if p.grad is not None)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type=float("inf"))


def drop_one(model):
    clip_value(model)
    model[0].weight.grad = None


def zero_one(model):
    if model[0].weight.grad is not None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        model[0].weight.grad.zero_()


EDITS = [
    clip_value, clip_value_one_by_one, value_then_norm, norm_then_value, twice_with_scales, numbers, read_between, drop_one,
    zero_one,
]


def idle(step, world):
    """Who skips this step's window; nobody does in every third."""
    return step % world if step % 3 else None


def mean_loss(model, step, rank, world):
    x, y = batch(step, rank, world)
    return (model(x) - y).square().mean()


def train(rank, world, edit, kind, options):
    plain, model = network(), network()
    theirs = KINDS[kind](plain.parameters())
    model, optimizer = wrap(model, KINDS[kind](model.parameters()), **options)
    for step in range(STEPS):
        if idle(step, world) != rank:
            mean_loss(model, step, rank, world).backward()
        edit(model)
        optimizer.step()
        optimizer.zero_grad()
        (sum(mean_loss(plain, step, r, world) for r in range(world) if r != idle(step, world)) / world).backward()
        edit(plain)
        theirs.step()
        theirs.zero_grad()
    assert_close(weights(model), weights(plain))
    assert not all(torch.equal(a, b) for a, b in zip(weights(plain), weights(network())))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_step_of_an_idle_rank_follows_what_others_did_to_their_gradients(world, edit):
    ranks.run(world, train, edit, "sgd", {})


@pytest.mark.parametrize("options", [{"transport": "c10d"}, {"debug": True}], ids=["c10d", "debug"])
def test_value_clip_with_an_idle_rank_over_a_process_group_and_with_poison(options):
    ranks.run(2, train, value_then_norm, "adamax", options)


def refused_body(rank, world):
    model = network()
    model, optimizer = wrap(model, KINDS["sgd"](model.parameters()))
    before = weights(model)
    if rank == 0:
        mean_loss(model, 0, rank, world).backward()
        model[0].weight.grad.add_(torch.ones(23, 11))
    with pytest.raises(shardstep.MismatchError) as caught:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model)))
    model.abort_window()
    mean_loss(model, 0, rank, world).backward()
    optimizer.step()
    return str(caught.value)


def test_edit_with_a_tensor_cannot_be_repeated_and_is_refused_on_all_ranks():
    messages = ranks.run(3, refused_body)
    assert len(set(messages)) == 1
    assert "rank 0 changed reduced gradients in place with other tensors" in messages[0]
    assert "run a backward on every rank" in messages[0]


def not_idle_body(rank, world):
    """A rank that had its gradients and did not clip them is not followed by anybody, nor does it follow."""
    model = network()
    model, optimizer = wrap(model, KINDS["sgd"](model.parameters()))
    mean_loss(model, 0, rank, world).backward()
    if rank == 0:
        clip_value(model)
    with pytest.raises(shardstep.MismatchError) as caught:
        optimizer.step()
    return str(caught.value)


def test_rank_that_only_forgot_to_clip_is_told():
    assert all("edit them on all ranks alike" in text for text in ranks.run(2, not_idle_body))


def test_every_edit_has_a_name_under_which_it_can_be_repeated():
    repeated = [function for function, handler in HANDLERS.items() if handler is _elementwise]
    assert len(repeated) > 30 and all(callable(getattr(torch.Tensor, function.__name__)) for function in repeated)
