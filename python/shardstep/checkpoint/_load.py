"""``load`` and ``latest``."""

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim import Optimizer

from shardstep._errors import CheckpointError
from shardstep.checkpoint import _folder, _ranks
from shardstep.checkpoint._channel import Channel, channel_of
from shardstep.checkpoint._folder import Manifest, candidates, damage
from shardstep.checkpoint._saved import Saved, open_distributed, open_whole
from shardstep.checkpoint._state import Pair
from shardstep.checkpoint._storage import METADATA


class Restored(NamedTuple):
    """What :func:`load` gives back: the step that was saved, None when it is no checkpoint of ours; this rank's extra; where
    it was."""

    step: "int | None"
    extra: Any
    path: Path


def latest(dir: "str | os.PathLike") -> "Path | None":
    """The newest checkpoint in ``dir`` that is complete and undamaged, or None. Reads all of it, to check. Local."""
    for checkpoint in candidates(Path(dir).absolute()):
        try:
            wrong = damage(checkpoint, Manifest.read(checkpoint))
        except CheckpointError as error:
            wrong = str(error)
        if wrong is None:
            return checkpoint
        warnings.warn(f"passed over: {wrong}", stacklevel=2)
    return None


def load(
    dir: "str | os.PathLike", model: Any, optimizer: "Optimizer | Iterable[Optimizer] | None" = None
) -> Restored:
    """Loads a checkpoint into a wrapped model and its optimizer (or optimizers), which may be over any number of ranks.
    Collective.

    ``dir`` is what was given to :func:`save`, and then the newest checkpoint that is complete and undamaged is taken; or one
    checkpoint in it; or a folder that torch.distributed.checkpoint has written, as ``{"model": ..., "optimizer": ...}`` from
    ``get_state_dict``, by whichever framework. Param-group options go to the parameters by name. Ranks that were there before
    get their random state back.

    Raises :class:`shardstep.CheckpointError`, on every rank: the checkpoint is damaged, or of another model, and how.
    ``TimeoutError``, ``PeerLostError`` or ``AbortedError`` as :func:`save` does.
    """
    pair = Pair(model, optimizer)
    doing = f"loading {dir}"
    channel = channel_of(pair.engine, doing)
    path, manifest = _choose(channel, doing, Path(dir).absolute())
    rank, old_world = channel.rank, manifest.world if manifest is not None else 0

    def prepare() -> "tuple[Callable[[], None], dict[str, Any]]":
        mine = _ranks.load(path, rank if rank < old_world else 0) if manifest is not None else {}
        return pair.prepare(_open(path, manifest)), mine

    def read() -> None:
        prepared()
        if channel.world == old_world:
            pair.load_buffers(mine["buffers"])

    prepared, mine = channel.locally(doing, prepare)  # what is refused is refused everywhere before anything changes
    channel.locally(doing, read)
    pair.gather()
    if rank < old_world:
        _ranks.set_random_state(mine["random"])
    if manifest is None:
        return Restored(None, {}, path)
    _folder.SEEN.add(path.parent)
    return Restored(manifest.step, mine["extra"], path)


def open_checked(dir: "str | os.PathLike") -> "tuple[Path, Saved]":
    """As :func:`load` chooses, in one process."""
    folder = Path(dir).absolute()
    if not _is_checkpoint(folder):
        found = latest(folder)
        if found is None:
            raise CheckpointError(f"there is no complete checkpoint in {folder}")
        return found, _open(found, Manifest.read(found))
    if _is_foreign(folder):
        return folder, open_distributed(folder)
    manifest = Manifest.read(folder)
    wrong = damage(folder, manifest)
    if wrong is not None:
        raise CheckpointError(wrong)
    return folder, _open(folder, manifest)


def _open(checkpoint: Path, manifest: "Manifest | None") -> Saved:
    return open_whole(checkpoint) if manifest is not None and manifest.full else open_distributed(checkpoint)


def _is_checkpoint(folder: Path) -> bool:
    return _folder.NAME.fullmatch(folder.name) is not None or (folder / METADATA).exists()


def _is_foreign(folder: Path) -> bool:
    """Written by torch.distributed.checkpoint itself? Then there are no checksums to compare."""
    return _folder.NAME.fullmatch(folder.name) is None and (folder / METADATA).exists()


def _choose(channel: Channel, doing: str, folder: Path) -> "tuple[Path, Manifest | None]":
    """The same on every rank; each checks its share of the files."""
    found = channel.agree(doing, lambda: _candidates(folder) if channel.rank == 0 else None)[0]
    for checkpoint in found:
        if checkpoint == folder and _is_foreign(folder):
            return checkpoint, None
        answers = channel.agree(doing, lambda checkpoint=checkpoint: _examine(channel, checkpoint))
        wrong = [problem for _, problem in answers if problem is not None]
        if not wrong:
            return checkpoint, answers[0][0]
        if checkpoint == folder:
            raise CheckpointError(f"while {doing}: {wrong[0]}")
        if channel.rank == 0:
            warnings.warn(f"passed over: {wrong[0]}", stacklevel=3)
    raise CheckpointError(f"while {doing}: there is no complete checkpoint")


def _candidates(folder: Path) -> list[Path]:
    """``folder`` itself when it is one, or those in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    return [folder] if _is_checkpoint(folder) else candidates(folder)


def _examine(channel: Channel, checkpoint: Path) -> "tuple[Manifest | None, str | None]":
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError as error:
        return None, str(error)
    return manifest, damage(checkpoint, manifest, channel.rank, channel.world)
