"""``clip_grad_norm=`` and ``skip_nonfinite=``: what a step does by itself with the norm of the gradients."""

import copy
import math
import warnings

import pytest
import ranks
import shardstep
import torch
from one_process import KINDS, STEPS, WORLDS, assert_bits, assert_close, both, loss_of, network, train, weights, wrap
from torch import nn

pytestmark = pytest.mark.timeout(60)

LIMIT = 3.0  # the norms of the runs below lie on both sides of it


def is_sharded(optimizer):
    return isinstance(optimizer, shardstep.ShardedOptimizer)


# -- clipping -----------------------------------------------------------------------------------------------------


def clipped_scenario(model, attach, loss, kind, zero_grad, options):
    model, optimizer = attach(model, KINDS[kind](model.parameters()), clip_grad_norm=LIMIT, **options)
    norms = []
    for step in range(STEPS):
        loss(model, step).backward()
        if not is_sharded(optimizer):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        if is_sharded(optimizer):
            norms.append(optimizer.grad_norm)
            assert model.stats()["step"]["closes"] == 1
        if zero_grad:
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("zero_grad", [True, False], ids=["zero_grad", "gradients_persist"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamax"])
@pytest.mark.parametrize("world", WORLDS)
def test_clipping_in_the_step_is_torchs_before_it(world, kind, zero_grad):
    for got, expected in ranks.run(world, both, clipped_scenario, kind, zero_grad, {}):
        assert got == pytest.approx(expected, rel=1e-5)
        assert min(expected) < LIMIT < max(expected) or not zero_grad


def test_clipping_in_the_step_over_a_process_group():
    for got, expected in ranks.run(2, both, clipped_scenario, "adamw", True, {"transport": "c10d"}):
        assert got == pytest.approx(expected, rel=1e-5)


def subset_scenario(model, attach, loss):
    """Each optimizer clips by the norm of its own parameters."""
    parts = [list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]]
    first, second = (torch.optim.SGD(part, lr=0.02, momentum=0.9) for part in parts)
    model, first = attach(model, first, clip_grad_norm=LIMIT / 2)
    if is_sharded(first):
        second = shardstep.ShardedOptimizer(second, model, clip_grad_norm=LIMIT)
    norms = []
    for step in range(STEPS):
        loss(model, step).backward()
        for optimizer, part, limit in zip((first, second), parts, (LIMIT / 2, LIMIT)):
            norm = None if is_sharded(optimizer) else float(nn.utils.clip_grad_norm_(part, limit))
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.grad_norm if norm is None else norm)
    return norms


@pytest.mark.parametrize("world", [2, 3])
def test_an_optimizer_of_a_subset_clips_by_the_norm_of_its_own(world):
    for got, expected in ranks.run(world, both, subset_scenario):
        assert got == pytest.approx(expected, rel=1e-5)


def scaled_scenario(model, attach, loss, kind):
    """GradScaler unscales before the step clips. Steps 3 and 7 overflow: the scaler does not call step() then."""
    model, optimizer = attach(model, KINDS[kind](model.parameters()), clip_grad_norm=LIMIT, skip_nonfinite=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(STEPS):
        value = loss(model, step)
        scaler.scale(value * float("inf") if step in (3, 7) else value).backward()
        if not is_sharded(optimizer):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        assert not is_sharded(optimizer) or (optimizer.skipped_steps, optimizer.step_was_skipped) == (0, step in (3, 7))
    return scales


@pytest.mark.parametrize("kind", ["adamw", "adamax"])
def test_clipping_in_the_step_sees_what_grad_scaler_has_unscaled(kind):
    for got, expected in ranks.run(2, both, scaled_scenario, kind):
        assert got == expected and len(set(expected)) > 2


def unfrozen_scenario(model, attach, loss):
    """The norm counts a layer from the first step that has its gradient."""
    model[0].requires_grad_(False)
    model, optimizer = attach(model, KINDS["adamw"](model.parameters()), clip_grad_norm=LIMIT)
    norms = []
    for step in range(STEPS):
        if step == 4:
            model[0].requires_grad_(True)
        loss(model, step).backward()
        norm = None if is_sharded(optimizer) else float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm if norm is None else norm)
    return norms


