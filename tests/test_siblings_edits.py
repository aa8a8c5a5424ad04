"""Siblings of the reported cases (test_cases.py): what else users of DDP and FSDP do to weights, buffers, gradients, param
groups and optimizer state. See siblings.py."""

# ruff: noqa: B023 - closures over loop variables are called before the loop goes on

import contextlib
import gc
import io
from collections import defaultdict

import pytest
import ranks
import shardstep
import torch
from siblings import (
    FORMS,
    SHARDED,
    Heads,
    Scenarios,
    Side,
    adamw,
    assert_equal,
    check,
    data,
    net,
    sgd,
    square,
    step_once,
    train,
    weights,
)
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, parametrizations, vector_to_parameters

scenario = Scenarios()

# -- weights -------------------------------------------------------------------------------------------------------------


@scenario()
def weights_set_by_data_by_vector_and_in_place(side):
    called, module, optimizer = side.make(net())
    train(side, called, module, optimizer)
    for p in module.parameters():
        p.data = p.data.clamp(-0.2, 0.2)
    train(side, called, module, optimizer)
    side.backward(lambda rank: square(called(data(rank, 3))))
    vector_to_parameters(parameters_to_vector(module.parameters()) * 0.5, module.parameters())  # in mid-window
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        module[2].weight.copy_(module[2].weight * 0.9)
        nn.init.constant_(module[0].bias, 0.1)
    square_weight = nn.Parameter(torch.eye(3) + torch.arange(9.0).view(3, 3))
    other, inner, second = side.make(nn.ParameterList([square_weight]))
    square_weight.data = square_weight.data.t()  # a view of its own memory
    side.backward(lambda rank: (inner[0] * data(rank, 0, 3, 3)).sum())
    second.step()
    return train(side, called, module, optimizer), weights(inner)


def set_in_bf16_body(rank, world):
    model = net()
    model, optimizer = shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5), param_dtype=torch.bfloat16)
    model[0].weight.data = torch.full((5, 3), 3.0, dtype=torch.bfloat16)
    model[0].weight.mul(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return model[0].weight.float().unique().tolist()


def test_masters_follow_weights_that_were_set_by_data():
    assert ranks.run(2, set_in_bf16_body) == [[2.5]] * 2


@scenario()
def loads_that_are_partial_rounded_or_of_a_submodule(side):
    called, module, optimizer = side.make(net())
    train(side, called, module, optimizer)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict({name: value.bfloat16().float() for name, value in saved.items()})
    module.load_state_dict(dict([*saved.items()][1:]), strict=False)
    module[0].load_state_dict({"weight": saved["0.weight"] * 0.5, "bias": saved["0.bias"]})
    return train(side, called, module, optimizer)


def changed_body(rank, world, form, change):
    called, module, optimizer = Side(rank, world, form).make(net())
    for step in range(2):  # also after the first window
        square(called(data(rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    if change == "added":
        module.add_module("extra", nn.Linear(3, 3))
    elif change == "assigned":
        module[2].load_state_dict({name: value.clone() for name, value in module[2].state_dict().items()}, assign=True)
    elif change == "normalised":
        parametrizations.weight_norm(module[2])
    message = "'extra.weight' was added" if change == "added" else "'2.weight' was replaced"
    with pytest.raises(shardstep.UsageError, match=message):
        called(data(rank, 9))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", ["added", "assigned", "normalised"])
def test_parameter_that_would_train_unsynchronised_is_named(form, change):
    ranks.run(2, changed_body, form, change)


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, x, length=2):
        if length > len(self.cache):
            self.cache = torch.zeros(length)
        return self.layer(x)


def cache_body(rank, world, form):
    called, module, optimizer = Side(rank, world, form).make(Cache())

    def window(length):
        square(called(data(rank, 0), length)).backward()
        optimizer.step()
        optimizer.zero_grad()

    window(4)  # on all ranks alike
    message = r"buffers: rank 0 has 'cache'.*\(4,\).*rank 1.*\(5,\).*broadcast_buffers=False"
    with pytest.raises(shardstep.MismatchError, match=message):
        window(4 + rank)
        window(4)


@pytest.mark.parametrize("form", FORMS)
def test_buffer_that_has_grown_on_one_rank_only_is_named_on_all(form):
    ranks.run(2, cache_body, form)


# -- gradients -----------------------------------------------------------------------------------------------------------


@scenario()
def clips_of_every_kind(side):
    called, module, optimizer = side.make(net())
    parameters, seen = [*module.parameters()], []

    def by_hand():
        norm = sum(p.grad.data.norm(2).item() ** 2 for p in parameters) ** 0.5
        for p in parameters:
            p.grad.data.mul_(0.1 / norm)
        return norm

    def by_stack():
        norm = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2.0) for p in parameters]), 2.0)
        for p in parameters:
            p.grad.detach().mul_(0.1 / norm)
        return norm

    def twice():
        first = clip_grad_norm_(module[0].parameters(), 0.1)
        return first + clip_grad_norm_(iter(parameters), 0.15)

    kinds = [
        lambda: clip_grad_norm_(parameters[0], 0.1), lambda: clip_grad_norm_(parameters, 0.1, norm_type=float("inf")),
        lambda: clip_grad_norm_(parameters, 0.1, norm_type=1.0), lambda: clip_grad_norm_(parameters, 0.1, 3, foreach=False),
        lambda: clip_grad_norm_(parameters, 100.0, norm_type=0.0), by_hand, by_stack, twice,
    ]
    for step, kind in enumerate(kinds):
        with side.no_sync(called):
            side.backward(lambda rank: square(called(data(rank, step))))
        side.backward(lambda rank: square(called(data(rank, step + 50))))
        seen.append(float(kind()))
        optimizer.step()
        optimizer.zero_grad()
    seen += [float(clip_grad_norm_(parameters, 1.0)), float(clip_grad_norm_([], 1.0))]
    return weights(module), seen


