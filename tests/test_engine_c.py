"""The engine in C, without a framework: ranks as threads, random programs against a closed form, under the sanitizers."""

import pytest
from c_programs import compiler
from test_shm_c import ADDRESS_SANITIZER, PROTOCOL, THREAD_SANITIZER, run

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

KERNELS = [f"csrc/kernels/{name}.c" for name in ("dispatch", "kernels_portable", "kernels_avx2", "kernels_avx512")]
CORE = [
    f"csrc/core/{name}.c"
    for name in ("balance", "layout", "engine", "window", "message", "close", "norms", "pieces", "update", "work", "clip")
]
ENGINE = ["tests/c/stress_engine.c", "tests/c/thread_wire.c", *CORE, *KERNELS, *PROTOCOL]
FLAGS = ("-fno-math-errno", "-fno-trapping-math")


def test_random_programs_give_the_closed_form():
    run(ENGINE, FLAGS, 6000, 1, seconds=120)


def test_engine_has_no_data_race():
    run(ENGINE, (*FLAGS, *THREAD_SANITIZER), 100, 4, seconds=120)


def test_engine_neither_leaks_nor_oversteps():
    run(ENGINE, (*FLAGS, *ADDRESS_SANITIZER), 300, 5, seconds=120)
