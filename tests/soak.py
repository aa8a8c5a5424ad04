"""Training that is killed again and again: ``examples/train_text.py`` under torchrun, on several ranks of this host.

    python tests/soak.py --kills 30 --seed 7          (make soak)

At every start of the ranks but the last, one of them is killed: which, in which phase of which step, and when in it, is drawn
at random. What is checked: the others end by themselves, by a PeerLostError that names the rank, within a second; torchrun
starts them again; at the end weights and optimizer are, to the bit, those of a run that was left alone; and no process, no
shared memory and no file is left.
"""

import argparse
import json
import os
import random
import shutil
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
    """Every phase before any comes again; each kill a step or two after the one before."""
    generator = random.Random(seed)
    phases = [phase for _ in range(0, kills, len(PHASES)) for phase in generator.sample(PHASES, len(PHASES))]
    plan, step = [], 0
    for phase in phases[:kills]:
        step += generator.randint(1, 2)
        at_once = phase in ("update", "all-gather") or generator.random() < 0.3
        seconds = 0 if at_once else round(generator.uniform(0.001, 0.06), 3)
        asynchronous = phase == "async save" or (phase != "sync save" and generator.random() < 0.5)
        plan.append([generator.randrange(world), step, phase, seconds, asynchronous])
    return plan


def train(folder, world, steps, plan=(), first_attempt=0, restarts=0, timeout=300):
    """One torchrun; its exit status. The checkpoints are in ``folder/checkpoints``, what the ranks said in ``folder/log``."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    soak = {"log": str(folder / "log"), "plan": plan, "first_attempt": first_attempt}
    environment = {
        **os.environ, "SOAK": json.dumps(soak), "SOAK_MARK": mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "--max-restarts", str(restarts), "--monitor-interval", "0.5", "--log-dir", str(folder / "torchrun"),
        str(RANK_PROGRAM), "--steps", str(steps), *MODEL,
        "--accumulate", str(MICRO_BATCHES // world), "--save-every", "1", "--resume", "auto", "--out", str(folder),
    ]
    with open(folder / "output", "a") as output:
        process = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=timeout)
    assert_nothing_left(mark, temporary)
    return process.returncode


def assert_nothing_left(mark, temporary):
    deadline = time.monotonic() + 10.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes are left: {left}"
    files = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    assert not files, f"files are left: {files}"


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


def assert_survivors_named_the_rank(log, plan, world, noticed):
    """For every kill of the plan: the other ranks' errors, and their delays. Returns the longest delay."""
    longest = 0.0
    for attempt, (victim, _, phase, *_) in enumerate(plan):
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


def assert_only_checkpoints_left(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"checkpoints", "log", "output", "tmp", "torchrun"}, names
    assert all(path.name.startswith("step-") for path in (folder / "checkpoints").iterdir())


def soak(folder, kills, seed, world=2, noticed=NOTICED):
    """Returns the run that was left alone, its number of steps, and the longest time in which a death was noticed."""
    plan = plan_of(kills, world, seed)
    steps = plan[-1][1] + 2
    shared_memory = set(os.listdir("/dev/shm"))
    assert train(folder / "alone", world, steps) == 0, (folder / "alone" / "output").read_text()[-5000:]
    status = train(folder / "killed", world, steps, plan, restarts=kills, timeout=60 + 30 * kills)
    assert status == 0, (folder / "killed" / "output").read_text()[-5000:]
    longest = assert_survivors_named_the_rank(read_log(folder / "killed"), plan, world, noticed)
    expected, got = (final_state(folder / name, steps) for name in ("alone", "killed"))
    assert got.keys() == expected.keys() and len(got) > 30
    for key, value in expected.items():
        assert torch.equal(got[key], value), f"{key} differs by {float((got[key] - value).abs().max())}"
    assert_only_checkpoints_left(folder / "killed")
    assert set(os.listdir("/dev/shm")) <= shared_memory
    return folder / "alone", steps, longest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--nproc-per-node", type=int, default=2)
    args = parser.parse_args()
    print(f"{args.kills} kills, seed {args.seed}")
    folder = Path(tempfile.mkdtemp(prefix="shardstep-soak-"))
    try:
        began = time.monotonic()
        _, steps, longest = soak(folder, args.kills, args.seed, args.nproc_per_node)
        print(f"{steps} steps in {time.monotonic() - began:.0f} s, equal to the bit")
        print(f"deaths were noticed within {longest * 1e3:.0f} ms")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
