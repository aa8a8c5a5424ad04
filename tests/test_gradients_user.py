"""Gradients in users' hands: references kept past ``zero_grad``, hooks, other tensors in ``.grad``. In every form; what torch
does with the same code on one process is the answer."""

import contextlib
import copy

import pytest
import ranks
import shardstep
import torch
from torch import nn

FORMS = ["wrap", "class", "replicated"]
every_form = pytest.mark.parametrize("form", FORMS)
sharded_forms = pytest.mark.parametrize("form", ["wrap", "class"])
TIGHT = dict(rtol=1e-5, atol=1e-7)


class Net(nn.Module):
    """A kernel in channels_last order, a bias and a 0-dim scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 5, 2).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(5, 33)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.linear(self.conv(x).tanh().mean((2, 3))) * self.scale


def data(rank, k=0):
    return torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(100 * k + rank))


def loss(model, x):
    return (model(x) ** 2).mean() * 30


def make(form, model=None, lr=0.1, **options):
    """(what is called, the user's module, the optimizer)"""
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if form == "wrap":
        called, optimizer = shardstep.wrap(model, optimizer, timeout=20, bucket_cap_mb=0.0005, **options)
        return called, called, optimizer
    ddp = shardstep.DistributedDataParallel(model, timeout=20, bucket_cap_mb=0.0005, **options)
    return ddp, model, shardstep.ShardedOptimizer(optimizer, ddp) if form == "class" else optimizer


def alone(batches, model=None):
    """The gradients of one process over ``batches``."""
    model = model or Net()
    for batch in batches:
        loss(model, batch).backward()
    return [p.grad for p in model.parameters()]


def mean(world, k=0):
    return [sum(gs) / world for gs in zip(*[alone([data(r, k)]) for r in range(world)])]


def assert_close(got, expected, **tolerance):
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
        torch.testing.assert_close(a, b, **(tolerance or TIGHT), msg=lambda m, i=i: f"tensor {i}: {m}")


# -- references kept past zero_grad -----------------------------------------------------------------------------------


def zero(optimizer, module, how):
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "module":
        module.zero_grad()
    elif how == "none":
        for p in module.parameters():
            p.grad = None
    else:
        optimizer.zero_grad(set_to_none=False)


def local_references_body(rank, world, form, how):
    """Gradients of two losses under no_sync, combined by hand (as gradient surgery does), and assigned."""
    called, module, optimizer = make(form)
    parameters = list(module.parameters())
    with called.no_sync():
        loss(called, data(rank, 0)).backward()
        first = [p.grad for p in parameters]
        views = [g.view(-1) if g.is_contiguous() else g[0] for g in first]
        zero(optimizer, module, how)
        loss(called, data(rank, 1)).backward()
        second = [p.grad for p in parameters]
        expected = [alone([data(rank, k)]) for k in range(2)]
        assert_close([g + 0 for g in first], expected[0])
        assert_close([g * 1 for g in second], expected[1])
        assert_close(views, [g.reshape(-1) if v.dim() == 1 and g.dim() != 4 else g[0] for g, v in zip(expected[0], views)])
        assert all(type(g + 0) is torch.Tensor for g in first)
        first[0].mul_(2.0)
        assert_close([first[0].norm()], [2 * expected[0][0].norm()])
        assert_close([p.grad * 1 for p in parameters], expected[1])  # which did not change for that
        zero(optimizer, module, how)
        for p, a, b in zip(parameters, first, second):
            p.grad = a + b if p is parameters[1] else a
    before = [p.detach().clone() for p in parameters]
    total = [mean(world, k) for k in range(2)]
    expected = [2 * total[0][0], total[0][1] + total[1][1], *total[0][2:]]  # 0 was doubled, 1 is a sum
    if form == "replicated":  # averages at the end of a synchronising backward
        sum(p.sum() * 0 for p in parameters).backward()
    optimizer.step()
    assert_close([b - p.detach() for p, b in zip(parameters, before)], [0.1 * g for g in expected], rtol=1e-4, atol=1e-6)


@every_form
@pytest.mark.parametrize("how", ["optimizer", "module", "none"])
def test_local_gradients_kept_past_zero_grad_keep_their_values(form, how):
    ranks.run(2, local_references_body, form, how)


def averaged_references_body(rank, world):
    """Replicated: a gradient that was averaged, kept over the next windows, and put back."""
    called, module, optimizer = make("replicated")
    parameters, kept = list(module.parameters()), []
    for k in range(3):
        loss(called, data(rank, k)).backward()
        kept.append([p.grad for p in parameters] + [parameters[0].grad.flatten(), parameters[1].grad.detach()])
        optimizer.zero_grad()
    for k, gradients in enumerate(kept):
        expected = mean(world, k)
        assert_close(gradients, [*expected, expected[0].flatten(), expected[1]])
    for p, g in zip(parameters, kept[1]):
        p.grad = g
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert_close([b - p.detach() for p, b in zip(parameters, before)], [0.1 * g for g in kept[1][:5]], rtol=1e-4, atol=1e-6)
    assert [p.grad is g for p, g in zip(parameters, kept[1])] == [True] * len(parameters)


def test_averaged_gradients_kept_past_zero_grad_keep_their_values():
    ranks.run(2, averaged_references_body)
    ranks.run(3, averaged_references_body)


def reduced_references_body(rank, world, form):
    """Sharded: of a reduced gradient a rank holds a piece. What it knows of it stays; nothing is mistaken for the new one."""
    called, module, optimizer = make(form, **dict(debug=True) if form == "wrap" else {})
    parameters = list(module.parameters())
    loss(called, data(rank, 0)).backward()
    total = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
    kept, aliases = [p.grad for p in parameters], [p.grad.data for p in parameters]
    expected = mean(world, 0)
    optimizer.zero_grad()
    loss(called, data(rank, 1)).backward()
    assert all(p.grad is not g for p, g in zip(parameters, kept))
    assert_close([g.norm() for g in kept], [g.norm() for g in expected])
    assert_close([torch.nn.utils.get_total_norm(kept), torch.nn.utils.get_total_norm(aliases)], [total, total])
    messages = []
    for call in (lambda g: g + 1, lambda g: g.mul_(2), lambda g: g.norm(1), lambda g: g.zero_()):
        for g in (kept[3], aliases[3]):
            with pytest.raises(shardstep.UsageError) as caught:
                call(g)
            messages.append(str(caught.value))
    assert all("'linear.weight'" in m and "kept past zero_grad" in m and "full_grad" in m for m in messages), messages
    assert kept[3].shape == parameters[3].shape and "linear.weight" in repr(kept[3])
    assert_close([called.full_grad(p) for p in parameters], mean(world, 1))
    optimizer.zero_grad()
    parameters[3].grad = kept[3]
    with pytest.raises(shardstep.UsageError, match="'linear.weight' was set to a tensor kept from an earlier window"):
        optimizer.step()


@sharded_forms
def test_reduced_gradients_kept_past_zero_grad_are_not_mistaken_for_new_ones(form):
    ranks.run(2, reduced_references_body, form)


def not_none_body(rank, world, form):
    """set_to_none=False: the same object, zeroed, and then the next gradient."""
    called, module, optimizer = make(form)
    parameters = list(module.parameters())
    with called.no_sync():
        loss(called, data(rank, 0)).backward()
        kept = [p.grad for p in parameters]
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is g for p, g in zip(parameters, kept))
        assert [float((g * 1).abs().sum()) for g in kept] == [0.0] * len(kept)
        loss(called, data(rank, 1)).backward()
        assert all(p.grad is g for p, g in zip(parameters, kept))
        assert_close([g * 1 for g in kept], alone([data(rank, 1)]))
    loss(called, data(rank, 2)).backward()
    assert all(p.grad is g for p, g in zip(parameters, kept))
    expected = [a + b for a, b in zip(mean(world, 1), mean(world, 2))]
    assert_close([called.full_grad(p) for p in parameters], expected)


