"""``examples/compare.ipynb`` from top to bottom, and :func:`shardstep.launch` in a kernel."""

import base64
import json
import os
import re
import time
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "build" / "compare"  # to be looked at

MEASURED = """
import json
wire = [[name, thrifty, k, count] for (name, thrifty, k), count in bytes_received.items()]
print(json.dumps({"losses": losses, "held": bytes_held, "wire": wire}))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="measures memory, which a sanitizer multiplies")
@pytest.mark.timeout(900)
def test_the_notebook_shows_what_it_says(monkeypatch):
    notebook = nbformat.read(ROOT / "examples" / "compare.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    notebook.cells.append(nbformat.v4.new_code_cell(MEASURED))
    monkeypatch.setenv("COMPARE_SECONDS", "1")
    folder = {"metadata": {"path": str(ROOT / "examples")}}
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3", resources=folder).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    PICTURES.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pictures, start=1):
        (PICTURES / f"{number}.png").write_bytes(base64.b64decode(picture))
    assert any("\r100% |" in output.text for output in outputs if output.get("name") == "stderr")  # rank 0's progress

    measured = json.loads(outputs[-1].text)
    losses = measured["losses"]
    for curve in losses.values():
        assert curve[0] == pytest.approx(8.0, abs=0.05)  # 256 bytes, equally likely
        assert curve[-1] < curve[0]
        assert curve == pytest.approx(losses["DDP"], abs=1e-3)
    # 8 + 8/W, and what else the process came to hold in so short a run; test_memory.py holds the budget to 3 %
    assert 11.6 < measured["held"]["shardstep"] < 14
    assert 15.5 < measured["held"]["DDP"] < 18.5
    for name, thrifty, k, count in measured["wire"]:
        if name != "FSDP2" and thrifty:
            assert count == pytest.approx(4, rel=0.02)  # half of the gradients and half of the weights, or as much
        if name == "DDP" and not thrifty:
            assert count == pytest.approx(4 * k, rel=0.02)
        if name == "shardstep" and not thrifty:
            assert count < 6.1


ENDLESS = """
import os, time
import shardstep

def endless():
    print("rank 0 is", os.getpid(), flush=True)
    time.sleep(600)

shardstep.launch(endless)
"""


def reply_to(client, request: str) -> dict:
    while True:
        message = client.get_shell_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request:
            return message["content"]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.timeout(200)
def test_interrupting_a_cell_ends_its_ranks_and_the_kernel_goes_on():
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    try:
        request = client.execute(ENDLESS)
        text = ""
        while not (found := re.search(r"rank 0 is (\d+)\n", text)):
            message = client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
        pid = int(found[1])
        assert is_running(pid)
        started = time.monotonic()
        manager.interrupt_kernel()
        assert reply_to(client, request)["ename"] == "KeyboardInterrupt"
        assert not is_running(pid)
        assert time.monotonic() - started < 30
        assert reply_to(client, client.execute("1 / 0"))["ename"] == "ZeroDivisionError"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
