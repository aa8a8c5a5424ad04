"""Training that is killed again and again: ``examples/train_text.py`` under torchrun, on several ranks of this host.

    python tests/soak.py --kills 30 --seed 7          (make soak)

At every start of the ranks but the last, one of them is killed: which, in which phase of which step, and when in it, is drawn
at random. What is checked: the others end by themselves, by a PeerLostError that names the rank, within a second; torchrun
starts them again; at the end weights and optimizer are, to the bit, those of a run that was left alone; and no process, no
shared memory and no file is left.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

RANK_PROGRAM = Path(__file__).resolve().parent / "soak_rank.py"
PHASES = ("forward", "backward", "reduce-scatter", "update", "all-gather", "sync save", "async save")
MODEL = "--layers 1 --width 32 --heads 2 --context 16 --batch 2".split()
MICRO_BATCHES = 12  # per step, of all ranks together
NOTICED = 1.0  # seconds


def plan_of(kills, world, seed):
    """Every phase before any comes again; each kill in one of the first steps after a start."""
    generator = random.Random(seed)
    phases = [phase for _ in range(0, kills, len(PHASES)) for phase in generator.sample(PHASES, len(PHASES))]
    plan = []
    for phase in phases[:kills]:
        at_once = phase in ("update", "all-gather") or generator.random() < 0.3
        seconds = 0 if at_once else round(generator.uniform(0.001, 0.03), 3)
        asynchronous = phase == "async save" or (phase != "sync save" and generator.random() < 0.5)
        plan.append([generator.randrange(world), generator.randint(0, 2), phase, seconds, asynchronous])
    return plan


def steps_for(plan):
    """So many that every kill comes before the end, however many steps are done between the starts."""
    return 4 * len(plan) + 4


def arguments(folder, world, steps):
    """Of ``examples/train_text.py``."""
    accumulate = str(MICRO_BATCHES // world)
    return [
        "--steps", str(steps), *MODEL, "--accumulate", accumulate, "--save-every", "1", "--resume", "auto", "--out", str(folder)
    ]


def description(folder, plan=()):
    """For ``soak_rank.py``."""
    return {"log": str(folder / "log"), "plan": plan}


def train(folder, world, steps, plan=(), timeout=300):
    """One torchrun; its exit status. The checkpoints are in ``folder/checkpoints``, what the ranks said in ``folder/log``."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    mark = uuid.uuid4().hex
    environment = {
        **os.environ, "SOAK": json.dumps(description(folder, plan)), "SOAK_MARK": mark, "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "--max-restarts", str(len(plan)), "--monitor-interval", "0.5", "--log-dir", str(folder / "torchrun"),
        str(RANK_PROGRAM), *arguments(folder, world, steps),
    ]
    try:
        with open(folder / "output", "w") as output:
            process = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=timeout)
        assert_nothing_left(mark, temporary)
    finally:
        for process_id, _ in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process_id), signal.SIGKILL)
    return process.returncode


def assert_nothing_left(mark, temporary):
    deadline = time.monotonic() + 10.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes are left: {left}"
    files = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    assert not files, f"files are left: {files}"


def shared_memory():
    """Names of it. Python's own locks are there too, those of every program."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def marked(mark):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process.name, (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:
            pass  # it has just ended, or is somebody else's
    return found


def read_log(folder):
    with open(folder / "log") as file:
        return [json.loads(line) for line in file]


def assert_survivors_named_the_rank(folder, plan, worlds, noticed=NOTICED):
    """For every kill of the plan: the other ranks' errors, and their delays. Returns the longest delay."""
    longest, log = 0.0, read_log(folder)
    for attempt, ((victim, _, phase, *_), world) in enumerate(zip(plan, worlds)):
        said = [line for line in log if line["attempt"] == attempt]
        killed = [line for line in said if "killed" in line]
        assert [(line["rank"], line["killed"]) for line in killed] == [(victim, phase)], (attempt, said)
        others = {line["rank"]: line for line in said if "error" in line}
        assert others.keys() == set(range(world)) - {victim}, (attempt, said)
        for line in others.values():
            assert (line["error"], line["named"]) == ("PeerLostError", victim), line
            assert f"rank {victim}" in line["message"]
            delay = line["time"] - killed[0]["time"]
            assert delay <= noticed, f"rank {line['rank']} noticed after {delay:.2f} s: {line['message']}"
            longest = max(longest, delay)
    return longest


def final_state(folder, steps):
    """Every tensor of the last checkpoint, whole."""
    checkpoint = folder / "checkpoints" / f"step-{steps:08d}"
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in entries.items() if hasattr(e, "chunks")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        dcp.load(state, checkpoint_id=checkpoint)
    return state


def assert_same_end(alone, killed, steps, exactly=True):
    """What two runs have saved last: all weights, and all state of the optimizer."""
    expected, got = final_state(alone, steps), final_state(killed, steps)
    assert got.keys() == expected.keys() and len(got) > 30
    for key, value in expected.items():
        difference = float((got[key].double() - value.double()).abs().max())
        assert torch.equal(got[key], value) if exactly else difference <= 1e-6, f"{key} differs by {difference}"


def assert_only_checkpoints_left(folder, *others):
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "log", *others}
    assert all(path.name.startswith("step-") for path in (folder / "checkpoints").iterdir())


def soak(folder, kills, seed, world=2):
    """Returns the number of steps, and the longest time in which a death was noticed."""
    plan = plan_of(kills, world, seed)
    steps = steps_for(plan)
    shared = shared_memory()
    assert train(folder / "alone", world, steps) == 0, (folder / "alone" / "output").read_text()[-5000:]
    status = train(folder / "killed", world, steps, plan, timeout=60 + 30 * kills)
    assert status == 0, (folder / "killed" / "output").read_text()[-5000:]
    longest = assert_survivors_named_the_rank(folder / "killed", plan, [world] * kills)
    assert_same_end(folder / "alone", folder / "killed", steps)
    assert_only_checkpoints_left(folder / "killed", "output", "tmp", "torchrun")
    assert shared_memory() <= shared
    return steps, longest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--nproc-per-node", type=int, default=2)
    args = parser.parse_args()
    print(f"{args.kills} kills, seed {args.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and no process or folder is left
    folder = Path(tempfile.mkdtemp(prefix="shardstep-soak-"))
    try:
        began = time.monotonic()
        steps, longest = soak(folder, args.kills, args.seed, args.nproc_per_node)
        print(f"{steps} steps in {time.monotonic() - began:.0f} s, equal to the bit")
        print(f"deaths were noticed within {longest * 1e3:.0f} ms")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
