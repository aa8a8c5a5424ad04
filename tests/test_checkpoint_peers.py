"""Checkpoints go from and to torch's DistributedDataParallel, FSDP2 and a single process, and training goes on with them."""

import pytest
import ranks
import shardstep
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


def peer_saves(rank, world, folder, peer):
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


@pytest.mark.parametrize("how", ["dcp", "checkpoint.load", "torch.load"])
@pytest.mark.parametrize("peer", PEERS)
def test_we_go_on_from_a_peers_checkpoint(peer, how, once):
    if (peer, how) == ("fsdp2", "torch.load"):
        pytest.skip("FSDP2 has no whole state_dict to save")
    folder, expected = once(PEERS[peer].world, peer_saves, peer)
    form = "class" if how == "torch.load" else "wrap"
    for got in ranks.run(3, we_go_on, form, folder, how, peer == "fsdp2"):
        assert_same(got, expected[0], exactly=False)


def we_save(rank, world, folder, how, plain):
    form = "wrap" if how == "dcp" else "class"
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


@pytest.mark.parametrize("how", ["dcp", "checkpoint.save"])
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_goes_on_from_our_checkpoint(peer, how, once):
    folder, expected = once(3, we_save, how, peer == "fsdp2")
    folder = folder if how == "dcp" else folder / "step-00000003"
    for got in ranks.run(PEERS[peer].world, peer_goes_on, peer, folder):
        assert_same(got, expected[0], exactly=False)


# -- BF16 weights with FP32 masters -------------------------------------------------------------------------------


def masters_of(model, optimizer):
    """Each weight in FP32, whole. Collective."""
    names = [name for name, _ in model.named_parameters()]
    positions = {id(p): k for k, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = optimizer.state_dict()["state"]
    found = {}
    for name, parameter in zip(names, model.parameters()):
        shard = state.get(positions[id(parameter)], {}).get("master_param")
        found[name] = shard.gather() if shard is not None else parameter.detach().to(masters_dtype(parameter))
    return found


def masters_dtype(parameter):
    return torch.complex64 if parameter.is_complex() else torch.float32


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
        kept = parameter.is_complex()
        assert parameter.dtype == (torch.complex64 if kept else torch.bfloat16)
        assert torch.equal(parameter, masters[name] if kept else masters[name].bfloat16()), name
    return masters


def ddp_loads(rank, world, folder):
    model, optimizer = DDP.start(seed=2)
    load_by_dcp(model, optimizer, folder)
    return weights(model)


def test_masters_become_the_weights_of_a_plain_fp32_model(tmp_path):
    masters = ranks.run(3, low_saves, tmp_path)[0]
    assert not torch.equal(masters["pair"], masters["pair"].bfloat16().float())
    for got in ranks.run(WORLD, ddp_loads, tmp_path / "step-00000003"):
        assert_same(got, masters, exactly=True)
    # And back into masters, from both kinds of folder: ours has them as the model's weights, torch's beside them.
    for folder in (tmp_path, tmp_path / "dcp"):
        for got in ranks.run(WORLD, low_loads, folder):
            assert_same(got, masters, exactly=True)


def test_weights_of_a_plain_fp32_model_become_masters(once):
    folder, _ = once(WORLD, peer_saves, "ddp")
    expected = ranks.run(WORLD, ddp_loads, folder / "dcp")[0]
    frozen = {name for name in expected if name.startswith("frozen.")}
    for got in ranks.run(3, low_loads, folder / "dcp"):
        for name, value in expected.items():
            assert torch.equal(got[name], value.bfloat16().float() if name in frozen else value), name


# -- whole files --------------------------------------------------------------------------------------------------


def saves_full(rank, world, folder, asynchronous, options):
    model, optimizer = start("wrap", seed=1, **options)
    optimizer.param_groups[1]["lr"] = 2e-2
    train(model, optimizer, range(3), rank, world)
    saving = checkpoint.save(folder, model, optimizer, step=3, full=True, async_=asynchronous, extra=rank)
    train(model, optimizer, range(3, 6), rank, world)
    saving.result()
    return weights(model)


def loads_full(rank, world, folder):
    model, optimizer = start("wrap", seed=2)
    assert checkpoint.load(folder, model, optimizer).extra == (rank if rank < 3 else 0)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    train(model, optimizer, range(3, 6), rank, world)
    return weights(model)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_whole_files_are_those_of_one_process_and_load_at_any_number_of_ranks(asynchronous, tmp_path):
    expected = ranks.run(3, saves_full, tmp_path, asynchronous, {})[0]
    folder = tmp_path / "step-00000003"
    files = ["manifest.json", "model.pt", "optimizer.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt"]
    assert sorted(path.name for path in folder.iterdir()) == files
    plain = Odd(2)
    state = torch.load(folder / "model.pt", weights_only=True)
    assert state["tied.weight"].data_ptr() == state["tied_again.weight"].data_ptr()
    assert state["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    plain.load_state_dict(state)
    optimizer = optimizer_over(plain)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    train(plain, optimizer, range(3, 6), 0, 1)
    assert_same(weights(plain), expected, exactly=False)
    for world in (2, 4):
        for got in ranks.run(world, loads_full, tmp_path):
            assert_same(got, expected, exactly=False)
    for got in ranks.run(3, loads_full, tmp_path):
        assert_same(got, expected, exactly=True)


def test_damaged_whole_file_is_refused(tmp_path):
    ranks.run(3, saves_full, tmp_path, False, {})
    path = tmp_path / "step-00000003" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="passed over: .*optimizer.pt is damaged: its checksum"):
        assert checkpoint.latest(tmp_path) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("full", [False, True], ids=["distributed", "full"])
def test_weights_are_exported_as_safetensors(full, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    ranks.run(3, saves_full if full else low_saves, tmp_path, *((False, {}) if full else ()))
    checkpoint_folder = tmp_path / "step-00000003"
    assert checkpoint.export(tmp_path) == tmp_path / "step-00000003.safetensors"
    low = checkpoint.export(checkpoint_folder, tmp_path / "low.safetensors", dtype=torch.bfloat16)
    # What torch reads from the same checkpoint, in one process.
    expected = Odd(2).state_dict()
    if full:
        expected = torch.load(checkpoint_folder / "model.pt")
    else:
        dcp.load({"model": expected}, checkpoint_id=checkpoint_folder)
    got, got_low = safetensors.load_file(tmp_path / "step-00000003.safetensors"), safetensors.load_file(low)
    assert got.keys() == got_low.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].to(value.dtype), value), name
        assert torch.equal(got_low[name], value.bfloat16() if value.is_floating_point() else value), name
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_exported_is_said(tmp_path):
    with pytest.raises(shardstep.CheckpointError, match="there is no complete checkpoint in"):
        checkpoint.export(tmp_path)
    with pytest.raises(shardstep.UsageError, match="format='gguf': only 'safetensors' can be written"):
        checkpoint.export(tmp_path, format="gguf")
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(shardstep.CheckpointError, match="is not a complete checkpoint: it has no manifest.json"):
        checkpoint.export(tmp_path / "step-00000001")


