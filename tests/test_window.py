"""Behaviours around the accumulation window that random programs would meet too seldom."""

import contextlib
import time

import fakes
import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist

TRANSPORTS = ["shm", "c10d", "nccl"]


class Two(torch.nn.Module):
    """Two vectors; one use of one of them with an input full of c has gradient c."""

    def __init__(self, n=5):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(n))
        self.b = torch.nn.Parameter(torch.ones(n))

    def forward(self, x, use="ab"):
        return sum((getattr(self, name) * x).sum() for name in use)


def wrapped(transport="shm", optimizer=torch.optim.SGD, model=None, **options):
    model = model or Two()
    options.setdefault("timeout", 20.0)
    return fakes.wrap(dist.get_rank(), model, optimizer(model.parameters(), lr=0.5), transport=transport, **options)


def grads(model):
    return [None if (g := model.full_grad(p)) is None else g.tolist() for p in model.parameters()]


# -- late gradient ----------------------------------------------------------------------------------------------------


def late_gradient(rank, world, transport, what):
    """Rank 0 runs two synchronising backwards before rank 1 has looked at the first."""
    model, optimizer = wrapped(transport)
    if rank == 1:
        time.sleep(0.3)
    for _ in range(2):
        model(torch.full((5,), rank + 1.0)).backward()
    mean = 2 * 1.5
    if what == "norm":
        return float(model.a.grad.norm()), mean * 5**0.5
    if what == "clip":
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert abs(float(total) - mean * 10**0.5) < 1e-5, total
        return model.full_grad(model.a)[0].item(), 1 / 10**0.5
    if what == "scale":
        model.a.grad.mul_(0.5)
        return model.full_grad(model.a)[0].item(), mean / 2
    if what == "clamp":
        torch.nn.utils.clip_grad_value_(model.parameters(), 2.0)
        return model.full_grad(model.a)[0].item(), 2.0
    if what == "zero":
        optimizer.zero_grad(set_to_none=False)
        return model.full_grad(model.a)[0].item(), 0.0
    if what == "third":
        model(torch.full((5,), rank + 1.0)).backward()
        return model.full_grad(model.a)[0].item(), 3 * 1.5
    if what == "drop":
        optimizer.zero_grad()
        model(torch.full((5,), rank + 1.0)).backward()
        return model.full_grad(model.a)[0].item(), 1.5
    if what == "drop one":
        model.a.grad = None
        assert model.full_grad(model.a) is None
        return model.full_grad(model.b)[0].item(), mean
    if what == "read":
        with pytest.raises(shardstep.UsageError):
            model.a.grad.sum()
        return 0.0, 0.0
    raise AssertionError(what)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["norm", "clip", "scale", "clamp", "zero", "third", "drop", "drop one", "read"])
def test_gradient_that_came_while_the_bucket_was_in_flight_counts(transport, what):
    for got, expected in ranks.run(2, late_gradient, transport, what):
        assert got == pytest.approx(expected, rel=1e-6)


