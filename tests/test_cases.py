"""Cases that users of the systems we replace have reported, by their ids, as kinds. ``P`` is a module with two vectors of
ones; the input of rank r is full of r + 1, so one use of a vector on each of two ranks has mean gradient 1.5.

``gradients`` are those of both forms in both modes: wrapped in place ("wrap"), DistributedDataParallel as it is constructed
("replicated") and with a ShardedOptimizer ("class").
"""

import contextlib
import copy

import pytest
import ranks
import shardstep
import torch
from boom import Boom
from torch import nn
from torch.utils.checkpoint import checkpoint

FORMS = ["wrap", "class", "replicated"]
SHARDED = ["wrap", "class"]
every_form = pytest.mark.parametrize("form", FORMS)
sharded_forms = pytest.mark.parametrize("form", SHARDED)


class P(nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.a = nn.Parameter(torch.ones(n))
        self.b = nn.Parameter(torch.ones(n))

    def forward(self, x, use="ab"):
        return sum((getattr(self, name) * x).sum() for name in use)


def make(form, model, optimizer=torch.optim.SGD, lr=0.5, **options):
    """(what is called, the user's module, the optimizer)"""
    optimizer = optimizer(model.parameters(), lr=lr) if isinstance(optimizer, type) else optimizer
    if form == "wrap":
        called, optimizer = shardstep.wrap(model, optimizer, timeout=20.0, **options)
        return called, called, optimizer
    ddp = shardstep.DistributedDataParallel(model, timeout=20.0, **options)
    if form == "class":
        optimizer = shardstep.ShardedOptimizer(optimizer, ddp)
    return ddp, model, optimizer


def x(rank, n=2):
    return torch.full((n,), rank + 1.0)


def full(called, p):
    g = called.full_grad(p)
    return None if g is None else g.flatten().tolist()


def gradients(called, module):
    return [full(called, p) for p in module.parameters()]


def micro(called, sync):
    return contextlib.nullcontext() if sync else called.no_sync()


# -- uses: B01, B03, B05, B12, B64, B67, B92 ----------------------------------------------------------------------------


def uses_body(rank, world, form, case):
    called, m, optimizer = make(form, P())
    data = x(rank)
    if case == "B01":
        with called.no_sync():
            called(data, "a").backward()
        called(data, "b").backward()
    elif case == "B03":
        called.set_requires_gradient_sync(False)
        called(data).backward()
        loss = called(data)
        called.set_requires_gradient_sync(True)
        loss.backward()
    elif case == "B05":
        called(data, "ab"[rank]).backward()
    elif case == "B12":
        loss = called(data)
        loss.backward(retain_graph=True)
        loss.backward()
    elif case == "B67":
        with called.no_sync():
            if rank == 0:
                called(data).backward()
        called(data).backward()
    return gradients(called, m)


@every_form
@pytest.mark.parametrize("case, a, b", [("B01", 1.5, 1.5), ("B03", 3, 3), ("B05", 0.5, 1), ("B12", 3, 3), ("B67", 2, 2)])
def test_every_use_in_the_window_counts_once(form, case, a, b):
    for got in ranks.run(2, uses_body, form, case):
        assert got == [[a, a], [b, b]]


def leftovers_body(rank, world):
    called, m, optimizer = make("wrap", P(), accumulate=4)
    seen = []
    for _ in range(2):
        for size in (4, 3):  # B64: the last window of each epoch is shorter
            for _ in range(size):
                called(x(rank)).backward()
            seen.append(full(called, m.a)[0])
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_shorter_last_window_is_reduced_and_leaves_nothing_behind():
    assert ranks.run(2, leftovers_body) == [[6, 4.5, 6, 4.5]] * 2


def without_zero_grad_body(rank, world, form):
    called, m, optimizer = make(form, P(), lr=1.0)
    for _ in range(3):
        called(x(rank)).backward()
        optimizer.step()
    return m.a.tolist()


@every_form
def test_step_without_zero_grad_accumulates_as_in_torch(form):
    assert ranks.run(2, without_zero_grad_body, form) == [[1 - 1.5 * (1 + 2 + 3)] * 2] * 2


# -- freezing and sharing: B08, B37, B38, B55, B82, B29 ------------------------------------------------------------------


def unfrozen_body(rank, world, form, grouped_later):
    m = P()
    m.b.requires_grad_(False)
    optimizer = torch.optim.AdamW([m.a] if grouped_later else m.parameters(), lr=0.1)
    reference = P()
    reference_optimizer = torch.optim.AdamW([reference.a] if grouped_later else reference.parameters(), lr=0.1)
    reference.b.requires_grad_(False)
    called, m, optimizer = make(form, m, optimizer)
    for step in range(6):
        if step == 3:
            for model, o in ((m, optimizer), (reference, reference_optimizer)):
                model.b.requires_grad_(True)
                if grouped_later:
                    o.add_param_group({"params": [model.b], "lr": 0.01})
        for r in range(world):
            (reference(x(r)) / world).backward()
        called(x(rank)).backward()
        for model, o in ((m, optimizer), (reference, reference_optimizer)):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            o.step()
            o.zero_grad()
    assert "exp_avg" in optimizer.state[m.b] and optimizer.state[m.b]["exp_avg"].numel() == (2 if rank == 0 else 0)
    return [p.tolist() for p in m.parameters()], [p.tolist() for p in reference.parameters()]


@sharded_forms
@pytest.mark.parametrize("grouped_later", [False, True])
def test_unfrozen_parameter_is_trained_synchronised_and_sharded(form, grouped_later):
    for got, expected in ranks.run(2, unfrozen_body, form, grouped_later):
        for a, b in zip(got, expected):
            assert a == pytest.approx(b, rel=1e-5)


def two_models_body(rank, world, form, transport):
    la, lc = (make(form, P(), lr=1.0, transport=transport) for _ in range(2))
    seen = []
    for _ in range(3):
        for called, _, _ in (la, lc) if rank == 0 else (lc, la):
            called(x(rank) * (10 if called is lc[0] else 1)).backward()
        seen += [full(called, m.a)[0] for called, m, _ in (la, lc)]
        for _, _, optimizer in (la, lc):
            optimizer.step()
            optimizer.zero_grad()
    return seen


@sharded_forms
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_two_models_are_not_mixed_when_their_backwards_run_in_another_order(form, transport):
    assert ranks.run(2, two_models_body, form, transport) == [[1.5, 15.0] * 3] * 2


def own_collectives_body(rank, world):
    """One rank reads a norm, so its model communicates now; the other first makes a collective of its own on the group."""
    called, m, optimizer = make("wrap", P(2), lr=1.0, transport="c10d")
    called(x(rank)).backward()
    mine = torch.full((4,), float(rank + 1))
    if rank == 0:
        torch.distributed.all_reduce(mine, async_op=True)
        norm = m.a.grad.norm()
    else:
        torch.distributed.all_reduce(mine)
        norm = None
    optimizer.step()
    torch.distributed.barrier()
    return mine.tolist(), m.a.tolist(), norm is None or norm.item()


def test_collectives_of_the_users_are_not_mixed_with_ours():
    (a, p, norm), (b, q, _) = ranks.run(2, own_collectives_body)
    assert a == b == [3.0] * 4 and p == q == [-0.5] * 2 and norm == pytest.approx(1.5 * 2**0.5)


def gan_body(rank, world, form):
    def nets():
        torch.manual_seed(0)
        return nn.Linear(3, 4), nn.Linear(4, 1)

    def train(g, d, og, od, batches, scale, gm, dm):
        for batch in batches:
            for p in dm.parameters():
                p.requires_grad_(True)
            for z, real in batch:
                ((d(g(z).detach()) ** 2).mean() - d(real).mean()).mul(scale).backward()
            od.step()
            od.zero_grad()
            for p in dm.parameters():
                p.requires_grad_(False)
            for z, _ in batch:
                (-d(g(z)).mean()).mul(scale).backward()
            og.step()
            og.zero_grad()

    data = [[(torch.randn(5, 3), torch.randn(5, 4)) for _ in range(world)] for _ in range(4)]
    rg, rd = nets()
    train(rg, rd, torch.optim.SGD(rg.parameters(), lr=0.1), torch.optim.SGD(rd.parameters(), lr=0.1), data, 1 / world, rg, rd)
    g, d = nets()
    g, gm, og = make(form, g, lr=0.1)
    d, dm, od = make(form, d, lr=0.1)
    train(g, d, og, od, [[batch[rank]] for batch in data], 1.0, gm, dm)
    for a, b in zip([*gm.parameters(), *dm.parameters()], [*rg.parameters(), *rd.parameters()]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_form
def test_gan_with_a_frozen_discriminator_equals_one_process(form):
    ranks.run(2, gan_body, form)


def lora_body(rank, world):
    m = nn.Module()
    m.base = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16), requires_grad=False)
    m.adapter = nn.Parameter(torch.ones(8, 64))
    m.forward = lambda data: (data @ m.base.float() @ m.adapter.t()).sum()
    before = m.base.clone()
    called, m, optimizer = make("wrap", m, torch.optim.AdamW)
    called(torch.randn(2, 64)).backward()
    optimizer.step()
    memory = called.stats()["memory"]
    assert m.base.grad is None and m.base.dtype == torch.bfloat16 and torch.equal(m.base, before)
    assert memory["grads"] == memory["params"] == 4 * 8 * 64, memory
    assert memory["master"] == 0 and memory["optimizer"] == 2 * 4 * 8 * 64 // world, memory


