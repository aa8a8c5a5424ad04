"""``shardstep.checkpoint``: what is saved comes back, at any number of ranks, complete or not at all."""

import contextlib
import io
import os
import random
import sys
import threading
import time

import numpy
import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from checkpointing import Odd, assert_same, optimizer_over, start, train, weights
from shardstep import checkpoint
from torch import nn

pytestmark = pytest.mark.timeout(60)
WORLDS = [1, 2, 3, 4]


def drawn():
    """A number from every generator that training draws from by default."""
    return [random.random(), float(torch.rand(())), float(numpy.random.rand())]


def run(rank, world, folder, form, options, asynchronous=False):
    model, optimizer = start(form, seed=1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    for step in range(3):
        train(model, optimizer, [step], rank, world)
        schedule.step()
    random.seed(rank), torch.manual_seed(rank), numpy.random.seed(rank)
    extra = {"schedule": schedule.state_dict(), "rank": rank}
    saving = checkpoint.save(folder, model, optimizer, step=3, extra=extra, async_=asynchronous)
    numbers = drawn()
    train(model, optimizer, [3], rank, world)
    assert saving.result() == folder / "step-00000003" and saving.done()
    schedule.step()
    train(model, optimizer, [4], rank, world)
    return weights(model), numbers


def resume(rank, world, form, folder, options):
    model, optimizer = start(form, seed=2, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    train(model, optimizer, range(2), rank, world)  # what was there before has no say
    before = drawn()
    restored = checkpoint.load(folder, model, optimizer)
    numbers = drawn()
    schedule.load_state_dict(restored.extra["schedule"])
    train(model, optimizer, [3], rank, world)
    schedule.step()
    train(model, optimizer, [4], rank, world)
    return weights(model), numbers, restored, before


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_run_goes_on_at_any_number_of_ranks(once, before, world):
    folder, expected = once(before, run, "wrap", {})
    for rank, (got, numbers, restored, others) in enumerate(ranks.run(world, resume, "wrap", folder, {})):
        assert_same(got, expected[0][0], exactly=before == world)
        assert (restored.step, restored.path) == (3, folder / "step-00000003")
        assert restored.extra["rank"] == (rank if rank < before else 0)
        assert numbers == expected[rank][1] if rank < before else numbers != others


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}, {"transport": "c10d"}], ids=["", "bf16", "c10d"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("form", ["wrap", "class"])
def test_every_form_goes_on_to_the_bit(once, form, asynchronous, options):
    if form == "class" and "param_dtype" in options:
        pytest.skip("the class form keeps the model's own types")
    folder, expected = once(2, run, form, options, asynchronous)
    for got, *_ in ranks.run(2, resume, form, folder, options):
        assert_same(got, expected[0][0], exactly=True)


# -- what cannot be right -----------------------------------------------------------------------------------------


def another_model(rank, world, path):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(7, 54)
            self.third = nn.Linear(54, 1)

    model = Other()
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        shardstep.CheckpointError,
        match=r"another model: 'first.weight' is of shape \(53, 7\) there and of \(54, 7\) here; 'first.bias' is of shape "
        r"\(53,\) there and of \(54,\) here; it has no 'third.weight'.* and \d+ more",
    ):
        checkpoint.load(path, model, optimizer)


def test_another_model_is_refused_by_the_names_that_differ(once):
    ranks.run(2, another_model, once(2, run, "wrap", {})[0])


def test_a_real_checkpoint_is_no_complex_model(tmp_path):
    def new(dtype):
        model = nn.ParameterList([torch.ones(3, dtype=dtype)])
        return shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

    model, optimizer = new(torch.float32)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    model.unwrap()
    model, optimizer = new(torch.complex64)
    with pytest.raises(shardstep.CheckpointError, match="another model: '0' is torch.float32 there and torch.complex64 here"):
        checkpoint.load(tmp_path, model, optimizer)
    model.unwrap()


def groups_of(rank, world, path, regrouped):
    model, _ = start("wrap", seed=2)
    model.unwrap()
    named = dict(model.named_parameters())
    if regrouped:  # a bias, which was not decayed, beside a matrix, which was
        groups = [dict(params=[named["first.weight"], named["first.bias"]])]
    else:  # the same two groups in the other order, under other options
        matrices = [p for p in named.values() if p.dim() > 1]
        others = [p for p in named.values() if p.dim() <= 1]
        groups = [dict(params=others, weight_decay=0.7), dict(params=matrices, weight_decay=0.7)]
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(groups, lr=5.0))
    if regrouped:
        with pytest.raises(shardstep.CheckpointError, match="'first.weight' and 'first.bias' are in one param group here, but "
                           "were saved with different values of 'weight_decay': 0.1 and 0.0"):
            checkpoint.load(path, model, optimizer)
        return None
    checkpoint.load(path, model, optimizer)
    return [(group["weight_decay"], group["lr"], group["initial_lr"]) for group in optimizer.param_groups]


