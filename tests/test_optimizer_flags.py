"""``foreach``, ``fused``, ``capturable`` and ``differentiable``: in the constructor, in ``add_param_group``, or set later."""

import inspect

import pytest
import ranks
import shardstep
import torch
from one_process import assert_bits, both, loss_of, network, train, weights, wrap

pytestmark = pytest.mark.timeout(60)

NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor"]
HOW = ["foreach", "fused"]  # torch computes the same in another way
REFUSED = ["capturable", "differentiable"]
LR = {"Adadelta": 0.5, "Rprop": 1e-3, "SGD": 0.02}


def takes(name, flag):
    return flag in inspect.signature(getattr(torch.optim, name)).parameters


def how_scenario(model, attach, loss, names, where):
    """Each class in turn trains on from where the one before has left the model."""
    for name, flag in names:
        members = list(model.parameters())
        make = getattr(torch.optim, name)
        lr = LR.get(name, 1e-3)
        if where == "constructor":
            optimizer = make(members, lr=lr, **{flag: True})
        else:
            optimizer = make(members[2:] if where == "add_param_group" else members, lr=lr)
        model, optimizer = attach(model, optimizer)
        if where == "add_param_group":
            optimizer.add_param_group({"params": members[:2], flag: True})
        for group in optimizer.param_groups if where == "param_groups" else ():
            group[flag] = True
        train(model, optimizer, loss, range(3))
        assert optimizer.param_groups[-1][flag] is True
        if isinstance(optimizer, shardstep.ShardedOptimizer):
            model.unwrap()


@pytest.mark.parametrize("where", ["constructor", "add_param_group", "param_groups"])
@pytest.mark.parametrize("flag", HOW)
def test_flags_that_say_how_torch_computes_are_taken(flag, where):
    names = [(name, flag) for name in NAMES if takes(name, flag)]
    assert len(names) > (10 if flag == "foreach" else 3)
    ranks.run(2, both, how_scenario, names, where)


def refused_body(rank, world):
    messages = []
    for flag in REFUSED:
        for name in (name for name in NAMES if takes(name, flag)):
            model = network()
            make = getattr(torch.optim, name)
            members = list(model.parameters())
            with pytest.raises(shardstep.UsageError) as caught:
                wrap(model, make(members, **{flag: True}))
            messages.append((name, flag, str(caught.value)))
            model, optimizer = wrap(model, make(members[2:]))
            with pytest.raises(shardstep.UsageError) as caught:
                optimizer.add_param_group({"params": members[:2], flag: True})
            messages.append((name, flag, str(caught.value)))
            assert len(optimizer.param_groups) == len(optimizer.wrapped.param_groups) == 1
            before = weights(model)
            loss_of(model, 0, rank, world).backward()
            optimizer.param_groups[0][flag] = True
            with pytest.raises(shardstep.UsageError) as caught:
                optimizer.step()
            messages.append((name, flag, str(caught.value)))
            assert_bits(weights(model), before)
            optimizer.param_groups[0][flag] = False
            optimizer.step()
            after = weights(model)
            assert_bits(after[:2], before[:2])  # no group's
            assert not torch.equal(after[2], before[2])
            model.unwrap()
    return messages


def test_flags_that_would_change_what_a_step_is_are_refused_by_name():
    first, second = ranks.run(2, refused_body)
    assert first == second and len(first) > 50
    for name, flag, text in first:
        assert f"{name}({flag}=True) is not supported: " in text and f"leave {flag} False" in text


def rolled_back_body(rank, world):
    """A group that is refused for its last member leaves nothing behind of the others."""
    model = network()
    members = list(model.parameters())
    model, optimizer = wrap(model, torch.optim.AdamW(members[2:], lr=1e-2))
    with pytest.raises(shardstep.UsageError, match="param group 1 has a parameter of shape .* that is not a parameter"):
        optimizer.add_param_group({"params": [*members[:2], torch.nn.Parameter(torch.ones(3))]})
    before = weights(model)
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2))
    assert_bits(weights(model)[:2], before[:2])
    optimizer.add_param_group({"params": members[:2], "lr": 1e-3})
    train(model, optimizer, lambda model, step: loss_of(model, step, rank, world), range(2))
    assert not torch.equal(weights(model)[0], before[0])
    return [float(optimizer.state[p]["step"]) for p in members]


def test_refused_group_leaves_the_optimizer_as_it_was():
    assert ranks.run(2, rolled_back_body) == [[2.0, 2.0, 4.0, 4.0, 4.0, 4.0]] * 2
