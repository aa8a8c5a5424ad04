"""The shared-memory transport in C: ranks as threads under the sanitizers, and as processes that die."""

import platform
import shutil
import subprocess

import pytest
from c_programs import build_program, compiler

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="memfd and futex are Linux"),
    pytest.mark.skipif(compiler() is None, reason="needs a C compiler"),
]

PROTOCOL = ["csrc/core/origin.c", "csrc/core/status.c", "csrc/transport/shm.c", "csrc/transport/shm_wait.c"]
WIRE = ["csrc/transport/shm_connect.c", "csrc/transport/shm_wire.c"]
THREADS = ["tests/c/stress_shm.c", "tests/c/thread_wire.c", *PROTOCOL]
PROCESSES = ["tests/c/test_shm_processes.c", *WIRE, *PROTOCOL]

SANITIZED = ("-O1", "-g")
THREAD_SANITIZER = (*SANITIZED, "-fsanitize=thread")
ADDRESS_SANITIZER = (*SANITIZED, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run(sources, flags, *arguments, seconds):
    program = build_program("program", sources, flags)
    try:
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=seconds)
    finally:
        shutil.rmtree(program.parent)
    report = done.stdout + done.stderr
    if flags and "unexpected memory mapping" in report:
        pytest.skip("this kernel's address space layout is not supported by the sanitizer")
    assert done.returncode == 0 and done.stdout == "ok\n", report[-4000:]
    assert done.stderr == ""


def test_random_rounds_between_threads_give_the_closed_form():
    run(THREADS, (), 500, seconds=60)


def test_protocol_has_no_data_race():
    run(THREADS, THREAD_SANITIZER, 100, 100, seconds=60)


def test_protocol_neither_leaks_nor_oversteps():
    run(THREADS, ADDRESS_SANITIZER, 120, 200, seconds=60)


def test_ranks_as_processes_that_are_killed_stopped_or_fail():
    run(PROCESSES, (), 100, seconds=60)


def test_wire_between_processes_neither_leaks_nor_oversteps():
    run(PROCESSES, ADDRESS_SANITIZER, 20, seconds=60)
