"""One rank of the soak: ``examples/train_text.py`` on a small corpus, which is killed when the plan says so.

    SOAK = {"log": path, "plan": [[rank, steps, phase, seconds, asynchronous], ...]}     (one entry per start of the ranks)

The kill is SIGKILL, so many steps after the start: at once when the phase begins on that rank, or from another process so many
seconds later, whatever the rank is doing by then. How a rank ended is written to the log, a line of JSON each.
"""

import ctypes
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

PR_SET_PDEATHSIG = 1


class Plan:
    """What this start of this rank has in store."""

    def __init__(self, soak, attempt, rank):
        self.log, self.attempt, self.rank = soak["log"], attempt, rank
        self.kill = soak["plan"][attempt] if attempt < len(soak["plan"]) else None
        self.asynchronous = self.kill is not None and self.kill[4]
        self.progress = None  # the example's own record of where it is
        self.first = None  # where that was at the start

    def note(self, **what):
        with open(self.log, "a") as file:
            file.write(json.dumps({"attempt": self.attempt, "rank": self.rank, "time": time.time(), **what}) + "\n")

    def reached(self, phase):
        """Kills this rank, or has it killed soon, when this is where the plan has it."""
        if self.first is None:
            self.first = self.progress.step
        if self.kill is None:
            return
        victim, steps, where, seconds, _ = self.kill
        if (victim, where) != (self.rank, phase) or self.progress.step < self.first + steps:
            return
        self.kill = None
        if seconds == 0:
            self.note(killed=phase)
            os.kill(os.getpid(), signal.SIGKILL)
        line = json.dumps({"attempt": self.attempt, "rank": self.rank, "killed": phase})[:-1]
        program = f"sleep {seconds}; echo '{line}, \"time\": '$(date +%s.%N)'}}' >> {self.log}; kill -9 {os.getpid()}"
        subprocess.Popen(["sh", "-c", program], start_new_session=True)

    def phases(self, owner, name, before=None, after=None):
        """Phases that begin with a call of this function, and with its end."""
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if before is not None:
                self.reached(before)
            result = real(*args, **kwargs)
            if after is not None:
                self.reached(after)
            return result

        setattr(owner, name, call)


def small_corpus():
    generator = random.Random(0)
    words = [bytes(generator.choices(range(97, 123), k=1 + k % 5)) for k in range(50)]
    train, held_out = (bytearray(b" ".join(generator.choices(words, k=k))) for k in (5000, 1000))
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))


def train(soak, attempt, rank, arguments):
    """The example, with these arguments, to its end or this rank's."""
    plan = Plan(soak, attempt, rank)

    class Recorded(train_text.Progress):
        def __init__(self):
            super().__init__()
            plan.progress = self

    train_text.load_corpus = small_corpus
    train_text.baselines = lambda *args: {}
    train_text.held_out_bits = lambda *args: 0.0  # with a collective of torch's, whose error names no rank
    train_text.sample = lambda *args: b""
    train_text.plot = lambda *args: None
    train_text.Progress = Recorded
    plan.phases(train_text.GPT, "forward", before="forward")
    plan.phases(torch.Tensor, "backward", before="backward")
    plan.phases(_engine.Engine, "close", before="reduce-scatter")
    plan.phases(_rules.FusedRule, "step", before="update", after="all-gather")
    plan.phases(checkpoint, "save", before="async save" if plan.asynchronous else "sync save")
    sys.argv = ["train_text.py", *arguments, *(["--async-save"] if plan.asynchronous else [])]
    try:
        train_text.main()
    except shardstep.Error as error:
        plan.note(error=type(error).__name__, named=error.rank, message=str(error))
        raise
    plan.note(finished=True)


def main():
    """Under torchrun."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives a torchrun that is killed
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's: this rank shall end by what it finds out itself
    soak, attempt = json.loads(os.environ["SOAK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    train(soak, attempt, int(os.environ["RANK"]), sys.argv[1:])


if __name__ == "__main__":
    main()
