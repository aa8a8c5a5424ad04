"""Shards in torch.distributed.checkpoint: torch's own functions save and load a wrapped model and optimizer at any number of
ranks, under the names of the plain model."""

import copy
import io
import math
import pickle

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import Odd, assert_same, optimizer_over, start, train, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from shardstep._flat_shard import Cut, FlatShard, memory_order
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

pytestmark = pytest.mark.timeout(60)
WORLDS = [1, 2, 3, 4]


# -- one shard ----------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw):
    """A dense tensor of some memory order, filled with 0, 1, 2, ... as its memory has them, and a range of it."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    numel = math.prod(shape)
    memory = torch.arange(float(numel)).view([shape[d] for d in order])
    tensor = memory.permute([order.index(d) for d in range(len(order))])
    begin = draw(st.integers(0, numel))
    return tensor, begin, draw(st.integers(begin, numel))


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_a_cut_is_few_boxes_that_cover_it_once_and_share_its_memory(case):
    tensor, begin, end = case
    cut = Cut(tensor.shape, begin, end - begin, memory_order(tensor))
    assert torch.equal(cut.of(tensor), torch.arange(float(begin), float(end)))
    local = cut.of(tensor).clone()
    shard = FlatShard(local, cut)
    chunks = shard.__create_chunk_list__()
    assert len(chunks) <= max(1, 2 * tensor.dim() - 1)
    seen = torch.zeros(tensor.shape)
    for item in shard.__create_write_items__("x", shard):
        offsets, sizes = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes))
        part = shard.__get_tensor_shard__(item.index)
        assert torch.equal(part, tensor[where])
        assert part.untyped_storage().nbytes() == part.nbytes
        assert local.data_ptr() <= part.data_ptr() < local.data_ptr() + local.nbytes
        seen[where] += 1
        part += 0.5
    assert torch.equal(seen, ((tensor >= begin) & (tensor < end)).float())
    assert torch.equal(local, torch.arange(float(begin), float(end)) + 0.5)


def test_shard_is_copied_saved_and_compared_and_says_that_it_cannot_compute():
    flat = torch.arange(1000.0)
    shard = FlatShard(flat[10:15], Cut((4, 5), 7, 5))
    assert shard.shape == (4, 5) and shard.local.data_ptr() == flat[10:].data_ptr()
    file = io.BytesIO()
    torch.save({"x": shard}, file)
    assert file.tell() < 2500  # five elements, not a thousand
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    twins = [copy.deepcopy(shard), pickle.loads(pickle.dumps(shard)), loaded, shard.clone(), shard.to(torch.float64).float()]
    for twin in twins:
        assert type(twin) is FlatShard and twin.shape == (4, 5) and torch.equal(twin, shard)
        assert twin.local.data_ptr() != shard.local.data_ptr()
    assert not torch.equal(shard, FlatShard(flat[10:15], Cut((4, 5), 8, 5)))
    assert repr(shard) == "FlatShard(shape=(4, 5), [7, 12), dtype=torch.float32)"
    with pytest.raises(NotImplementedError, match=r"this rank holds 5 of its 20 elements, in \.local"):
        shard + 1
    with pytest.raises(ValueError, match="a shard of 6 elements"):
        FlatShard(flat[10:15], Cut((4, 5), 7, 6))


# -- a model and its optimizer ------------------------------------------------------------------------------------


def save_by_torch(rank, world, folder, form, asynchronous=False):
    model, optimizer = start(form, seed=1)
    train(model, optimizer, range(3), rank, world)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    if asynchronous:
        group = dist.new_group(backend="gloo")  # it communicates while the buffers of the training do
        future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        train(model, optimizer, range(3, 6), rank, world)
        future.result()
        dist.destroy_process_group(group)
    else:
        dcp.save(state, checkpoint_id=folder)
        train(model, optimizer, range(3, 6), rank, world)
    return weights(model)


def load_by_torch(rank, world, form, folder):
    model, optimizer = start(form, seed=2)
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert steps == []  # torch steps an optimizer without state to make it
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(model, optimizer, range(3, 6), rank, world)
    return weights(model), [group["weight_decay"] for group in optimizer.param_groups]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_run_saved_and_loaded_by_torch_goes_on_at_any_number_of_ranks(once, before, world):
    folder, expected = once(before, save_by_torch, "wrap")
    for got, decays in ranks.run(world, load_by_torch, "wrap", folder):
        assert_same(got, expected[0], exactly=before == world)
        assert decays == [0.1, 0.0]


@pytest.mark.parametrize("form,other", [("class", "class"), ("class", "wrap"), ("wrap", "class")])
def test_both_forms_have_the_same_names(once, form, other):
    folder, expected = once(2, save_by_torch, form)
    for got, _ in ranks.run(2, load_by_torch, other, folder):
        assert_same(got, expected[0], exactly=True)


def test_async_save_is_of_the_moment_it_was_called(once):
    folder, expected = once(2, save_by_torch, "wrap", True)
    for got, _ in ranks.run(2, load_by_torch, "wrap", folder):
        assert_same(got, expected[0], exactly=True)


def names_and_values(rank, world, form):
    """Against torch's own optimizer over the same model in one process."""
    plain = Odd(1)
    theirs = optimizer_over(plain)
    model, optimizer = start(form, seed=1)
    for step in range(2):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        plain(x).backward()
        theirs.step()
        theirs.zero_grad()
    train(model, optimizer, range(2), rank, world)
    expected = get_optimizer_state_dict(plain, theirs)
    sharded = get_optimizer_state_dict(model, optimizer)
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    on_rank_0 = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert list(get_model_state_dict(model)) == list(get_model_state_dict(plain))
    for got in (sharded, full):
        assert got["param_groups"] == expected["param_groups"]
        assert got["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert full["state"][name].keys() == state.keys()
        for key, value in state.items():
            got = full["state"][name][key]
            assert type(got) is torch.Tensor and got.stride() == value.stride()
            assert torch.allclose(got, value, rtol=1e-5, atol=1e-7), (name, key)
            if rank == 0:
                assert torch.equal(on_rank_0["state"][name][key], got)
            shard = sharded["state"][name][key]
            if key != "step":
                assert type(shard) is FlatShard and torch.equal(shard.local, shard.cut.of(got))
    assert rank == 0 or not on_rank_0
    # And back, from rank 0 alone and from whole tensors everywhere.
    for options, state in (
        (StateDictOptions(full_state_dict=True), full),
        (StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), full if rank == 0 else {}),
    ):
        model, optimizer = start(form, seed=2)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
        again = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        groups = [{**group, "betas": tuple(group["betas"])} for group in again["param_groups"]]  # torch flattens the tuple
        assert groups == expected["param_groups"]
        for name, values in full["state"].items():
            if options.broadcast_from_rank0 and name == "conv.weight":
                continue  # torch broadcasts its memory, whatever order that has on each rank
            assert all(torch.equal(again["state"][name][key], value) for key, value in values.items()), name