@every_form
def test_set_to_none_false_keeps_the_object(form):
    ranks.run(2, not_none_body, form)


def unheld_body(rank, world, form):
    """Where nobody holds them, dropping gradients copies nothing: the same tensors come back."""
    called, module, optimizer = make(form)

    def seen():
        loss(called, data(rank)).backward()
        return {name: id(p.grad) for name, p in module.named_parameters()}

    before = seen()
    for _ in range(3):
        loss(called, data(rank)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for p in module.parameters():
            p.grad.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
        called.state_dict(), called.stats()
    assert seen() == before
    held = module.linear.weight.grad
    optimizer.zero_grad()
    assert [name for name, g in seen().items() if g != before[name]] == ["linear.weight"] and held is not None


@every_form
def test_only_gradients_that_somebody_holds_are_copied(form):
    ranks.run(2, unheld_body, form)


# -- the same gradient in other clothes -------------------------------------------------------------------------------


def alias_body(rank, world, form, how):
    """``p.grad = p.grad.detach()`` and ``.data``: nothing has changed, whatever was done to it before."""
    called, module, optimizer = make(form)
    parameters = list(module.parameters())
    reference = Net()
    for p, g in zip(reference.parameters(), mean(world)):
        p.grad = g
    loss(called, data(rank)).backward()
    for model in (module, reference):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad = p.grad.detach() if how == "detach" else p.grad.data
        for p in model.parameters():
            p.grad /= 2
    assert_close([called.full_grad(p) for p in parameters], [p.grad for p in reference.parameters()])
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert_close([b - p.detach() for p, b in zip(parameters, before)], [0.1 * p.grad for p in reference.parameters()],
                 rtol=1e-4, atol=1e-6)


@every_form
@pytest.mark.parametrize("how", ["detach", "data"])
def test_alias_assigned_to_grad_is_the_same_gradient(form, how):
    ranks.run(2, alias_body, form, how)


def before_wrap_body(rank, world, form):
    """Gradients made before wrapping count as this rank's part of the first window, as in torch DDP."""
    model = Net()
    loss(model, data(rank, 0)).backward()
    held = model.linear.weight.grad
    called, module, optimizer = make(form, model)
    loss(called, data(rank, 1)).backward()
    expected = [a + b for a, b in zip(mean(world, 0), mean(world, 1))]
    assert_close([called.full_grad(p) for p in module.parameters()], expected)
    assert_close([held], [alone([data(rank, 0)])[3]])


@every_form
def test_gradients_from_before_wrapping_are_part_of_the_first_window(form):
    ranks.run(2, before_wrap_body, form)


# -- hooks ------------------------------------------------------------------------------------------------------------


def halve(p):
    p.grad.mul_(0.5)


def clamp(p):
    p.grad.clamp_(-0.05, 0.05)


def normalise(p):
    p.grad /= 1.0 + p.grad.norm()


def read(p):
    if p.grad.abs().max() > 0.1:
        p.grad.add_(p.grad, alpha=0.1)


def replace(p):
    p.grad = p.grad * 0.25


def zeroed(p):
    p.grad.zero_()


def foreach(p):
    torch._foreach_mul_([p.grad], 3.0)


def clip(p):
    torch.nn.utils.clip_grad_norm_([p], 0.1)


HOOKS = {hook.__name__: hook for hook in (halve, clamp, normalise, read, replace, zeroed, foreach, clip)}


def hooks_body(rank, world, form, kind, when):
    """Users' hooks act on this rank's gradient, before ranks have anything to do with each other."""
    hook = HOOKS[kind]

    def register(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    models = [Net() for _ in range(world)]
    for r, model in enumerate(models):
        register(model)
        for k in range(3):
            loss(model, data(r, k)).backward()
    expected = [sum(gs) / world for gs in zip(*[[p.grad for p in model.parameters()] for model in models])]
    model = Net()
    if when == "before":
        register(model)
    called, module, optimizer = make(form, model)
    if when == "after":
        register(module)
    for k in range(3):
        with called.no_sync() if k < 2 else contextlib.nullcontext():
            loss(called, data(rank, k)).backward()
    assert called.stats()["total"]["closes"] == (form == "replicated")
    assert_close([called.full_grad(p) for p in module.parameters()], expected)


@every_form
@pytest.mark.parametrize("kind", HOOKS)
def test_post_accumulate_hooks_act_on_the_local_gradient(form, kind):
    ranks.run(2, hooks_body, form, kind, "after")
    if kind in ("halve", "clamp"):
        ranks.run(2, hooks_body, form, kind, "before")


def tensor_hooks_body(rank, world, form):
    """``Tensor.register_hook`` and module hooks see and change this rank's incoming gradient."""

    def register(model):
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.05, 0.05))
        model.linear.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 if g is not None else g for g in gi))

    models = [Net() for _ in range(world)]
    for r, model in enumerate(models):
        register(model)
        for k in range(2):
            loss(model, data(r, k)).backward()
    expected = [sum(gs) / world for gs in zip(*[[p.grad for p in model.parameters()] for model in models])]
    called, module, optimizer = make(form)
    register(module)
    for k in range(2):
        loss(called, data(rank, k)).backward()
        if form == "replicated" and k == 0:  # the second backward adds to the average
            first = [p.grad.clone() for p in module.parameters()]
    if form == "replicated":
        expected = [sum(gs) / world for gs in zip(*[alone_with(register, r, 0) for r in range(world)])]
        assert_close(first, expected)
        return
    assert_close([called.full_grad(p) for p in module.parameters()], expected)


