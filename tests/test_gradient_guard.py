"""Rule 6: what a sharded gradient answers, does and refuses. Every answer is held to one process that saw all the data;
``debug=True`` makes NaN of whatever a rank does not own, so an answer taken from there cannot go unnoticed."""

import contextlib
import copy
import io
import itertools
import math
import pickle
import time
import warnings

import pytest
import ranks
import shardstep
import torch
import torch.overrides
from shardstep._gradient import ShardedGradient
from torch import nn

TRANSPORTS = ("shm", "c10d")
TIGHT = dict(rtol=1e-5, atol=1e-7)


class Shapes(nn.Module):
    """A matrix, a bias, a channels_last kernel and a 0-dim scale: cut by segments wherever that falls."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(8, 33)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.linear(self.conv(x).tanh().mean((2, 3))) * self.scale


def inputs(rank, micro=0):
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(100 * micro + rank))


def loss(model, x):
    return (model(x) ** 2).mean() * 30


def wrapped(transport="shm", seed=0, optimizer=torch.optim.SGD, lr=0.1, **options):
    model = Shapes(seed)
    options = {"debug": True, "bucket_cap_mb": 0.002, "timeout": 20, **options}
    return shardstep.wrap(model, optimizer(model.parameters(), lr=lr), transport=transport, **options)


def reference(world, seed=0, optimizer=torch.optim.SGD, lr=0.1, micros=1, scale=1.0):
    """One process over everybody's data: its gradients are the mean over ranks."""
    model = Shapes(seed)
    for rank, micro in itertools.product(range(world), range(micros)):
        (loss(model, inputs(rank, micro)) * scale / world).backward()
    return model, optimizer(model.parameters(), lr=lr)


def assert_same_gradients(model, plain, **tolerance):
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        full = model.full_grad(p)
        assert (full is None) == (q.grad is None), name
        if full is not None:
            torch.testing.assert_close(full, q.grad, **(tolerance or TIGHT), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_weights(model, plain, **tolerance):
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(p.detach(), q[1].detach(), **(tolerance or TIGHT), msg=lambda m, n=name: f"{n}: {m}")


def after_backward(rank, world, transport="shm", **options):
    model, optimizer = wrapped(transport, **options)
    loss(model, inputs(rank)).backward()
    return model, optimizer, *reference(world)


# -- clipping ---------------------------------------------------------------------------------------------------------


def clip_norm_body(rank, world, transport, norm_type, foreach):
    model, optimizer, plain, plain_optimizer = after_backward(rank, world, transport)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type, foreach=foreach)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
    assert type(total) is torch.Tensor
    torch.testing.assert_close(total, expected, **TIGHT)
    assert_same_gradients(model, plain)
    optimizer.step()
    plain_optimizer.step()
    assert_same_weights(model, plain)
    model.unwrap()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3, 0.5, math.inf, -math.inf, 0], ids=str)
def test_clip_grad_norm_is_that_of_one_process(world, norm_type):
    for foreach in (None, True, False):
        ranks.run(world, clip_norm_body, "shm", norm_type, foreach)
    if norm_type in (2.0, math.inf):
        ranks.run(world, clip_norm_body, "c10d", norm_type, None)


def clip_others_body(rank, world, foreach):
    model, optimizer, plain, plain_optimizer = after_backward(rank, world)
    for parameters in (model.parameters(), plain.parameters()):
        torch.nn.utils.clip_grad_value_(parameters, 0.01, foreach=foreach)
    assert_same_gradients(model, plain)
    totals = []
    for parameters in (list(model.parameters()), list(plain.parameters())):
        totals.append(torch.nn.utils.get_total_norm([p.grad for p in parameters], 2.0, foreach=foreach))
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.05, totals[-1], foreach=foreach)
    torch.testing.assert_close(*totals, **TIGHT)
    assert_same_gradients(model, plain)
    optimizer.step()
    plain_optimizer.step()
    assert_same_weights(model, plain)
    model.unwrap()


