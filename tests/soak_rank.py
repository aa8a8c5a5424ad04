"""One rank of the soak: ``examples/train_text.py`` on a small corpus, which is killed when the plan says so.

    SOAK = {"log": path, "plan": [[rank, step, phase, seconds, asynchronous], ...]}     (one entry per start of the ranks)

The kill is SIGKILL, at once when the phase begins on that rank, or from another process so many seconds later, whatever the
rank is doing by then. How a rank ended is written to the log, a line of JSON each.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import shardstep
import torch
from shardstep import _engine, _rules, checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import train_text  # noqa: E402
from corpus import Corpus  # noqa: E402

soak = json.loads(os.environ["SOAK"])
attempt = soak["first_attempt"] + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])
planned = soak["plan"][attempt] if attempt < len(soak["plan"]) else None
runs = []  # the example's own record of where it is


def note(**what):
    with open(soak["log"], "a") as file:
        file.write(json.dumps({"attempt": attempt, "rank": rank, "time": time.time(), **what}) + "\n")


def reached(phase):
    """Kills this rank, or has it killed soon, when this is where the plan has it."""
    global planned
    if planned is None or runs[0].step + 1 < planned[1] or planned[:1] + planned[2:3] != [rank, phase]:
        return
    seconds, planned = planned[3], None
    if seconds == 0:
        note(killed=phase)
        os.kill(os.getpid(), signal.SIGKILL)
    line = json.dumps({"attempt": attempt, "rank": rank, "killed": phase})[:-1]
    program = f"sleep {seconds}; echo '{line}, \"time\": '$(date +%s.%N)'}}' >> {soak['log']}; kill -9 {os.getpid()}"
    subprocess.Popen(["sh", "-c", program], start_new_session=True)


def phases(owner, name, before=None, after=None):
    """Phases that begin with a call of this function, and with its end."""
    real = getattr(owner, name)

    def call(*args, **kwargs):
        if before is not None:
            reached(before)
        result = real(*args, **kwargs)
        if after is not None:
            reached(after)
        return result

    setattr(owner, name, call)


def small_corpus():
    generator = random.Random(0)
    words = [bytes(generator.choices(range(97, 123), k=1 + k % 5)) for k in range(50)]
    train, held_out = (bytearray(b" ".join(generator.choices(words, k=k))) for k in (5000, 1000))
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))


class Recorded(train_text.Progress):
    def __init__(self):
        super().__init__()
        runs.append(self)


def main():
    train_text.load_corpus = small_corpus
    train_text.baselines = lambda *args: {}
    train_text.held_out_bits = lambda *args: 0.0  # with a collective of torch's, whose error names no rank
    train_text.sample = lambda *args: b""
    train_text.plot = lambda *args: None
    train_text.Progress = Recorded
    phases(train_text.GPT, "forward", before="forward")
    phases(torch.Tensor, "backward", before="backward")
    phases(_engine.Engine, "close", before="reduce-scatter")
    phases(_rules.FusedRule, "step", before="update", after="all-gather")
    asynchronous = planned is not None and planned[4]
    phases(checkpoint, "save", before="async save" if asynchronous else "sync save")
    if asynchronous:
        sys.argv.append("--async-save")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: this rank shall end by what it finds out itself
    try:
        train_text.main()
    except shardstep.Error as error:
        note(error=type(error).__name__, named=error.rank, message=str(error))
        raise
    note(finished=True)


if __name__ == "__main__":
    main()
