"""State of the sharded optimizer: whose it is, how it is shown, saved and loaded."""

import copy
import io
import pickle

import pytest
import ranks
import torch
from one_process import (
    KINDS,
    STEPS,
    WORLDS,
    assert_bits,
    assert_close,
    batch,
    both,
    loss_of,
    network,
    train,
    weights,
    wrap,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

pytestmark = pytest.mark.timeout(60)


def flat_values(state):
    return {key: torch.as_tensor(value).flatten() for key, value in state.items() if value is not None}


def state_as_a_mapping(rank, world, kind):
    model = network()
    mine = list(model.parameters())
    model, optimizer = wrap(model, KINDS[kind](mine))
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2))
    state = optimizer.state
    assert len(state) == len(mine) and bool(state)
    assert all(a is b for a, b in zip(state, mine, strict=True))  # before any entry was looked at
    assert mine[0] in state and torch.zeros(1) not in state
    held = flat_values(state[mine[0]])
    for copied in (dict(state), copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert len(copied) == len(mine)
        for entry, p in zip(copied.values(), mine, strict=True):
            assert type(entry) is dict
            assert_bits(flat_values(entry).values(), flat_values(state[p]).values())
    assert state.get(mine[0]) is state[mine[0]] and state.get(torch.zeros(1)) is None
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2, 4))
    now = flat_values(state[mine[0]])
    assert_bits(held.values(), now.values())  # views of what the update works on
    assert [len(values) for values in get_optimizer_state_dict(model, optimizer)["state"].values()] == [len(now)] * len(mine)
    return {i: sorted(entry) for i, entry in optimizer.state_dict()["state"].items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 3])
def test_state_is_a_mapping_like_that_of_torch_with_the_same_keys_on_every_rank(world, kind):
    """Of three ranks, some own nothing of a bias."""
    model = network()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, lambda model, step: loss_of(model, step, None, 1), range(4))
    expected = {i: sorted(entry) for i, entry in optimizer.state_dict()["state"].items()}
    assert ranks.run(world, state_as_a_mapping, kind) == [expected] * world


def popped(rank, world):
    model = network()
    model, optimizer = wrap(model, KINDS["adamw"](model.parameters()))
    first, *others = model.parameters()
    entry = optimizer.state.pop(first)
    assert sorted(entry) == ["exp_avg", "exp_avg_sq", "step"]
    assert first not in optimizer.state and optimizer.state.pop(first, 1) == 1
    with pytest.raises(KeyError):
        optimizer.state.pop(first)
    assert optimizer.state.setdefault(first, {"mine": 1}) == {"mine": 1}
    assert sorted(optimizer.state.setdefault(others[0], {})) == ["exp_avg", "exp_avg_sq", "step"]
    assert all(type(value) is dict for _, value in optimizer.state.items())


def test_entries_of_the_state_can_be_taken_out():
    ranks.run(1, popped)



def warm_scenario(model, attach, loss, kind):
    optimizer = KINDS[kind](model.parameters())
    for step in range(5):  # before wrapping, alike everywhere
        loss_of(model, step, None, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = attach(model, optimizer)
    train(model, optimizer, loss, range(5, STEPS))
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_warm_optimizer_is_taken_over(world, kind):
    ranks.run(world, both, warm_scenario, kind)


def state_is_keyed(rank, world, kind):
    model = network()
    mine = list(model.parameters())
    given = KINDS[kind](mine)
    model, optimizer = wrap(model, given)
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], mine, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), mine, strict=True))
    assert all(any(key is p for p in mine) for key in optimizer.state)
    key = {"sgd": "momentum_buffer", "adamax": "exp_avg", "asgd": "ax"}.get(kind, "exp_avg")
    return [optimizer.state[p][key].clone() for p in mine]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_state_and_groups_are_those_of_the_users_parameters(world, kind):
    """B95. Pieces of all ranks, put together, are the state of one process."""
    pieces = ranks.run(world, state_is_keyed, kind)
    model = network()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, lambda model, step: loss_of(model, step, None, 1), range(2))
    key = {"sgd": "momentum_buffer", "asgd": "ax"}.get(kind, "exp_avg")
    whole = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    assert_close(whole, [optimizer.state[p][key].flatten() for p in model.parameters()])


def resume(rank, world, kind, param_dtype):
    def start(seed):
        model = network(seed)
        return wrap(model, KINDS[kind](model.parameters()), param_dtype=param_dtype)

    def loss(model, step):
        return loss_of(model, step, rank, world)

    model, optimizer = start(1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    train(model, optimizer, loss, range(6), lambda step: scheduler.step())
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(model, optimizer, loss, range(6, STEPS), lambda step: scheduler.step())
    expected = weights(model)

    model, optimizer = start(2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    train(model, optimizer, loss, range(2))  # what was there before has no say
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    assert optimizer.param_groups[0]["initial_lr"] == saved[1]["param_groups"][0]["initial_lr"]
    train(model, optimizer, loss, range(6, STEPS), lambda step: scheduler.step())
    assert_bits(weights(model), expected)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_resumed_run_has_the_bits_of_the_uninterrupted_one(world, kind, param_dtype):
    ranks.run(world, resume, kind, param_dtype)


def loads_unsharded(rank, world, kind):
    plain = network()
    theirs = KINDS[kind](plain.parameters())
    for step in range(5):
        loss_of(plain, step, None, 1).backward()
        theirs.step()
        theirs.zero_grad()
    model = network(2)
    model, optimizer = wrap(model, KINDS[kind](model.parameters()))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    for step in range(5, STEPS):
        for m, o, who in ((plain, theirs, (None, 1)), (model, optimizer, (rank, world))):
            loss_of(m, step, *who).backward()
            o.step()
            o.zero_grad()
    assert_close(weights(model), weights(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_of_the_unsharded_optimizer_can_be_loaded(kind):
    ranks.run(2, loads_unsharded, kind)


def warm_in_bf16(rank, world, kind):
    """A BF16 model's state is BF16 in torch; beside FP32 masters it has to be FP32."""
    model = network().bfloat16()
    optimizer = KINDS[kind](model.parameters())

    def loss(model, step):
        x, y = batch(step, rank, world)
        return (model(x.bfloat16()).float() - y).square().mean()

    loss(model, 0).backward()
    for p in model.parameters():
        p.grad.fill_(0.5)  # alike on all ranks
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = wrap(model, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, loss, range(1, 5))
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)}
    assert dtypes == {torch.float32}
    optimizer.load_state_dict(kept)
    again = optimizer.state_dict()["state"]
    for i, state in kept["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[i][key])), (i, key)


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_a_bf16_model_becomes_fp32(kind):
    ranks.run(2, warm_in_bf16, kind)


def loaded_options(rank, world):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    model, optimizer = wrap(model, optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    return float(saved["param_groups"][0]["lr"]), float(optimizer.param_groups[0]["lr"])


def test_options_are_copied_from_a_loaded_state_dict():
    assert ranks.run(2, loaded_options) == [(0.5, 0.25)] * 2


def state_dict_hooks(rank, world):
    model = network()
    model, optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    seen = []

    def halve(o, state_dict):
        seen.append("before")
        groups = [{**group, "lr": group["lr"] / 2} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    return seen


def test_hooks_on_loading_state_run_as_in_torch():
    assert ranks.run(2, state_dict_hooks) == [["before", 0.05]] * 2