def test_options_of_groups_go_to_parameters_by_name(once):
    folder, _ = once(2, run, "wrap", {})
    got = ranks.run(2, groups_of, folder, False)
    expected = [(0.0, 1e-2 * 0.8**3, 1e-2), (0.1, 1e-2 * 0.9**3, 1e-2)]
    assert got[0] == got[1] == [pytest.approx(group) for group in expected]
    ranks.run(2, groups_of, folder, True)


def misused(rank, world, folder):
    model, optimizer = start("wrap", seed=1)
    plain = nn.Linear(2, 2)
    cases = [
        (dict(step=-1), shardstep.CheckpointError, "UsageError: step must be an integer of at least 0, not -1"),
        (dict(step=1.5), shardstep.CheckpointError, "step must be an integer of at least 0, not 1.5"),
        (dict(step=1, keep=0), shardstep.CheckpointError, "keep must be an integer of at least 1, not 0"),
        (dict(step=1, extra={"f": misused}), shardstep.CheckpointError, "extra holds something that cannot be loaded without"),
        (dict(step=rank), shardstep.MismatchError, "rank 0 was called with step=0 and rank 1 with step=1"),
        (dict(step=rank - 1), shardstep.CheckpointError, "rank 0: UsageError: step must be"),
    ]
    for options, error, says in cases:
        with pytest.raises(error, match=says):
            checkpoint.save(folder, model, optimizer, **options)
    with pytest.raises(shardstep.UsageError, match="the model, a Linear, is not wrapped"):
        checkpoint.save(folder, plain, step=1)
    with pytest.raises(shardstep.UsageError, match="the optimizer, a SGD, is not the model's"):
        checkpoint.save(folder, model, torch.optim.SGD(model.parameters(), lr=1.0), step=1)
    with pytest.raises(shardstep.UsageError, match="belongs to another model"):
        checkpoint.save(folder, model, start("wrap", seed=1)[1], step=1)
    dist.barrier()
    assert not folder.exists() or not list(folder.iterdir())
    checkpoint.save(folder, model, optimizer, step=1)