def test_frozen_base_takes_no_gradient_master_or_state_memory():
    ranks.run(2, lora_body)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def against_one_process(rank, world, form, make_model, make_batch, steps=5, K=2, optimizer=None):
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    reference, mine = (torch.manual_seed(3) and make_model() for _ in range(2))
    o = optimizer(reference.parameters())
    called, m, mo = make(form, mine, optimizer(mine.parameters()))
    for step in range(steps):
        for r in range(world):
            for k in range(K):
                torch.manual_seed(100 * step + 10 * r + k)
                (make_batch(reference) / (K * world)).backward()
        for k in range(K):
            torch.manual_seed(100 * step + 10 * rank + k)
            with micro(called, k == K - 1):
                (make_batch(called) / K).backward()
        for model, opt in ((reference, o), (m, mo)):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    for (name, a), (_, b) in zip(reference.named_parameters(), m.named_parameters()):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=f"{name}: {b} instead of {a}")
    return m


def tied_batch(model):
    return (model(torch.randint(0, 7, (6,))) ** 2).mean()


def tied_body(rank, world, form):
    m = against_one_process(rank, world, form, Tied, tied_batch)
    assert m.head.weight is m.embedding.weight
    assert {"embedding.weight", "head.weight"} <= set(m.state_dict())


@every_form
def test_tied_weights_keep_their_identity_and_equal_one_process(form):
    ranks.run(2, tied_body, form)


