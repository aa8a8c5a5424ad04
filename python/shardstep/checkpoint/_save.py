"""``save``."""

import copy
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from shardstep._errors import UsageError
from shardstep._flat_shard import FlatShard
from shardstep._rank import CHECKPOINT_THREAD
from shardstep.checkpoint import _folder, _ranks, _whole
from shardstep.checkpoint._channel import Channel, channel_of
from shardstep.checkpoint._folder import File, Manifest
from shardstep.checkpoint._progress import progress_bar
from shardstep.checkpoint._state import Pair
from shardstep.checkpoint._storage import METADATA, Writer

#: What each engine is writing in the background.
PENDING: "weakref.WeakKeyDictionary[Any, Saving]" = weakref.WeakKeyDictionary()


class Saving:
    """A checkpoint that has been written, or is being written in the background.

    ``path`` is where it is, once it is complete."""

    def __init__(self, path: Path):
        self.path = path
        self._future: Future[None] = Future()
        self._told = False  # of what went wrong

    def done(self) -> bool:
        """Whether it is written, or has failed. Local."""
        return self._future.done()

    def result(self, timeout: "float | None" = None) -> Path:
        """Waits until it is written, at most ``timeout`` seconds (then raises ``TimeoutError``), and returns ``path``. Raises
        what went wrong, on every rank alike."""
        try:
            self._future.result(timeout)
        finally:
            self._told = self._future.done()
        return self.path


def save(
    dir: "str | os.PathLike",
    model: Any,
    optimizer: "Optimizer | Iterable[Optimizer] | None" = None,
    *,
    step: int,
    extra: Any = None,
    keep: "int | None" = None,
    async_: bool = False,
    full: bool = False,
) -> Saving:
    """Writes a checkpoint of a wrapped model and its optimizer (or optimizers) into the folder ``dir``, which all ranks see and
    which belongs to one run. Collective, between steps.

    It has the model's weights (FP32 masters where there are such) and buffers, the optimizer's state and options, each rank's
    random state and each rank's ``extra``; and is complete, on disk, before it gets its name, ``dir/step-<step>``.

    Args:
        step: a number that grows; the checkpoint with the highest is the newest.
        extra: what :func:`load` shall give back to this rank (rank 0's to ranks that are new): tensors, numbers, strings and
            containers of them, such as the ``state_dict()`` of a scheduler, a scaler or a loader.
        keep: after it, remove all but this many of the newest checkpoints.
        async_: return when this rank's part is copied, and write in the background. A crash leaves the earlier checkpoint;
            the next save waits for this one first, and raises what went wrong with it.
        full: write ``model.pt`` and ``optimizer.pt`` (``optimizer-1.pt``, ... with several), which ``torch.load`` reads in one
            process, in place of torch.distributed.checkpoint's files. Nothing is gathered for it.

    Raises :class:`shardstep.CheckpointError`, on every rank: a rank could not write, and why. ``TimeoutError``,
    ``PeerLostError`` or ``AbortedError``: a rank did not make this call within the model's ``timeout=``, has died, or has given
    up, and which. The training is as it was, and so are earlier checkpoints.
    """
    pair = Pair(model, optimizer)
    channel = channel_of(pair.engine, f"saving a checkpoint to {Path(dir).absolute()}")
    before = PENDING.pop(pair.engine, None)
    if before is not None and not before._told:
        before.result()
    task = _Task(channel, Path(dir).absolute(), pair, dict(step=step, keep=keep, async_=async_, full=full), extra)
    if not async_:
        with progress_bar(channel.rank, task.doing, task.bytes()) as task.progress:
            task.run()
        task.saving._future.set_result(None)
        return task.saving
    task.detach()
    PENDING[pair.engine] = task.saving
    threading.Thread(target=task.run_in_background, name=CHECKPOINT_THREAD).start()
    return task.saving