@pytest.mark.parametrize("foreach", [None, True, False], ids=str)
def test_clip_grad_value_and_get_total_norm_are_those_of_one_process(foreach):
    ranks.run(2, clip_others_body, foreach)
    ranks.run(3, clip_others_body, foreach)


def nonfinite_body(rank, world, poison, foreach):
    model, optimizer = wrapped()
    (loss(model, inputs(rank)) * (poison if rank == world - 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    model.unwrap()
    return total.item()


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_error_if_nonfinite_raises_on_every_rank(poison):
    for foreach in (True, False):
        totals = ranks.run(2, nonfinite_body, poison, foreach)
        assert not any(math.isfinite(total) for total in totals), totals


def repeated_clip_body(rank, world):
    """Norms after scaling, and a clip of a window that was never synchronised."""
    model, optimizer = wrapped()
    plain, plain_optimizer = reference(world, micros=2)
    for micro in range(2):
        with model.no_sync():
            loss(model, inputs(rank, micro)).backward()
    for parameters in (list(model.parameters()), list(plain.parameters())):
        for p in parameters:
            p.grad.mul_(3.0)
            p.grad /= -7.0
    for order in (1.0, 2.0, math.inf, 0.0):
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.norm(order), q.grad.norm(order), **TIGHT, msg=lambda m, n=name: f"{n}: {m}")
    first = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    second = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(first, expected, **TIGHT)
    torch.testing.assert_close(second, torch.tensor(0.1), rtol=1e-4, atol=0.0)
    for p in itertools.chain(model.parameters(), plain.parameters()):
        p.grad.mul_(0.0)
    for p, q in zip(model.parameters(), plain.parameters()):
        for order in (0.0, 1.0, 2.0):
            assert p.grad.norm(order) == q.grad.norm(order) == 0.0
    model.unwrap()


def test_norms_follow_scaling_and_close_a_window_that_never_synchronised():
    ranks.run(2, repeated_clip_body)
    ranks.run(3, repeated_clip_body)


def parts_body(rank, world):
    """Only a part of the parameters is clipped; a rank that alone reads a norm is met by the others in their step."""
    model, optimizer, plain, plain_optimizer = after_backward(rank, world)
    for m in (model, plain):
        torch.nn.utils.clip_grad_norm_(m.linear.parameters(), 0.01)
    assert_same_gradients(model, plain)
    if rank == world - 1:
        torch.testing.assert_close(model.scale.grad.norm(), plain.scale.grad.norm(), **TIGHT)
    optimizer.step()
    plain_optimizer.step()
    assert_same_weights(model, plain)
    optimizer.zero_grad()
    loss(model, inputs(rank)).backward()
    if rank == 0:
        assert model.linear.weight.grad.norm() > 0
    optimizer.step()
    model.unwrap()
    return [p.detach().clone() for p in model.parameters()]


def test_a_rank_that_alone_reads_a_norm_is_met_in_the_others_step():
    first, second = ranks.run(2, parts_body)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


# -- GradScaler -------------------------------------------------------------------------------------------------------


def scaler_body(rank, world, owner, unscale):
    """An inf in an element that only rank ``owner`` owns."""
    model, optimizer = wrapped(optimizer=torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, plain_optimizer = reference(world, optimizer=torch.optim.AdamW, scale=1024.0)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain_scaler.scale(torch.ones(()))
    scaler.scale(loss(model, inputs(rank))).backward()
    for m, o, s in ((model, optimizer, scaler), (plain, plain_optimizer, plain_scaler)):
        if unscale:
            s.unscale_(o)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.2)
        s.step(o)
        s.update()
        o.zero_grad()
    # bf16-like tolerance of Adam's first step is not needed: gradients agree to rounding, the update is their sign
    assert_same_weights(model, plain, rtol=1e-3, atol=1e-4)
    assert scaler.get_scale() == plain_scaler.get_scale() == 1024.0

    engine = model._engine
    position = engine.index_of(model.linear.weight)
    slots = engine.slots[position]
    mine = slots["begin"] if slots["numel"] else None
    before = [p.detach().clone() for p in model.parameters()]
    states = copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    y = loss(model, inputs(rank, 1))
    if rank == owner:
        assert mine is not None
        y = y + model.linear.weight.flatten()[mine] * math.inf
    scaler.scale(y).backward()
    if unscale:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p, old)
    for p, old in zip(model.parameters(), states):
        for key, value in old.items():
            assert torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value)), key
    optimizer.zero_grad()
    scaler.scale(loss(model, inputs(rank, 2))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before))
    model.unwrap()


