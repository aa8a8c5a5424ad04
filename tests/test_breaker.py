"""Legal programs that once gave a wrong number, a crash or an unclear message."""

import copy
import pickle
import warnings

import pytest
import ranks
import shardstep
import torch


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def x(rank):
    return torch.full((2, 3), rank + 1.0)


def make(form, model, optimizer):
    if form == "wrap":
        return shardstep.wrap(model, optimizer, timeout=20.0)
    called = shardstep.DistributedDataParallel(model, timeout=20.0)
    return called, shardstep.ShardedOptimizer(optimizer, called) if form == "sharded" else optimizer


def same_on_ranks(model):
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    return all(torch.equal(p, q) for other in everyone for p, q in zip(everyone[0], other))


forms = pytest.mark.parametrize("form", ["wrap", "replicated", "sharded"])


# -- different reads on different ranks ---------------------------------------------------------------------------------


def norm_and_full_gradient(rank, world):
    model = net()
    reference = copy.deepcopy(model)
    model, optimizer = shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=20.0)
    model(x(rank)).sum().backward()
    for r in range(world):
        (reference(x(r)).sum() / world).backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        if rank % 2:
            torch.testing.assert_close(model.full_grad(p), q.grad)
        else:
            torch.testing.assert_close(p.grad.norm(), q.grad.norm())
    optimizer.step()
    assert same_on_ranks(model)


@pytest.mark.parametrize("world", [2, 3])
def test_norm_on_one_rank_meets_full_grad_on_another(world):
    ranks.run(world, norm_and_full_gradient)


# -- parameters that another name stands for --------------------------------------------------------------------------


def functional_after_a_step(rank, world, form):
    model = net()
    called, optimizer = make(form, model, torch.optim.SGD(model.parameters(), lr=0.1))
    called(x(rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    doubled = {name: (2 * p.detach()).requires_grad_() for name, p in called.named_parameters()}
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for p in expected.parameters():
            p.mul_(2.0)
    output = torch.func.functional_call(called, doubled, (x(rank),))
    torch.testing.assert_close(output, expected(x(rank)))
    fast = {name: 1.0 * p for name, p in called.named_parameters()}  # of the parameters' graph, as in meta-learning
    torch.func.functional_call(called, fast, (x(rank),)).sum().backward()
    optimizer.step()
    assert same_on_ranks(model)
    if form == "wrap":  # and what is really replaced is noticed still
        model[0].weight = torch.nn.Parameter(torch.ones(4, 3))
        with pytest.raises(shardstep.UsageError, match=r"0\.weight"):
            model(x(rank))


@forms
def test_functional_call_of_a_wrapped_model_after_a_step(form):
    ranks.run(2, functional_after_a_step, form)


# -- unfreezing in replicated mode ------------------------------------------------------------------------------------


def unfrozen_replicated(rank, world, K):
    model = net()
    model[2].requires_grad_(False)
    reference = copy.deepcopy(model)
    called, optimizer = make("replicated", model, torch.optim.AdamW(model.parameters(), lr=0.1))
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            model[2].requires_grad_(True)
            reference[2].requires_grad_(True)
        for k in range(K):
            called.require_backward_grad_sync = k == K - 1
            called(x(rank)).sum().backward()
            for r in range(world):
                (reference(x(r)).sum() / world).backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        for o in (optimizer, reference_optimizer):
            o.step()
            o.zero_grad()
    assert same_on_ranks(model)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_unfrozen_parameter_is_averaged_in_replicated_mode(world, K):
    ranks.run(world, unfrozen_replicated, K)


# -- clear messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copy_of_a_sharded_optimizer_says_that_it_is_one(duplicate):
    model, optimizer = shardstep.wrap(model := net(), torch.optim.AdamW(model.parameters()))
    twin = duplicate(optimizer)
    for call in (twin.step, twin.zero_grad):
        with pytest.raises(shardstep.UsageError, match="copy"):
            call()
    optimizer.step()


def test_torchscript_module_is_refused_in_place_and_trains_in_the_class_form():
    with warnings.catch_warnings():  # that torch.jit is deprecated
        warnings.simplefilter("ignore")
        script = torch.jit.trace(net(), x(0))
    with pytest.raises(shardstep.UsageError, match="TorchScript"):
        shardstep.wrap(script)
    before = [p.detach().clone() for p in script.parameters()]
    model = shardstep.DistributedDataParallel(script)
    optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        model(x(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not all(torch.equal(p, q) for p, q in zip(script.parameters(), before))
