"""A script written for FSDP2: its methods, its mixed precision and its exceptions, each beside ``fully_shard`` itself."""

import collections
import copy
import dataclasses
import inspect
import typing

import pytest
import ranks
import shardstep
import torch
from boom import Boom
from shardstep._module import WrappedModule
from shardstep._precision import map_tensors, tensors_in
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import PackedSequence, pack_sequence

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Takes and returns a dict, and notes the dtypes that its forward sees."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)
        self.seen = []

    def forward(self, batch):
        self.seen.append((batch["x"].dtype, batch["index"].dtype, self.first.weight.dtype))
        hidden = torch.relu(self.first(batch["x"].to(self.first.weight.dtype)))
        return {"y": self.last(hidden), "index": batch["index"]}


def in_both(rank, world, policy, use, lr=0.1, steps=3, **options):
    """Runs ``use(model, optimizer, step)`` with FSDP2 and with shardstep and returns (weights, dtypes) of each."""
    from torch.distributed.device_mesh import init_device_mesh

    results = []
    for name in ("fsdp2", "shardstep"):
        torch.manual_seed(0)
        model = Net()
        ignored = {p for n, p in model.named_parameters() if n in options.get("ignored", ())}
        if name == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy, ignored_params=ignored)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            model, optimizer = shardstep.wrap(model, optimizer, mp_policy=policy, ignored_params=ignored, timeout=20.0)
        dtypes = []
        for step in range(steps):
            use(model, optimizer, step, rank, dtypes)
        if name == "fsdp2":
            weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        else:  # the FP32 masters, of which each rank has a part
            weights = [whole_master(model, p, world) for p in model.parameters()]
        results.append(([w.detach().float() for w in weights], model.seen, dtypes))
    return results


def whole_master(model, parameter, world):
    """An update with a rate of zero changes nothing but shows nothing either, so the pieces are collected."""
    slot = model._engine.slots[model._engine.index[id(parameter)]] if id(parameter) in model._engine.index else None
    if slot is None or slot["piece_master"] is None:
        return parameter
    pieces = [None] * world
    torch.distributed.all_gather_object(pieces, slot["piece_master"])
    return torch.cat(pieces).view(parameter.shape)


def batch(step, k, rank, dtype=fp32):
    g = torch.Generator().manual_seed(100 * step + 10 * k + rank)
    return {"x": torch.randn(4, 6, generator=g).to(dtype), "index": torch.arange(4)}


# -- mixed precision --------------------------------------------------------------------------------------------------


def train(model, optimizer, step, rank, dtypes):
    for k in range(2):
        model.set_requires_gradient_sync(k == 1)
        out = model(batch(step, k, rank))
        dtypes.append((out["y"].dtype, out["index"].dtype))
        out["y"].float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def policy_body(rank, world, policy, exact):
    (theirs, seen, out), (ours, our_seen, our_out) = in_both(rank, world, policy, train)
    assert our_seen == seen and our_out == out
    for a, b in zip(theirs, ours):
        if exact:
            assert torch.equal(a, b), (a - b).abs().max()
        else:
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("policy, exact", [
    (MixedPrecisionPolicy(), True),
    (MixedPrecisionPolicy(bf16, fp32), True),
    (MixedPrecisionPolicy(bf16, fp32, fp32), True),
    (MixedPrecisionPolicy(bf16, fp32, cast_forward_inputs=False), True),
    (MixedPrecisionPolicy(fp16, fp32, bf16), True),
    (MixedPrecisionPolicy(output_dtype=bf16), True),
    (MixedPrecisionPolicy(bf16), False),  # FSDP2 sums in bf16 then
    (MixedPrecisionPolicy(bf16, fp16), False),
], ids=str)
def test_mixed_precision_policy_has_the_dtypes_and_weights_of_fsdp2(policy, exact):
    ranks.run(2, policy_body, policy, exact)


def test_policy_and_its_short_form_are_the_same():
    weights = []
    for option in ({"param_dtype": bf16}, {"mp_policy": MixedPrecisionPolicy(bf16)}):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        model, optimizer = shardstep.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **option)
        assert model(torch.ones(2, 3)).dtype == bf16
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
        model.unwrap()
    assert weights[0].dtype == bf16 and torch.equal(*weights)