@scenario()
def not_a_number_on_one_rank_is_seen_and_skipped_by_all(side):
    called, module, optimizer = side.make(net(), adamw)
    skipped = []
    for step in range(5):
        bad = {1: float("nan"), 3: float("inf")}.get(step, 1.0)
        side.backward(lambda rank: square(called(data(rank, step))) * (bad if rank == 1 else 1.0))
        try:
            clip_grad_norm_(module.parameters(), 0.3, error_if_nonfinite=True)
            optimizer.step()
        except RuntimeError as error:
            assert "non-finite" in str(error)
            skipped.append(step)
        optimizer.zero_grad()
    return weights(module), skipped


@scenario()
def a_scaler_over_two_models_of_which_one_overflows(side):
    first, second = side.make(net(1)), side.make(net(2))
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0), []

    def run(rank, scale, step):
        x = first[0](data(rank, step))
        other = square(second[0](x)) * (float("inf") if step == 1 and rank == 1 else 1.0)
        scaler.scale(square(x) * scale).backward(retain_graph=True)
        scaler.scale(other * scale).backward()

    for step in range(3):
        side.each(lambda rank, scale: run(rank, scale, step))
        scaler.unscale_(first[2])
        clip_grad_norm_(first[1].parameters(), 0.1)
        for _, _, optimizer in (first, second):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(first[1]), weights(second[1]), scales


ZERO = {
    "optimizer": lambda o, m: o.zero_grad(), "to zero": lambda o, m: o.zero_grad(set_to_none=False),
    "module": lambda o, m: m.zero_grad(), "None": lambda o, m: [setattr(p, "grad", None) for p in m.parameters()],
    "zero_": lambda o, m: [p.grad.zero_() for p in m.parameters()],
    "detach_": lambda o, m: [p.grad.detach_().zero_() for p in m.parameters()],
    "data": lambda o, m: [p.grad.data.zero_() for p in m.parameters()],
    "foreach": lambda o, m: torch._foreach_zero_([p.grad for p in m.parameters()]),
    "fill_": lambda o, m: [p.grad.fill_(0) for p in m.parameters()],
    "mul_": lambda o, m: [p.grad.mul_(0) for p in m.parameters()],
    "assign": lambda o, m: [setattr(p, "grad", torch.zeros_like(p)) for p in m.parameters()],
    "copy_": lambda o, m: [p.grad.copy_(torch.zeros_like(p)) for p in m.parameters()],
}


@scenario(SHARDED)
def zero_grad_in_every_spelling_at_every_place(side):
    called, module, optimizer = side.make(net())
    seen = []
    for step, zero in enumerate(ZERO.values()):
        for place in ("between micro-batches", "before the step", "after it"):
            with side.no_sync(called):
                side.backward(lambda rank: square(called(data(rank, step))))
            if place == "between micro-batches":
                zero(optimizer, module)
            side.backward(lambda rank: square(called(data(rank, step + 30))))
            if place == "before the step":
                zero(optimizer, module)
            optimizer.step()
            if place == "after it":
                zero(optimizer, module)
                optimizer.step()
            optimizer.zero_grad()
        seen.append(weights(module))
    return seen