@pytest.mark.parametrize("form", ["wrap", "class"])
@pytest.mark.parametrize("world", [1, 3])
def test_state_has_the_names_and_whole_values_of_torch(world, form):
    ranks.run(world, names_and_values, form)


def kept_master(rank, world, folder):
    def new(seed):
        return start("wrap", seed, param_dtype=torch.bfloat16)

    model, optimizer = new(1)
    train(model, optimizer, range(3), rank, world)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    train(model, optimizer, range(3, 6), rank, world)
    expected = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    model, optimizer = new(2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(model, optimizer, range(3, 6), rank, world)
    assert_same(weights(model), expected[0], exactly=True)
    for position, state in expected[1].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][position][key], value), key
    # Weights alone, without an optimizer's masters, are followed to the bit.
    weights_alone = {name: torch.full_like(value, 1.0) for name, value in model.state_dict().items()}
    model.load_state_dict(weights_alone)
    masters = [s["master_param"].local for s in optimizer.state_dict()["state"].values() if "master_param" in s]
    assert all(bool((m == 1.0).all()) for m in masters)


def test_masters_of_a_bf16_model_survive_to_the_bit(tmp_path):
    ranks.run(2, kept_master, tmp_path)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2, t0=2),
}


def other_optimizers(rank, world, kind, folder):
    def new(seed):
        return start("wrap", seed, lambda model: OPTIMIZERS[kind](model.parameters()))

    model, optimizer = new(1)
    train(model, optimizer, range(3), rank, world)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    train(model, optimizer, range(3, 6), rank, world)
    expected = weights(model)
    model, optimizer = new(2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(model, optimizer, range(3, 6), rank, world)
    assert_same(weights(model), expected, exactly=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_is_saved_and_loaded_by_torch(kind, tmp_path):
    ranks.run(2, other_optimizers, kind, tmp_path)


def another_cut(rank, world, folder):
    model, optimizer = start("wrap", seed=1)
    theirs = torch.load(folder / "rank0.pt")
    with pytest.raises(shardstep.UsageError, match=r"parameter '[a-z.]+' is FlatShard.*cut for other ranks"):
        optimizer.load_state_dict(theirs)


def save_rank_0(rank, world, folder):
    model, optimizer = start("wrap", seed=1)
    if rank == 0:
        torch.save(optimizer.state_dict(), folder / "rank0.pt")
    dist.barrier()


def test_a_ranks_own_state_dict_is_refused_by_name_at_another_number_of_ranks(tmp_path):
    ranks.run(2, save_rank_0, tmp_path)
    ranks.run(3, another_cut, tmp_path)


def of_another_torch(rank, world, folder):
    from torch.distributed.checkpoint import state_dict

    model, optimizer = start("wrap", seed=1)
    known, state_dict._gather_state_dict = state_dict._gather_state_dict, lambda tree, ranks=(): tree
    try:
        with pytest.raises(shardstep.UsageError, match="gathers a full state dict in a way that shardstep does not know"):
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        shardstep.checkpoint.save(folder, model, optimizer, step=1)
    finally:
        state_dict._gather_state_dict = known


def test_torch_that_gathers_in_another_way_is_noticed(tmp_path):
    ranks.run(2, of_another_torch, tmp_path)
