"""``shardstep.launch``: what goes to the ranks, what comes back, and that nothing outlives it."""

import io
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import ranks
import shardstep
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(120)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_script(folder: Path, source: str) -> subprocess.Popen:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, path], stdout=pipe, stderr=pipe, text=True, cwd=folder)


class AnswersWhatItHears(io.StringIO):
    """A stdout that creates ``path`` when it is told "ready"."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def write(self, text: str) -> int:
        if "ready" in text:
            self.path.touch()
        return super().write(text)


def goes_on_when_heard(path: Path):
    rank = dist.get_rank()
    if rank == 0:
        print("ready", end="\r")
        wait_until(path.exists)
        print("50 %", end="\r", file=sys.stderr)
    print(f"rank {rank} is done ✓")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return os.getpid(), total, [os.environ[name] for name in names], torch.get_num_threads()


def test_ranks_have_a_process_group_and_rank_0_is_heard_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    stdout, stderr = AnswersWhatItHears(tmp_path / "heard"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    results = shardstep.launch(goes_on_when_heard, path=tmp_path / "heard")
    assert stdout.getvalue() == "ready\rrank 0 is done ✓\n"
    assert stderr.getvalue() == "50 %\r"
    for rank, (pid, total, environment, threads) in enumerate(results):
        assert torch.equal(total, torch.tensor([3.0]))
        assert environment == [str(rank), str(rank), "2", "2", "1"] and threads == 1
        assert not alive(pid)


def test_functions_of_a_script_closures_and_lambdas(tmp_path):
    script = start_script(
        tmp_path,
        """
        from dataclasses import dataclass
        import shardstep
        import torch.distributed as dist
        print("the script runs once")

        @dataclass
        class Point:
            x: int

        def scaled(factor):
            def inner(x):
                return Point(factor * x + dist.get_rank())
            return inner

        times_ten = scaled(10)
        results = shardstep.launch(lambda x: times_ten(x), 4, nproc_per_node=2)
        assert results == [Point(40), Point(41)], results
        """,
    )
    assert script.communicate(timeout=90) == ("the script runs once\n", "")
    assert script.returncode == 0


CELL = """
def train():
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 0:
        dist.barrier()
    raise ValueError(f"no batch for rank {dist.get_rank()}")  # this line is shown
"""


def test_every_failed_ranks_traceback_reaches_the_caller(monkeypatch, capsys):
    name = "/nowhere/cell.py"
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(True), name))
    cell = {"__name__": "__main__", "dist": dist}
    exec(compile(CELL, name, "exec"), cell)
    with pytest.raises(shardstep.RankFailedError) as caught:
        shardstep.launch(cell["train"], nproc_per_node=3)
    error = caught.value
    message = str(error)
    assert error.rank in (1, 2) and sorted(error.tracebacks) == [1, 2]
    assert message.startswith(f"rank {error.rank} of 3 raised ValueError: no batch for rank {error.rank}\n")
    for rank in (1, 2):
        assert f"ValueError: no batch for rank {rank}" in error.tracebacks[rank]
        assert f'File "{name}", line 6, in train' in error.tracebacks[rank]
        assert "# this line is shown" in error.tracebacks[rank]
        assert error.tracebacks[rank] in message
        assert f"rank {rank} was here" in message
    assert capsys.readouterr().out == "rank 0 was here\n"


def dies_on_rank_1():
    if dist.get_rank() == 1:
        os.write(2, b"the last words\n")
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_named_before_what_its_death_caused():
    with pytest.raises(shardstep.RankFailedError) as caught:
        shardstep.launch(dies_on_rank_1)
    message = str(caught.value)
    assert message.startswith("rank 1 of 2 died: exit code 7\n")
    assert caught.value.rank == 1
    assert "the last words" in message
    assert "in dies_on_rank_1\n    dist.barrier()" in caught.value.tracebacks[0]


def test_a_result_that_cannot_be_pickled_is_a_clear_error():
    what = r"rank 0 of 1 raised .*UsageError.* a generator, cannot be pickled"
    with pytest.raises(shardstep.RankFailedError, match=what):
        shardstep.launch(lambda: (i for i in range(3)), nproc_per_node=1)


def test_arguments_are_checked_before_anything_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(shardstep.UsageError, match="print cannot be sent to the ranks.*lock"):
        shardstep.launch(print, threading.Lock())
    for count in (0, -1, True, 2.0):
        with pytest.raises(shardstep.UsageError, match="nproc_per_node"):
            shardstep.launch(print, nproc_per_node=count)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(shardstep.UsageError, match="pip install cloudpickle"):
        shardstep.launch(print)


ENDLESS = """
    import os, signal, subprocess, time
    from pathlib import Path
    import shardstep
    import torch.distributed as dist

    def endless():
        if dist.get_rank() == 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # has to be killed
        child = subprocess.Popen(["sleep", "600"])
        Path(f"{dist.get_rank()}.part").write_text(f"{os.getpid()} {child.pid}")
        os.rename(f"{dist.get_rank()}.part", f"{dist.get_rank()}.pids")
        try:
            time.sleep(600)
        finally:
            Path("tidied").touch()

    shardstep.launch(endless)
"""


def processes(folder: Path) -> list[int]:
    files = [folder / "0.pids", folder / "1.pids"]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_an_interrupt_ends_all_ranks_and_what_they_have_started(tmp_path):
    script = start_script(tmp_path, ENDLESS)
    pids = processes(tmp_path)
    assert all(map(alive, pids))
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert (tmp_path / "tidied").exists()
    assert not any(map(alive, pids))


def test_ranks_end_with_a_caller_that_is_killed(tmp_path):
    script = start_script(tmp_path, ENDLESS)
    pids = processes(tmp_path)
    script.kill()
    script.communicate(timeout=30)
    ranks, children = pids[0::2], pids[1::2]
    wait_until(lambda: not any(map(alive, ranks)))
    for child in children:
        os.kill(child, signal.SIGKILL)


def joins(rank, world, port, late):
    os.environ["MASTER_PORT"] = str(port)
    if rank == late:
        time.sleep(0.5)
    shardstep.init()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return float(total)


def test_ranks_that_are_started_again_do_not_take_each_other_for_those_before():
    """torchrun's agent has one store for all starts, in which Gloo finds the addresses of ranks that are gone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for late in (0, 1):
        outcomes = ranks.outcomes(2, joins, store.port, late, group=False, timeout=30)
        assert [outcome[:2] for outcome in outcomes] == [("ok", 3.0)] * 2, outcomes


def waits_in_vain(rank, world):
    os.environ["WORLD_SIZE"] = "2"
    began = time.monotonic()
    with pytest.raises(shardstep.TimeoutError, match=r"rank 0 has waited 1 s in vain for all 2 ranks to call init\(\)"):
        shardstep.init(timeout=1)
    return time.monotonic() - began


def test_rank_that_never_starts_is_a_timeout():
    assert ranks.outcomes(1, waits_in_vain, group=False)[0][1] < 3.0
