"""Checkpoints when something goes wrong: damage is noticed, failures are told on every rank, and what was there stays good."""

import os
import resource
import shutil
import signal
import time
import warnings

import pytest
import ranks
import shardstep
import torch.distributed as dist
from checkpointing import assert_same, start, train, weights
from shardstep import checkpoint

pytestmark = pytest.mark.timeout(60)


# -- the folder ---------------------------------------------------------------------------------------------------


def some(folder, *steps, world=1, **options):
    """Checkpoints of these steps in ``folder``."""
    ranks.run(world, save_steps, folder, steps, options)
    return [folder / f"step-{step:08d}" for step in steps]


def save_steps(rank, world, folder, steps, options):
    model, optimizer = start("wrap", seed=1)
    for step in steps:
        checkpoint.save(folder, model, optimizer, step=step, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    (tmp_path / ".saving-00000002-killed").mkdir()
    (tmp_path / ".saving-00000002-killed" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's own")
    some(tmp_path, 5, 10, 20, 7, keep=3, world=2)
    assert names(tmp_path) == ["notes.txt", "step-00000007", "step-00000010", "step-00000020"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000020"
    expected = {".metadata", "manifest.json", "__0_0.distcp", "__1_0.distcp", "rank-0.pt", "rank-1.pt"}
    assert set(names(tmp_path / "step-00000020")) == expected


def test_step_that_is_there_is_replaced(tmp_path):
    first, = some(tmp_path, 3, extra="first")
    some(tmp_path, 3, extra="second")
    assert names(tmp_path) == ["step-00000003"]
    assert ranks.run(1, resume_extra, tmp_path) == [(3, "second")]
    # A run that died between the two renames has left this.
    first.rename(tmp_path / "step-00000003.replaced")
    assert ranks.run(1, resume_extra, tmp_path) == [(3, "second")]


def resume_extra(rank, world, path):
    model, optimizer = start("wrap", seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = checkpoint.load(path, model, optimizer)
    return restored.step, restored.extra


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda c: os.truncate(c / "__0_0.distcp", 1000),
    "a bit flipped": lambda c: flip(c / "__1_0.distcp"),
    "metadata flipped": lambda c: flip(c / ".metadata"),
    "rank file flipped": lambda c: flip(c / "rank-1.pt"),
    "a file gone": lambda c: (c / "rank-0.pt").unlink(),
    "half written": lambda c: (c / "manifest.json").unlink(),
    "manifest truncated": lambda c: os.truncate(c / "manifest.json", 200),
    "manifest empty": lambda c: os.truncate(c / "manifest.json", 0),
    "manifest flipped": lambda c: (c / "manifest.json").write_text(
        (c / "manifest.json").read_text().replace('"step": 2', '"step": 7')
    ),
}
SAYS = {
    "truncated": r"__0_0.distcp is damaged: it has 1000 bytes, and was written with \d+",
    "a bit flipped": "__1_0.distcp is damaged: its checksum is not the one it was written with",
    "metadata flipped": ".metadata is damaged",
    "rank file flipped": "rank-1.pt is damaged",
    "a file gone": "rank-0.pt is missing",
    "half written": "is not a complete checkpoint: it has no manifest.json",
    "manifest truncated": "manifest.json is damaged",
    "manifest empty": "manifest.json is damaged",
    "manifest flipped": "manifest.json is damaged: its checksum",
}


def refused(rank, world, path, says, error=shardstep.CheckpointError):
    """On every rank, before anything is touched; and training goes on."""
    model, optimizer = start("wrap", seed=2)
    before = weights(model), optimizer.state_dict()["state"]
    with pytest.raises(error, match=says) as raised:
        checkpoint.load(path, model, optimizer)
    assert_same(weights(model), before[0], exactly=True)
    train(model, optimizer, range(1), rank, world)
    return str(raised.value)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_taken(kind, tmp_path):
    older, newer = some(tmp_path, 1, 2, world=2)
    DAMAGE[kind](newer)
    messages = ranks.run(2, refused, newer, "step-00000002.*" + SAYS[kind])
    assert len(set(messages)) == 1
    with pytest.warns(UserWarning, match="passed over: .*step-00000002.*" + SAYS[kind]):
        assert checkpoint.latest(tmp_path) == older
    assert ranks.run(2, resume_extra, tmp_path) == [(1, None)] * 2


def test_no_checkpoint_is_none_to_latest_and_an_error_to_load(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    ranks.run(2, refused, tmp_path, f"while loading {tmp_path}: there is no complete checkpoint")
    ranks.run(2, refused, tmp_path / "nowhere", "rank 0: FileNotFoundError: there is no folder .*nowhere")


# -- failures while saving ----------------------------------------------------------------------------------------


def failing(rank, world, folder, how, asynchronous):
    model, optimizer = start("wrap", seed=1)
    train(model, optimizer, range(2), rank, world)
    checkpoint.save(folder, model, optimizer, step=2)
    train(model, optimizer, [2], rank, world)
    dist.barrier()
    undo, says = HOW[how](rank, folder)
    dist.barrier()
    try:
        with pytest.raises(shardstep.CheckpointError, match=says) as raised:
            full = how == "no room for a whole file"
            checkpoint.save(folder, model, optimizer, step=3, async_=asynchronous, full=full).result()
    finally:
        dist.barrier()
        undo()
    left = names(folder) if folder.is_dir() else None
    dist.barrier()
    train(model, optimizer, range(3, 5), rank, world)  # the training is as it was
    if left is not None:
        checkpoint.save(folder, model, optimizer, step=5)
    return weights(model), str(raised.value), left


def file_limit(rank, folder):
    """One rank's files may not grow beyond a page: as on a full disk, a write fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before), "rank 1: OSError: .*File too large: .*__1_0.distcp"


def read_only(rank, folder):
    if os.geteuid() != 0:
        if rank == 0:
            folder.chmod(0o555)
        return lambda: folder.chmod(0o755), "rank 0: PermissionError: .*Permission denied"
    os.seteuid(65534)  # root may write anywhere
    return lambda: os.seteuid(0), "rank 0: PermissionError: .*Permission denied"


def vanished(rank, folder):
    if rank == 0:
        shutil.rmtree(folder)
    return lambda: None, "rank 0: FileNotFoundError: the folder .* was there before, and is not now"


def vanishing(rank, folder):
    """Away between the first moment of a save and the next."""
    real = checkpoint._folder.begin

    def begin(*args):
        partial = real(*args)
        shutil.rmtree(partial)
        return partial

    checkpoint._folder.begin = begin
    return lambda: setattr(checkpoint._folder, "begin", real), "rank 0: FileNotFoundError.*rank 1: FileNotFoundError"


def no_room(rank, folder):
    """As :func:`file_limit`, where rank 0 takes the space for a whole file at once."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before), "rank 0: OSError: .*File too large: .*model.pt"


HOW = {
    "one rank's disk is full": file_limit, "no room for a whole file": no_room, "read-only": read_only, "vanished": vanished,
    "vanishing": vanishing,
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("how", HOW)
def test_save_that_fails_is_told_on_every_rank_and_harms_nothing(how, asynchronous, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    results = ranks.run(2, failing, folder, how, asynchronous)
    expected = ranks.run(2, undisturbed)[0]
    for got, message, left in results:
        assert_same(got, expected, exactly=True)
        assert message == results[0][1] and str(folder) in message
        assert left == (None if how == "vanished" else ["step-00000002"])
    if how != "vanished":
        assert names(folder) == ["step-00000002", "step-00000005"]


def undisturbed(rank, world):
    model, optimizer = start("wrap", seed=1)
    train(model, optimizer, range(5), rank, world)
    return weights(model)


def dies(rank, world, folder, victim, moment, asynchronous, transport):
    model, optimizer = start("wrap", seed=1, transport=transport)
    checkpoint.save(folder, model, optimizer, step=1)
    train(model, optimizer, [1], rank, world)
    if rank == victim:
        task = checkpoint._save._Task
        method = {"preparing": "__init__", "writing": "_write", "finishing": "_finish"}[moment]
        setattr(task, method, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(shardstep.PeerLostError, match=f"while saving .*rank {victim} has (died|ended)") as raised:
        checkpoint.save(folder, model, optimizer, step=2, async_=asynchronous).result()
    return raised.value.rank, time.monotonic() - began


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize(
    "victim,moment,asynchronous",
    [(1, "preparing", False), (1, "writing", False), (0, "writing", True), (0, "finishing", False), (0, "finishing", True)],
)
def test_rank_that_dies_while_saving_is_named_at_once(victim, moment, asynchronous, transport, tmp_path):
    outcomes = ranks.outcomes(3, dies, tmp_path, victim, moment, asynchronous, transport)
    assert outcomes[victim][:2] == ("died", signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank][0] == "ok", outcomes[rank]
        named, seconds = outcomes[rank][1]
        assert named == victim and seconds < 2.5
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    some(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def ends_before(rank, world, folder, transport, moment):
    """One rank dies where the others save for the first time, or while the ranks open their channel for it."""
    model, optimizer = start("wrap", seed=1, transport=transport)
    if rank == 1 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        checkpoint._channel.Channel.__init__ = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(shardstep.PeerLostError, match="while saving .*rank 1") as raised:
        checkpoint.save(folder, model, optimizer, step=1)
    return raised.value.rank, time.monotonic() - began


@pytest.mark.parametrize("moment", ["before", "opening"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_rank_that_dies_before_the_first_save_is_named_at_once(transport, moment, tmp_path):
    outcomes = ranks.outcomes(3, ends_before, tmp_path, transport, moment)
    for rank in (0, 2):
        assert outcomes[rank][0] == "ok", outcomes[rank]
        assert outcomes[rank][1][0] == 1 and outcomes[rank][1][1] < 2.5


def late(rank, world, folder, transport, before):
    """One rank comes to its save when the other has given up."""
    model, optimizer = start("wrap", seed=1, transport=transport, timeout=1.0)
    if before:
        checkpoint.save(folder, model, optimizer, step=1)
    began = time.monotonic()
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises(shardstep.Error) as raised:
        checkpoint.save(folder, model, optimizer, step=2)
    seconds = time.monotonic() - began
    train(model, optimizer, [1], rank, world)
    checkpoint.save(folder, model, optimizer, step=3)
    return type(raised.value).__name__, str(raised.value), seconds


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_rank_that_does_not_come_is_a_timeout_and_the_next_save_works(transport, before, tmp_path):
    waited, came = ranks.run(2, late, tmp_path, transport, before)
    assert waited[0] == "TimeoutError" and "while saving" in waited[1] and 0.9 < waited[2] < 2.5, waited
    assert came[0] in ("AbortedError", "PeerLostError") and "rank 0" in came[1] and came[2] < 3.0, came
    if not before:
        assert "rank 0 has waited 1 s in vain for rank 1 to do the same" in waited[1]
        assert "rank 0 has given up" in came[1]
    assert names(tmp_path) == ["step-00000001", "step-00000003"] if before else ["step-00000003"]


def in_the_background(rank, world, folder):
    """A failure that nobody asked for is told by the next save, and by that one alone."""
    model, optimizer = start("wrap", seed=1)
    checkpoint.save(folder, model, optimizer, step=0)
    undo, says = file_limit(rank, folder)
    try:
        saving = checkpoint.save(folder, model, optimizer, step=1, async_=True)
        while not saving.done():
            time.sleep(0.01)
    finally:
        undo()
    train(model, optimizer, [0], rank, world)
    with pytest.raises(shardstep.CheckpointError, match=f"step-00000001: {says}"):
        checkpoint.save(folder, model, optimizer, step=2, async_=True)
    first = checkpoint.save(folder, model, optimizer, step=3, async_=True)
    second = checkpoint.save(folder, model, optimizer, step=4, async_=True)
    assert first.done()
    second.result()


def test_failure_in_the_background_is_told_by_the_next_save(tmp_path):
    ranks.run(2, in_the_background, tmp_path)
    assert names(tmp_path) == ["step-00000000", "step-00000003", "step-00000004"]


def leaves_at_once(folder):
    """The program ends while its last checkpoints are being written."""
    real = os.fsync
    os.fsync = lambda descriptor: time.sleep(0.1) or real(descriptor)
    done = []
    for transport in ("shm", "c10d"):
        model, optimizer = start("wrap", seed=1, transport=transport)
        done.append(checkpoint.save(folder / transport, model, optimizer, step=1, async_=True).done())
    return done


def test_program_that_ends_finishes_its_checkpoints(tmp_path):
    assert shardstep.launch(leaves_at_once, tmp_path) == [[False, False]] * 2
    for folder in (tmp_path / "shm", tmp_path / "c10d"):
        assert checkpoint.latest(folder) == folder / "step-00000001"
        assert names(folder) == ["step-00000001"]


def test_somebody_else_may_remove_checkpoints_too(tmp_path, monkeypatch):
    folder = checkpoint._folder
    for step in range(4):
        (tmp_path / f"step-{step:08d}").mkdir()
    real = folder.candidates

    def candidates(path):
        found = real(path)
        shutil.rmtree(found[-1])
        return found

    monkeypatch.setattr(folder, "candidates", candidates)
    partial = folder.begin(tmp_path, 4)
    folder.commit(partial, tmp_path / "step-00000004", folder.Manifest(4, 1, False, {}), keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
