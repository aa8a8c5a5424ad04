"""Optimizers that need parameters whole, alone and beside others; several over one model, each with the layout it needs."""

import copy
import io

import pytest
import ranks
import shardstep
import torch
import torch.distributed.checkpoint as dcp
from one_process import STEPS, assert_bits, assert_close, both, loss_of, network, train, weights, wrap
from shardstep import checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

pytestmark = pytest.mark.timeout(60)
WORLDS = [1, 2, 3, 4]


class RowNorm(torch.optim.Optimizer):
    """A user's own: normalises each row of the momentum, as it can only when it sees whole rows."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                state["count"] = count = state.get("count", 0) + 1
                rows = momentum if p.dim() > 1 else momentum.unsqueeze(0)
                p.sub_(group["lr"] / count**0.5 * (rows / (rows.norm(dim=-1, keepdim=True) + 1e-3)).view_as(p))


def split(model):
    """Matrices, and the rest."""
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]


PAIRS = {
    "muon": lambda matrices, rest: [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)],
    "adafactor": lambda matrices, rest: [torch.optim.Adafactor(matrices), torch.optim.SGD(rest, lr=0.02, momentum=0.9)],
    "adafactor_last": lambda matrices, rest: [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.Adafactor(rest)],
    "own": lambda matrices, rest: [RowNorm(matrices), torch.optim.Adamax(rest, lr=1e-2)],
    "both_whole": lambda matrices, rest: [torch.optim.Muon(matrices, lr=0.02), torch.optim.Adafactor(rest)],
}
ALONE = {
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "own": lambda model: RowNorm(model.parameters()),
}


def is_sharded(optimizers):
    return isinstance(optimizers[0], shardstep.ShardedOptimizer)


def pair_scenario(model, attach, loss, kind, options, accumulate=False):
    optimizers = PAIRS[kind](*split(model))
    model, optimizers = attach(model, optimizers, whole=kind == "own", **options)
    for step in range(STEPS):
        if accumulate and is_sharded(optimizers):
            with model.no_sync():
                (loss(model, step) / 2).backward()
            (loss(model, step) / 2).backward()
        else:
            loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return len(optimizers)


# Newton-Schulz runs in BF16: sums that round differently in the last place of FP32 are other BF16 numbers now and then.
@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind not in ("muon", "both_whole")])
@pytest.mark.parametrize("world", WORLDS)
def test_several_optimizers_train_as_in_one_process(world, kind):
    assert ranks.run(world, both, pair_scenario, kind, {}) == [(2, 2)] * world


def muon_body(rank, world, options, form="wrap"):
    """Gradients are small multiples of the number of ranks, so that their sums and means are exact: then so is the update."""
    def gradients(step, who):
        generator = torch.Generator().manual_seed(1000 * step + who)
        return [torch.randint(-8, 9, p.shape, generator=generator).float() * world for p in plain.parameters()]

    plain, model = network(), network()
    theirs = PAIRS["muon"](*split(plain))
    optimizers = PAIRS["muon"](*split(model))
    if form == "wrap":
        model, optimizers = wrap(model, optimizers, **options)
    else:
        model = shardstep.DistributedDataParallel(model, bucket_cap_mb=0.002)
        optimizers = [shardstep.ShardedOptimizer(o, model) for o in (optimizers if form == "ddp" else optimizers[::-1])]
    mine = list(model.parameters())
    for step in range(6):
        sum((p * g).sum() for p, g in zip(mine, gradients(step, rank))).backward()
        for k, p in enumerate(plain.parameters()):
            p.grad = sum(gradients(step, r)[k] for r in range(world)) / world
        for o in [*optimizers, *theirs]:
            o.step()
            o.zero_grad()
    return [(a - b.to(a.dtype)).abs().max().item() for a, b in zip(weights(model), weights(plain))]


def assert_muon(results):
    for differences in results:
        assert max(differences[::2]) == 0.0  # Muon's matrices, to the bit
        assert max(differences) < 1e-5


@pytest.mark.parametrize("form", ["wrap", "ddp", "ddp, elementwise first"])
@pytest.mark.parametrize("world", WORLDS)
def test_muon_beside_adamw_is_torchs(world, form):
    """B72."""
    assert_muon(ranks.run(world, muon_body, {}, form))


@pytest.mark.parametrize("world", WORLDS)
def test_muon_beside_adamw_over_a_process_group(world):
    assert_muon(ranks.run(world, muon_body, {"transport": "c10d"}))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_muon_of_bf16_weights_steps_fp32_masters(world):
    """Small integers are exact in BF16, too; what is compared is torch's Muon on FP32, rounded."""
    for differences in ranks.run(world, muon_body, {"param_dtype": torch.bfloat16}):
        assert max(differences[::2]) == 0.0


