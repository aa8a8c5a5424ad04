"""Ranks with different numbers of inputs, in torch's join contexts."""

import contextlib
import os

import pytest
import ranks
import shardstep
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

DDP = shardstep.DistributedDataParallel


class Net(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Tanh()
        self.b = nn.Linear(7, 2)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).tanh())


def data(rank, k):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * k + rank))


def loss(model, rank, k):
    return (model(data(rank, k)) - 1).square().mean()


def assert_close(got, expected, **tolerance):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(a, b, **(tolerance or dict(rtol=1e-5, atol=1e-6)), msg=lambda m, i=i: f"tensor {i}: {m}")


# -- replicated, against torch DDP -----------------------------------------------------------------------------------------


def replicated_body(rank, world, counts, options, hook=False, micro=1, zero=False, transport="auto"):
    results = []
    for cls in (TorchDDP, DDP):
        ddp = cls(Net()) if cls is TorchDDP else cls(Net(), timeout=20, transport=transport)
        if hook:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        if zero:
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            with Join([ddp, optimizer], **options) if zero else ddp.join(**options):
                for k in range(counts[rank]):
                    last = (k + 1) % micro == 0
                    with contextlib.nullcontext() if last else ddp.no_sync():
                        loss(ddp, rank, k + 10 * epoch).backward()
                    if last:
                        optimizer.step()
                        optimizer.zero_grad()
        state = [t.clone() for t in ddp.state_dict().values()]
        loss(ddp, rank, 99).backward()  # after it, as before
        results.append(state + [p.grad for p in ddp.parameters()])
    assert_close(results[1], results[0])
    assert ddp._get_ddp_logging_data()["join_uneven_inputs"] == 1


@pytest.mark.parametrize("options", [{}, dict(divide_by_initial_world_size=False)], ids=str)
@pytest.mark.parametrize("counts", [(3, 5), (4, 1, 3), (0, 2, 3, 1)], ids=str)
def test_replicated_join_trains_as_torch_ddp(counts, options):
    ranks.run(len(counts), replicated_body, counts, options)


def test_replicated_join_over_c10d():
    ranks.run(2, replicated_body, (2, 4), {}, transport="c10d")


def test_replicated_join_with_a_communication_hook():
    ranks.run(2, replicated_body, (2, 4), {}, True)


def test_replicated_join_with_micro_batches_and_leftovers():
    ranks.run(2, replicated_body, (3, 6), {}, micro=2)


def test_replicated_join_with_an_optimizer_of_torchs_that_joins_too():
    ranks.run(2, replicated_body, (2, 4), {}, zero=True)


def left_body(rank, world):
    """A rank leaves its loop between a forward and its backward: the others do not wait for it."""
    ddp = DDP(Net(), timeout=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for k in range(2 + 2 * rank):
            value = loss(ddp, rank, k)
            if rank == 0 and k == 1:
                break
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.tolist() for p in ddp.parameters()]


def test_a_rank_may_leave_a_replicated_join_between_forward_and_backward():
    first, second = ranks.run(2, left_body)
    assert first == second


def gan_body(rank, world, sharded):
    """Two models in one context, of which one is trained twice as often."""
    torch.manual_seed(0)
    results = []
    for wrapped in (True, False):
        g, d = nn.Linear(2, 3), nn.Linear(3, 1)
        with torch.no_grad():
            for p in (*g.parameters(), *d.parameters()):
                p.fill_(0.3)
        og, od = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
        if wrapped:
            cg, cd = DDP(g, timeout=20), DDP(d, timeout=20)
            if sharded:
                og, od = shardstep.ShardedOptimizer(og, cg), shardstep.ShardedOptimizer(od, cd)
            with Join([cg, cd]):
                for k in range(2 + rank):
                    gan_step(cg, cd, og, od, [(rank, k)], 2)
        else:
            for k in range(3):
                gan_step(g, d, og, od, [(r, k) for r in range(2) if k < 2 + r], 2)
        results.append([p.detach().clone() for p in (*g.parameters(), *d.parameters())])
    assert_close(*results)


def gan_step(g, d, og, od, work, world):
    divide = world if type(g) is nn.Linear else 1
    for _ in range(2):
        for r, k in work:
            (d(g(torch.full((4, 2), 1.0 + r + k)).detach()).square().mean() / divide).backward()
        od.step()
        od.zero_grad()
    for r, k in work:
        d.requires_grad_(False)
        ((d(g(torch.full((4, 2), 1.0 + r + k))) - 1).square().mean() / divide).backward()
        d.requires_grad_(True)
    og.step()
    og.zero_grad()


@pytest.mark.parametrize("sharded", [True, False])
def test_two_models_in_one_join(sharded):
    ranks.run(2, gan_body, sharded)