@pytest.mark.parametrize("unscale", [False, True])
def test_inf_in_one_shard_makes_every_rank_skip_alike(unscale):
    for owner in range(2):
        ranks.run(2, scaler_body, owner, unscale)
    ranks.run(3, scaler_body, 1, unscale)


# -- writes -----------------------------------------------------------------------------------------------------------


def like(g, seed=7):
    return torch.randn(g.shape, generator=torch.Generator().manual_seed(seed))


def data_mul(g):
    g.data.mul_(0.3)


def detached_div(g):
    g.detach().div_(3)


def augmented(g):
    g *= 0.5
    g /= 3
    g += like(g)
    g -= 0.25


EDITS = {
    "mul_": lambda g: g.mul_(0.5),
    "mul_ by an int": lambda g: g.mul_(3),
    "mul_ by a 0-dim tensor": lambda g: g.mul_(torch.tensor(0.25)),
    "mul_ by a 0-dim double": lambda g: g.mul_(torch.tensor(0.25, dtype=torch.float64)),
    "mul_ by a tensor": lambda g: g.mul_(like(g)),
    "mul_ by itself": lambda g: g.mul_(g),
    "multiply_": lambda g: g.multiply_(1.5),
    "div_": lambda g: g.div_(3.0),
    "div_ by zero": lambda g: g.div_(0.0),
    "div_ with rounding": lambda g: g.div_(0.01, rounding_mode="floor"),
    "augmented": augmented,
    ".data.mul_": data_mul,
    ".detach().div_": detached_div,
    "add_ a tensor": lambda g: g.add_(like(g), alpha=2.0),
    "add_ a row": lambda g: g.add_(like(g)[..., :1]) if g.dim() else g.add_(1.0),
    "add_ a number": lambda g: g.add_(0.5),
    "sub_": lambda g: g.sub_(like(g)),
    "clamp_": lambda g: g.clamp_(-0.01, 0.02),
    "clamp_ by tensors": lambda g: g.clamp_(min=-like(g).abs(), max=like(g).abs()),
    "torch.clamp_": lambda g: torch.clamp_(g, max=0.0),
    "nan_to_num_": lambda g: g.div_(0.0).nan_to_num_(1.0, 2.0, 3.0),
    "copy_": lambda g: g.copy_(like(g)),
    "fill_": lambda g: g.fill_(2.0),
    "zero_": lambda g: g.zero_(),
    "zero_ then add_": lambda g: g.zero_().add_(1.0),
    "lerp_": lambda g: g.lerp_(like(g), 0.3),
    "addcmul_": lambda g: g.addcmul_(like(g), like(g, 8), value=0.1),
    "addcdiv_": lambda g: g.addcdiv_(like(g), 2 + like(g, 8).abs(), value=0.1),
    "neg_": lambda g: g.neg_(),
    "sign_": lambda g: g.sign_(),
    "pow_": lambda g: g.pow_(2),
    "masked_fill_": lambda g: g.masked_fill_(like(g) > 0, 0.0),
    "mul_ after add_": lambda g: g.mul_(2.0).add_(like(g)).mul_(0.5),
    "_foreach_mul_": lambda g: torch._foreach_mul_([g], 0.5),
    "_foreach_mul_ by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.5)),
    "_foreach_mul_ by tensors": lambda g: torch._foreach_mul_([g], [like(g)]),
    "_foreach_div_": lambda g: torch._foreach_div_([g], 3.0),
    "_foreach_add_": lambda g: torch._foreach_add_([g], [like(g)], alpha=0.1),
    "_foreach_zero_": lambda g: torch._foreach_zero_([g]),
    "_foreach_clamp_min_": lambda g: torch._foreach_clamp_min_([g], -0.01),
    "_foreach_lerp_": lambda g: torch._foreach_lerp_([g], [like(g)], 0.3),
}


