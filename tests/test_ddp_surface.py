"""The class form against torch's own DistributedDataParallel: constructor, attributes, buffers, inputs and outputs, copies."""

import collections
import copy
import dataclasses
import inspect
import io
import pickle
import typing
import warnings

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

DDP = shardstep.DistributedDataParallel


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def data(rank, step=0, n=4):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def assert_same_grads(model, other, **tolerance):
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


# -- constructor ------------------------------------------------------------------------------------------------------


def test_constructor_takes_torchs_arguments_in_torchs_order():
    theirs = list(inspect.signature(TorchDDP.__init__).parameters)
    mine = inspect.signature(DDP.__init__).parameters
    positional = [name for name, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(theirs)] == theirs
    assert {name for name in mine if name not in theirs} <= {  # of newer torch, and ours
        "skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers", "transport",
        "timeout"}
    for name, p in inspect.signature(TorchDDP.__init__).parameters.items():
        assert mine[name].default == p.default or name == "broadcast_buffers", name


def synchronised_norm():
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


#: Arguments and what torch raises for them, on one rank and on the CPU.
MISUSES = {
    "nothing to train": (lambda: (nn.Linear(2, 2).requires_grad_(False),), {}),
    "several devices": (lambda: (net(),), dict(device_ids=[0, 1])),
    "a device": (lambda: (net(),), dict(device_ids=[0])),
    "an output device": (lambda: (net(),), dict(output_device=torch.device("cpu"))),
    "delayed parameters without a parameter to hook": (lambda: (net(),), dict(delay_all_reduce_named_params=[])),
    "a parameter to hook alone": (lambda: (net(),), dict(param_to_hook_all_reduce=nn.Parameter(torch.ones(1)))),
    "a lazy module": (lambda: (nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)),), {}),
    "SyncBatchNorm": (lambda: (synchronised_norm(),), {}),
}


def misuse_body(rank, world):
    results = {}
    for name, (arguments, keywords) in MISUSES.items():
        for cls in (TorchDDP, DDP):
            with pytest.raises(Exception) as caught:
                cls(*arguments(), **keywords)
            results.setdefault(name, []).append(type(caught.value))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    for name, keywords in {"two dimensions": dict(device_mesh=mesh),
                           "mesh and group": dict(device_mesh=mesh["a"], process_group=dist.group.WORLD)}.items():
        for cls in (TorchDDP, DDP):
            with pytest.raises(Exception) as caught:
                cls(net(), **keywords)
            results.setdefault(name, []).append(type(caught.value))
    return results


@pytest.mark.filterwarnings("ignore")
def test_misuse_raises_torchs_exceptions():
    for name, (theirs, mine) in ranks.run(1, misuse_body)[0].items():
        assert issubclass(mine, theirs), (name, mine, theirs)


def mismatch_body(rank, world, kind):
    model = nn.Linear(3, 2 + rank) if kind == "shape" else nn.Sequential(*[nn.Linear(3, 3) for _ in range(1 + rank)])
    with pytest.raises(RuntimeError) as caught:  # torch's; there only one rank raises and the other waits
        DDP(model)
    return str(caught.value)


@pytest.mark.parametrize("kind, named", [("shape", "weight"), ("count", "1.weight")])
def test_different_models_are_a_runtime_error_on_every_rank(kind, named):
    first, second = ranks.run(2, mismatch_body, kind)
    assert first == second and f"'{named}'" in first