def shared_scenario(model, attach, loss):
    """Parameters that two optimizers step, one of them whole."""
    matrices, _ = split(model)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.Adafactor(matrices[1:])]
    model, optimizers = attach(model, optimizers)
    for step in range(STEPS):
        loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("world", [2, 3])
def test_parameter_that_two_optimizers_step(world):
    ranks.run(world, both, shared_scenario)


def add_to_one_scenario(model, attach, loss, unfrozen):
    """A matrix that no optimizer had, frozen until then or not, is added to the one that needs it whole."""
    matrices, rest = split(model)
    matrices[0].requires_grad_(not unfrozen)
    model, optimizers = attach(model, PAIRS["adafactor"](matrices[1:], rest))
    for step in range(STEPS):
        if step == 3:
            matrices[0].requires_grad_(True)
            optimizers[0].add_param_group(dict(params=[matrices[0]], lr=2e-2))
        loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("unfrozen", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_matrix_is_added_later_to_one_of_several_optimizers(world, unfrozen):
    ranks.run(world, both, add_to_one_scenario, unfrozen)


@pytest.mark.parametrize("world", [2, 3])
def test_adafactor_beside_sgd_over_a_process_group(world):
    ranks.run(world, both, pair_scenario, "adafactor", {"transport": "c10d"})


def test_several_optimizers_after_accumulation():
    ranks.run(2, both, pair_scenario, "own", {}, True)


def alone_scenario(model, attach, loss, kind):
    model, optimizer = attach(model, ALONE[kind](model), whole=kind == "own")
    train(model, optimizer, loss)


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_optimizer_over_whole_parameters_alone(world, kind):
    ranks.run(world, both, alone_scenario, kind)


def shapes_body(rank, world):
    """More ranks than parameters, empty and 0-dim ones, and another order of memory."""
    def build():
        torch.manual_seed(3)
        weight = nn.Parameter(torch.randn(5, 7).t())
        return nn.ParameterList([weight, nn.Parameter(torch.randn(0, 4)), nn.Parameter(torch.randn(()))])

    plain, model = build(), build()
    theirs = RowNorm([plain[0], plain[1]])
    model, optimizer = wrap(model, RowNorm([model[0], model[1]]), whole=True)
    alone = model[2].detach().clone()
    for _ in range(3):
        for m, o, scale in ((plain, theirs, (world + 1) / 2), (model, optimizer, rank + 1.0)):
            (sum((p * p).sum() for p in m) * scale).backward()
            o.step()
            o.zero_grad()
            m[2].grad = None
    assert torch.equal(model[2], alone)  # no optimizer's: reduced, and left alone
    assert_close(weights(model)[:1], weights(plain)[:1])
    return optimizer.state_bytes()


def test_ranks_that_own_nothing_and_odd_shapes():
    sizes = ranks.run(4, shapes_body)
    assert sorted(size > 100 for size in sizes) == [False, False, False, True]


# -- placement ----------------------------------------------------------------------------------------------------


def wire_body(rank, world):
    """Each bucket belongs to one optimizer, is reduced and gathered once, and whole parameters are on one rank each."""
    model = network()
    model, optimizers = wrap(model, PAIRS["adafactor"](*split(model)))
    loss_of(model, 0, rank, world).backward()
    for optimizer in optimizers:
        optimizer.step()
    now = model.stats()
    counted = {key: now["total"][key] for key in ("reduce_scatters", "all_gathers")}
    matrices, _ = split(model)
    engine = model._engine
    pieces = [engine.slots[engine.index[id(p)]]["numel"] for p in matrices]
    return counted, now["buckets"], pieces, [p.numel() for p in matrices], now["memory"]["padding"]


def test_each_bucket_is_one_optimizers_and_travels_once():
    results = ranks.run(2, wire_body)
    for counted, buckets, pieces, numels, _ in results:
        assert counted == {"reduce_scatters": buckets, "all_gathers": buckets} and buckets >= 2
        assert all(piece in (0, numel) for piece, numel in zip(pieces, numels))
    assert [sum(of) for of in zip(*(pieces for _, _, pieces, _, _ in results))] == results[0][3]
    assert results[0][4] == results[1][4]


# -- state --------------------------------------------------------------------------------------------------------


def steps_of(model, optimizers, which, rank, world):
    for step in which:
        loss_of(model, step, rank, world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def state_body(rank, world, kind, param_dtype):
    def start(seed):
        model = network(seed)
        return wrap(model, PAIRS[kind](*split(model)), whole=kind == "own", param_dtype=param_dtype)

    model, optimizers = start(1)
    steps_of(model, optimizers, range(5), rank, world)
    file = io.BytesIO()
    torch.save([model.state_dict(), *[o.state_dict() for o in optimizers]], file)
    keys = [{i: sorted(entry) for i, entry in o.state_dict()["state"].items()} for o in optimizers]
    shown = [[sorted(o.state[p]) for group in o.param_groups for p in group["params"]] for o in optimizers]
    steps_of(model, optimizers, range(5, 9), rank, world)
    expected = weights(model)

    model, optimizers = start(2)
    steps_of(model, optimizers, range(2), rank, world)  # what was there before has no say
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved[0])
    for optimizer, state in zip(optimizers, saved[1:]):
        optimizer.load_state_dict(state)
    steps_of(model, optimizers, range(5, 9), rank, world)
    assert_bits(weights(model), expected)
    return keys, shown


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["muon", "adafactor", "own"])
@pytest.mark.parametrize("world", [1, 3])
def test_resumed_run_has_the_bits_of_the_uninterrupted_one(world, kind, param_dtype):
    results = ranks.run(world, state_body, kind, param_dtype)
    assert all(result == results[0] for result in results)
    assert all(results[0][0][0].values())