@scenario(SHARDED)
def ranks_with_other_numbers_of_micro_batches_and_other_hints(side):
    called, module, optimizer = side.make(net())

    def run(rank, scale, step):
        count = 1 + (rank + step) % 3
        for k in range(count):
            with side.no_sync(called) if (k + rank + step) % 2 else contextlib.nullcontext():
                (square(called(data(rank, 10 * step + k))) * scale / count).backward()

    for step in range(4):
        side.each(lambda rank, scale: run(rank, scale, step))
        clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


# -- optimizers ----------------------------------------------------------------------------------------------------------


@scenario()
def members_leave_groups_join_them_and_move(side):
    model = Heads()
    called, module, optimizer = side.make(model, lambda parameters: torch.optim.AdamW([*parameters][:4], lr=0.01))
    groups = optimizer.param_groups
    step_once(side, called, optimizer, 0)
    groups[0]["params"] += module.second.parameters()  # joins
    step_once(side, called, optimizer, 1)
    trunk, heads = groups[0]["params"][:2], groups[0]["params"][2:]
    groups.append({**groups[0], "params": heads, "lr": 0.1})
    groups[0]["params"] = trunk
    step_once(side, called, optimizer, 2)
    del groups[1]["params"][:2]  # leaves
    clip_grad_norm_(module.parameters(), 0.1)
    step_once(side, called, optimizer, 3)
    module.zero_grad()
    groups.pop(0)
    step_once(side, called, optimizer, 4)
    assert all("exp_avg" in optimizer.state[p] for p in module.parameters())
    return weights(module)


@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("form", SHARDED)
def test_edits_of_the_state_act_from_the_next_step(form, kind):
    for name in ("assigned", "cleared", "popped", "entry set", "value set", "scaled in place"):
        ranks.run(2, edits_body, form, kind, name)


def edits_body(rank, world, form, kind, how):
    results = []
    for side in (Side(rank, world, "alone"), Side(rank, world, form)):
        called, module, optimizer = side.make(net(), lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.01))
        train(side, called, module, optimizer)
        first, key = next(module.parameters()), {"AdamW": "exp_avg_sq", "RMSprop": "square_avg"}[kind]
        if how == "assigned":
            optimizer.state = defaultdict(dict)
        elif how == "cleared":
            optimizer.state.clear()
        elif how == "popped":
            optimizer.state.pop(first)
        elif how == "entry set":
            optimizer.state[first] = {}
        elif how == "value set":
            optimizer.state[first][key] = optimizer.state[first][key] * 100
        elif how == "scaled in place":
            optimizer.state[first][key].mul_(100)
        results.append(train(side, called, module, optimizer))
        assert float(optimizer.state[first]["step"]) == (4 if "value" in how or "scaled" in how else 2)
    assert_equal(results[1], results[0], how)


@scenario()
def steps_without_backwards_and_backwards_without_steps(side):
    called, module, optimizer = side.make(net())
    seen = []

    def backward(step):
        side.backward(lambda rank: square(called(data(rank, step))))

    optimizer.step()
    backward(0)
    optimizer.step()
    optimizer.step()
    seen.append(weights(module))
    optimizer.zero_grad()
    optimizer.step()
    backward(1)
    optimizer.zero_grad()
    optimizer.step()
    seen.append(weights(module))
    backward(2)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # with zeros: momentum goes on
    return seen, weights(module)


@scenario(SHARDED)
def a_second_optimizer_takes_over(side):
    called, module, optimizer = side.make(net(), adamw)
    train(side, called, module, optimizer)
    second = sgd(module.parameters())
    second = second if side.alone else shardstep.ShardedOptimizer(second, called)
    train(side, called, module, second)
    del optimizer
    gc.collect()
    return train(side, called, module, second)


@scenario()
def state_of_everything_round_trips_through_a_file(side):
    called, module, optimizer = side.make(net(), adamw)
    train(side, called, module, optimizer)
    file = io.BytesIO()
    torch.save({"whole": module, "model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert type(saved["whole"]) is nn.Sequential
    called2, module2, optimizer2 = side.make(net(5), lambda parameters: torch.optim.AdamW(parameters, lr=1.0))
    module2.load_state_dict(saved["model"])
    optimizer2.load_state_dict(saved["optimizer"])
    result = train(side, called2, module2, optimizer2)
    assert_equal(result, train(side, called, module, optimizer), "the original")
    return result


@pytest.mark.parametrize("name, form", scenario.cases())
def test_edit(name, form):
    check(scenario, name, form)