def refusals_body(rank, world):
    from torch.distributed.optim import _apply_optimizer_in_backward

    messages = []
    module = net()
    with pytest.raises(shardstep.UsageError) as caught:
        DDP(module, delay_all_reduce_named_params=[("0.weight", module[0].weight)], param_to_hook_all_reduce=module[2].bias)
    messages.append(str(caught.value))
    _apply_optimizer_in_backward(torch.optim.SGD, module[2].parameters(), {"lr": 0.1})
    for wrap in (DDP, shardstep.wrap):
        with pytest.raises(shardstep.UsageError) as caught:
            wrap(module)
        messages.append(str(caught.value))
    ddp = DDP(net())
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.module[2].parameters(), {"lr": 0.1})
    with pytest.raises(shardstep.UsageError) as caught:
        ddp(data(rank))
    messages.append(str(caught.value))
    with pytest.raises(shardstep.UsageError) as caught:
        DDP(net())._register_fused_optim(torch.optim.Adam, 0.1)
    messages.append(str(caught.value))
    with pytest.raises(shardstep.UsageError) as caught:
        DDP(net())._update_process_group(dist.group.WORLD)
    messages.append(str(caught.value))
    return messages


def test_what_is_refused_is_refused_by_name():
    for messages in ranks.run(2, refusals_body):
        delayed, *fused, registered, updated = messages
        assert "delay_all_reduce_named_params (0.weight)" in delayed
        assert len(fused) == 3 and all("'2.weight' has SGD fused into its backward" in m for m in fused), fused
        assert "Adam cannot be fused into the backward" in registered and "unwrap()" in updated


def group_body(rank, world, how):
    """Ranks {0, 2} and {1} train apart."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    if how == "mesh":
        options = dict(device_mesh=dist.device_mesh.DeviceMesh.from_group(mine, "cpu"))
    else:
        options = dict(process_group=mine)
    results = []
    for cls in (TorchDDP, DDP):
        ddp = cls(net(rank), **options)
        ddp(data(rank)).sum().backward()
        results.append(ddp)
    assert_same_grads(results[1], results[0])
    assert results[1].process_group is mine
    if how == "mesh":
        assert results[1].device_mesh is options["device_mesh"]


@pytest.mark.parametrize("how", ["group", "mesh"])
def test_subgroups_and_meshes_train_apart(how):
    ranks.run(3, group_body, how)


def caps_body(rank, world):
    """Layers of 40 bytes: 32 of weight and 8 of bias."""
    layers = [nn.Linear(4, 2) for _ in range(6)]
    mib = 2.0**-20
    ddp = DDP(nn.Sequential(nn.Linear(2, 4), *layers[:1]), bucket_cap_mb_list=[128 * mib, 64 * mib])
    sizes = [[name for name, slot in zip(ddp._engine.names, ddp._engine.slots) if slot["bucket"] == b]
             for b in range(ddp._engine.n_buckets)]
    ddp(torch.ones(1, 2)).sum().backward()
    return sizes, ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_list


def test_bucket_cap_mb_list_sizes_bucket_by_bucket():
    """Every parameter takes 64 bytes in its bucket, so two fit into the first and one into each of the rest."""
    for sizes, cap, caps in ranks.run(2, caps_body):
        assert sizes == [["1.weight", "1.bias"], ["0.bias"], ["0.weight"]]
        assert cap == 128 and caps == [128, 64]


class Ignoring(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.shared = nn.Parameter(torch.full((3,), float(rank)))
        self.own = nn.Parameter(torch.full((3,), float(rank)))
        self.register_buffer("ours", torch.full((2,), float(rank)))
        self.register_buffer("mine", torch.full((2 + rank,), float(rank)))

    def forward(self, x):
        return (x * self.shared * self.own).sum()


def ignore_body(rank, world, cls):
    cls = {"torch": TorchDDP, "mine": DDP}[cls]
    module = Ignoring(rank)
    cls._set_params_and_buffers_to_ignore_for_model(module, ["own", "mine"])
    ddp = cls(module)
    for _ in range(2):
        ddp(torch.ones(3)).backward()
    return ([t.tolist() for t in (*module.parameters(), *module.buffers())], [p.grad.tolist() for p in module.parameters()],
            sorted(ddp.parameters_to_ignore), list(ddp.named_module_buffers), len(ddp._module_parameters))


def test_ignored_parameters_and_buffers_are_each_ranks_own():
    assert ranks.run(2, ignore_body, "mine") == ranks.run(2, ignore_body, "torch")


# -- buffers ----------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that every forward writes, and one that is replaced."""

    def __init__(self, rank=0):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("replaced", torch.tensor(float(rank)))

    def forward(self, x):
        self.replaced = self.replaced + x.sum().detach()
        return self.norm(self.linear(x))


