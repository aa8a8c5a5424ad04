"""The sharded optimizer is a torch optimizer: groups, schedulers, closures, state, and what it refuses."""

import copy
import io
import pickle
import warnings

import pytest
import ranks
import shardstep
import torch
from one_process import (
    KINDS,
    STEPS,
    WORLDS,
    assert_bits,
    assert_close,
    both,
    loss_of,
    network,
    train,
    weights,
    wrap,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

pytestmark = pytest.mark.timeout(60)

# -- groups and schedules -----------------------------------------------------------------------------------------


def groups_scenario(model, attach, loss, kind):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = KINDS[kind]([dict(params=decayed, weight_decay=0.2, lr=3e-3), dict(params=others[:2])])
    optimizer.param_groups[1]["weight_decay"] = 0.0
    model, optimizer = attach(model, optimizer)
    optimizer.add_param_group(dict(params=others[2:], lr=5e-3, weight_decay=0.0))
    assert len(optimizer.param_groups) == 3 and optimizer.param_groups[2]["lr"] == 5e-3

    def edit(step):
        optimizer.param_groups[1]["lr"] *= 0.9

    train(model, optimizer, loss, after=edit)
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamax"])
@pytest.mark.parametrize("world", WORLDS)
def test_param_groups_keep_their_own_options_also_when_added_or_edited_later(world, kind):
    for got, expected in ranks.run(world, both, groups_scenario, kind):
        assert got == expected


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=STEPS + 1),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def scheduler_scenario(model, attach, loss, kind, name, built_first):
    optimizer = KINDS[kind](model.parameters())
    if built_first:
        scheduler = SCHEDULERS[name](optimizer)
    model, optimizer = attach(model, optimizer)
    if not built_first:
        scheduler = SCHEDULERS[name](optimizer)
    seen = []

    def after(step):
        seen.append({key: optimizer.param_groups[0].get(key) for key in ("lr", "betas", "momentum", "initial_lr")})
        scheduler.step(*([1.0] if name == "plateau" else []))  # a metric that never improves

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when a scheduler steps before its optimizer
        train(model, optimizer, loss, after=after)
    return seen


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamax"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_shards_follow_torch_schedulers(name, kind):
    for got, expected in ranks.run(2, both, scheduler_scenario, kind, name, False):
        assert got == expected
        assert len({str(seen) for seen in got}) > 2


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_built_before_wrapping_drives_the_sharded_optimizer(name):
    for got, expected in ranks.run(2, both, scheduler_scenario, "adamw", name, True):
        assert got == expected
        assert len({str(seen) for seen in got}) > 2


EDITS = {
    "momentum on": (torch.optim.SGD, dict(lr=0.02, dampening=0.5), [(3, dict(momentum=0.9))]),
    "momentum off and on": (
        torch.optim.SGD, dict(lr=0.02, momentum=0.9), [(3, dict(momentum=0.0)), (6, dict(momentum=0.9))]
    ),
    "nesterov": (torch.optim.SGD, dict(lr=0.02, momentum=0.9), [(3, dict(nesterov=True))]),
    "weight decay": (torch.optim.Adam, dict(lr=1e-3), [(3, dict(weight_decay=0.1))]),
    "maximize": (torch.optim.AdamW, dict(lr=1e-3), [(3, dict(maximize=True)), (5, dict(maximize=False))]),
    "eps and betas": (torch.optim.AdamW, dict(lr=1e-3), [(3, dict(eps=1e-2, betas=(0.5, 0.9)))]),
}


def edits_scenario(model, attach, loss, name):
    cls, options, edits = EDITS[name]
    model, optimizer = attach(model, cls(model.parameters(), **options))
    train(model, optimizer, loss, after=lambda step: [
        optimizer.param_groups[0].update(change) for at, change in edits if at == step
    ])


@pytest.mark.parametrize("name", EDITS)
def test_options_edited_between_steps_act_from_the_next_step(name):
    ranks.run(2, both, edits_scenario, name)


def tensor_lr_scenario(model, attach, loss, kind):
    optimizer = dict(adamw=torch.optim.AdamW, sgd=torch.optim.SGD, adagrad=torch.optim.Adagrad)[kind](
        model.parameters(), lr=torch.tensor(1e-2), **({} if kind == "adagrad" else dict(foreach=False))
    )
    model, optimizer = attach(model, optimizer)
    train(model, optimizer, loss, after=lambda step: optimizer.param_groups[0]["lr"].mul_(0.8))
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_learning_rate_as_a_tensor_is_read_at_every_step(kind):
    for got, expected in ranks.run(2, both, tensor_lr_scenario, kind):
        assert got == expected