def refused_body(rank, world):
    theirs, mine = TorchDDP(nn.Linear(2, 2)), DDP(nn.Linear(2, 2), timeout=20)
    with pytest.raises(shardstep.UsageError, match="has to begin with a model or an optimizer of shardstep"):
        with Join([theirs, mine]):
            mine(torch.ones(1, 2))
    ddp = DDP(Net(), timeout=20)
    with pytest.raises(shardstep.MismatchError, match=r"ranks 0, 1 still train but are not at the same place"):
        with ddp.join():
            (ddp if rank == 0 else ddp.module)(data(rank, 0)).sum().backward()  # a forward with buffers, and none


def test_join_refuses_what_it_cannot_shadow():
    ranks.run(2, refused_body)


def disabled_body(rank, world):
    """enable=False: no communication of join's own, and ranks are expected to have the same number of inputs."""
    replicated_body(rank, world, (3, 3), dict(enable=False), False)


def test_disabled_join_does_nothing():
    ranks.run(2, disabled_body)


def dying_body(rank, world, sharded):
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if sharded:
        optimizer = shardstep.ShardedOptimizer(optimizer, ddp)
    with ddp.join():
        for k in range(1 + 3 * rank):
            loss(ddp, rank, k).backward()
            optimizer.step()
            optimizer.zero_grad()
            if k == 2:
                os._exit(3)


@pytest.mark.parametrize("sharded", [True, False])
def test_rank_that_has_joined_notices_the_death_of_one_that_trains(sharded):
    waiting, dead = ranks.outcomes(2, dying_body, sharded, timeout=30)
    assert waiting[0] == "error" and waiting[3] < 20 and dead[0] != "ok"


def throwing_body(rank, world, form):
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if form == "sharded":
        optimizer = shardstep.ShardedOptimizer(optimizer, ddp)
    done = 0
    with pytest.raises(RuntimeError, match="exhausted"):
        with ddp.join(throw_on_early_termination=True):
            for k in range(3 + 2 * rank):
                loss(ddp, rank, k).backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    ddp.abort_window()
    loss(ddp, rank, 50).backward()  # and on without join
    optimizer.step()
    return done, ddp.module.b.bias.tolist()


@pytest.mark.parametrize("form", ["replicated", "sharded"])
def test_early_termination_is_raised_on_every_rank(form):
    (n0, b0), (n1, b1) = ranks.run(2, throwing_body, form)
    assert n0 == n1 == 3 and b0 == b1


def announcements_body(rank, world, norm, n):
    """One announcement per window, however many micro-batches it has, and one of the broadcast of buffers."""
    ddp = DDP(Net(norm))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    calls = []
    original = Join.notify_join_context
    Join.notify_join_context = staticmethod(lambda joinable: calls.append(1) or original(joinable))
    try:
        with ddp.join():
            for k in range(2 + rank):
                for micro in range(n):
                    with ddp.no_sync() if micro + 1 < n else contextlib.nullcontext():
                        loss(ddp, rank, 10 * k + micro).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        Join.notify_join_context = original
    return len(calls)


def test_windows_are_announced_not_forwards():
    assert ranks.run(2, announcements_body, False, 1) == [2, 3]
    assert ranks.run(2, announcements_body, False, 4) == [2, 3]
    assert ranks.run(2, announcements_body, True, 4) == [4, 6]


# -- sharded, against one process ---------------------------------------------------------------------------------------