def buffers_body(rank, world, cls, follow):
    """Buffers as a forward finds them, over windows of two micro-batches; torch sends them at every forward that follows a
    synchronising backward."""
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = {"torch": TorchDDP, "mine": DDP}[cls](Counting(rank), **follow)
    seen = [[b.clone() for b in ddp.module.buffers()]]
    ddp.module.register_forward_pre_hook(lambda m, _: seen.append([b.clone() for b in m.buffers()]))
    for step in range(3):
        with ddp.no_sync():
            ddp(data(rank, step)).sum().backward()
        ddp(data(rank, step + 10)).sum().backward()
    ddp.eval()
    return seen, ddp.broadcast_buffers, ddp.forward_sync_buffers


@pytest.mark.parametrize("follow", [
    {}, dict(broadcast_buffers=True), dict(broadcast_buffers=False), dict(forward_sync_buffers=False),
    dict(forward_sync_buffers=True, init_sync=False),
], ids=str)
def test_buffers_follow_rank_0_as_in_torch(follow):
    for mine, theirs in zip(ranks.run(2, buffers_body, "mine", follow), ranks.run(2, buffers_body, "torch", follow)):
        assert mine[1:] == theirs[1:]
        for a, b in zip(mine[0], theirs[0]):
            for x, y in zip(a, b):
                torch.testing.assert_close(x, y)


def both_given_body(rank, world):
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        ddp = DDP(net(), broadcast_buffers=False, forward_sync_buffers=True)
    return ddp.broadcast_buffers


def test_forward_sync_buffers_wins_over_broadcast_buffers():
    assert ranks.run(1, both_given_body) == [True]


