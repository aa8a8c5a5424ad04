"""The folder that checkpoints are in: which are there, which are whole, and how one comes into being.

    dir/
        step-00001000/            a checkpoint: complete, or it would not have this name
            manifest.json         every other file's size and SHA-256; written last
            .metadata, *.distcp   torch.distributed.checkpoint's (or model.pt and optimizer.pt, with full=True)
            rank-0.pt ...         each rank's random state and extra
        .saving-...               one that is being written, or was when its run died; the next save removes it
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardstep._errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "shardstep checkpoint 1"
NAME = re.compile(r"step-(\d+)(\.replaced)?")  # one that another of the same step replaces keeps a name until that is there
FILE_NAME = re.compile(r"[\w.-]+")
BLOCK = 2**20

#: What this process is writing now, and the folders that it has seen.
ACTIVE: set[Path] = set()
SEEN: set[Path] = set()


class File(NamedTuple):
    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """What ``manifest.json`` says."""

    step: int
    world: int
    full: bool
    files: dict[str, File]

    def dump(self) -> bytes:
        body = {
            "format": FORMAT, "step": self.step, "world": self.world, "full": self.full,
            "torch": torch.__version__, "files": {name: file._asdict() for name, file in sorted(self.files.items())},
        }
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1).encode()

    @staticmethod
    def read(checkpoint: Path) -> "Manifest":
        """Raises CheckpointError when the checkpoint has none, or one that is damaged."""
        path = checkpoint / MANIFEST
        try:
            body = json.loads(path.read_bytes())
            digest = body.pop("sha256")
            files = {name: File(int(file["bytes"]), str(file["sha256"])) for name, file in body["files"].items()}
            manifest = Manifest(int(body["step"]), int(body["world"]), bool(body["full"]), files)
        except FileNotFoundError:
            raise CheckpointError(f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if digest != _digest_of(body):
            raise CheckpointError(f"{path} is damaged: its checksum is not that of its content")
        if body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is of format {body.get('format')!r}; this version reads {FORMAT!r}")
        for name in files:
            if not FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
                raise CheckpointError(f"{path} lists {name!r}, which is not the name of a file beside it")
        return manifest


def _digest_of(body: "dict[str, Any]") -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> File:
    """Size and checksum of a file as it is on disk."""
    sha, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            sha.update(block)
            size += len(block)
    return File(size, sha.hexdigest())


def damage(checkpoint: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> "str | None":
    """What is wrong with the files of a checkpoint, or None. ``part`` of ``parts`` checks its share of them."""
    for name, expected in sorted(manifest.files.items())[part::parts]:
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                return f"{path} is damaged: it has {size} bytes, and was written with {expected.bytes}"
            if digest(path) != expected:
                return f"{path} is damaged: its checksum is not the one it was written with"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
    return None


def candidates(folder: Path) -> list[Path]:
    """Checkpoints by name, the newest first; whether they are whole is another question."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


# -- writing ----------------------------------------------------------------------------------------------------------


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int) -> Path:
    """Makes the folder to write a checkpoint in, and removes what runs that died have left."""
    if folder in SEEN and not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} was there before, and is not now")
    folder.mkdir(parents=True, exist_ok=True)
    SEEN.add(folder)
    for stale in folder.glob(".saving-*"):
        if stale not in ACTIVE:
            with contextlib.suppress(FileNotFoundError):  # somebody else is removing it too
                shutil.rmtree(stale)
    partial = folder / f".saving-{step:08d}-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    ACTIVE.add(partial)
    return partial


def abandon(partial: Path) -> None:
    ACTIVE.discard(partial)
    shutil.rmtree(partial, ignore_errors=True)  # whatever failed before may fail here; the next save tries again


def commit(partial: Path, checkpoint: Path, manifest: Manifest, keep: "int | None") -> None:
    """Makes what was written a checkpoint, in one instant, and removes all but the newest ``keep``."""
    write(partial / MANIFEST, manifest.dump())
    sync_folder(partial)
    replaced = checkpoint.with_name(checkpoint.name + ".replaced")
    if checkpoint.exists():
        remove(replaced)
        checkpoint.rename(replaced)
    partial.rename(checkpoint)
    sync_folder(checkpoint.parent)
    ACTIVE.discard(partial)
    remove(replaced)
    for old in candidates(checkpoint.parent)[keep:] if keep is not None else ():
        remove(old)


def remove(checkpoint: Path) -> None:
    """Under another name first: half of a checkpoint has no business under its own. Somebody else may be removing it too."""
    trash = checkpoint.with_name(f".saving-{checkpoint.name}-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        checkpoint.rename(trash)
        shutil.rmtree(trash)


@contextlib.contextmanager
def naming(path: Path) -> "Iterator[None]":
    """An error of a write does not say by itself which file was written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write(path: Path, content: bytes) -> None:
    with naming(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Until then a rename in it may be undone by a power cut."""
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
