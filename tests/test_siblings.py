"""Siblings of the reported cases (test_cases.py): how else users of DDP and FSDP run forwards and backwards, fail and go
on, and build modules. See siblings.py."""

# ruff: noqa: B023 - closures over loop variables are called before the loop goes on

import copy
import gc
import threading

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from siblings import SHARDED, Heads, Scenarios, adamw, check, data, net, sgd, square, step_once, train, weights
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune
from torch.utils.checkpoint import checkpoint

scenario = Scenarios()

# -- forwards and backwards ----------------------------------------------------------------------------------------------


@scenario()
def forwards_without_a_backward_in_mid_window(side):
    called, module, optimizer = side.make(net())

    def loss(rank, step):
        called(data(rank, 77))
        called.eval()
        with torch.no_grad():
            called(data(rank, 78))
        with torch.inference_mode():
            called(data(rank, 78))
        called.train()
        return square(called(data(rank, step)))

    with torch.inference_mode():
        called(data(0, 0))
    return train(side, called, module, optimizer, loss=loss)


@scenario()
def nested_no_sync(side):
    called, module, optimizer = side.make(net())
    for step in range(2):
        with side.no_sync(called):
            with side.no_sync(called):
                side.backward(lambda rank: square(called(data(rank, step))))
            side.backward(lambda rank: square(called(data(rank, 10 + step))))
        side.backward(lambda rank: square(called(data(rank, 20 + step))))
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@scenario()
def two_losses_of_one_forward_in_two_backwards_and_in_one(side):
    called, module, optimizer = side.make(Heads())

    def apart(rank, scale):
        a, b = called(data(rank, 1))
        (a.pow(2).mean() * scale).backward(retain_graph=True)
        (b.pow(2).mean() * scale).backward()

    def together(rank, scale):
        a, b = called(data(rank, 2))
        torch.autograd.backward([a.pow(2).mean() * scale, b.pow(2).mean() * scale])

    for run in (apart, together):
        side.each(run)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@scenario()
def the_output_that_is_used_depends_on_the_rank(side):
    called, module, optimizer = side.make(Heads())
    for step in range(3):
        side.backward(lambda rank: called(data(rank, step))[rank].pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@scenario()
def backward_with_inputs_and_losses_outside_of_the_forward(side):
    called, module, optimizer = side.make(Heads())
    side.each(lambda rank, scale: (square(called(data(rank, 0))) * scale).backward(inputs=[module.trunk.weight]))
    optimizer.step()
    optimizer.zero_grad()
    with side.no_sync(called):
        side.backward(lambda rank: sum(p.pow(2).sum() for p in module.parameters()))
    side.backward(lambda rank: module.first(data(rank, 0, 2, 4)).mean())
    optimizer.step()
    return weights(module)


@scenario(SHARDED)
def gradients_assigned_from_autograd_grad(side):
    called, module, optimizer = side.make(net())

    def run(rank, scale):
        slopes = torch.autograd.grad(square(called(data(rank, 0))) * scale, [*module.parameters()])
        for p, g in zip(module.parameters(), slopes):
            p.grad = g if p.grad is None else p.grad + g

    side.each(run)
    optimizer.step()
    return weights(module)


@scenario()
def gradient_penalty_and_maml(side):
    called, module, optimizer = side.make(net())

    def penalty(rank, step):
        x = data(rank, step).requires_grad_(True)
        (slope,) = torch.autograd.grad(called(x).sum(), x, create_graph=True)
        return called(x).mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    def maml(rank, step):
        fast = dict(module.named_parameters())
        for inner in range(2):
            loss = square(torch.func.functional_call(module, fast, (data(rank, step + inner),)))
            slopes = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes)}
        return square(torch.func.functional_call(module, fast, (data(rank, step + 9),)))

    for loss in (penalty, maml):
        train(side, called, module, optimizer, loss=loss)
    return weights(module)


@scenario()
def an_average_as_parameters_of_a_functional_call(side):
    called, module, optimizer = side.make(net())
    average = {name: copy.deepcopy(p) for name, p in module.named_parameters()}  # are Parameters, too

    def loss(rank, step):
        x = data(rank, step)
        teacher = torch.func.functional_call(called if side.form == "wrap" else module, average, (x,)).detach()
        return square(called(x) - teacher) + square(called(data(rank, step + 5)))

    return train(side, called, module, optimizer, loss=loss)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, plain):
        def run(block, x, reentrant):
            return block(x) if plain else checkpoint(block, x, use_reentrant=reentrant)

        def inner(x):
            return torch.tanh(self.a(x))

        def outer(x):
            return self.b(run(inner, x, True))  # nested

        for reentrant in (True, False, True):
            x = run(inner, run(outer, x, reentrant), not reentrant)
        return x