def checkpoint_body(rank, world, folder, kind, by, param_dtype, loads=False):
    model = network(2 if loads else 1)
    model, optimizers = wrap(model, PAIRS[kind](*split(model)), whole=kind == "own", param_dtype=param_dtype)
    if not loads:
        steps_of(model, optimizers, range(4), rank, world)
    if by == "dcp":
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers)))
        if loads:
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            dcp.save(state, checkpoint_id=folder)
    elif loads:
        assert checkpoint.load(folder, model, optimizers).step == 4
    else:
        checkpoint.save(folder, model, optimizers, step=4)
    steps_of(model, optimizers, range(4, 7), rank, world)
    return weights(model)


@pytest.mark.parametrize("by", ["shardstep", "dcp"])
@pytest.mark.parametrize("kind", ["adafactor", "own"])
@pytest.mark.parametrize("before,world", [(1, 3), (2, 2), (3, 1), (3, 2)])
def test_checkpoint_goes_on_at_any_number_of_ranks(once, before, world, kind, by):
    folder, expected = once(before, checkpoint_body, kind, by, None)
    for got in ranks.run(world, checkpoint_body, folder, kind, by, None, True):
        (assert_bits if before == world else assert_close)(got, expected[0])


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("by", ["shardstep", "dcp"])
def test_checkpoint_of_muon_goes_on_to_the_bit(once, by, param_dtype):
    folder, expected = once(2, checkpoint_body, "muon", by, param_dtype)
    for got in ranks.run(2, checkpoint_body, folder, "muon", by, param_dtype, True):
        assert_bits(got, expected[0])