def reference(counts, micro, kind, divide_by_initial, steps_of):
    """What one process does with the micro-batches that ranks have, window by window; a rank with an unfinished window at its
    end adds what it has to the others' next one."""
    model = Net(norm=False)
    optimizer = steps_of(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    world = len(counts)
    windows = max(-(-n // micro) for n in counts)
    full = max(n // micro for n in counts)
    for w in range(full):
        training = sum(n // micro > w for n in counts)
        for r, n in enumerate(counts):
            for k in range(w * micro, min((w + 1) * micro, n)):
                (loss(model, r, k) / (world if divide_by_initial else training)).backward()
        clip(model, kind)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert windows >= full
    return [p.detach() for p in model.parameters()]


def clip(model, kind):
    if kind in ("norm", "both"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    if kind in ("value", "both"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
    if kind == "both":
        for p in model.parameters():
            p.grad.mul_(0.5).add_(0.001)


def sharded_body(rank, world, form, counts, micro, kind, cls, divide_by_initial=True, transport="auto"):
    model = Net(norm=False)
    optimizer = getattr(torch.optim, cls)(model.parameters(), lr=0.05)
    if form.startswith("wrap"):
        called, optimizer = shardstep.wrap(model, optimizer, timeout=20, transport=transport)
    else:
        called = DDP(model, timeout=20, transport=transport)
        optimizer = shardstep.ShardedOptimizer(optimizer, called)
    joined = {"optimizer": [optimizer], "both": [called, optimizer], "reversed": [optimizer, called]}
    how = dict(divide_by_initial_world_size=divide_by_initial)
    context = called.join(**how) if form.endswith("join") else Join(joined[form.split()[-1]], **how)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    steps = 0
    with context:
        for k in range(counts[rank]):
            last = (k + 1) % micro == 0
            with contextlib.nullcontext() if last else called.no_sync():
                loss(called, rank, k).backward()
            if last:
                clip(model, kind)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                steps += 1
    expected = reference(counts, micro, kind, divide_by_initial, lambda m: getattr(torch.optim, cls)(m.parameters(), lr=0.05))
    assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-4, atol=1e-5)
    assert steps == counts[rank] // micro
    assert called.stats()["total"]["steps"] == max(counts) // micro
    optimizer.zero_grad()
    loss(called, rank, 77).backward()
    optimizer.step()  # and on without join
    return [p.tolist() for p in model.parameters()]


FORMS = ["wrap, optimizer", "wrap, both", "wrap, join", "class, join", "class, both", "class, reversed"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", [(3, 5), (4, 1, 3), (2, 3, 0, 4)], ids=str)
def test_sharded_join_trains_as_one_process(form, counts):
    transport = "c10d" if form in ("wrap, both", "class, reversed") else "auto"
    first, *others = ranks.run(len(counts), sharded_body, form, counts, 1, None, "AdamW", True, transport)
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["norm", "value", "both"])
@pytest.mark.parametrize("cls", ["SGD", "Adagrad"])
def test_sharded_join_with_clipping_and_schedules(kind, cls):
    results = ranks.run(3, sharded_body, "class, join", (2, 5, 4), 1, kind, cls)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("divide_by_initial", [True, False])
def test_sharded_join_with_micro_batches_and_leftovers(divide_by_initial):
    ranks.run(2, sharded_body, "class, both", (3, 8) if divide_by_initial else (4, 8), 2, "norm", "SGD", divide_by_initial)


def several_body(rank, world, counts):
    """Two optimizers over one model, whose gradients are clipped together."""
    results = []
    for wrapped in (True, False):
        model = Net(norm=False)
        matrices, vectors = [[p for p in model.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False)]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
        if wrapped:
            model, optimizers = shardstep.wrap(model, optimizers, timeout=20, clip_grad_norm=0.3)
        with model.join() if wrapped else contextlib.nullcontext():
            for k in range(counts[rank] if wrapped else max(counts)):
                for r in [rank] if wrapped else [r for r in range(world) if k < counts[r]]:
                    (loss(model, r, k) / (1 if wrapped else world)).backward()
                if not wrapped:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert_close(*results, rtol=2e-3, atol=2e-4)


def test_several_optimizers_of_one_model_in_a_join():
    ranks.run(3, several_body, (4, 1, 3))


def buffers_body(rank, world):
    """Buffers are those of a rank that still trains."""
    model = Net()
    ddp = DDP(model)
    optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ddp)
    alone = Net()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    with ddp.join():
        for k in range(1 + 2 * rank):
            loss(ddp, rank, k).backward()
            optimizer.step()
            optimizer.zero_grad()
    for k in range(3):  # rank 1 was the last to train in every window
        alone.norm.train()
        own = [r for r in range(world) if k < 1 + 2 * r]
        buffers = [b.clone() for b in alone.buffers()]
        for r in own:
            for b, old in zip(alone.buffers(), buffers):
                b.copy_(old)
            (loss(alone, r, k) / world).backward()
        plain.step()
        plain.zero_grad()
    assert_close(list(model.buffers()), list(alone.buffers()))


def test_buffers_in_a_sharded_join_are_those_of_a_rank_that_trains():
    ranks.run(2, buffers_body)


def scaler_body(rank, world, last):
    """Steps that a GradScaler skips, also as the last of all."""
    model = Net(norm=False)
    ddp = DDP(model, timeout=20)
    optimizer = shardstep.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    counts = (2, 5)
    with Join([ddp, optimizer]):
        for k in range(counts[rank]):
            bad = rank == 1 and k == (4 if last else 3)
            scaler.scale(loss(ddp, rank, k) * (float("inf") if bad else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    alone = Net(norm=False)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.05)
    for k in range(5):
        if k == (4 if last else 3):
            continue
        for r in range(world):
            if k < counts[r]:
                (loss(alone, r, k) / world).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        plain.step()
        plain.zero_grad()
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in alone.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_skipped_steps_in_a_sharded_join(last):
    ranks.run(2, scaler_body, last)


def aborting_body(rank, world):
    """A window that is given up while another rank has joined."""
    model = Net(norm=False)
    ddp = DDP(model, timeout=20)
    optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ddp)
    with ddp.join():
        for k in range(1 + 2 * rank):
            loss(ddp, rank, k).backward()
            if k == 1:
                ddp.abort_window()
                loss(ddp, rank, k).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()], ddp.stats()["total"]["steps"]


def test_window_aborted_while_a_rank_has_joined():
    first, second = ranks.run(2, aborting_body)
    assert first == second and first[1] == 3