def step_buffers_body(rank, world, form, follow):
    torch.manual_seed(rank)
    model = Counting(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if form == "wrap":
        model, optimizer = shardstep.wrap(model, optimizer, broadcast_buffers=follow)
        called = model
    else:
        called = DDP(model, forward_sync_buffers=follow)
        optimizer = shardstep.ShardedOptimizer(optimizer, called)
    start = [b.tolist() for b in model.buffers()]
    for step in range(2):
        fake, real = called(data(rank, step)), called(data(rank, step + 10))  # B14: two forwards, one backward
        (fake.square().mean() - real.mean()).backward()
        during = [b.tolist() for b in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return start, during, [b.tolist() for b in model.buffers()]


@pytest.mark.parametrize("form", ["wrap", "class"])
@pytest.mark.parametrize("follow", [True, False])
def test_sharded_buffers_are_rank_0s_after_every_step(form, follow):
    (start0, during0, end0), (start1, during1, end1) = ranks.run(2, step_buffers_body, form, follow)
    assert during0 != during1 and end0 == during0
    assert end1 == (end0 if follow else during1)
    assert (start0 == start1) == (follow or form == "class")


def no_buffers_body(rank, world):
    model = net()
    model, optimizer = shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sent = []
    original, dist._broadcast_coalesced = dist._broadcast_coalesced, lambda *a: sent.append(a)
    try:
        model(data(rank)).sum().backward()
        optimizer.step()
    finally:
        dist._broadcast_coalesced = original
    return len(sent)


def test_nothing_is_sent_where_there_are_no_buffers():
    assert ranks.run(2, no_buffers_body) == [0, 0]


# -- attributes -------------------------------------------------------------------------------------------------------


def attributes_body(rank, world):
    theirs, mine = TorchDDP(net()), DDP(net())
    for ddp in (theirs, mine):
        for _ in range(2):
            ddp(data(rank)).sum().backward()
    same = ["device", "device_type", "device_ids", "output_device", "dim", "process_group", "broadcast_buffers",
            "forward_sync_buffers", "find_unused_parameters", "require_backward_grad_sync", "require_forward_param_sync",
            "gradient_as_bucket_view", "static_graph", "mixed_precision", "broadcast_bucket_size", "bucket_bytes_cap",
            "is_multi_device_module", "parameters_to_ignore", "modules_buffers", "named_module_buffers", "_use_python_reducer",
            "_delay_all_reduce_all_params", "batched_grad_copy", "skip_all_reduce_unused_params", "bucket_bytes_cap_list"]
    different = [name for name in same if hasattr(theirs, name) and getattr(mine, name) != getattr(theirs, name)]
    assert mine.reducer is not None and mine.logger is not None and isinstance(mine, TorchDDP)
    logged = [ddp._get_ddp_logging_data() for ddp in (theirs, mine)]
    agree = ["module_name", "backend_name", "bucket_sizes", "dtypes", "world_size", "rank", "num_parameter_tensors",
             "total_parameter_size_bytes", "bucket_cap_bytes", "broadcast_buffers", "find_unused_parameters", "output_device",
             "gradient_as_bucket_view", "device_ids", "is_multi_device_module", "unused_parameter_size", "master_addr"]
    different += [name for name in agree if logged[0][name] != logged[1][name]]
    mine._set_ddp_runtime_logging_sample_rate(10)
    mine._check_reducer_finalized()
    with pytest.raises(ValueError):
        mine._set_ddp_runtime_logging_sample_rate(0)
    mine._set_static_graph()
    assert mine.static_graph
    with pytest.warns(UserWarning, match="no need to set it again"):
        mine._set_static_graph()
    with mine.no_sync():
        assert not mine.require_backward_grad_sync
    assert mine.require_backward_grad_sync
    mine.require_backward_grad_sync = False
    mine(data(rank)).sum().backward()
    assert mine._engine.core.stats()["closes"] == 2
    return different


def test_attributes_and_logging_data_are_torchs():
    assert ranks.run(2, attributes_body) == [[], []]


def state_dict_body(rank, world):
    mine, theirs = DDP(Counting()), TorchDDP(Counting())
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in mine.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    theirs.load_state_dict(mine.state_dict())
    mine.load_state_dict(theirs.state_dict())
    mine.module.load_state_dict({k.removeprefix("module."): v for k, v in theirs.state_dict().items()})
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    assert list(get_model_state_dict(mine)) == list(Counting().state_dict())


def test_state_dict_has_torchs_names():
    ranks.run(2, state_dict_body)


def pickle_body(rank, world, sharded):
    ddp = DDP(Counting(), bucket_cap_mb=1, forward_sync_buffers=False)
    if sharded:
        shardstep.ShardedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    ddp(data(rank)).sum().backward()
    twin = pickle.loads(pickle.dumps(ddp))
    assert type(twin) is DDP and twin.process_group is dist.group.WORLD and not twin.forward_sync_buffers
    assert twin.bucket_bytes_cap == ddp.bucket_bytes_cap
    for p, q in zip(twin.parameters(), ddp.parameters()):
        assert torch.equal(p, q) and p is not q and p.data_ptr() != q.data_ptr()
    twin(data(rank)).sum().backward()
    theirs = TorchDDP(copy.deepcopy(ddp.module))
    theirs(data(rank)).sum().backward()
    assert_same_grads(twin.module, theirs.module)
    buffer = io.BytesIO()
    torch.save(ddp, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is DDP
    subgroup = DDP(net(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(subgroup)


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_wrapper_is_synchronised_anew(sharded):
    ranks.run(2, pickle_body, sharded)


# -- inputs and outputs -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Record:
    loss: torch.Tensor
    parts: dict


class Named(typing.NamedTuple):
    loss: torch.Tensor
    rest: list


class Plain:
    def __init__(self, loss, parts):
        self.loss, self.parts = loss, parts


class Nesting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, batch, *, kind):
        x = batch["x"][0]
        loss = self.layer(x).sum()
        extra = {"constant": torch.ones(2), "unused": self.unused(torch.ones(2)), "n": 3, "none": None, "input": (x.sum(),)}
        if kind == "dict":
            return {"loss": loss, "more": [extra]}
        if kind == "ordered":
            return collections.OrderedDict(loss=loss, more=(extra,))
        if kind == "dataclass":
            return Record(loss, extra)
        if kind == "named":
            return Named(loss, [extra, loss.detach()])
        if kind == "object":
            return Plain(loss, extra)
        return [extra, (loss, extra)]


def parts_of(out):
    """(loss, sum of the input)"""
    if isinstance(out, dict):
        return out["loss"], out["more"][0]["input"][0]
    if isinstance(out, list):
        return out[1][0], out[0]["input"][0]
    return out.loss, (out.rest[0] if isinstance(out, Named) else out.parts)["input"][0]


def nesting_body(rank, world, kind, form):
    """On rank 0 the second backward starts at an output that no parameter has a part in. Closed form, because torch DDP
    averages nothing for dataclasses and objects when it is told to look for unused parameters."""
    module = Nesting()
    called = DDP(module) if form == "class" else shardstep.wrap(module)
    for step, used in enumerate(([0, 1], [1])):
        x = data(rank, step).requires_grad_()
        out = called({"x": (x, None), "rank": rank}, kind=kind)
        assert type(out) in (dict, collections.OrderedDict, list, Record, Named, Plain)
        loss, through = parts_of(out)
        (loss if rank in used else through).backward()
        expected = sum(data(r, step).sum(0) for r in used).expand(2, 3) / 2
        torch.testing.assert_close(called.full_grad(module.layer.weight), expected)
        assert called.full_grad(module.unused.weight) is None
        called.zero_grad()


@pytest.mark.parametrize("form", ["wrap", "class"])
@pytest.mark.parametrize("kind", ["dict", "ordered", "dataclass", "named", "list", "object"])
def test_inputs_and_outputs_of_any_nesting(kind, form):
    ranks.run(2, nesting_body, kind, form)


def hooks_body(rank, world, form):
    """Forward and full-backward hooks, on the wrapper and inside, see what they see in one process."""
    module = net()
    called = DDP(module) if form == "class" else shardstep.wrap(module)
    alone = net()
    seen = []
    for model, outer in ((called, called), (alone, alone)):
        seen.append([])
        inner = model.module if form == "class" and model is called else model
        for where in (outer, inner[0]):
            where.register_forward_pre_hook(lambda m, i, s=seen[-1]: s.append(("pre", i[0].sum().item())))
            where.register_forward_hook(lambda m, i, o, s=seen[-1]: s.append(("post", o.sum().item())))
            where.register_full_backward_hook(lambda m, gi, go, s=seen[-1]: s.append(("back", go[0].sum().item())))
            where.register_full_backward_pre_hook(lambda m, go, s=seen[-1]: s.append(("backpre", go[0].sum().item())))
        model(data(rank)).sum().backward()
    assert seen[0] == seen[1] and len(seen[0]) == 8, seen


@pytest.mark.parametrize("form", ["wrap", "class"])
def test_module_hooks_see_what_they_see_in_one_process(form):
    ranks.run(2, hooks_body, form)


def functional_body(rank, world, form):
    module = net()
    called = DDP(module) if form == "class" else shardstep.wrap(module)
    prefix = "module." if form == "class" else ""
    doubled = {prefix + name: 2 * p for name, p in module.named_parameters()}
    alone = net()
    expected = torch.func.functional_call(alone, {name: 2 * p for name, p in alone.named_parameters()}, data(rank))
    out = torch.func.functional_call(called, doubled, (data(rank),))
    assert torch.equal(out, expected)
    out.sum().backward()  # reaches the parameters through the doubled ones
    for r in range(world):
        (torch.func.functional_call(alone, {n: 2 * p for n, p in alone.named_parameters()}, data(r)).sum() / world).backward()
    for p, q in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(called.full_grad(p), q.grad)


@pytest.mark.parametrize("form", ["wrap", "class"])
def test_functional_call_runs_with_other_tensors(form):
    ranks.run(2, functional_body, form)

