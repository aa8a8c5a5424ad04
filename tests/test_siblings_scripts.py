"""Siblings of the reported cases: what training scripts do around a wrapped model, between two and among three ranks and over
both transports. See siblings.py."""

import functools

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from siblings import Scenarios, adamw, check, data, net, square, step_once, train, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad_norm_, prune

scenario = Scenarios()


def trained(side, between, model=None, optimizer=None, windows=2):
    """Windows with ``between(module)`` between backward and step."""
    called, module, optimizer = side.make(model or net(), **(dict(optimizer=optimizer) if optimizer else {}))
    for step in range(windows):
        side.backward(lambda rank, step=step: square(called(data(rank, step))))
        torch.manual_seed(step)
        between(module)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def noise(module):
    for p in module.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        p.grad += 0.1 * torch.randn(p.shape)


def weight_decay(module):
    for p in module.parameters():
        p.grad.add_(p.detach(), alpha=0.1)
        p.grad.data.add_(p.data, alpha=0.01)


def adaptive_clip(module):
    for p in module.parameters():
        limit, norm = 0.01 * p.detach().norm(), p.grad.detach().norm()
        if norm > limit:
            p.grad.detach().mul_(limit / norm)


def clip_one_by_one(module):
    for p in module.parameters():
        clip_grad_norm_(p, 0.05)


def clip_by_hand(module):
    total = sum(p.grad.norm().item() ** 2 for p in module.parameters()) ** 0.5
    for p in module.parameters():
        p.grad.data.mul_(min(1.0, 0.1 / total))


def signs(module):
    for p in module.parameters():
        p.grad.sign_()


def replace_not_finite(module):
    for p in module.parameters():
        torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        torch.clamp(p.grad, -0.01, 0.01, out=p.grad)


EDITS = [noise, weight_decay, adaptive_clip, clip_one_by_one, clip_by_hand, signs, replace_not_finite]


@scenario()
def gradients_edited_as_in_scripts(side):
    return [trained(side, edit) for edit in EDITS]