class _Task:
    """One save, on one rank."""

    def __init__(self, channel: Channel, folder: Path, pair: Pair, options: "dict[str, Any]", extra: Any):
        self.doing = f"saving a checkpoint to {folder}"
        self.progress: Callable[[int], None] = lambda n: None
        self._channel, self._folder = channel, folder
        self._writer: Writer | None = None

        def prepare() -> "tuple[dict[str, Any], str]":
            _check(options)
            self._state = pair.whole_to_save() if options["full"] else pair.to_save()
            self._own = _ranks.packed(extra, {})
            return {"dir": str(folder), **options}, _ranks.digest(pair.buffers())

        answers = channel.agree(self.doing, prepare)
        channel.require_equal(self.doing, [said for said, _ in answers])
        if any(buffers != answers[0][1] for _, buffers in answers):
            self._own = _ranks.packed(extra, pair.buffers())
        self._step, self._keep, self._full = operator.index(options["step"]), options["keep"], bool(options["full"])
        self.saving = Saving(_folder.path_of(folder, self._step))
        self.doing = f"saving {self.saving.path}"

    def bytes(self) -> int:
        """Of the tensors that this rank writes."""
        leaves = torch.utils._pytree.tree_leaves(self._state)
        return sum((t.local if isinstance(t, FlatShard) else t).nbytes for t in leaves if isinstance(t, torch.Tensor))

    def detach(self) -> None:
        """From here on the training may change its tensors."""
        self._state = copy.deepcopy(self._state)

    def run(self) -> None:
        channel = self._channel
        first = channel.rank == 0
        partial = channel.agree(self.doing, lambda: _folder.begin(self._folder, self._step) if first else None)[0]
        try:
            if self._full:
                offsets = channel.agree(self.doing, lambda: self._lay_out(partial) if first else None)[0]
                parts = channel.agree(self.doing, lambda: self._fill_in(partial, offsets))
            else:
                parts = channel.agree(self.doing, lambda: self._write(partial))
            channel.agree(self.doing, lambda: self._finish(partial, parts) if first else None)
        except BaseException:
            if first:
                _folder.abandon(partial)
            raise

    def run_in_background(self) -> None:
        failure: BaseException | None = None
        try:
            self.run()
        except BaseException as error:
            logging.getLogger("shardstep").error("%s: %s", type(error).__name__, error)  # result() may never be called
            failure = error
        self._state, self._writer = {}, None  # the copies end before anybody hears of it
        if failure is None:
            self.saving._future.set_result(None)
        else:
            self.saving._future.set_exception(failure)

    def _write(self, partial: Path) -> "Part":
        self._writer = Writer(self._seen(partial), self._channel.rank, self._channel.world, self.progress)
        plan, results, files = self._writer.write(self._state)
        return Part({**files, **self._write_own(partial)}, plan, results)

    def _lay_out(self, partial: Path) -> "dict[str, dict[tuple, int]]":
        return {name: _whole.lay_out(partial / name, tree) for name, tree in self._state.items()}

    def _fill_in(self, partial: Path, offsets: "dict[str, dict[tuple, int]]") -> "Part":
        for name, tree in self._state.items():
            _whole.fill_in(self._seen(partial) / name, tree, offsets[name])
        return Part(self._write_own(partial))

    def _write_own(self, partial: Path) -> "dict[str, File]":
        path = partial / _ranks.name_of(self._channel.rank)
        _folder.write(path, self._own)
        return {path.name: _folder.digest(path)}

    def _seen(self, partial: Path) -> Path:
        if not partial.is_dir():
            raise FileNotFoundError(
                f"{partial}, which rank 0 has made, is not there for rank {self._channel.rank}; all ranks need the same file "
                "system"
            )
        return partial

    def _finish(self, partial: Path, parts: "list[Part]") -> None:
        files = {name: file for part in parts for name, file in part.files.items()}
        if self._full:
            files.update({name: _folder.digest(partial / name) for name in self._state})
        else:
            files[METADATA] = self._writer.finish([part.plan for part in parts], [part.results for part in parts])
        manifest = Manifest(self._step, self._channel.world, self._full, files)
        _folder.commit(partial, self.saving.path, manifest, self._keep)


class Part(NamedTuple):
    """What one rank has written; plan and results are DCP's."""

    files: dict[str, File]
    plan: Any = None
    results: Any = None


def _check(options: "dict[str, Any]") -> None:
    for name, least in (("step", 0), ("keep", 1)):
        value = options[name]
        if value is None and name == "keep":
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
            raise UsageError(f"{name} must be an integer of at least {least}, not {value!r}")
