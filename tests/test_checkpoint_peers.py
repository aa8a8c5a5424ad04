"""Checkpoints go from and to torch's DistributedDataParallel, FSDP2 and a single process, and training goes on with them."""

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import Odd, assert_same, optimizer_over, start, train, weights
from shardstep import checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.timeout(60)
WORLD = 2


class DDP:
    world = WORLD

    @staticmethod
    def start(seed):
        model = nn.parallel.DistributedDataParallel(Odd(seed))
        return model, optimizer_over(model)


class FSDP2:
    world = WORLD

    @staticmethod
    def start(seed):
        model = Odd(seed, plain=True)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, optimizer_over(model)


class OneProcess:
    world = 1

    @staticmethod
    def start(seed):
        model = Odd(seed)
        return model, optimizer_over(model)


PEERS = {"ddp": DDP, "fsdp2": FSDP2, "one process": OneProcess}


def full(model):
    """Every weight, whole, by its plain name."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in weights(model).items()}


def save_by_dcp(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_by_dcp(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def peer_saves(rank, world, peer, folder):
    """Both by DCP and by torch.save; and goes on."""
    model, optimizer = PEERS[peer].start(seed=1)
    optimizer.param_groups[1]["lr"] = 2e-2
    train(model, optimizer, range(3), rank, world)
    save_by_dcp(model, optimizer, folder / "dcp")
    if peer != "fsdp2" and rank == 0:
        plain = getattr(model, "module", model)
        torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
    train(model, optimizer, range(3, 6), rank, world)
    return full(model)


def we_go_on(rank, world, form, folder, how, plain):
    model, optimizer = start(form, seed=2, plain=plain)
    if how == "dcp":
        load_by_dcp(model, optimizer, folder / "dcp")
    elif how == "checkpoint.load":
        restored = checkpoint.load(folder / "dcp", model, optimizer)
        assert restored == (None, {}, folder / "dcp")
    else:
        saved = torch.load(folder / "plain.pt")
        getattr(model, "module", model).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    train(model, optimizer, range(3, 6), rank, world)
    return weights(model)


@pytest.fixture(scope="module")
def of_peer(tmp_path_factory):
    made = {}

    def get(peer):
        if peer not in made:
            folder = tmp_path_factory.mktemp("peer")
            made[peer] = folder, ranks.run(PEERS[peer].world, peer_saves, peer, folder)[0]
        return made[peer]

    return get


@pytest.mark.parametrize("how", ["dcp", "checkpoint.load", "torch.load"])
@pytest.mark.parametrize("peer", PEERS)
def test_we_go_on_from_a_peers_checkpoint(peer, how, of_peer):
    if (peer, how) == ("fsdp2", "torch.load"):
        pytest.skip("FSDP2 has no whole state_dict to save")
    folder, expected = of_peer(peer)
    form = "class" if how == "torch.load" else "wrap"
    for got in ranks.run(3, we_go_on, form, folder, how, peer == "fsdp2"):
        assert_same(got, expected, exactly=False)


def we_save(rank, world, form, folder, how, plain):
    model, optimizer = start(form, seed=1, plain=plain)
    optimizer.param_groups[1]["lr"] = 2e-2
    train(model, optimizer, range(3), rank, world)
    if how == "dcp":
        save_by_dcp(model, optimizer, folder)
    else:
        checkpoint.save(folder, model, optimizer, step=3)
    train(model, optimizer, range(3, 6), rank, world)
    return weights(model)


def peer_goes_on(rank, world, peer, folder):
    model, optimizer = PEERS[peer].start(seed=2)
    load_by_dcp(model, optimizer, folder)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    train(model, optimizer, range(3, 6), rank, world)
    return full(model)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    made = {}

    def get(how, plain):
        if (how, plain) not in made:
            folder = tmp_path_factory.mktemp("ours")
            expected = ranks.run(3, we_save, "wrap" if how == "dcp" else "class", folder, how, plain)[0]
            made[how, plain] = folder if how == "dcp" else folder / "step-00000003", expected
        return made[how, plain]

    return get


@pytest.mark.parametrize("how", ["dcp", "checkpoint.save"])
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_goes_on_from_our_checkpoint(peer, how, ours):
    folder, expected = ours(how, peer == "fsdp2")
    for got in ranks.run(PEERS[peer].world, peer_goes_on, peer, folder):
        assert_same(got, expected, exactly=False)


# -- BF16 weights with FP32 masters -------------------------------------------------------------------------------


def masters_of(model, optimizer):
    """Each weight in FP32, whole. Collective."""
    names = [name for name, _ in model.named_parameters()]
    positions = {id(p): k for k, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = optimizer.state_dict()["state"]
    found = {}
    for name, parameter in zip(names, model.parameters()):
        shard = state.get(positions[id(parameter)], {}).get("master_param")
        found[name] = shard.gather() if shard is not None else parameter.detach().float()
    return found


def low_saves(rank, world, folder):
    model, optimizer = start("wrap", seed=1, param_dtype=torch.bfloat16)
    train(model, optimizer, range(3), rank, world)
    checkpoint.save(folder, model, optimizer, step=3)
    save_by_dcp(model, optimizer, folder / "dcp")
    return masters_of(model, optimizer)


def low_loads(rank, world, folder):
    model, optimizer = start("wrap", seed=2, param_dtype=torch.bfloat16)
    checkpoint.load(folder, model, optimizer)
    masters = masters_of(model, optimizer)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, masters[name].bfloat16()), name
    return masters


def ddp_loads(rank, world, folder):
    model, optimizer = DDP.start(seed=2)
    load_by_dcp(model, optimizer, folder)
    return weights(model)


def test_masters_become_the_weights_of_a_plain_fp32_model(tmp_path):
    masters = ranks.run(3, low_saves, tmp_path)[0]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    for got in ranks.run(WORLD, ddp_loads, tmp_path / "step-00000003"):
        assert_same(got, masters, exactly=True)
    # And back into masters, from both kinds of folder: ours has them as the model's weights, torch's beside them.
    for folder in (tmp_path, tmp_path / "dcp"):
        for got in ranks.run(WORLD, low_loads, folder):
            assert_same(got, masters, exactly=True)


def test_weights_of_a_plain_fp32_model_become_masters(of_peer):
    folder, _ = of_peer("ddp")
    expected = ranks.run(WORLD, ddp_loads, folder / "dcp")[0]
    frozen = {name for name in expected if name.startswith("frozen.")}
    for got in ranks.run(3, low_loads, folder / "dcp"):
        for name, value in expected.items():
            assert torch.equal(got[name], value.bfloat16().float() if name in frozen else value), name
