"""Loading a checkpoint executes nothing that is in it: a malicious file of each kind is refused, with checksums that fit."""

import os
import pickle

import pytest
import ranks
import shardstep
import torch
import torch.distributed.checkpoint as dcp
from checkpointing import start
from shardstep import checkpoint
from shardstep.checkpoint._folder import MANIFEST, Manifest, digest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

pytestmark = pytest.mark.timeout(60)


class Attack:
    """Unpickled, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def save(rank, world, folder):
    model, optimizer = start("wrap", seed=1)
    checkpoint.save(folder, model, optimizer, step=1)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    ranks.run(2, save, folder)
    return folder / "step-00000001"


def metadata_of(folder):
    with open(folder / ".metadata", "rb") as file:
        return pickle.load(file)


def rewrite(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def point(folder, marker, key, entry=None):
    """Makes ``key`` lie in a file of its own, which is an attack in torch.save's format."""
    torch.save(Attack(marker), folder / "__9_0.distcp")
    metadata = metadata_of(folder)
    if entry is not None:
        metadata.state_dict_metadata[key] = entry
        metadata.storage_data[MetadataIndex(key)] = None
    for index in metadata.storage_data:
        if index.fqn == key:
            size = (folder / "__9_0.distcp").stat().st_size
            metadata.storage_data[index] = _StorageInfo("__9_0.distcp", 0, size)
    rewrite(folder, metadata)


def metadata_is_an_attack(folder, marker):
    rewrite(folder, Attack(marker))
    return r"\.metadata is refused: UnpicklingError: it asks for posix.mkdir"


def metadata_carries_an_attack(folder, marker):
    metadata = metadata_of(folder)
    metadata.planner_data["model.pair"] = Attack(marker)
    rewrite(folder, metadata)
    return r"\.metadata is refused: UnpicklingError: it asks for posix.mkdir"


class Reach:
    """Unpickled, it is what getattr finds in a class that metadata may hold."""

    def __reduce__(self):
        return getattr, (Metadata, "__init__")


def metadata_reaches_into_a_class(folder, marker):
    rewrite(folder, Reach())
    return r"\.metadata is refused: UnpicklingError: it asks for '__init__' of"


def metadata_is_something_else(folder, marker):
    rewrite(folder, torch.Size([1]))
    return r"\.metadata is refused: it holds a Size"


def metadata_asks_for_an_attribute(folder, marker):
    """``Metadata.__init__.__globals__``: by pickle's dotted names one would get from an admitted class to anything."""
    content = b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x10Metadata.__doc__\x93."
    (folder / ".metadata").write_bytes(content)
    return r"\.metadata is refused: UnpicklingError"


def tensor_is_an_attack(folder, marker):
    point(folder, marker, "model.pair")
    return "UnpicklingError: Weights only load failed"


def option_is_an_attack(folder, marker):
    point(folder, marker, "optimizer.param_groups.0.lr")
    return "UnpicklingError: Weights only load failed"


def tensor_becomes_an_object(folder, marker):
    point(folder, marker, "model.pair", BytesStorageMetadata())
    return "it has no 'pair'"


def state_becomes_an_object(folder, marker):
    point(folder, marker, "optimizer.state.pair.exp_avg", BytesStorageMetadata())
    return "UnpicklingError: Weights only load failed"


def rank_file_is_an_attack(folder, marker):
    torch.save({"extra": Attack(marker), "random": {}, "buffers": {}}, folder / "rank-1.pt")
    return r"rank-1.pt is refused: UnpicklingError: Weights only load failed"


def rank_file_is_a_plain_pickle(folder, marker):
    (folder / "rank-0.pt").write_bytes(pickle.dumps(Attack(marker)))
    return r"rank-0.pt is refused: UnpicklingError: Weights only load failed"


def file_lies_elsewhere(folder, marker):
    metadata = metadata_of(folder)
    for index in metadata.storage_data:
        metadata.storage_data[index].relative_path = "../honest/__0_0.distcp"
    rewrite(folder, metadata)
    return r"\.metadata is refused: '.*' is said to be in '../honest/__0_0.distcp'"


def manifest_names_a_file_elsewhere(folder, marker):
    manifest = Manifest.read(folder)
    refreshed(folder, {**manifest.files, "../other": digest(folder / "rank-0.pt")})
    return r"manifest.json lists '../other', which is not the name of a file beside it"


ATTACKS = [
    metadata_is_an_attack, metadata_carries_an_attack, metadata_reaches_into_a_class, metadata_is_something_else,
    metadata_asks_for_an_attribute,
    tensor_is_an_attack, option_is_an_attack, tensor_becomes_an_object, state_becomes_an_object, rank_file_is_an_attack,
    rank_file_is_a_plain_pickle, file_lies_elsewhere, manifest_names_a_file_elsewhere,
]


def refreshed(folder, files=None):
    """The manifest of an attacker who can compute checksums."""
    manifest = Manifest.read(folder)
    if files is None:
        files = {path.name: digest(path) for path in folder.iterdir() if path.name != MANIFEST}
    (folder / MANIFEST).write_bytes(manifest._replace(files=files).dump())


def attacked(rank, world, folder, says, marker):
    model, optimizer = start("wrap", seed=2)
    with pytest.raises(shardstep.CheckpointError, match=says):
        checkpoint.load(folder, model, optimizer)
    assert not marker.exists()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_malicious_checkpoint_is_refused_and_executes_nothing(attack, honest, tmp_path):
    marker, folder = tmp_path / "executed", tmp_path / "step-00000001"
    folder.mkdir()
    for path in honest.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    says = attack(folder, marker)
    if attack is not manifest_names_a_file_elsewhere:
        refreshed(folder)
    ranks.run(2, attacked, folder, says, marker)
    assert not marker.exists()


def test_torch_itself_would_execute_that_metadata(honest, tmp_path):
    """So the tests above attack something."""
    marker = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert marker.exists()