def test_checkpoint_of_bf16_weights_with_masters_at_another_number_of_ranks(once):
    folder, expected = once(3, checkpoint_body, "adafactor", "dcp", torch.bfloat16)
    for got in ranks.run(2, checkpoint_body, folder, "adafactor", "dcp", torch.bfloat16, True):
        assert_close(got, expected[0], 2**-7)


class Mixed(nn.Module):
    """Matrices, vectors, a 0-dim parameter, and one in another order of memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Parameter(torch.randn(9, 13))
        self.b = nn.Parameter(torch.randn(7, 5).t())
        self.c = nn.Parameter(torch.randn(6))
        self.d = nn.Parameter(torch.tensor(1.5))


def full_state_body(rank, world, kind):
    """What torch's functions gather of the state, beside torch's own optimizer in one process."""
    make = {"adafactor": torch.optim.Adafactor, "own": RowNorm}[kind]
    plain, model = Mixed(), Mixed()
    theirs = make(plain.parameters())
    model, optimizer = wrap(model, make(model.parameters()), whole=kind == "own")
    for _ in range(3):
        for m, o in ((plain, theirs), (model, optimizer)):
            sum((p**3).sum() for p in m.parameters()).backward()
            o.step()
            o.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    got, expected = get_optimizer_state_dict(model, optimizer, options=full), get_optimizer_state_dict(plain, theirs)
    assert got["state"].keys() == expected["state"].keys() == {"a", "b", "c", "d"}
    for name, state in expected["state"].items():
        assert got["state"][name].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(got["state"][name][key], value, rtol=1e-5, atol=1e-7, msg=f"{name} {key}")


@pytest.mark.parametrize("kind", ["adafactor", "own"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_state_of_whole_parameters_is_that_of_one_process(world, kind):
    ranks.run(world, full_state_body, kind)


def loads_plain_body(rank, world, kind):
    """The state of torch's own optimizers, warm at the wrap or loaded later."""
    plain = network()
    theirs = PAIRS[kind](*split(plain))
    for step in range(4):
        loss_of(plain, step, None, 1).backward()
        for o in theirs:
            o.step()
            o.zero_grad()
    model = copy.deepcopy(plain)
    optimizers = PAIRS[kind](*split(model))
    for o, t in zip(optimizers, theirs):
        o.load_state_dict(t.state_dict())
    model, optimizers = wrap(model, optimizers)
    fresh = network(2)
    fresh, loaded = wrap(fresh, PAIRS[kind](*split(fresh)))
    fresh.load_state_dict(plain.state_dict())
    for o, t in zip(loaded, theirs):
        o.load_state_dict(t.state_dict())
    for step in range(4, 8):
        for m, os, who in ((plain, theirs, (None, 1)), (model, optimizers, (rank, world)), (fresh, loaded, (rank, world))):
            loss_of(m, step, *who).backward()
            for o in os:
                o.step()
                o.zero_grad()
    assert_close(weights(model), weights(plain))
    assert_bits(weights(fresh), weights(model))


@pytest.mark.parametrize("kind", ["adafactor", "adafactor_last"])
def test_state_of_the_plain_optimizers_is_taken_over(kind):
    ranks.run(3, loads_plain_body, kind)


# -- what else touches a step -------------------------------------------------------------------------------------


LIMIT = 3.0


def clip_scenario(model, attach, loss, inside):
    options = dict(clip_grad_norm=LIMIT) if inside else {}
    model, optimizers = attach(model, PAIRS["adafactor"](*split(model)), **options)
    for step in range(STEPS):
        loss(model, step).backward()
        if not inside or not is_sharded(optimizers):
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        for k, optimizer in enumerate(optimizers):
            optimizer.step()
            if inside and is_sharded(optimizers) and k == 0:
                norm = optimizer.grad_norm
        for optimizer in optimizers:
            optimizer.zero_grad()
    return norm