@scenario()
def both_kinds_of_checkpointing_nested_over_shared_layers(side):
    called, module, optimizer = side.make(Blocks())

    def loss(rank, step):
        return square(called(data(rank, step).requires_grad_(), side.alone))

    return train(side, called, module, optimizer, loss=loss)


# -- exceptions ----------------------------------------------------------------------------------------------------------


@scenario()
def exceptions_in_hook_closure_and_step_hook_then_going_on(side):
    called, module, optimizer = side.make(net())
    fail = [True]

    def hook(grad):
        if fail[0]:
            raise ValueError("hook")
        return grad * 2

    def refuse(*_):
        raise ValueError("refused")

    next(module.parameters()).register_hook(hook)
    with pytest.raises(ValueError, match="hook"):
        side.backward(lambda rank: square(called(data(rank, 0))))
    optimizer.zero_grad()
    fail[0] = False
    for step in range(2):
        side.backward(lambda rank: square(called(data(rank, step))))
        with pytest.raises(ValueError, match="refused"):
            optimizer.step(refuse)
        handle = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ValueError, match="refused"):
            optimizer.step()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.fail = nn.Linear(3, 3), False

    def forward(self, x):
        if self.fail:
            raise ValueError("forward")
        return self.layer(x)


@scenario()
def exception_in_a_forward_of_one_rank_that_is_skipped(side):
    called, module, optimizer = side.make(Failing())
    for step in range(2):
        with side.no_sync(called):
            side.backward(lambda rank: square(called(data(rank, step))))
        if side.rank == 0:
            module.fail = True
            with pytest.raises(ValueError, match="forward"), side.no_sync(called):
                called(data(0, 0))
            module.fail = False
        side.backward(lambda rank: square(called(data(rank, step + 5))))
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


# -- freezing and sharing ------------------------------------------------------------------------------------------------


