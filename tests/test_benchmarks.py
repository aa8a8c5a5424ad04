"""The benchmarks run, and write what they say they write: at sizes that measure nothing, all at the same time."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from c_programs import compiler

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="they read /proc"),
    pytest.mark.skipif(compiler() is None, reason="they need a C compiler"),
]

ROOT = Path(__file__).resolve().parent.parent
TINY = "--model tiny --world 2 --dtype float32 --rounds 1 --rest-seconds 0.05"
RUNS = {
    "steps": f"compare {TINY} --accumulate 1 2 --peers shardstep ddp --measure time",
    "memory": f"compare {TINY} --accumulate 4 --peers shardstep --measure memory",
    "transport": "transport --world 2 --sizes 64e3 --rounds 1 --repetitions 2 --peers gloo",
    "update": "update --world 1 --elements 4096 --model tiny --parameters 100 --rounds 1 --repetitions 2",
    "gpu": "gpu --device cpu --elements 4096 --models tiny --accumulate 2 --peers shardstep fsdp2 --quick",
    "scale": "scale --parameters 1000 --ranks 1 512 --elements 10000 --world 2 --rounds 1 --repetitions 2",
}
PARAMETERS = 41_472  # of the tiny model


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Every run, by name: its process and the folder of its results."""
    runs = {}
    for name, line in RUNS.items():
        script, *arguments = line.split()
        out = tmp_path_factory.mktemp(name)
        command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments, "--out", str(out)]
        runs[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), out
    yield runs
    for process, _ in runs.values():
        process.kill()


@pytest.fixture
def finished(started):
    def wait(name: str, picture: bool = True):
        """What a run printed, and its JSON."""
        process, out = started[name]
        text, _ = process.communicate(timeout=240)
        assert process.returncode == 0, text
        script = RUNS[name].split()[0]
        assert (out / f"{script}.png").exists() == picture
        results = json.loads((out / f"{script}.json").read_text())
        assert results["machine"]["torch"] and results["machine"]["cores"] == os.cpu_count()
        return text, results

    return wait


def test_compare(finished):
    text, results = finished("steps")
    assert "tiny, W = 2, K = 1, float32" in text and "step to the best peer's" in text
    assert [point["accumulate"] for point in results["points"]] == [1, 2]
    for point in results["points"]:
        peers = point["peers"]
        assert list(peers) == ["local", "shardstep", "ddp"]
        assert peers["local"]["overhead"] == 0 and peers["local"]["wire_bytes"] < 4096
        for name in ("shardstep", "ddp"):
            assert 0 < peers[name]["update"] < peers[name]["minimum"]
            # Reduce-scatter and all-gather over two ranks: 4 bytes per parameter, and little else.
            assert 4 * PARAMETERS <= peers[name]["wire_bytes"] < 4.5 * PARAMETERS


def test_compare_of_memory(finished):
    text, results = finished("memory", picture=False)
    assert "tiny, W = 2, float32: memory to budget" in text
    found = results["points"][0]["peers"]["shardstep"]
    assert found["memory_bytes"] > 12 * PARAMETERS
    assert found["memory_to_budget"] == pytest.approx(found["memory_per_parameter"] / 12)


def test_transport(finished):
    _, results = finished("transport")
    (point,) = results["points"]
    assert point["world"] == 2 and point["bytes"] == 64e3
    for peer in ("shm", "gloo", "limit"):
        for operation in ("reduce_scatter fp32", "all_gather fp32", "all_gather bf16"):
            assert 0 < point["minima"][peer][operation] <= point["medians"][peer][operation]


def test_update(finished):
    _, results = finished("update")
    assert set(results["update"][0]["minima"]) == {"shardstep", "torch fused", "torch foreach", "limit"}
    assert set(results["micro_batches"][0]["minima"]) == {"bare", "hooked in Python", "wrapped"}
    assert results["wrap"][0]["parameters"] == 100 and results["wrap"][0]["seconds"] > 0


def test_scale(finished):
    _, results = finished("scale")
    for point in results["layout"]:
        assert 0 <= point["padding"] < 0.5
    (step,) = results["steps"]
    assert step["predicted"] > 0 and step["measured"] > 0


def test_gpu_tried_on_the_cpu(finished):
    text, results = finished("gpu")
    assert text.startswith("on the CPU, by the kernels' source compiled for it")
    assert results["gpu"] is None and results["verdicts"] == []
    assert [point["dtype"] for point in results["update"]] == ["float32", "bfloat16"]
    for point in results["update"]:
        assert set(point["minima"]) == {"shardstep", "torch fused", "copy"} and all(point["minima"].values())
    (step,) = results["steps"]
    assert list(step["peers"]) == ["shardstep", "fsdp2"] and step["tokens"] == 2 * 4 * 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == f"not measured: torch {torch.__version__} finds no GPU here\n"
    assert done.returncode != 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["compare", "transport", "update", "scale", "gpu"])
def test_help(name):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--quick" in text and "--out" in text
