"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    train: torch.Tensor  # uint8, one dimension
    held_out: torch.Tensor

    def windows(self, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Training windows at these positions: inputs and, one byte further on, targets; int64 ``(n, length)``."""
        return _windows(self.train, starts, length)

    def held_out_windows(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``count`` windows spread evenly over the held-out text, the same at every call."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, count, dtype=torch.float64).long()
        return _windows(self.held_out, starts, length)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    window = text[starts[:, None] + torch.arange(length + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def load_corpus() -> Corpus:
    """About one file in ten is held out; which one depends on its name alone."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts):
            part = held_out if zlib.crc32(name.as_posix().encode()) % 10 == 0 else train
            part += path.read_bytes()
    if not held_out:
        raise SystemExit(f"no Python sources in {root}: this Python comes without its standard library's text")
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))


def baselines(train: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Bits per byte on these windows of byte counts with add-one smoothing, fitted on ``train``.

    ``unigram`` knows how frequent each byte is; ``bigram`` how frequent after the byte before it.
    """
    text = train.long()
    unigram = torch.bincount(text, minlength=256).double() + 1
    bigram = torch.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256).view(256, 256).double() + 1
    return {
        "unigram": -(unigram / unigram.sum()).log2()[targets].mean().item(),
        "bigram": -(bigram / bigram.sum(1, keepdim=True)).log2()[inputs, targets].mean().item(),
    }