# -- other people's ways of saving a model ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["wrap", "class"])
def test_transformers_saves_and_loads_the_model(form, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=31, n_positions=8)
    model = plain = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if form == "wrap":
        model, optimizer = shardstep.wrap(model, optimizer)
    else:
        model = shardstep.DistributedDataParallel(model)
        optimizer = shardstep.ShardedOptimizer(optimizer, model)
    tokens = torch.arange(16).view(2, 8)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    getattr(model, "module", model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.GPT2LMHeadModel
    assert transformers.GPT2Config.from_pretrained(tmp_path).architectures == ["GPT2LMHeadModel"]
    assert_same(dict(loaded.named_parameters()), dict(plain.named_parameters()), exactly=True)
    model.unwrap()


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(300, 300)
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(300, 4, bias=False), nn.Linear(4, 300, bias=False)

    def forward(self, x):
        return (self.base(x) + self.lora_b(self.lora_a(x))).square().mean()


def saves_adapter(rank, world, folder):
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = shardstep.wrap(model, torch.optim.AdamW(trained, lr=1e-2))
    model(torch.ones(1, 300)).backward()
    optimizer.step()
    state = model.state_dict()
    torch.save({name: value for name, value in state.items() if "lora" in name}, folder / f"adapter-{rank}.pt")
    torch.save(state["lora_a.weight"], folder / f"one-{rank}.pt")
    return {name: value.clone() for name, value in state.items()}


def test_subset_of_the_weights_takes_only_its_own_bytes(tmp_path):
    for rank, state in enumerate(ranks.run(2, saves_adapter, tmp_path)):
        for file, size in ((f"adapter-{rank}.pt", 2 * 4 * 1200), (f"one-{rank}.pt", 4 * 1200)):
            assert size < (tmp_path / file).stat().st_size < size + 2500
        adapter = torch.load(tmp_path / f"adapter-{rank}.pt")
        assert_same(adapter, {name: state[name] for name in ("lora_a.weight", "lora_b.weight")}, exactly=True)