def partly_late(rank, world, transport):
    """The late gradient is dropped again on all ranks; on one of them its bucket was reopened before."""
    model, optimizer = wrapped(transport)
    model(torch.full((5,), rank + 1.0)).backward()
    if rank == 1:
        time.sleep(0.3)
    model(torch.full((5,), rank + 1.0), "a").backward()
    model.a.grad = None
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [p[0].item() for p in model.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_late_gradient_that_was_dropped_leaves_ranks_agreed(transport):
    for a, b in ranks.run(2, partly_late, transport):
        assert a == 1.0
        assert b == pytest.approx(1 - 0.5 * 5**-0.5, rel=1e-5)


# -- unfreezing -------------------------------------------------------------------------------------------------------


def unfreeze_and_clip(rank, world, transport, form, K):
    model = Two()
    model.b.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = shardstep.wrap(model, optimizer, transport=transport, timeout=20.0)
    inner = model
    model(torch.full((5,), rank + 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.b.requires_grad_(True)
    for k in range(K):
        model.set_requires_gradient_sync(k == K - 1)
        model(torch.full((5,), rank + 1.0)).backward()
    if form == "norm":
        return float(inner.b.grad.norm()), K * 1.5 * 5**0.5
    if form == "clip":
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert abs(float(total) - K * 1.5 * 10**0.5) < 1e-5, total
        return model.full_grad(model.b)[0].item(), 1 / 10**0.5
    if form == "scale":
        model.b.grad.mul_(0.5)
        return model.full_grad(model.b)[0].item(), K * 1.5 / 2
    if form == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.25)
        return model.full_grad(model.b)[0].item(), 1.25
    if form == "zero":
        optimizer.zero_grad(set_to_none=False)
        return model.full_grad(model.b)[0].item(), 0.0
    if form == "full":
        return model.full_grad(model.b)[0].item(), K * 1.5
    optimizer.step()
    return model.b[0].item(), 1 - 0.5 * K * 1.5


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("form", ["norm", "clip", "scale", "value", "zero", "full", "step"])
def test_gradient_of_a_parameter_unfrozen_after_wrapping_is_global(form, K):
    for got, expected in ranks.run(2, unfreeze_and_clip, "shm", form, K):
        assert got == pytest.approx(expected, rel=1e-6)


# -- torch.autograd.grad ----------------------------------------------------------------------------------------------


def input_gradient_on_one_rank(rank, world, form):
    model = Two()
    if form == "replicated":
        model = shardstep.DistributedDataParallel(model, timeout=10.0)
        inner = model.module
    else:
        model, optimizer = wrapped()
        inner = model
    for _ in range(3):
        x = torch.full((5,), rank + 1.0, requires_grad=True)
        if rank == 0:
            torch.autograd.grad(model(x), x)
        model(x).backward()
        got = inner.a.grad[0].item() if form == "replicated" else model.full_grad(inner.a)[0].item()
        assert got == 1.5, got
        if form == "replicated":
            inner.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
            step = model.stats()["step"]
            assert step["reduce_scatters"] == 1, step
    return True


@pytest.mark.parametrize("form", ["replicated", "sharded"])
def test_autograd_grad_is_no_backward(form):
    ranks.run(2, input_gradient_on_one_rank, form)


# -- edits ------------------------------------------------------------------------------------------------------------


def assign_on_one_rank(rank, world, when):
    model, optimizer = wrapped()
    for _ in range(2):
        model(torch.full((5,), rank + 1.0)).backward()
        optimizer.step()
    model.full_grad(model.a)
    if rank == 0:
        model.a.grad = torch.full((5,), 7.0)
    try:
        optimizer.step()
    except shardstep.MismatchError:
        return "mismatch"
    return model.a.tolist()


def test_reduced_gradient_replaced_on_one_rank_is_an_error_on_all():
    assert ranks.run(2, assign_on_one_rank, "") == ["mismatch", "mismatch"]


def abort_twice(rank, world):
    model, optimizer = wrapped()
    model(torch.full((5,), rank + 1.0)).backward()
    if rank == 0:
        model.abort_window()
    else:
        with pytest.raises(shardstep.AbortedError):
            optimizer.step()
    model(torch.full((5,), rank + 1.0)).backward()
    model.abort_window()
    model(torch.full((5,), rank + 1.0)).backward()
    optimizer.step()
    return model.a.tolist()


def test_abort_after_a_peers_abort_is_an_abort_of_its_own():
    for a in ranks.run(2, abort_twice):
        assert a == [0.25] * 5


# -- buffers ----------------------------------------------------------------------------------------------------------


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.out = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.norm(x))


def buffers_uneven(rank, world, what):
    torch.manual_seed(0)
    ddp = shardstep.DistributedDataParallel(Normed(), timeout=10.0)
    optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    torch.manual_seed(rank)
    for step in range(3):
        ddp(torch.randn(4, 3)).sum().backward()
        if what == "read" and rank == 0:
            next(ddp.parameters()).grad.norm()
        if what == "skip" and step == 1 and rank == 1:
            pass
        else:
            ddp(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if what == "skip" and step == 1:
            if rank == 0:
                ddp(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ddp(torch.randn(4, 3))
    return [p.tolist() for p in ddp.parameters()]


@pytest.mark.parametrize("what", ["read", "skip"])
def test_buffers_of_ranks_with_different_forwards_do_not_hang(what):
    a, b = ranks.run(2, buffers_uneven, what, timeout=15)
    assert a == b


# -- who closes -------------------------------------------------------------------------------------------------------


def norm_after_full_grad(rank, world):
    model, optimizer = wrapped(model=Two(3))  # rank 1 owns nothing
    model(torch.full((3,), rank + 1.0)).backward()
    torch.nn.utils.get_total_norm([model.a.grad])
    model.full_grad(model.a)
    model.a.grad.norm()
    closes = model.stats()["total"]["closes"]
    optimizer.step()
    return closes


def test_rank_that_owns_nothing_closes_as_often_as_the_others():
    first, second = ranks.run(2, norm_after_full_grad)
    assert first == second


# -- dropped in mid-window --------------------------------------------------------------------------------------------


def dropped_after_one_rank_sent(rank, world, transport):
    model, optimizer = wrapped(transport)
    for _ in range(2):
        with model.no_sync() if rank == 0 else contextlib.nullcontext():
            model(torch.full((5,), rank + 1.0)).backward()
    model.a.grad = None
    with model.no_sync():
        model(torch.full((5,), rank + 1.0)).backward()
    return model.full_grad(model.a)[0].item(), model.full_grad(model.b)[0].item()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradient_made_after_a_drop_is_not_dropped_with_the_old_one(transport):
    assert ranks.run(2, dropped_after_one_rank_sent, transport) == [(1.5, 4.5)] * 2


def divide_unused(rank, world):
    model, optimizer = wrapped()
    model(torch.full((5,), rank + 1.0), "a").backward()
    for p in (model.b, model.a):
        if p.grad is not None:
            p.grad /= 2
    optimizer.step()
    return [p[0].item() for p in model.parameters()]


def test_gradient_that_no_rank_has_can_be_divided():
    assert ranks.run(2, divide_unused) == [[1 - 0.5 * 0.75, 1.0]] * 2


def one_rank_adds(rank, world):
    model, optimizer = wrapped(bucket_cap_mb=0.00001)
    model(torch.full((5,), rank + 1.0)).backward()
    assert model.a.grad.norm() == pytest.approx(1.5 * 5**0.5)
    model(torch.full((5,), rank + 1.0), "ab"[rank]).backward()  # each bucket gets more on one rank only
    norm = float(model.a.grad.norm())
    model.b.grad.mul_(0.5)
    optimizer.step()
    return norm, model.a[0].item(), model.b[0].item()


def one_rank_adds_before_a_scale(rank, world):
    model, optimizer = wrapped(bucket_cap_mb=0.00001)
    for use in ("ab", "ab"[rank]):
        model(torch.full((5,), rank + 1.0), use).backward()
        model.b.grad.mul_(0.5)
    optimizer.step()
    return model.a[0].item(), model.b[0].item()


def test_gradient_to_which_another_rank_has_added_is_settled_before_it_is_scaled():
    for got in ranks.run(2, one_rank_adds_before_a_scale):
        assert got == pytest.approx((1 - 0.5 * 2.0, 1 - 0.5 * (1.5 / 2 + 1) / 2))


def test_gradient_to_which_another_rank_has_added_is_settled_again():
    for got in ranks.run(2, one_rank_adds):
        assert got == pytest.approx((2.0 * 5**0.5, 1 - 0.5 * 2.0, 1 - 0.5 * 2.5 / 2))


def unused_after_module_zero_grad(rank, world):
    model, optimizer = wrapped()
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            model(torch.full((5,), rank + 1.0), "ab" if rank == 1 else "a").backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    return float(norm)


def test_clip_after_the_modules_own_zero_grad_sees_what_only_another_rank_used():
    assert ranks.run(2, unused_after_module_zero_grad) == pytest.approx([(5 * 1.5**2 + 5 * 1.0) ** 0.5] * 2)


def low_precision_sums(rank, world, hooked):
    """The gradients of a bf16 weight after each of three micro-batches, wrapped and as torch itself accumulates into FP32."""
    torch.manual_seed(0)
    weight = torch.randn(5, 7).bfloat16()
    inputs = [torch.randn(4, 7).bfloat16() for _ in range(3)]
    seen = {}
    for kind in ("wrapped", "torch"):
        layer = torch.nn.Linear(7, 5, bias=False)
        layer.weight.data.copy_(weight)
        if kind == "wrapped":
            shardstep.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.0), param_dtype=torch.bfloat16)
            context = layer.no_sync
        else:
            layer.bfloat16()
            layer.weight.grad_dtype = None
            layer.weight.grad = torch.zeros(5, 7)
            context = contextlib.nullcontext
        in_hook = []
        if hooked:
            layer.weight.register_post_accumulate_grad_hook(lambda p, to=in_hook: to.append(p.grad.detach().clone()))
        after = []
        for x in inputs:
            with context():
                layer(x).float().square().sum().backward()
                after.append(layer.weight.grad.detach().clone())
        assert all(gradient.dtype == torch.float32 for gradient in after)
        seen[kind] = [torch.Tensor(gradient.float()) for gradient in after + in_hook]
    return [torch.equal(a, b) for a, b in zip(seen["wrapped"], seen["torch"], strict=True)]


@pytest.mark.parametrize("hooked", [False, True], ids=["", "with a hook of the user's"])
def test_low_precision_gradients_add_up_in_fp32_as_torch_adds_them(hooked):
    (result,) = ranks.run(1, low_precision_sums, hooked)
    assert result == [True] * (6 if hooked else 3)