@pytest.mark.parametrize("options, message", [
    ({"mp_policy": MixedPrecisionPolicy(bf16), "param_dtype": fp16}, "param_dtype=torch.float16 contradicts.*bfloat16"),
    ({"mp_policy": MixedPrecisionPolicy(), "param_dtype": bf16}, "contradicts mp_policy.*None"),
    ({"mp_policy": MixedPrecisionPolicy(torch.float64)}, "mp_policy's param_dtype must be one of .*float64"),
    ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, "mp_policy's reduce_dtype.*float64"),
    ({"mp_policy": MixedPrecisionPolicy(output_dtype=torch.int32)}, "mp_policy's output_dtype.*int32"),
    ({"mp_policy": bf16}, "mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, not dtype"),
], ids=lambda v: "" if isinstance(v, dict) else v[:40])
def test_wrong_policies_are_refused_by_name(options, message):
    model = nn.Linear(3, 3)
    with pytest.raises(shardstep.UsageError, match=message):
        shardstep.wrap(model, **options)
    assert type(model) is nn.Linear


def differing_policies_body(rank, world):
    with pytest.raises(shardstep.MismatchError, match="precision"):
        shardstep.wrap(nn.Linear(3, 3), mp_policy=MixedPrecisionPolicy(bf16, output_dtype=[fp32, bf16][rank]), timeout=20.0)


def test_policies_that_differ_between_ranks_are_a_mismatch():
    ranks.run(2, differing_policies_body)


class WithDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.wide = nn.Linear(3, 3), nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x, y):
        return self.low(x).double() * self.wide * y


def test_double_inputs_are_cast_unless_the_model_has_double_parameters():
    model = shardstep.wrap(nn.Linear(3, 3), param_dtype=bf16)
    assert model(torch.ones(2, 3, dtype=torch.float64)).dtype == bf16
    model = shardstep.wrap(WithDouble(), param_dtype=bf16)
    out = model(torch.ones(2, 3), torch.full((3,), 1 / 3, dtype=torch.float64))
    assert out.dtype == torch.float64 and model.wide.dtype == torch.float64 and model.low.weight.dtype == bf16


# -- what the casts go through ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    tag: str = "t"


class Pair(typing.NamedTuple):
    x: torch.Tensor
    n: int


class Record(collections.OrderedDict):
    pass


def test_containers_of_every_kind_are_gone_through_and_keep_their_class():
    one = torch.ones(2)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    tree = {
        "list": [one, 1], "tuple": (one, "a"), "set": {None}, "named": Pair(one, 3), "dataclass": Inputs(one),
        "record": Record(a=one), "default": collections.defaultdict(list, a=[one]), "packed": packed, "other": object(),
    }
    low = map_tensors(lambda t: t.to(bf16), tree)
    floats = [t.dtype for t in tensors_in(low) if t is not packed.batch_sizes]
    assert floats == [bf16] * 7 and len(list(tensors_in(tree))) == 8
    assert {k: type(v) for k, v in low.items()} == {k: type(v) for k, v in tree.items()}
    assert low["other"] is tree["other"] and low["set"] is tree["set"] and low["dataclass"].tag == "t"
    assert low["default"].default_factory is list and isinstance(low["packed"], PackedSequence)
    assert torch.equal(low["packed"].batch_sizes, packed.batch_sizes)
    assert map_tensors(lambda t: t, tree) is tree


def test_packed_sequences_reach_an_lstm_of_low_precision():
    model = shardstep.wrap(nn.LSTM(2, 3), param_dtype=bf16)
    out, _ = model(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))
    out.data.float().sum().backward()
    assert out.data.dtype == bf16 and torch.isfinite(model.full_grad(model.weight_ih_l0)).all()


# -- methods ----------------------------------------------------------------------------------------------------------


def test_every_method_of_fsdp2_is_there_with_its_parameters():
    for name, method in vars(FSDPModule).items():
        if not name.startswith("_"):
            ours = inspect.signature(getattr(WrappedModule, name)).parameters
            theirs = inspect.signature(method).parameters
            assert list(ours) == list(theirs), name
            assert [p.default for p in ours.values()] == [p.default for p in theirs.values()], name