def test_misuse_is_told_on_every_rank_and_leaves_nothing(tmp_path):
    ranks.run(2, misused, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000001"]


# -- what else there is to save -----------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Running statistics, a buffer that is not saved, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(7, 9)
        self.norm = nn.BatchNorm1d(9)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = {"count": 0}

    def forward(self, x):
        self.calls["count"] += 1
        return self.norm(self.layer(x)).square().mean() + self.norm.running_var.sum() * self.layer.bias.sum()

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def own_buffers(rank, world, folder, step, broadcast):
    def new():
        model = Stateful()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # which has no state
        return shardstep.wrap(model, optimizer, broadcast_buffers=broadcast)

    if step == "save":
        model, optimizer = new()
        train(model, optimizer, range(3), rank, world)
        checkpoint.save(folder, model, optimizer, step=3)
        train(model, optimizer, range(3, 6), rank, world)
    else:
        model, optimizer = new()
        checkpoint.load(folder, model, optimizer)
        train(model, optimizer, range(3, 6), rank, world)
    return weights(model), {name: b.clone() for name, b in model.named_buffers()}, model.calls


@pytest.mark.parametrize("broadcast", [True, False], ids=["shared", "own"])
def test_buffers_of_each_rank_and_state_that_is_no_tensor_come_back(broadcast, tmp_path):
    expected = ranks.run(2, own_buffers, tmp_path, "save", broadcast)
    assert torch.equal(expected[0][1]["norm.running_mean"], expected[1][1]["norm.running_mean"]) == broadcast
    for got, wanted in zip(ranks.run(2, own_buffers, tmp_path, "load", broadcast), expected):
        assert_same(got[0], wanted[0], exactly=True)
        assert_same(got[1], wanted[1], exactly=True)
        assert got[2] == wanted[2] == {"count": 6}
    for _, buffers, calls in ranks.run(3, own_buffers, tmp_path, "load", broadcast):
        assert buffers["norm.num_batches_tracked"] == 6 and calls == {"count": 6}


def replicated(rank, world, folder):
    """The class form with an optimizer of torch's: everything is whole on every rank."""

    def new():
        model = shardstep.DistributedDataParallel(Odd(1))
        return model, optimizer_over(model)

    model, optimizer = new()
    checkpoint.save(folder, model, optimizer, step=0)
    assert not optimizer.state  # no hidden step
    train(model, optimizer, range(3), rank, world)
    checkpoint.save(folder, model, optimizer, step=3)
    train(model, optimizer, range(3, 5), rank, world)
    expected = weights(model)
    model, optimizer = new()
    checkpoint.load(folder, model, optimizer)
    train(model, optimizer, range(3, 5), rank, world)
    assert_same(weights(model), expected, exactly=True)
    return expected


def test_replicated_model_with_torchs_optimizer_is_saved_and_goes_on_sharded(tmp_path):
    expected = ranks.run(2, replicated, tmp_path)[0]
    for got in ranks.run(3, goes_on_sharded, tmp_path):
        assert_same(got, expected, exactly=False)


def goes_on_sharded(rank, world, folder):
    model, optimizer = start("wrap", seed=2)
    checkpoint.load(folder, model, optimizer)
    train(model, optimizer, range(3, 5), rank, world)
    return weights(model)


def two_optimizers(rank, world, folder):
    def new(seed):
        model, _ = start("wrap", seed)
        model.unwrap()
        first = torch.optim.AdamW([model.first.weight, model.pair], lr=1e-2)
        model, first = shardstep.wrap(model, first)
        second = torch.optim.Adagrad([model.second.weight, model.scale, model.conv.weight], lr=1e-2)
        return model, [first, shardstep.ShardedOptimizer(second, model)]

    def both(model, optimizers, steps):
        for step in steps:
            model(torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, optimizers = new(1)
    both(model, optimizers, range(2))
    checkpoint.save(folder, model, optimizers, step=2)
    both(model, optimizers, range(2, 4))
    expected = weights(model)
    model, optimizers = new(2)
    checkpoint.load(folder, model, optimizers)
    both(model, optimizers, range(2, 4))
    assert_same(weights(model), expected, exactly=True)
    model, optimizers = new(2)
    checkpoint.load(folder, model)  # the weights alone
    assert float(optimizers[0].state[model.pair]["step"]) == 0
    with pytest.raises(AssertionError):
        assert_same(weights(model), expected, exactly=True)


def test_two_optimizers_are_saved_together_and_weights_load_alone(tmp_path):
    ranks.run(2, two_optimizers, tmp_path)


def in_a_window(rank, world, folder):
    """A save and a load between two backwards: the gradients stay what they are, and the weights are those of the last step."""
    model, optimizer = start("wrap", seed=1)
    train(model, optimizer, [0], rank, world)
    before = weights(model)

    def second_step(disturb):
        for step in (1, 2):
            x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                model(x).backward()
            if step == 1:
                disturb()
        optimizer.step()
        optimizer.zero_grad()
        return weights(model)

    expected = second_step(lambda: checkpoint.save(folder, model, optimizer, step=1))
    steps = model.stats()["total"]["steps"]
    checkpoint.load(folder, model, optimizer)
    assert_same(weights(model), before, exactly=True)
    assert model.stats()["total"]["steps"] == steps
    assert_same(second_step(lambda: checkpoint.load(folder, model, optimizer)), expected, exactly=True)
    now, wire = model.stats(), model.stats()["step"]["wire_bytes"]
    assert now["total"]["steps"] == steps + 1
    train(model, optimizer, [3], rank, world)
    assert model.stats()["step"]["wire_bytes"] == wire  # what a load sends is part of no step


def test_save_and_load_in_an_open_window_leave_its_gradients_alone(tmp_path):
    ranks.run(2, in_a_window, tmp_path)


# -- what it costs ------------------------------------------------------------------------------------------------


def blocked(rank, world, folder):
    """The disk hangs. Training goes on, from the moment of the save; a second save waits."""
    model, optimizer = start("wrap", seed=1)
    train(model, optimizer, [0], rank, world)
    real, gate = os.fsync, threading.Event()
    os.fsync = lambda descriptor: gate.wait(30) and real(descriptor)
    try:
        saving = checkpoint.save(folder, model, optimizer, step=1, async_=True)
        train(model, optimizer, range(1, 4), rank, world)
        assert not saving.done() and not saving.path.exists()
        with pytest.raises(TimeoutError):
            saving.result(0.01)
        threading.Timer(0.2, gate.set).start()
        began = time.monotonic()
        checkpoint.save(folder, model, optimizer, step=4)
        assert saving.done() and time.monotonic() - began > 0.15
    finally:
        gate.set()
        os.fsync = real
    expected = weights(model)
    model, optimizer = start("wrap", seed=2)
    checkpoint.load(saving.path, model, optimizer)
    train(model, optimizer, range(1, 4), rank, world)
    assert_same(weights(model), expected, exactly=True)


def test_async_save_holds_up_nothing_but_the_next_save(tmp_path):
    ranks.run(2, blocked, tmp_path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
def test_long_save_shows_its_progress_on_a_terminal(terminal, tmp_path, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(checkpoint._progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", shown := Terminal() if terminal else io.StringIO())
    model, optimizer = shardstep.wrap(layer := nn.Linear(300, 300), torch.optim.AdamW(layer.parameters()))
    checkpoint.save(tmp_path, model, optimizer, step=7)
    model.unwrap()
    assert (f"saving {tmp_path}/step-00000007" in shown.getvalue()) == terminal
    assert ("MB" in shown.getvalue() or "1.08M" in shown.getvalue()) == terminal  # 90,300 numbers, three times