# -- the step -----------------------------------------------------------------------------------------------------


def closure_scenario(model, attach, loss):
    model, optimizer = attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    calls, returned = [], []
    for step in range(STEPS):

        def closure(step=step):
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            value = loss(model, step)
            value.backward()
            return value

        with torch.no_grad():  # the step enables gradients for the closure by itself
            value = optimizer.step(closure)
        assert value is not None and value.requires_grad
        returned.append(value.item())
    return calls, returned


@pytest.mark.parametrize("world", WORLDS)
def test_closure_is_called_once_with_gradients_and_its_loss_returned(world):
    """B71."""
    results = ranks.run(world, both, closure_scenario)
    for (calls, _), (expected_calls, _) in results:
        assert calls == expected_calls == [True] * STEPS
    losses = torch.tensor([returned for (_, returned), _ in results]).mean(0)
    assert_close([losses], [torch.tensor(results[0][1][1])])


def no_gradient(rank, world, kind):
    model = network()
    model, optimizer = wrap(model, KINDS[kind](model.parameters()))
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(3))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.step()
    assert_bits(weights(model), before)
    after = optimizer.state_dict()
    for i, entries in state["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][i][key])), (i, key)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_step_without_a_gradient_changes_nothing(world, kind):
    ranks.run(world, no_gradient, kind)


def no_zero_grad_scenario(model, attach, loss, kind):
    model, optimizer = attach(model, KINDS[kind](model.parameters()))
    for step in range(6):
        loss(model, step).backward()
        optimizer.step()
    optimizer.step()  # the same gradients once more
    return None


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamax"])
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_persist_and_accumulate_over_a_step_without_zero_grad(world, kind):
    """B92."""
    ranks.run(world, both, no_zero_grad_scenario, kind)


def no_zero_grad_in_numbers(rank, world):
    p = nn.Parameter(torch.zeros(2))
    model, optimizer = wrap(nn.ParameterList([p]), torch.optim.SGD([p], lr=1.0))
    seen = []
    for _ in range(3):
        (p * (rank + 1.0)).sum().backward()
        optimizer.step()
        seen.append(p.detach().clone())
    return seen


def test_gradient_of_every_earlier_step_is_stepped_with_again():
    """B92: means 1.5, 3.0 and 4.5 are taken off."""
    for seen in ranks.run(2, no_zero_grad_in_numbers):
        assert_bits(seen, [torch.full((2,), value) for value in (-1.5, -4.5, -9.0)])


# -- the model's own state ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A weight, a tied weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(40, 40)
        self.b = nn.Linear(40, 40, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.b(torch.tanh(self.a(x)))


def model_state(rank, world, replicated):
    torch.manual_seed(1)
    plain = Counting()
    model = copy.deepcopy(plain)
    if replicated:
        outer = shardstep.DistributedDataParallel(model, bucket_cap_mb=0.002)
        theirs = nn.parallel.DistributedDataParallel(plain)
        expected, got = theirs.state_dict(), outer.state_dict()
    else:
        outer, _ = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        theirs, expected, got = plain, plain.state_dict(), outer.state_dict()
        assert outer is model and isinstance(model, Counting)
    assert list(got) == list(expected)
    assert_bits(got.values(), expected.values())
    other = {key: torch.full_like(value, 3.0) for key, value in expected.items()}
    assert str(outer.load_state_dict(other)) == "<All keys matched successfully>"
    assert all(bool((value == 3.0).all()) for value in outer.state_dict().values())
    assert outer.load_state_dict({}, strict=False).missing_keys == theirs.load_state_dict({}, strict=False).missing_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        outer.load_state_dict({})

    # Each weight has a storage of its own: saving one writes its bytes, not its bucket's.
    for tensor in (outer.state_dict()["module.a.bias" if replicated else "a.bias"], model.a.weight.detach()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        file, alone = io.BytesIO(), io.BytesIO()
        torch.save(tensor, file)
        torch.save(tensor.clone(), alone)
        assert abs(file.tell() - alone.tell()) < 256

    # Copies are plain modules with equal weights, and live on their own.
    for twin in (copy.deepcopy(outer), pickle.loads(pickle.dumps(model))):
        assert type(twin) is Counting
        assert twin.a.weight is twin.b.weight
        assert_bits(twin.state_dict().values(), model.state_dict().values())
        assert twin.a.weight.data_ptr() != model.a.weight.data_ptr()
        if rank == 0:  # a copy that communicated would hang
            twin(torch.ones(2, 40)).sum().backward()
            torch.optim.SGD(twin.parameters(), lr=1.0).step()
            assert type(twin.a.weight.grad) is torch.Tensor
        assert all(bool((p == 3.0).all()) for p in model.parameters())


@pytest.mark.parametrize("replicated", [False, True], ids=["wrap", "ddp"])
@pytest.mark.parametrize("world", [1, 2])
def test_model_state_and_copies_are_those_of_a_plain_module(world, replicated):
    ranks.run(world, model_state, replicated)


# -- layers that come later ---------------------------------------------------------------------------------------


def unfrozen_scenario(model, attach, loss, kind):
    """B55."""
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = KINDS[kind](p for p in model.parameters() if p.requires_grad)
    model, optimizer = attach(model, optimizer)
    train(model, optimizer, loss, range(3))
    for p in model[0].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group(dict(params=list(model[0].parameters()), lr=2e-3))
    train(model, optimizer, loss, range(3, STEPS))
    return [len(optimizer.state[p]) for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_layer_unfrozen_and_added_after_some_steps_trains_with_state_of_its_own(world, kind):
    results = ranks.run(world, both, unfrozen_scenario, kind)
    for got, expected in results:  # also for a bias of which some ranks own no piece
        assert got == expected


def warm_and_frozen_scenario(model, attach, loss, kind):
    """A layer that has state is frozen before wrapping and unfrozen after some steps."""
    optimizer = KINDS[kind](model.parameters())
    for step in range(4):
        loss_of(model, step, None, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model[0].parameters():
        p.requires_grad_(False)
    model, optimizer = attach(model, optimizer)
    train(model, optimizer, loss, range(4, 7))
    for p in model[0].parameters():
        p.requires_grad_(True)
    train(model, optimizer, loss, range(7, STEPS))


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_a_frozen_layer_waits_until_it_is_unfrozen(kind):
    ranks.run(2, both, warm_and_frozen_scenario, kind)


def two_optimizers_scenario(model, attach, loss, kind):
    """B63: one steps every time, the other every second time over the gradients of two."""
    first = KINDS[kind](model[0].parameters())
    second = KINDS[kind]([*model[2].parameters(), *model[4].parameters()])
    model, first = attach(model, first)
    if isinstance(first, shardstep.ShardedOptimizer):
        second = shardstep.ShardedOptimizer(second, model)
    for step in range(STEPS):
        loss(model, step).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_two_optimizers_over_one_model_step_at_their_own_pace(world, kind):
    ranks.run(world, both, two_optimizers_scenario, kind)


def module_zero_grad_scenario(model, attach, loss, kind, set_to_none):
    model, optimizer = attach(model, KINDS[kind](model.parameters()))
    for step in range(STEPS):
        loss(model, step).backward()
        optimizer.step()
        model.zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamax"])
def test_zero_grad_of_the_module_does_as_that_of_the_optimizer(kind, set_to_none):
    ranks.run(2, both, module_zero_grad_scenario, kind, set_to_none)


# -- refusals -----------------------------------------------------------------------------------------------------


class LineSearch(torch.optim.LBFGS):
    pass


class Unknown(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


def refused(rank, world):
    messages = {}
    makers = {
        "LBFGS": lambda m: torch.optim.LBFGS(m.parameters()),
        "LineSearch": lambda m: LineSearch(m.parameters()),
        "SparseAdam": lambda m: torch.optim.SparseAdam(list(m.parameters())),
        "Unknown": lambda m: Unknown(m.parameters()),
    }
    for name, make in makers.items():
        for attach in ("wrap", "ShardedOptimizer", "ddp"):
            model = network()
            optimizer = make(model)
            before, kind = weights(model), type(model)
            with pytest.raises(shardstep.UsageError) as caught:
                if attach == "wrap":
                    wrap(model, optimizer)
                elif attach == "ShardedOptimizer":
                    model = shardstep.wrap(model)
                    kind = type(model)
                    shardstep.ShardedOptimizer(optimizer, model)
                else:
                    shardstep.ShardedOptimizer(optimizer, shardstep.DistributedDataParallel(model))
            assert type(model) is kind
            assert_bits(weights(model), before)
            messages.setdefault(name, set()).add(str(caught.value))
    return messages


def test_optimizers_that_cannot_be_sharded_are_refused_by_name_and_reason():
    reasons = {
        "LBFGS": "line search", "LineSearch": "a torch.optim.LBFGS, cannot", "SparseAdam": "sparse",
        "Unknown": "elementwise=True",
    }
    for messages in ranks.run(2, refused):
        for name, found in messages.items():
            assert len(found) == 1
            assert name in min(found) and reasons[name] in min(found), found


def unattached(rank, world, replicated):
    model = network()
    params = list(model.parameters())
    late = torch.optim.AdamW(params, lr=0.1)
    if replicated:
        model = shardstep.DistributedDataParallel(model)
        shardstep.ShardedOptimizer(torch.optim.SGD(params, lr=0.1), model)
    else:
        model, _ = wrap(model, torch.optim.SGD(params, lr=0.1))
    loss_of(model, 0, rank, world).backward()
    before = weights(model)
    for optimizer in (late, torch.optim.SGD(params, lr=0.1)):
        with pytest.raises(shardstep.UsageError, match=type(optimizer).__name__ + ".*weight.*ShardedOptimizer"):
            optimizer.step()
    assert_bits(weights(model), before)
    assert not late.state
    model.unwrap()
    for p in params:
        p.grad = torch.zeros_like(p)
    late.step()  # an ordinary model again


@pytest.mark.parametrize("replicated", [False, True], ids=["wrap", "ddp"])
def test_unattached_optimizer_is_refused_before_it_touches_a_weight(replicated):
    ranks.run(2, unattached, replicated)


def foreign_parameters(rank, world):
    model, other = network(), network()
    with pytest.raises(shardstep.UsageError, match="not a parameter of the wrapped model"):
        wrap(model, torch.optim.SGD(other.parameters(), lr=0.1))
    assert type(model) is nn.Sequential
    with pytest.raises(shardstep.UsageError, match="differentiable"):
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True))
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(shardstep.UsageError, match="sharded already"):
        shardstep.ShardedOptimizer(optimizer, model)


def test_optimizers_of_other_models_are_refused():
    ranks.run(2, foreign_parameters)


def joins(rank, world):
    shardstep.init()
    assert torch.distributed.is_initialized()
    return both(rank, world, closure_scenario)[0][0]


def test_init_joins_the_ranks_that_torchrun_has_started():
    for outcome in ranks.outcomes(2, joins, group=False):
        assert outcome[:2] == ("ok", [True] * STEPS), outcome


def test_a_process_without_a_group_trains_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    shardstep.init()
    assert not torch.distributed.is_initialized()
    both(0, 1, closure_scenario)


# -- GradScaler ---------------------------------------------------------------------------------------------------


def scaled_scenario(model, attach, loss, kind, clip):
    """Steps 3 and 7 overflow."""
    model, optimizer = attach(model, KINDS[kind](model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(STEPS):
        value = loss(model, step)
        scaler.scale(value * float("inf") if step in (3, 7) else value).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamax"])
def test_grad_scaler_scales_and_skips_as_in_one_process(kind, clip):
    for got, expected in ranks.run(2, both, scaled_scenario, kind, clip):
        assert got == expected
        assert len(set(expected)) > 2


def overflow_elsewhere(rank, world, element):
    """B54: one element of one rank's gradient is infinite."""
    p = nn.Parameter(torch.ones(1000))
    model, optimizer = wrap(nn.ParameterList([p]), torch.optim.AdamW([p], lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    p.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    factor = torch.ones(1000)
    if rank == 1:
        factor[element] = float("inf")
    scaler.scale((p * factor).sum()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, before)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, state[0][key]), key
    return scaler.get_scale(), norm.item()


@pytest.mark.parametrize("element", [0, 999])
def test_overflow_in_another_ranks_segment_skips_the_step_on_all(element):
    for scale, norm in ranks.run(2, overflow_elsewhere, element):
        assert scale == 2.0
        assert norm == float("inf")


# -- hooks --------------------------------------------------------------------------------------------------------


def hooks(rank, world):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", type(o).__name__)))
    model, optimizer = wrap(model, optimizer)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", type(o).__name__)))
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2))
    return seen


def global_hooks(rank, world, kind):
    model = network()
    model, optimizer = wrap(model, KINDS[kind](model.parameters()))
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append(("before", o is optimizer))),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(("after", o is optimizer))),
    ]
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", ["adamw", "adamax"])
def test_global_step_hooks_run_once_per_step(kind):
    for seen in ranks.run(2, global_hooks, kind):
        assert seen == [("before", True), ("after", True)] * 2


def test_step_hooks_of_either_optimizer_run_once_per_step():
    for seen in ranks.run(2, hooks):
        assert seen == [("before", "ShardedOptimizer"), ("after", "ShardedOptimizer")] * 2