NOTHING = [  # what FSDP2 does for memory and overlap
    lambda m: m.reshard(),
    lambda m: m.unshard(),
    lambda m: m.unshard(async_op=True).wait(),
    lambda m: m.set_reshard_after_forward(True),
    lambda m: m.set_reshard_after_backward(True, recurse=False),
    lambda m: m.set_unshard_in_backward(True),
    lambda m: m.set_modules_to_forward_prefetch([m]),
    lambda m: m.set_modules_to_backward_prefetch([m]),
    lambda m: m.set_requires_all_reduce(True),
    lambda m: m.set_reduce_scatter_unused_params(True),
    lambda m: m.set_force_sum_reduction_for_comms(True),
    lambda m: m.set_reduce_scatter_max_input_buffers(2),
]


def nothing(model, optimizer, step, rank, dtypes):
    for k in range(2):
        for call in NOTHING:
            call(model)
        model.set_is_last_backward(k == 1)
        model(batch(step, k, rank))["y"].pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def divided(model, optimizer, step, rank, dtypes):
    model.set_force_sum_reduction_for_comms(True)  # Gloo cannot do what FSDP2 does otherwise
    model.set_gradient_divide_factor(8.0)
    train(model, optimizer, step, rank, dtypes)


def method_body(rank, world, use, **options):
    (theirs, *_), (ours, *_) = in_both(rank, world, MixedPrecisionPolicy(), use, **options)
    torch.manual_seed(0)
    assert not torch.equal(ours[0], Net().first.weight)
    for a, b in zip(theirs, ours):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("use", [nothing, divided])
def test_methods_of_fsdp2_have_its_effect(use):
    ranks.run(2, method_body, use)


def misuse_body(rank, world, call):
    from torch.distributed.device_mesh import init_device_mesh

    theirs = fully_shard(Net(), mesh=init_device_mesh("cpu", (world,)))
    errors = []
    for model in (theirs, shardstep.wrap(Net(), timeout=20.0)):
        with pytest.raises(Exception) as error:
            call(model)
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


def prefetch_a_tensor(m):
    m.set_modules_to_forward_prefetch(["layer"])


def prefetch_a_tensor_in_backward(m):
    m.set_modules_to_backward_prefetch([3])


def reshard_by_name(m):
    m.set_reshard_after_forward("always")


def no_buffers(m):
    m.set_reduce_scatter_max_input_buffers(0)


def true_buffers(m):
    m.set_reduce_scatter_max_input_buffers(True)


@pytest.mark.parametrize("call", [
    prefetch_a_tensor, prefetch_a_tensor_in_backward, reshard_by_name, no_buffers, true_buffers])
def test_misuse_raises_what_fsdp2_raises(call):
    ranks.run(2, misuse_body, call)


@pytest.mark.parametrize("name", ["set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"])
def test_code_of_the_users_in_the_communication_is_refused_by_name(name):
    model = shardstep.wrap(nn.Linear(2, 2))
    with pytest.raises(shardstep.UsageError, match=f"^{name}: .*between backward\\(\\) and step\\(\\)"):
        getattr(model, name)(lambda tensor: None)


def test_earlier_name_of_the_divide_factor_warns_and_works():
    model = shardstep.wrap(nn.Linear(1, 1, bias=False))
    with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(4.0)
    model(torch.ones(1, 1)).sum().backward()
    assert model.full_grad(model.weight).item() == 0.25


def reset_body(rank, world):
    torch.manual_seed(0)
    clean = Net()
    model, optimizer = shardstep.wrap(copy.deepcopy(clean), None, timeout=20.0), None
    optimizer = shardstep.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with model.no_sync():
        model(batch(9, 0, rank))["y"].sum().backward()
    with pytest.raises(ValueError, match="boom"):
        Boom.apply(model(batch(9, 1, rank))["y"]).sum().backward()
    model.reset_iter_state()
    train(model, optimizer, 0, rank, [])
    reference = torch.optim.SGD(clean.parameters(), lr=0.1)
    for r in range(world):
        for k in range(2):
            (clean(batch(0, k, r))["y"].pow(2).mean() / world).backward()
    reference.step()
    for a, b in zip(clean.parameters(), model.parameters()):
        torch.testing.assert_close(b, a)


def test_reset_iter_state_drops_what_an_exception_left():
    ranks.run(2, reset_body)