def alone_with(register, rank, k):
    model = Net()
    register(model)
    return alone([data(rank, k)], model)


@every_form
def test_tensor_and_module_hooks_act_on_the_local_gradient(form):
    ranks.run(2, tensor_hooks_body, form)


def raising_hook_body(rank, world, form):
    """A hook that raises once leaves nothing behind that takes a later edit for local."""
    called, module, optimizer = make(form)
    calls = []

    def hook(p):
        calls.append(p)
        if len(calls) == 6:
            raise ValueError("boom")

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)
    with called.no_sync():
        loss(called, data(rank)).backward()
    with pytest.raises(ValueError, match="boom"):
        loss(called, data(rank)).backward()
    called.abort_window()
    loss(called, data(rank)).backward()
    for p in module.parameters():
        p.grad.clamp_(-0.02, 0.02)
    assert_close([called.full_grad(p) for p in module.parameters()], [g.clamp(-0.02, 0.02) for g in mean(world)])


@every_form
def test_window_after_a_raising_hook_is_clean(form):
    ranks.run(2, raising_hook_body, form)


# -- graphs on gradients ----------------------------------------------------------------------------------------------


def grad_call_body(rank, world, form):
    """``torch.autograd.grad`` gives this rank's gradients and leaves the window alone."""
    called, module, optimizer = make(form)
    parameters = list(module.parameters())
    got = torch.autograd.grad(loss(called, data(rank)), parameters)
    assert all(type(g) is torch.Tensor for g in got) and all(p.grad is None for p in parameters)
    assert_close(got, alone([data(rank)]))
    if rank == 0:
        torch.autograd.grad(loss(called, data(rank)), parameters)  # alone
    loss(called, data(rank)).backward()
    assert_close([called.full_grad(p) for p in parameters], mean(world))
    called.zero_grad()
    loss(called, data(rank)).backward(inputs=parameters[:2])
    assert_close([called.full_grad(p) for p in parameters[:2]], mean(world)[:2])
    assert [called.full_grad(p) for p in parameters[2:]] == [None] * 3


