"""The benchmarks run, and write what they say they write: at sizes that measure nothing."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from c_programs import compiler

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="they read /proc"),
    pytest.mark.skipif(compiler() is None, reason="they need a C compiler"),
]

ROOT = Path(__file__).resolve().parent.parent


def run(out, name, *arguments):
    """What ``benchmarks/<name>.py`` printed, and its JSON."""
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--rounds", "1", "--out", out, *arguments]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / f"{name}.png").stat().st_size > 5000
    results = json.loads((out / f"{name}.json").read_text())
    assert results["machine"]["torch"] and results["machine"]["cores"] == os.cpu_count()
    return done.stdout, results


def test_compare(tmp_path):
    text, results = run(tmp_path, "compare", "--model", "tiny", "--peers", "shardstep", "ddp", "--steps", 2)
    assert "tiny, W = 2, K = 1, float32" in text
    peers = results["points"][0]["peers"]
    assert list(peers) == ["local", "shardstep", "ddp"]
    parameters = peers["ddp"]["memory_bytes"] / peers["ddp"]["memory_per_parameter"]
    for name in ("shardstep", "ddp"):
        assert 0 < peers[name]["update"] < peers[name]["minimum"]
        # Reduce-scatter and all-gather over two ranks: 4 bytes per parameter, and little else.
        assert 4 * parameters <= peers[name]["wire_bytes"] < 4.5 * parameters


def test_transport(tmp_path):
    _, results = run(
        tmp_path, "transport", "--world", 2, "--sizes", 64e3, "--repetitions", 2, "--peers", "gloo"
    )
    (point,) = results["points"]
    assert point["world"] == 2 and point["bytes"] == 64e3
    for peer in ("shm", "gloo", "limit"):
        for operation in ("reduce_scatter fp32", "all_gather fp32", "all_gather bf16"):
            assert 0 < point["minima"][peer][operation] <= point["medians"][peer][operation]


def test_update(tmp_path):
    _, results = run(
        tmp_path, "update", "--world", 1, "--elements", 4096, "--model", "tiny", "--parameters", 100, "--repetitions", 2
    )
    assert set(results["update"][0]["minima"]) == {"shardstep", "torch fused", "torch foreach", "limit"}
    assert set(results["micro_batches"][0]["minima"]) == {"bare", "hooked in Python", "wrapped"}
    assert results["wrap"][0]["parameters"] == 100 and results["wrap"][0]["seconds"] > 0


def test_scale(tmp_path):
    sizes = ("--parameters", 1000, "--ranks", 1, 512, "--elements", 10000)
    _, results = run(tmp_path, "scale", *sizes, "--world", 2, "--repetitions", 2)
    for point in results["layout"]:
        assert 0 <= point["padding"] < 0.5
    (step,) = results["steps"]
    assert step["predicted"] > 0 and step["measured"] > 0


@pytest.mark.parametrize("name", ["compare", "transport", "update", "scale"])
def test_help(name):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--quick" in text and "--out" in text