@scenario()
def averages_of_weights_and_a_lookahead(side):
    called, module, optimizer = side.make(nn.Sequential(net(), nn.BatchNorm1d(3)))
    average = torch.optim.swa_utils.AveragedModel(called, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    slow = {name: p.detach().clone() for name, p in module.named_parameters()}
    called.eval()
    for step in range(4):
        step_once(side, called, optimizer, step)
        average.update_parameters(called)
        if step % 2:
            for name, p in module.named_parameters():
                slow[name].lerp_(p.detach(), 0.5)
                p.data.copy_(slow[name])
    torch.optim.swa_utils.update_bn([data(0, 7)], average)
    return weights(module), list(weights(average).values()), average(data(0, 8)).detach()


@scenario()
def forwards_and_evaluations_in_other_ways(side):
    called, module, optimizer = side.make(net())
    traced = torch.jit.trace(module, data(0, 1))
    ways = [called.forward, getattr(called, "module", called), traced]
    for step, way in enumerate(ways):
        side.backward(lambda rank, step=step, way=way: square(way(data(rank, step))))
        optimizer.step()
        optimizer.zero_grad()
        if side.rank == 0 or side.alone:  # on one rank only, once without and once with a graph
            called.eval()
            with torch.no_grad():
                called(data(0, 50))
            called(data(0, 51))
            called.state_dict()
            called.train()
    return weights(module)


@scenario()
def modules_changed_and_weights_sent_after_the_wrap(side):
    called, module, optimizer = side.make(net())
    module.to(memory_format=torch.channels_last)
    module[0].register_forward_hook(lambda m, i, o: o * 1.5)
    module[2].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    train(side, called, module, optimizer)
    if not side.alone:
        for p in module.parameters():
            dist.broadcast(p.data, 0)
    module.register_buffer("seen", torch.zeros(3))
    prune.l1_unstructured(module[0], "weight", 0.5)
    for p in module.parameters():
        p.requires_grad = False
    optimizer.step()
    for p in module.parameters():
        p.requires_grad = True
    step, calls = optimizer.step, []
    optimizer.step = functools.wraps(step)(lambda *a: (calls.append(1), step(*a))[1])
    return train(side, called, module, optimizer, first=4), len(calls)


@scenario()
def debugging_and_functional_transforms(side):
    called, module, optimizer = side.make(net())
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    each = torch.func.vmap(torch.func.grad(
        lambda p, x: torch.func.functional_call(module, p, (x[None],)).square().sum()), in_dims=(None, 0))
    samples = each(parameters, data(0, 9))
    with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
        return train(side, called, module, optimizer), samples


@scenario()
def closures_that_clip_and_chained_schedules(side):
    called, module, optimizer = side.make(net())
    kinds = torch.optim.lr_scheduler
    schedule = kinds.SequentialLR(
        optimizer, [kinds.LinearLR(optimizer, 0.1, total_iters=2), kinds.CosineAnnealingWarmRestarts(optimizer, 3)], [2])
    for step in range(5):

        def closure(step=step):
            optimizer.zero_grad()
            side.backward(lambda rank: square(called(data(rank, step))))
            return clip_grad_norm_(module.parameters(), 0.1).item()

        optimizer.step(closure)
        schedule.step()
    return weights(module), schedule.get_last_lr()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, form", scenario.cases())
def test_script(name, form):
    check(scenario, name, form)
    check(scenario, name, form, world=3, transport="c10d")


#: What needs more of a gradient than one rank has, or moves parameters: (what, the message).
REFUSED = {
    "an average by hand": (lambda m: [dist.all_reduce(p.grad) for p in m.parameters()], "all_reduce: the gradient of"),
    "a mean": (lambda m: m[0].weight.grad.mean(), "mean: the gradient of parameter '0.weight' is sharded"),
    "isfinite": (lambda m: torch.isfinite(m[0].weight.grad), "isfinite: the gradient of parameter '0.weight' is sharded"),
    "into another tensor": (lambda m: torch.clamp(m[0].weight.grad, 0, 1, out=torch.empty(5, 3)), "clamp: the gradient of"),
    "share_memory": (lambda m: (m.zero_grad(), m.share_memory()), "parameter '0.weight' was cast or moved after wrapping"),
    "a tie": (lambda m: setattr(m[4], "bias", m[0].bias), "parameter '4.bias' was replaced or removed"),
}


def refused_body(rank, world):
    for do, message in REFUSED.values():
        model = net()
        model, optimizer = shardstep.wrap(model, torch.optim.SGD(model.parameters()), timeout=20.0)
        square(model(data(rank, 0))).backward()
        with pytest.raises(shardstep.UsageError, match=message):
            do(model)
            optimizer.step()


def test_what_a_script_cannot_do_with_a_part_of_a_gradient_is_refused():
    ranks.run(2, refused_body)


def low_body(rank, world):
    dtype, results = torch.bfloat16, []
    for cls in (TorchDDP, shardstep.DistributedDataParallel):
        ddp = cls(net().to(dtype))
        optimizer = adamw(ddp.parameters())
        for step in range(3):
            square(ddp(data(rank, step).to(dtype))).backward()
            optimizer.step()
            assert {p.grad.dtype for p in ddp.parameters()} == {dtype}
            if step != 1:  # one step without, after which gradients add up
                optimizer.zero_grad()
        results.append(torch.cat([p.detach().float().flatten() for p in ddp.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=0.005)


def test_adamw_of_torchs_steps_a_replicated_model_of_low_precision():
    ranks.run(2, low_body)


def test_wrapped_module_can_be_scripted():
    model = shardstep.wrap(net(), process_group=None)
    torch.testing.assert_close(torch.jit.script(model)(data(0, 0)), model(data(0, 0)))

