"""Optimizers that need parameters whole, alone and beside others; several over one model, each with the layout it needs."""

import copy
import io

import pytest
import ranks
import shardstep
import torch
from one_process import STEPS, assert_bits, assert_close, both, loss_of, network, train, weights, wrap
from torch import nn

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
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                rows = momentum if p.dim() > 1 else momentum.unsqueeze(0)
                p.sub_(group["lr"] * (rows / (rows.norm(dim=-1, keepdim=True) + 1e-3)).view_as(p))


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
    """Gradients are small integers, so that their sums and means are exact: then so is the update."""
    def gradients(step, who):
        generator = torch.Generator().manual_seed(1000 * step + who)
        return [torch.randint(-8, 9, p.shape, generator=generator).float() for p in plain.parameters()]

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
    return [(a - b).abs().max().item() for a, b in zip(weights(model), weights(plain))]


@pytest.mark.parametrize("form", ["wrap", "ddp", "ddp, elementwise first"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_muon_beside_adamw_is_torchs(world, form):
    """B72. With 2 and 4 ranks the mean of small integers is exact."""
    for differences in ranks.run(world, muon_body, {}, form):
        assert max(differences[::2]) == 0.0  # Muon's matrices, to the bit
        assert max(differences) < 1e-5


def test_muon_over_a_process_group():
    for differences in ranks.run(2, muon_body, {"transport": "c10d"}):
        assert max(differences[::2]) == 0.0


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


def state_body(rank, world, kind, param_dtype):
    def start(seed):
        model = network(seed)
        return wrap(model, PAIRS[kind](*split(model)), whole=kind == "own", param_dtype=param_dtype)

    def steps(model, optimizers, which):
        for step in which:
            loss_of(model, step, rank, world).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, optimizers = start(1)
    steps(model, optimizers, range(5))
    file = io.BytesIO()
    torch.save([model.state_dict(), *[o.state_dict() for o in optimizers]], file)
    keys = [{i: sorted(entry) for i, entry in o.state_dict()["state"].items()} for o in optimizers]
    shown = [[sorted(o.state[p]) for group in o.param_groups for p in group["params"]] for o in optimizers]
    steps(model, optimizers, range(5, 9))
    expected = weights(model)

    model, optimizers = start(2)
    steps(model, optimizers, range(2))  # what was there before has no say
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved[0])
    for optimizer, state in zip(optimizers, saved[1:]):
        optimizer.load_state_dict(state)
    steps(model, optimizers, range(5, 9))
    assert_bits(weights(model), expected)
    return keys, shown


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["muon", "adafactor", "own"])
@pytest.mark.parametrize("world", [1, 3])
def test_resumed_run_has_the_bits_of_the_uninterrupted_one(world, kind, param_dtype):
    results = ranks.run(world, state_body, kind, param_dtype)
    if kind != "own":  # whose state only its owner can know
        assert all(result == results[0] for result in results)
        assert all(results[0][0][0].values())


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


def pace_scenario(model, attach, loss):
    """B63 with two kinds of placement."""
    model, (first, second) = attach(model, PAIRS["adafactor"](*split(model)))
    for step in range(STEPS):
        loss(model, step).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()


@pytest.mark.parametrize("world", [2, 3])
def test_several_optimizers_step_at_their_own_pace(world):
    ranks.run(world, both, pace_scenario)


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