def test_clipping_counts_a_layer_unfrozen_later():
    for got, expected in ranks.run(2, both, unfrozen_scenario):
        assert got == pytest.approx(expected, rel=1e-5)


# -- skipping -----------------------------------------------------------------------------------------------------


def skip_body(rank, world, kind, form, bad, clip):
    """Steps 2 and 5 have a gradient that is not finite, on the last rank alone. The reference leaves them out."""
    plain = network()
    theirs = KINDS[kind](plain.parameters())
    model = network()
    optimizer = KINDS[kind](model.parameters())
    options = {"clip_grad_norm": LIMIT} if clip else {}
    if form == "wrap":
        model, optimizer = wrap(model, optimizer, skip_nonfinite=True, **options)
    else:
        model = shardstep.DistributedDataParallel(model, bucket_cap_mb=0.002)
        optimizer = shardstep.ShardedOptimizer(optimizer, model, skip_nonfinite=True, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    their_scheduler = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.9)
    flags = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            loss = loss_of(model, step, rank, world)
            if step in (2, 5):
                before = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
                loss = loss * bad if rank == world - 1 else loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            flags.append(optimizer.step_was_skipped)
            if step in (2, 5):
                assert_bits(weights(model), before[0])
                for i, entry in optimizer.state_dict()["state"].items():
                    for key, value in entry.items():
                        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[1][i][key])), key
                assert not math.isfinite(optimizer.grad_norm)
                continue
            scheduler.step()
            loss_of(plain, step, None, 1).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
            theirs.step()
            theirs.zero_grad()
            their_scheduler.step()
    assert flags == [step in (2, 5) for step in range(8)]
    assert optimizer.skipped_steps == model.stats()["skipped_steps"] == 2
    assert_close(weights(model), weights(plain))
    told = [w for w in caught if "skip_nonfinite" in str(w.message)]
    return [str(w.message) for w in told]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["wrap", "ddp"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamax"])
def test_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(kind, form, bad):
    """B22."""
    said, *others = ranks.run(3, skip_body, kind, form, bad, False)
    [text] = said
    assert "all ranks" in text and "'0.weight'" in text
    assert others == [[], []]


def test_skipping_and_clipping_together():
    ranks.run(2, skip_body, "adamw", "wrap", float("nan"), True)


def elsewhere_body(rank, world, element):
    """One element is infinite, in one rank's segment, and by one rank's doing."""
    p = nn.Parameter(torch.ones(1000))
    model, optimizer = wrap(nn.ParameterList([p]), torch.optim.AdamW([p], lr=0.1), skip_nonfinite=True)
    factor = torch.ones(1000)
    if rank == 1:
        factor[element] = float("inf")
    (p * factor).sum().backward()
    optimizer.step()
    assert bool((p == 1.0).all()) and optimizer.state[p]["step"] == 0.0
    skipped = optimizer.step_was_skipped
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    assert bool((p < 1.0).all()) and optimizer.state[p]["step"] == 1.0
    return skipped, optimizer.step_was_skipped, optimizer.skipped_steps


@pytest.mark.filterwarnings("ignore:skip_nonfinite")
@pytest.mark.parametrize("element", [0, 999])
def test_one_element_in_another_ranks_segment_skips_the_step(element):
    """B54."""
    assert ranks.run(2, elsewhere_body, element) == [(True, False, 1)] * 2


def without_body(rank, world):
    model = network()
    model, optimizer = wrap(model, KINDS["sgd"](model.parameters()))
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world) * float("nan"), range(1))
    assert all(bool(p.isnan().any()) for p in model.parameters())
    return optimizer.grad_norm, optimizer.step_was_skipped, optimizer.skipped_steps


def test_without_the_option_a_nan_reaches_the_weights_as_in_torch():
    assert ranks.run(2, without_body) == [(None, False, 0)] * 2


def arguments_body(rank, world):
    messages = []
    for value in (0, -1.0, float("nan"), True, "1"):
        model = network()
        with pytest.raises(shardstep.UsageError) as caught:
            wrap(model, KINDS["sgd"](model.parameters()), clip_grad_norm=value)
        assert type(model) is nn.Sequential
        messages.append(str(caught.value))
    return messages


def test_clip_grad_norm_must_be_a_positive_number():
    for messages in ranks.run(2, arguments_body):
        assert all("clip_grad_norm must be a positive number" in text for text in messages)