@every_form
def test_autograd_grad_and_backward_with_inputs(form):
    ranks.run(2, grad_call_body, form)


def penalty_body(rank, world, form):
    """The norm of the parameters' gradients as a penalty, through ``create_graph``, in both spellings; and a second backward
    through ``.grad`` itself while its graph lives."""

    def run(model, batch, through_grad):
        value = loss(model, batch)
        if through_grad:
            value.backward(create_graph=True)
            return None
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        penalty = sum(g.pow(2).sum() for g in gradients)
        (value + penalty).backward()

    called, module, optimizer = make(form)
    for through_grad in (False, True):
        expected = []
        for r in range(world):
            model = Net()
            model.load_state_dict(module.state_dict())
            run(model, data(r), through_grad)
            expected.append([p.grad.detach() for p in model.parameters()])
        run(called, data(rank), through_grad)
        assert_close([called.full_grad(p).detach() for p in module.parameters()], [sum(gs) / world for gs in zip(*expected)])
        optimizer.step()
        optimizer.zero_grad()


@every_form
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradient_penalty_is_that_of_one_process(form):
    ranks.run(2, penalty_body, form)


def bypass_body(rank, world):
    """``set_`` and conversions; and what asks only for a gradient's shape and dtype is answered."""
    called, module, optimizer = make("wrap", debug=True)
    loss(called, data(rank)).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    g = module.linear.weight.grad
    for call in (lambda: g.set_(torch.zeros(33, 5)), lambda: g.as_subclass(torch.Tensor),
                 lambda: torch.add(torch.zeros(33, 5), 1, out=g), lambda: copy.copy(g), lambda: torch.from_dlpack(g),
                 lambda: g.new_tensor(g), lambda: torch.as_tensor(g) + 1, lambda: torch.asarray(g).sum(), lambda: g.view_as(g)):
        with pytest.raises(shardstep.UsageError, match="'linear.weight'"):
            call()
    zeros = (torch.zeros_like(g), g.new_zeros(33, 5), torch.zeros(165).view_as(g), torch.zeros(1, 5).expand_as(g),
             torch.zeros(33, 5).type_as(g), torch.ones_like(g) - 1, torch.full_like(g, 3) - 3, 0 * torch.randn_like(g))
    assert all(type(made) is torch.Tensor and torch.equal(made, torch.zeros(33, 5)) for made in zeros)
    assert type(torch.empty_like(g)) is torch.Tensor and torch.empty_like(g).shape == (33, 5)
    assert_close([called.full_grad(p) for p in module.parameters()], mean(world))


def test_conversions_do_not_bypass_the_guard_and_shapes_can_be_asked_for():
    ranks.run(2, bypass_body)
