"""The example's options. That it trains is seen by make train, make soak and tests/gpu."""

import sys

import pytest
import torch
from c_build import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import train_text  # noqa: E402


def refusal(monkeypatch, capsys, *arguments, gpus=0, ranks=None):
    """What the user is told."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["train_text.py", *arguments])
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit):
        train_text.parse_arguments()
    return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]


def test_cuda_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal(monkeypatch, capsys, "--device", "cuda") == (
        f"--device cuda: torch {torch.__version__}, built without CUDA, finds no GPU here; use --device cpu"
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert refusal(monkeypatch, capsys, "--device", "cuda") == (
        f"--device cuda: torch {torch.__version__} finds no GPU here; use --device cpu"
    )


def test_more_ranks_than_gpus(monkeypatch, capsys):
    expected = "--device cuda: 2 ranks need a GPU each, and there are 1; use --nproc-per-node 1"
    assert refusal(monkeypatch, capsys, "--device", "cuda", gpus=1) == expected
    assert refusal(monkeypatch, capsys, "--device", "cuda", "--nproc-per-node", "1", gpus=1, ranks=2) == expected


def test_an_unknown_device(monkeypatch, capsys):
    assert "invalid choice: 'gpu'" in refusal(monkeypatch, capsys, "--device", "gpu")


def test_checkpoints_are_for_shardstep(monkeypatch, capsys):
    assert refusal(monkeypatch, capsys, "--impl", "ddp", "--resume", "auto") == (
        "--save-every and --resume are for --impl shardstep"
    )