def edits_body(rank, world, transport, names):
    model, optimizer = wrapped(transport)
    for name in names:
        plain, plain_optimizer = reference(world)
        plain.load_state_dict(model.state_dict())
        for p in plain.parameters():
            p.grad = None
        for k in range(world):
            (loss(plain, inputs(k)) / world).backward()
        loss(model, inputs(rank)).backward()
        for p in itertools.chain(model.parameters(), plain.parameters()):
            with torch.no_grad():
                EDITS[name](p.grad)
        try:
            for p, q in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(p.grad.norm(), q.grad.norm(), rtol=1e-4, atol=1e-6, equal_nan=True)
            assert_same_gradients(model, plain, rtol=1e-4, atol=1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        for p in itertools.chain(model.parameters(), plain.parameters()):
            p.grad.nan_to_num_(0.0, 0.0, 0.0).clamp_(-1e-3, 1e-3)
        optimizer.step()
        plain_optimizer.step()
        assert_same_weights(model, plain, rtol=1e-4, atol=1e-6)
        optimizer.zero_grad()
    model.unwrap()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
def test_in_place_edits_act_on_the_reduced_gradient(world, transport):
    ranks.run(world, edits_body, transport, list(EDITS))


def assignment_body(rank, world):
    model, optimizer, plain, plain_optimizer = after_backward(rank, world)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # closes the window
    for m in (model, plain):
        m.linear.weight.grad = torch.full_like(m.linear.weight, 0.5)
        m.linear.bias.grad = None
        m.conv.weight.grad = like(m.conv.weight)  # other strides than the parameter
    assert_same_gradients(model, plain)
    optimizer.step()
    plain_optimizer.step()
    assert_same_weights(model, plain)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    loss(model, inputs(rank)).backward()
    kept = model.linear.weight.grad
    optimizer.step()
    optimizer.zero_grad()
    loss(model, inputs(rank)).backward()
    optimizer.zero_grad()
    model.linear.weight.grad = kept
    with pytest.raises(shardstep.UsageError, match="linear.weight"):
        optimizer.step()
    model.unwrap()


def test_assigned_gradients_are_those_stepped_with_and_none_is_left_alone():
    ranks.run(2, assignment_body)


def unequal_body(rank, world, edit):
    model, optimizer = wrapped()
    loss(model, inputs(rank)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    g = model.linear.weight.grad
    if rank == 1:
        {"scale": lambda: g.mul_(0.5), "edit": lambda: g.clamp_(0.0, 1.0), "drop": optimizer.zero_grad}[edit]()
    with pytest.raises(shardstep.MismatchError) as caught:
        optimizer.step()
    model.abort_window()
    optimizer.zero_grad()
    loss(model, inputs(rank)).backward()
    optimizer.step()
    model.unwrap()
    return str(caught.value), [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("edit", ["scale", "edit", "drop"])
def test_edits_on_one_rank_only_are_a_mismatch_on_all(edit):
    (first, a), (second, b) = ranks.run(2, unequal_body, edit)
    assert "rank 0" in first and "rank 1" in first and "rank 0" in second and "rank 1" in second
    assert all(torch.equal(x, y) for x, y in zip(a, b))


# -- reads ------------------------------------------------------------------------------------------------------------


def metadata_body(rank, world):
    model, optimizer, plain, _ = after_backward(rank, world)
    for p, q in zip(model.parameters(), plain.parameters()):
        g, h = p.grad, q.grad
        assert (g.shape, g.dtype, g.device, g.layout, g.dim(), g.numel(), g.size()) == (
            h.shape, h.dtype, h.device, h.layout, h.dim(), h.numel(), h.size())
        assert g.stride() == p.stride() and g.is_contiguous() == p.is_contiguous()
        assert not g.requires_grad and g.is_leaf and g.grad_fn is None and not g.is_sparse
        assert g.element_size() == 4 and g.nbytes == h.nbytes and g.is_floating_point() and torch.is_floating_point(g)
        assert isinstance(g.data_ptr(), int) and g.untyped_storage().nbytes() >= g.nbytes
        assert isinstance(hash(g), int) and {g: 1}[g] == 1 and (g is p.grad) and g in {g: 0}
        assert g.dim() == 0 or len(g) == len(h)
        for text in (repr(g), str(g), f"{g}", f"{g!r:>10}", format(g), repr([g])):
            assert "ShardedGradient" in text
        with contextlib.redirect_stdout(io.StringIO()):
            print(g, p)
    assert "linear.weight" in repr(model.linear.weight.grad)
    optimizer.step()
    assert f"{model.linear.weight.grad}"
    model.unwrap()


def test_metadata_passes_and_printing_never_fails():
    ranks.run(2, metadata_body)


def refused_body(rank, world):
    model, optimizer, plain, _ = after_backward(rank, world)
    g, other = model.linear.weight.grad, model.conv.weight.grad
    x = torch.randn(33, 8)
    reads = [
        lambda: g + 1, lambda: 1 + g, lambda: x @ g.T, lambda: g.sum(), lambda: g.abs().max(), lambda: g.mean(),
        lambda: g[0], lambda: g[0, 0].item(), lambda: g.tolist(), lambda: g.numpy(), lambda: g.clone(), lambda: g.float(),
        lambda: g.to(torch.float64), lambda: g.type(torch.float64), lambda: g.cpu(),
        lambda: g.view(-1), lambda: g.reshape(-1), lambda: g.flatten(),
        lambda: g.isnan().any(), lambda: torch.isfinite(g).all(), lambda: torch.cat([g, x]), lambda: torch.stack([x, g]),
        lambda: g == g, lambda: torch.equal(g, x), lambda: torch.allclose(g, x), lambda: bool((g > 0).all()), lambda: g.std(),
        lambda: list(g), lambda: torch.norm(g, dim=0), lambda: g.norm(2, 0), lambda: torch.linalg.vector_norm(g, 2, 0),
        lambda: torch.linalg.matrix_norm(g), lambda: torch.linalg.norm(g, 2), lambda: torch.linalg.norm(g, 1),
        lambda: torch.norm(g, "nuc"), lambda: torch.linalg.norm(g, "nuc"), lambda: torch.linalg.norm(g, 2, 1),
        lambda: torch.add(x, x, out=g), lambda: x.add_(g), lambda: x.copy_(g), lambda: torch._foreach_add_([x], [g]),
        lambda: torch._foreach_mul([g], 2.0), lambda: g.sort(), lambda: g.t_(), lambda: g.unsqueeze_(0), lambda: g.resize_(3),
        lambda: g.random_(), lambda: g.normal_(), lambda: g.index_fill_(0, torch.tensor([0]), 1.0),
        lambda: torch.nn.functional.normalize(g), lambda: torch.nn.functional.dropout(g), lambda: torch.histc(g),
        lambda: g.__array__(), lambda: g.__setitem__(0, 1.0), lambda: setattr(g, "data", x), lambda: float(model.scale.grad),
        lambda: model.scale.grad.item(), lambda: torch.save(g, io.BytesIO()), lambda: pickle.dumps(g),
        lambda: copy.deepcopy(g), lambda: copy.copy(g), lambda: g.storage()[0], lambda: g.__dlpack__(),
        lambda: torch.linalg.vector_norm(g, 2, dtype=torch.float64).item() + g.cumsum(0),
        lambda: torch.dot(g.view(-1), other.view(-1)), lambda: torch.utils._foreach_utils.foo(g),
    ][:-1]
    silent = []
    for k, read in enumerate(reads):
        try:
            result = read()
            silent.append((k, read.__code__.co_names, repr(result)[:80]))
        except shardstep.UsageError as error:
            assert "linear.weight" in str(error) or "scale" in str(error), (k, error)
            assert "full_grad" in str(error), (k, error)
    assert not silent, silent
    assert_same_gradients(model, plain)  # and nothing was done
    model.unwrap()


def test_refused_reads_name_the_parameter_and_full_grad():
    ranks.run(2, refused_body)


def local_reads_body(rank, world):
    model, optimizer = wrapped()
    alone = Shapes()
    loss(alone, inputs(rank)).backward()
    with model.no_sync():
        loss(model, inputs(rank)).backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad.clone(), q.grad, **TIGHT)
            torch.testing.assert_close(p.grad.sum(), q.grad.sum(), **TIGHT)
            assert type(p.grad + 0) is torch.Tensor
    assert model.stats()["total"]["closes"] == 0
    with pytest.raises(shardstep.UsageError, match="linear.weight"):
        model.linear.weight.grad.sum()
    model.unwrap()


def test_the_local_gradient_can_be_read_under_no_sync():
    ranks.run(2, local_reads_body)


# -- the sweep --------------------------------------------------------------------------------------------------------

#: They say where a tensor is or how often it was written, which differs from tensor to tensor.
IDENTITY = {"data_ptr", "untyped_storage", "_version", "__hash__", "_base", "storage_offset", "is_set_to", "_backward_hooks",
            "__repr__", "__format__", "_cdata", "_is_view", "names", "__len__", "empty_like", "new_empty"}


#: Arguments to call an unknown function with: ``a`` is the tensor under test, ``x`` another one of its shape.
TEMPLATES = (
    lambda a, x: (a,), lambda a, x: (a, 2.0), lambda a, x: (a, 1), lambda a, x: (a, 0), lambda a, x: (a, x),
    lambda a, x: (x, a), lambda a, x: (a, a), lambda a, x: ([a],), lambda a, x: ([a], [x]), lambda a, x: ([x], [a]),
    lambda a, x: ([a], 2.0), lambda a, x: (a, x, x), lambda a, x: (x, a, x), lambda a, x: (x, x, a),
    lambda a, x: (a, 0, 1), lambda a, x: (a, -0.5, 0.5), lambda a, x: (a, (0,)), lambda a, x: (a, "fro"),
    lambda a, x: (a, 0, torch.tensor([0])), lambda a, x: (a, torch.float64), lambda a, x: ([a], [x], [x]),
    lambda a, x: (a, x > 0), lambda a, x: (a, torch.tensor(2.0)), lambda a, x: (a, 0, torch.tensor([0]), 1.0),
    lambda a, x: (a, x > 0, 3.0), lambda a, x: (a, x > 0, x), lambda a, x: (2.0, a), lambda a, x: (a, None, 0),
    lambda a, x: ([a], torch.tensor(2.0)), lambda a, x: (a, 2, 0), lambda a, x: ([a, x], 1.0), lambda a, x: ([x, a], [a, x]),
)


def same(result, expected):
    if isinstance(expected, torch.Tensor):
        if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            a, b = result.detach(), expected.detach()
            return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=False) if not a.is_complex() else (
                torch.allclose(a, b))
    if isinstance(expected, (tuple, list)) and not isinstance(expected, torch.Size):
        return len(result) == len(expected) and all(same(r, e) for r, e in zip(result, expected))
    if isinstance(expected, float):
        return math.isclose(result, expected, rel_tol=1e-4)
    return result == expected


SKIPPED = {
    "backward", "register_hook", "_has_post_accumulate", "retain_grad", "register_post_accumulate_grad_hook", "__reduce_ex__",
    "set_", "requires_grad_", "share_memory_", "pin_memory", "cuda", "xpu", "ipu", "hpu", "mtia", "from_file", "save", "load",
}


def sweep_body(rank, world):
    warnings.simplefilter("ignore")
    shape = (6, 6)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    other = start.flip(0) + 0.25
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape))
    model.other = nn.Parameter(torch.zeros(77))
    model, optimizer = shardstep.wrap(
        model, torch.optim.SGD(model.parameters(), lr=1.0), transport="shm", debug=True, timeout=20)

    def fresh():
        optimizer.zero_grad()
        ((model.weight * start).sum() + model.other.sum()).backward()
        torch.nn.utils.get_total_norm([model.other.grad])

    def compare(name, k, plain):
        try:
            full = model.full_grad(model.weight)
        except shardstep.Error as error:
            raise AssertionError(f"{name}, {k}: {error}") from error
        if full is None or full.shape != plain.shape or not torch.allclose(full, plain, 1e-4, 1e-6, equal_nan=True):
            wrong.append((name, k, "left another gradient"))
        if full is None or not torch.equal(full, start):
            fresh()

    functions = []
    for members in torch.overrides.get_overridable_functions().values():
        for function in members:
            name = getattr(function, "__name__", "?")
            if name == "__get__":
                owner = getattr(function, "__self__", None)
                name = getattr(owner, "__name__", name)
            if name in SKIPPED or name == "__set__" or name.startswith("_cudnn") or "_thnn_" in name:
                continue
            functions.append((name, function))
    functions.sort(key=lambda pair: pair[0])
    wrong, answered, refused = [], set(), set()
    fresh()
    for name, function in functions:
        touched = False
        for k, arguments in enumerate(TEMPLATES):
            x, guard = other.clone(), model.weight.grad
            try:
                torch.default_generator.manual_seed(1)  # torch.manual_seed costs more than all else here
                result = function(*arguments(guard, x))
            except shardstep.UsageError as error:
                refused.add(name)
                if "'weight'" not in str(error) or "full_grad" not in str(error):
                    wrong.append((name, k, f"says {error}"))
                continue
            except Exception:
                refused.add(name)
                touched = True
                continue
            y, plain = other.clone(), start.clone()
            try:
                torch.default_generator.manual_seed(1)
                expected = function(*arguments(plain, y))
            except Exception as error:
                wrong.append((name, k, f"answered {result!r} instead of raising {error!r}"))
                touched = True
                continue
            changed = plain.shape != start.shape or not torch.equal(plain, start)
            answered.add(name)
            touched = True
            if name in IDENTITY:
                continue
            if isinstance(result, ShardedGradient):
                if not isinstance(expected, torch.Tensor) or expected.shape != result.shape:
                    wrong.append((name, k, f"returned the gradient instead of {expected!r}"))
            elif not same(result, expected):
                wrong.append((name, k, f"answered {result!r} instead of {expected!r}"))
            if not torch.equal(x, y):
                wrong.append((name, k, "left its other argument different"))
            if changed:
                compare(name, k, plain)
                touched = False
        if touched:
            compare(name, "after all", start)
    model.unwrap()
    return wrong, sorted(answered), sorted(refused), len(functions)


def test_every_torch_function_answers_globally_or_refuses():
    results = ranks.run(2, sweep_body, timeout=120)
    for wrong, answered, refused, count in results:
        assert not wrong, "\n".join(map(str, wrong))
        assert len(refused) > 500 and "norm" in answered and "mul_" in answered and "shape" in answered, (count, answered)
    assert results[0][1:] == results[1][1:]


# -- cost -------------------------------------------------------------------------------------------------------------


def cost_body(rank, world):
    model, optimizer = wrapped(debug=False)
    loss(model, inputs(rank)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    g, plain = model.linear.weight.grad, torch.zeros(33, 8)
    costs = {}
    for name, call in {"shape": lambda t: t.shape, "mul_": lambda t: t.mul_(1.0), "norm": lambda t: t.norm()}.items():
        for kind, tensor in (("guard", g), ("plain", plain)):
            call(tensor)
            begin = time.perf_counter()
            for _ in range(1000):
                call(tensor)
            costs[f"{name}, {kind}"] = (time.perf_counter() - begin) * 1e3
    model.unwrap()
    return costs


def test_dispatch_cost_is_reported():
    costs = ranks.run(2, cost_body)[0]
    print("\nmicroseconds per call:", ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items()))
    assert costs