@pytest.mark.parametrize("inside", [True, False], ids=["clip_grad_norm=", "torchs"])
def test_clipping_is_by_the_norm_of_all_optimizers_together(inside):
    for got, expected in ranks.run(3, both, clip_scenario, inside):
        assert got == pytest.approx(expected, rel=1e-4)


def skip_body(rank, world):
    """A NaN in what one optimizer has, on one rank, skips the step of both."""
    model = network()
    model, optimizers = wrap(model, PAIRS["adafactor"](*split(model)), skip_nonfinite=True)
    before = weights(model)
    loss_of(model, 0, rank, world).backward()
    if rank == 1:
        model[0].weight.register_hook(lambda grad: grad * float("nan"))
        loss_of(model, 0, rank, world).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_bits(weights(model), before)
    return [optimizer.step_was_skipped for optimizer in optimizers], model.stats()["skipped_steps"]


@pytest.mark.filterwarnings("ignore:skip_nonfinite")
def test_a_nan_in_one_optimizers_part_skips_the_step_of_all():
    assert ranks.run(2, skip_body) == [([True, True], 2)] * 2


def unfrozen_scenario(model, attach, loss, add):
    """A layer joins later; added to the group of an optimizer that needs it whole, or waiting there from the start."""
    layer = list(model[0].parameters())
    for p in layer:
        p.requires_grad_(False)
    others = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = attach(model, torch.optim.Adafactor(others if add else list(model.parameters())))
    train(model, optimizer, loss, range(3))
    for p in layer:
        p.requires_grad_(True)
    if add:
        optimizer.add_param_group(dict(params=layer, lr=2e-2))
    train(model, optimizer, loss, range(3, STEPS))


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_layer_unfrozen_later_is_placed_whole(world, add):
    ranks.run(world, both, unfrozen_scenario, add)


def pace_scenario(model, attach, loss, kind, order):
    """B63 with two kinds of placement. Who is not stepped keeps its gradients, which add up."""
    model, optimizers = attach(model, PAIRS[kind](*split(model)))
    often, seldom = optimizers[::order]
    for step in range(STEPS):
        loss(model, step).backward()
        before = [p.clone() for group in seldom.param_groups for p in group["params"]]
        often.step()
        often.zero_grad()
        assert_bits([p for group in seldom.param_groups for p in group["params"]], before)
        if step % 2:
            nn.utils.clip_grad_norm_([p for group in seldom.param_groups for p in group["params"]], 2.0)
            seldom.step()
            seldom.zero_grad()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", ["adafactor", "adafactor_last"])
@pytest.mark.parametrize("world", [2, 3])
def test_several_optimizers_step_at_their_own_pace(world, kind, order):
    ranks.run(world, both, pace_scenario, kind, order)


def joins_later_scenario(model, attach, loss):
    """An optimizer without one parameter in a bucket that another's members bring."""
    first, layer = list(model[2].parameters()), list(model[0].parameters())
    for p in layer:
        p.requires_grad_(False)
    model, optimizer = attach(model, torch.optim.AdamW(first, lr=1e-2))
    second = torch.optim.SGD(layer, lr=0.02, momentum=0.9)
    if is_sharded([optimizer]):
        second = shardstep.ShardedOptimizer(second, model)
    for step in range(STEPS):
        if step == 3:
            for p in layer:
                p.requires_grad_(True)
        loss(model, step).backward()
        for o in (optimizer, second):
            o.step()
            o.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_join_later_are_nothing_to_another_optimizer(world):
    ranks.run(world, both, joins_later_scenario)