@scenario()
def frozen_and_unfrozen_again_and_again_also_within_a_window(side):
    model = Heads()
    model.second.requires_grad_(False)
    called, module, optimizer = side.make(model, adamw)
    norms = []
    for step in range(7):
        module.first.requires_grad_(step % 3 != 1)
        with side.no_sync(called):
            side.backward(lambda rank: square(called(data(rank, step))))
        module.second.requires_grad_(step % 2 == 1)
        side.backward(lambda rank: square(called(data(rank, step + 10))))
        norms.append(float(clip_grad_norm_(module.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return weights(module), norms


@scenario(SHARDED)
def frozen_on_one_rank_contributes_nothing_there(side):
    called, module, optimizer = side.make(Heads())

    def loss(rank, step):
        module.first.requires_grad_(rank != 0)
        return square(called(data(rank, step)))

    return train(side, called, module, optimizer, loss=loss)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        layer = nn.Linear(3, 3)
        self.modules_ = nn.ModuleList([layer, nn.Tanh(), layer])
        self.list = nn.ParameterList([layer.weight, nn.Parameter(torch.randn(3))])
        self.dict = nn.ParameterDict({"w": layer.weight, "u": nn.Parameter(torch.randn(3))})
        self.alias = layer.bias

    def forward(self, x):
        for part in self.modules_:
            x = part(x)
        return x @ self.list[0] * self.list[1] + x @ self.dict["w"].t() * self.dict["u"] + self.alias


@scenario()
def one_parameter_in_lists_dicts_and_modules(side):
    called, module, optimizer = side.make(Shared())
    train(side, called, module, optimizer)
    assert module.list[0] is module.modules_[0].weight is module.dict["w"] and module.alias is module.modules_[2].bias
    module.load_state_dict(module.state_dict())
    return train(side, called, module, optimizer)


# -- modules -------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.scalar, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.transposed, self.strided = nn.Parameter(torch.randn(4, 3).t()), nn.Parameter(torch.randn(6, 4)[::2, ::2])
        self.conv = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.real64, self.frozen = nn.Parameter(torch.randn(3).double()), nn.Parameter(torch.ones(3).long(), False)

    def forward(self, x):
        strided = (self.strided * self.real64.float()[:, None]).sum() * x.sum() * 0.1
        return square(x @ self.transposed) * self.scalar + square(self.conv) * x.mean() + strided + self.empty.sum()


@scenario()
def parameters_of_every_shape_and_dtype_in_one_module(side):
    results = []
    for optimizer in (sgd, adamw):
        called, module, optimizer = side.make(Odd(), optimizer)
        results.append(train(side, called, module, optimizer, loss=lambda rank, step: called(data(rank, step))))
    return results


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(1)
        self.layer = kind(3, 4, num_layers=2, bidirectional=True, **options)

    def forward(self, x):
        self.layer.flatten_parameters()
        return self.layer(x)[0]


@scenario()
def recurrent_layers_and_orthogonal_and_pruned_weights(side):
    orthogonal, pruned = net(), net()
    parametrizations.orthogonal(orthogonal[2])
    prune.l1_unstructured(pruned[2], "weight", amount=0.3)
    results = []
    for model in (Recurrent(nn.GRU), Recurrent(nn.LSTM, proj_size=2), orthogonal, pruned):
        called, module, optimizer = side.make(model)
        results.append(train(side, called, module, optimizer))
    return results


@scenario()
def embeddings_with_padding_bags_frequencies_and_sparse_gradients_of_one_rank(side):
    results = []
    for layer, options in ((nn.Embedding, {"padding_idx": 0, "sparse": True}), (nn.EmbeddingBag, {"sparse": True}),
                           (nn.Embedding, {"scale_grad_by_freq": True})):
        torch.manual_seed(1)
        called, module, optimizer = side.make(layer(9, 4, **options))
        for step in range(2):
            tokens = [torch.randint(0, 9, (6, 2), generator=torch.Generator().manual_seed(10 * step + k)) for k in range(3)]
            side.backward(lambda rank: square(called(tokens[rank])) + (square(called(tokens[2])) if rank == 0 else 0))
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(module))
    return results


class Named(nn.Module):
    """Has names that a wrap adds, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stats, self.reshard, self._engine = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), "mine"
        self.register_buffer("unwrap", torch.ones(1))

    def full_grad(self):
        return "mine"

    def forward(self, x):
        return self.stats(x) * self.reshard * self.unwrap


@scenario()
def names_of_the_users_stay_the_users(side):
    called, module, optimizer = side.make(Named())
    result = train(side, called, module, optimizer)
    assert module._engine == module.full_grad() == "mine" and isinstance(module.stats, nn.Linear)
    return result


def names_body(rank, world):
    with pytest.warns(UserWarning, match="Named has _engine, full_grad, reshard, stats, unwrap of its own"):
        shardstep.wrap(Named(), transport="shm")


def test_a_hidden_method_of_ours_is_announced():
    ranks.run(2, names_body)


@scenario(["wrap"])
def slices_of_a_wrapped_container_are_plain(side):
    called, module, optimizer = side.make(net())
    assert type(module[:2]) is type(module + nn.Sequential(nn.Tanh())) is nn.Sequential
    assert type(type(module)(nn.Tanh())) is nn.Sequential
    side.backward(lambda rank: square(module[3:](module[:3](data(rank, 0)))))  # the same layers
    optimizer.step()
    return weights(module)


@scenario()
def a_larger_module_of_wrapped_ones(side):
    encoder, decoder = side.make(net(1)), side.make(net(2))
    model = nn.Sequential(encoder[0], decoder[0]).to("cpu").train()
    for step in range(2):
        with side.no_sync(encoder[0]), side.no_sync(decoder[0]):
            side.backward(lambda rank: square(model(data(rank, step))))
        side.backward(lambda rank: square(model(data(rank, step + 5))))
        clip_grad_norm_(model.parameters(), 0.2)
        encoder[2].step()
        decoder[2].step()
        model.zero_grad()
    model.load_state_dict(model.state_dict())
    copy.deepcopy(model)(data(0, 0)).sum().backward()
    return weights(encoder[1]), weights(decoder[1])


# -- life ----------------------------------------------------------------------------------------------------------------


def abandon(side):
    """A model that goes in mid-window."""
    called, _, _ = side.make(net(7))
    side.backward(lambda rank: square(called(data(rank, 0))))


@scenario()
def wrapped_unwrapped_and_collected_in_turn(side):
    model = net()
    for _ in range(3):
        called, module, optimizer = side.make(model)
        train(side, called, module, optimizer, steps=1)
        model = model if side.alone else called.unwrap()
        square(model(data(0, 0))).backward()
        model.zero_grad()
        abandon(side)
        gc.collect()
    return weights(model)


@scenario()
def backward_and_step_in_threads(side):
    called, module, optimizer = side.make(net())
    errors = []

    def run(function):
        def guarded():
            try:
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()

    for step in range(2):
        run(lambda: side.backward(lambda rank: square(called(data(rank, step)))))
        run(optimizer.step)
        optimizer.zero_grad()
    assert not errors, errors
    return weights(module)


@scenario()
def a_group_of_this_rank_alone(side):
    options = {} if side.alone else {"process_group": [dist.new_group([r]) for r in range(side.world)][side.rank]}
    called, module, optimizer = side.make(net(), **options)
    side.world, side.rank = 1, 0
    step_once(side, called, optimizer, 0)
    return weights(module)


@pytest.mark.parametrize("name, form", scenario.cases())
def test_sibling(name, form):
    check(scenario, name, form)