# -- modules: B20, B26, B41, B77, sparse -----------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self, style):
        super().__init__()
        old = style == "hook"
        norm = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
        self.layer = norm(nn.Linear(3, 3))

    def forward(self, data):
        return self.layer(torch.tanh(self.layer(data)))  # used twice


def linear_batch(model):
    return (model(torch.randn(4, 3)) ** 2).mean()


def weight_norm_body(rank, world, form, style):
    m = against_one_process(rank, world, form, lambda: Normalised(style), linear_batch)
    if style == "parametrization":
        twin = copy.deepcopy(m)
        assert type(twin) is Normalised
        twin(torch.randn(4, 3)).sum().backward()


@every_form
@pytest.mark.parametrize("style", ["hook", "parametrization"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_of_a_module_used_twice_trains(form, style):
    ranks.run(2, weight_norm_body, form, style)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(3, 3), reentrant

    def block(self, data):
        return torch.tanh(self.layer(data))

    def forward(self, data):
        for _ in range(2):
            data = self.block(data) if self.reentrant is None else checkpoint(
                self.block, data, use_reentrant=self.reentrant)
        return data


def checkpoint_body(rank, world, form):
    weights = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        called, m, optimizer = make(form, Checkpointed(reentrant))
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            called(torch.randn(4, 3, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(m.layer.weight.detach().clone())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@every_form
def test_checkpointing_of_a_layer_used_twice_changes_no_bit(form):
    ranks.run(2, checkpoint_body, form)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.embedding = nn.Embedding(7, 3, sparse=True)
        self.lstm = nn.LSTM(3, 3)

    def forward(self, _):
        return self.lstm(self.embedding(torch.randint(0, 7, (5, 2))))[0] * self.scale


@sharded_forms
def test_scalars_lstms_and_sparse_gradients_train(form):
    ranks.run(2, sparse_body, form)


def sparse_body(rank, world, form):
    """torch's clip refuses sparse gradients, so the reference is dense."""
    torch.manual_seed(0)
    reference = Scaled()
    reference.embedding.sparse = False
    mine = copy.deepcopy(reference)
    mine.embedding.sparse = True
    held = list(mine.parameters())
    o = torch.optim.SGD(reference.parameters(), lr=0.1)
    called, m, mo = make(form, mine, lr=0.1)
    for step in range(4):
        for r in range(world):
            torch.manual_seed(10 * step + r)
            ((reference(None) ** 2).mean() / world).backward()
        torch.manual_seed(10 * step + rank)
        (called(None) ** 2).mean().backward()
        for model, opt in ((reference, o), (m, mo)):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
    for a, b, c in zip(reference.parameters(), m.parameters(), held):
        assert b is c
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


# -- refusals: B18, B35, B47 -----------------------------------------------------------------------------------------------


def shapes_body(rank, world, form):
    with pytest.raises(shardstep.MismatchError, match="weight"):
        make(form, nn.Linear(2, 2 + rank))


def cast_body(rank, world, form):
    called, m, optimizer = make(form, P())
    with pytest.raises(shardstep.UsageError):
        called.double()
    m.a.data = m.a.data.double()
    with pytest.raises(shardstep.UsageError, match="'.*a'"):
        called(x(rank).double())


def meta_body(rank, world, form):
    with torch.device("meta"):
        m = Tied()
    with pytest.raises(shardstep.UsageError, match="embedding.weight"):
        make(form, m)
    m.to_empty(device="cpu")
    m.head.weight = m.embedding.weight
    nn.init.ones_(m.embedding.weight)
    called, m, optimizer = make(form, m)
    called(torch.arange(7)).sum().backward()
    optimizer.step()
    assert m.head.weight is m.embedding.weight and m.head.weight.max() < 1.0


@every_form
@pytest.mark.parametrize("body", [shapes_body, cast_body, meta_body])
def test_what_cannot_work_is_refused_by_name(form, body):
    ranks.run(2, body, form)


# -- values: B22, B53, B54, B65, B74, B93 -----------------------------------------------------------------------------------


def nan_body(rank, world, form):
    called, m, optimizer = make(form, P(5), torch.optim.AdamW)
    loss = called(x(rank, 5), "a")
    (loss * float("nan") if rank == 1 else loss).backward()
    total = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    return total.isnan().item(), m.a.isnan().tolist(), m.b.tolist()


@every_form
def test_nan_of_one_rank_is_seen_alike_by_all(form):
    assert ranks.run(2, nan_body, form) == [(True, [True] * 5, [1.0] * 5)] * 2


def clip_body(rank, world, form, kind):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    mine = copy.deepcopy(reference)
    o = torch.optim.AdamW(reference.parameters(), lr=0.01)
    called, m, mo = make(form, mine, torch.optim.AdamW, 0.01)
    for _ in range(4):
        data = torch.randn(world, 4, 6, 5)
        for r in range(world):
            for k in range(4):
                (reference(data[r, k]).pow(2).mean() / (4 * world)).backward()
        for k in range(4):
            with micro(called, k == 3 and kind != "never synchronised"):
                (called(data[rank, k]).pow(2).mean() / 4).backward()
        if kind == "value":
            for model in (reference, m):
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            order = float("inf") if kind == "inf" else 2.0
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order, error_if_nonfinite=True)
                     for model in (reference, m)]
            assert norms[1] > 0
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        for opt in (o, mo):
            opt.step()
            opt.zero_grad()
    for a, b in zip(reference.parameters(), m.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


@sharded_forms
@pytest.mark.parametrize("kind", ["L2", "inf", "value", "never synchronised"])
def test_clipping_under_accumulation_equals_one_process(form, kind):
    ranks.run(2, clip_body, form, kind)


def scaler_body(rank, world, form, owner):
    called, m, optimizer = make(form, P(200), torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales, weights = [], []
    for step in range(4):
        data = x(rank, 200)
        if step == 1 and rank == 0:
            data[0 if owner == 0 else -1] = float("inf")
        scaler.scale(called(data)).backward()
        scaler.unscale_(optimizer)
        total = torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        assert step == 1 or abs(total - 1.5 * 20) < 1e-3, total
        before = [m.a.detach().clone(), {k: v.clone() for k, v in optimizer.state[m.a].items()}]
        scaler.step(optimizer)
        if step == 1:
            assert torch.equal(m.a, before[0])
            assert all(torch.equal(v, optimizer.state[m.a][k]) for k, v in before[1].items())
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        weights.append(m.a.tolist())
    return scales, weights


@sharded_forms
@pytest.mark.parametrize("owner", [0, 1])
def test_inf_in_a_shard_of_another_rank_skips_the_step_everywhere(form, owner):
    first, second = ranks.run(2, scaler_body, form, owner)
    assert first == second and first[0] == [8.0, 4.0, 4.0, 8.0]


def ragged_body(rank, world, form):
    called, m, optimizer = make(form, P())
    called.set_gradient_divide_factor(1.0)
    tokens = [3, 7][rank]
    (called(x(rank)) * tokens).backward()  # a sum over this rank's tokens
    for p in m.parameters():
        p.grad.mul_(1 / 10)
    return full(called, m.a)


@sharded_forms
def test_sums_over_ragged_counts_give_the_gradient_of_one_process(form):
    for got in ranks.run(2, ragged_body, form):
        assert got == pytest.approx([(3 * 1 + 7 * 2) / 10] * 2)


def padding_body(rank, world):
    """Everything of the buckets that belongs to no parameter is NaN before every backward and every close."""
    import ctypes

    torch.manual_seed(0)
    reference = nn.Linear(5, 7)
    mine = copy.deepcopy(reference)
    called, m, optimizer = make("wrap", mine, torch.optim.AdamW, 0.1)
    o = torch.optim.AdamW(reference.parameters(), lr=0.1)
    engine = m._engine
    slots = [slot for slot in engine.slots if slot is not None]
    grads = [engine.core.grad(i) for i, slot in enumerate(engine.slots) if slot is not None]
    total = slots[0]["segment"] * world
    base = min(g.data_ptr() for g in grads)
    memory = (ctypes.c_float * total).from_address(base)
    used = [False] * total
    for g in grads:
        begin = (g.data_ptr() - base) // 4
        used[begin : begin + g.numel()] = [True] * g.numel()
    assert used.count(False) > 100

    def poison():
        for k in range(total):
            if not used[k]:
                memory[k] = float("nan")

    for _ in range(3):
        data = torch.randn(world, 4, 5)
        for r in range(world):
            (reference(data[r]).pow(2).sum() / world).backward()
        poison()
        with m.no_sync():
            called(data[rank]).pow(2).sum().backward()
        poison()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (reference, m)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        for opt in (o, optimizer):
            opt.step()
            opt.zero_grad()
    for a, b in zip(reference.parameters(), m.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_padding_reaches_neither_norms_nor_weights():
    ranks.run(3, padding_body)


def edit_body(rank, world, form, edit):
    called, m, optimizer = make(form, P(5), lr=1.0)
    called(x(rank, 5)).backward()
    g = m.a.grad
    if edit == "clamp_":
        g.clamp_(max=1.25)
    elif edit == "mul_":
        g.mul_(2.0)
    elif edit == "None":
        m.a.grad = None
    elif edit == "assign":
        called.full_grad(m.a)
        m.a.grad = torch.full((5,), 4.0)
    optimizer.step()
    return m.a[0].item(), m.b[0].item()


@every_form
@pytest.mark.parametrize("edit, a", [("clamp_", 1.25), ("mul_", 3.0), ("None", 0.0), ("assign", 4.0)])
def test_edits_of_gradients_act_on_the_reduced_ones(form, edit, a):
    assert ranks.run(2, edit_body, form, edit) == [(1 - a, -0.5)] * 2


# -- life: B25, B32, B56, B58, B69, B71, B78, B91, B95, B97, B99 ---------------------------------------------------------------


def copy_body(rank, world, form):
    called, m, optimizer = make(form, P())
    twin = copy.deepcopy(called)
    assert type(twin) is P and twin.a is not m.a
    if rank == 0:
        twin(x(5)).backward()  # alone
        twin.a.data.zero_()
    called(x(rank)).backward()
    optimizer.step()
    return m.a.tolist(), twin.a.grad.tolist() if rank == 0 else None


@every_form
def test_deepcopy_is_plain_and_detached(form):
    results = ranks.run(2, copy_body, form)
    assert [r[0] for r in results] == [[0.25, 0.25]] * 2 and results[0][1] == [6.0, 6.0]


def boom_body(rank, world, form, recover, alone):
    called, m, optimizer = make(form, P())
    if rank == 0 or not alone:
        with pytest.raises(ValueError, match="boom"):
            (Boom.apply(called(x(rank), "a")) + called(x(rank), "b")).backward()
    called.abort_window() if recover == "abort" else optimizer.zero_grad()
    called(x(rank)).backward()
    optimizer.step()
    return m.a.tolist()


@sharded_forms
@pytest.mark.parametrize("recover", ["zero_grad", "abort"])
@pytest.mark.parametrize("alone", [False, True])
def test_window_after_an_exception_in_backward_is_right(form, recover, alone):
    assert ranks.run(2, boom_body, form, recover, alone) == [[0.25, 0.25]] * 2


def redo_body(rank, world, form):
    called, m, optimizer = make(form, P())
    with called.no_sync():
        called(x(rank)).backward()
    if rank == 0:  # out of memory on rank 1 here
        called(x(rank)).backward()
    called.abort_window()
    assert all(p.grad is None for p in m.parameters())
    for k in range(2):
        with micro(called, k == 1):
            (called(x(rank)) / 2).backward()
    optimizer.step()
    return m.a.tolist()


@sharded_forms
def test_aborted_window_done_again_equals_a_clean_one(form):
    assert ranks.run(2, redo_body, form) == [[0.25, 0.25]] * 2


def closure_body(rank, world, form):
    called, m, optimizer = make(form, P(), torch.optim.AdamW, 0.1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = called(x(rank))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [True] and loss.item() == 4.0 * (rank + 1)
    return m.a[0].item()


@every_form
def test_closure_is_called_once_with_gradients_enabled(form):
    p = torch.nn.Parameter(torch.ones(1))
    reference = torch.optim.AdamW([p], lr=0.1)
    p.grad = torch.full((1,), 1.5)
    reference.step()
    assert ranks.run(2, closure_body, form) == pytest.approx([p.item()] * 2, rel=1e-6)


def scheduler_body(rank, world, form, kind):
    def schedule(optimizer):
        s = torch.optim.lr_scheduler
        return {"lambda": lambda: s.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
                "cycle": lambda: s.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
                "plateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0)}[kind]()

    reference, m = P(), P()
    o = torch.optim.AdamW(reference.parameters(), lr=torch.tensor(0.1) if kind == "lambda" else 0.1)
    mo = torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1) if kind == "lambda" else 0.1)
    called, m, mo = make(form, m, mo)
    schedulers = schedule(o), schedule(mo)
    for _ in range(6):
        for r in range(world):
            ((reference(x(r)) ** 2) / world).backward()
        (called(x(rank)) ** 2).backward()
        for opt, scheduler in zip((o, mo), schedulers):
            opt.step()
            opt.zero_grad()
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
        assert float(o.param_groups[0]["lr"]) == float(mo.param_groups[0]["lr"])
    torch.testing.assert_close(m.a, reference.a, rtol=1e-5, atol=1e-6)
    if kind != "plateau":
        saved = mo.state_dict()
        assert "initial_lr" in saved["param_groups"][0]
        mo.load_state_dict(saved)
        assert "initial_lr" in mo.param_groups[0]


@sharded_forms
@pytest.mark.parametrize("kind", ["lambda", "cycle", "plateau"])
def test_shards_see_what_schedulers_set(form, kind):
    ranks.run(2, scheduler_body, form, kind)


def masters_body(rank, world, how):
    m = P(300)
    called, m, optimizer = make("wrap", m, lr=0.5, param_dtype=torch.bfloat16)
    called(x(rank, 300)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if how == "load":
        m.load_state_dict({name: torch.full_like(value, 3.0) for name, value in m.state_dict().items()})
    else:
        m.a.data.copy_(torch.full((300,), 3.0))
    called(x(rank, 300)).backward()
    optimizer.step()
    return m.a.float().unique().tolist()


@pytest.mark.parametrize("how", ["load", "copy"])
def test_step_after_a_load_starts_from_the_loaded_weights(how):
    assert ranks.run(2, masters_body, how) == [[2.25]] * 2


def small_updates_body(rank, world):
    called, m, optimizer = make("wrap", P(300), lr=1e-5, param_dtype=torch.bfloat16)
    for _ in range(1000):
        called(x(rank, 300), "a").backward()
        optimizer.step()
        optimizer.zero_grad()
    return m.a.float().unique().tolist()


def test_updates_smaller_than_one_ulp_add_up_in_the_master():
    expected = torch.tensor(1 - 1000 * 1.5e-5).bfloat16().float().item()
    for got in ranks.run(2, small_updates_body, timeout=120):
        assert len(got) == 1 and abs(got[0] - expected) <= 2**-8


def fresh_weights_body(rank, world, form):
    called, m, optimizer = make(form, P(300))
    average = {name: p.detach().clone() for name, p in m.named_parameters()}
    for _ in range(3):
        called(x(rank, 300)).backward()
        optimizer.step()
        for name, p in m.named_parameters():
            average[name].lerp_(p.detach(), 0.5)
        saved, seen = m.state_dict()["a"].clone(), called(torch.ones(300), "a").item()
        assert saved.sum().item() == pytest.approx(seen) and saved.unique().numel() == 1
        optimizer.zero_grad()
    return average["a"].unique().tolist()


@every_form
def test_weights_read_after_a_step_are_new(form):
    value, average = 1.0, 1.0
    for _ in range(3):
        value -= 0.75
        average = (average + value) / 2
    assert ranks.run(2, fresh_weights_body, form) == [[average]] * 2


def penalty_body(rank, world, form):
    import gc

    called, m, optimizer = make(form, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), lr=0.01)
    counts = []
    for step in range(100):
        data = torch.randn(4, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(called(data).sum(), data, create_graph=True)
        (called(data).sum() + slope.pow(2).sum()).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        data.grad = None  # with its graph it is a cycle, in torch alone too
        if step in (20, 99):
            del data, slope
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    return counts


@every_form
@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_leaks_nothing(form):
    for early, late in ranks.run(2, penalty_body, form):
        assert late <= early


def keys_body(rank, world, form):
    m = P()
    parameters = list(m.parameters())
    called, m, optimizer = make(form, m, torch.optim.AdamW)
    called(x(rank)).backward()
    optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters))
    assert set(optimizer.state) == set(parameters)
    assert all("exp_avg" in optimizer.state[p] for p in parameters)


@every_form
def test_state_and_groups_are_keyed_by_the_users_parameters(form):
    ranks.run(2, keys_body, form)


def order_body(rank, world, form):
    called, m, optimizer = make(form, P())
    saved = called.state_dict()
    names = sorted(saved, reverse=rank == 1)
    called.load_state_dict({name: saved[name] + 1 for name in names})
    called(x(rank)).backward()
    optimizer.step()
    return m.a.tolist(), sorted(called.state_dict()) == sorted(saved)


@every_form
def test_state_dicts_in_another_order_load(form):
    assert ranks.run(2, order_body, form) == [([1.25, 1.25], True)] * 2


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(40)) for _ in range(8))

    def forward(self, data, order):
        out = 0
        for n in order:  # backward visits the last first
            out = torch.tanh(out + self.layers[n] * data.mean())
        return out.sum()


def shuffled_body(rank, world, form, differ):
    called, m, optimizer = make(form, Shuffled(), lr=0.01, bucket_cap_mb=0.0004)
    for step in range(4):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(10 * step + (rank if differ else 0))).tolist()
        sum((m.layers[n] * (n + 1 + rank) * data).sum() for n, data in ((n, 1.0) for n in order)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.tolist() for p in m.parameters()]


@sharded_forms
def test_gradients_in_another_order_per_rank_change_nothing(form):
    ordered, shuffled = (ranks.run(2, shuffled_body, form, differ) for differ in (False, True))
    assert ordered[0] == ordered[1] == shuffled[0] == shuffled[1]