def scaled_scenario(model, attach, loss):
    """One GradScaler and a schedule for each, torch's clip over both; which of them steps first changes. Step 3 overflows in
    the part of one of them, which alone is skipped."""
    matrices, rest = split(model)
    model, optimizers = attach(model, PAIRS["adafactor"](matrices, rest))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, gamma) for o, gamma in zip(optimizers, (0.9, 0.8))]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    seen = []
    for step in range(STEPS):
        scaler.scale(loss(model, step) + (matrices[0].sum() * float("inf") if step == 3 else 0.0)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if step != 3:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        for optimizer in optimizers[:: 1 if step % 2 else -1]:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if is_sharded(optimizers):
            assert [optimizer.step_was_skipped for optimizer in optimizers] == [step == 3, False]
        for schedule in schedules:
            schedule.step()
        seen.append((scaler.get_scale(), *(group["lr"] for o in optimizers for group in o.param_groups)))
    return seen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("world", [2, 3])
def test_grad_scaler_and_schedules_with_several_optimizers(world):
    for got, expected in ranks.run(world, both, scaled_scenario):
        assert got == expected and len({scale for scale, *_ in expected}) > 2


def order_body(rank, world):
    model = network()
    model, optimizers = wrap(model, PAIRS["adafactor"](*split(model)))
    before = weights(model)
    loss_of(model, 0, rank, world).backward()
    with pytest.raises(shardstep.MismatchError) as caught:
        optimizers[rank == world - 1].step()
    assert_bits(weights(model), before)
    model.abort_window()
    steps_of(model, optimizers, range(2), rank, world)
    return str(caught.value)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_step_optimizers_in_different_orders_are_told(world):
    messages = ranks.run(world, order_body)
    told = f"of number 0 (in the order in which they were sharded), rank {world - 1} in that of number 1"
    assert all(told in text for text in messages)


# -- refusals and differences -------------------------------------------------------------------------------------


def refused_body(rank, world):
    messages = {}

    def refused(name, call):
        with pytest.raises(shardstep.Error) as caught:
            call()
        messages[name] = type(caught.value).__name__, str(caught.value)

    model = shardstep.wrap(nn.Sequential(*[nn.Linear(30, 30) for _ in range(3)]))
    refused("late", lambda: shardstep.ShardedOptimizer(torch.optim.Muon(split(model)[0]), model))
    model.unwrap()
    model = network()
    refused("both", lambda: wrap(model, RowNorm(model.parameters()), whole=True, elementwise=True))
    refused("list", lambda: wrap(model, [torch.optim.SGD(split(model)[0], lr=0.1), torch.optim.LBFGS(split(model)[1])]))
    model.phase = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    refused("complex", lambda: wrap(model, torch.optim.Adafactor([model.phase])))
    del model.phase
    refused("thing", lambda: wrap(model, [torch.optim.SGD(model.parameters(), lr=0.1), "adamw"]))
    one, two = split(model)
    kinds = torch.optim.AdamW if rank == 0 else torch.optim.Adam
    refused("class", lambda: wrap(model, kinds(one)))
    refused("lr", lambda: wrap(model, torch.optim.SGD(one, lr=0.1 + rank)))
    refused("members", lambda: wrap(model, torch.optim.SGD(one if rank == 0 else two, lr=0.1)))
    refused("option", lambda: wrap(model, torch.optim.SGD(one, lr=0.1), skip_nonfinite=rank == 0))
    refused("only here", lambda: wrap(model, torch.optim.LBFGS(one) if rank == 1 else torch.optim.SGD(one, lr=0.1)))
    assert type(model) is nn.Sequential
    return messages


def test_optimizers_that_cannot_be_or_that_differ_are_refused_on_all_ranks():
    first, second = ranks.run(2, refused_body)
    told = {
        "late": ("UsageError", "'1.weight' is cut"), "both": ("UsageError", "contradict"), "list": ("UsageError", "LBFGS"),
        "thing": ("UsageError", "'adamw'"), "complex": ("UsageError", "'phase' is complex"),
        "class": ("MismatchError", "AdamW"), "lr": ("MismatchError", "1.1"),
        "members": ("MismatchError", "parameters of param group 0"), "option": ("MismatchError", "skip_nonfinite"),
    }
    for name, (kind, text) in told.items():
        assert first[name] == second[name]
        assert first[name][0] == kind and text in first[name][1], first[name]
    assert second["only here"][0] == "UsageError" and "line search" in second["only here"][1]
    assert first["only here"][0] == "MismatchError" and "line search" in first["only here"][1]
