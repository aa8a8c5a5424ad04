"""Test doubles of a GPU and of NCCL: see doubles.h, which says what they are and are not.

    with fakes.gpus(rank):                          # in a rank's process
        model = shardstep.wrap(model, optimizer, transport="nccl")

While it lasts, models on the CPU count as on a double of a GPU, one for each rank, and NCCL is the double of it.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCES = [*(ROOT / "tests/fakes" / name for name in ("device_double.c", "nccl_double.c")), ROOT / "csrc/core/status.c"]
FLAGS = "-std=c11 -O2 -fPIC -shared -pthread -fvisibility=hidden -Wall -Wextra -Werror".split()


class Counts(ctypes.Structure):
    """Settings of the double of NCCL, and what it has counted in this process (nccl_double.c)."""

    _fields_ = [(name, ctypes.c_int) for name in (
        "version", "busy", "fail_at", "groups", "collectives", "largest_group", "mem_alloc", "mem_free", "registered",
        "deregistered", "windows", "windows_gone", "finalized", "destroyed", "aborted", "outside_group", "errors")]

    def since(self, before: "dict[str, int]") -> "dict[str, int]":
        return {name: value - before[name] for name, value in self.now().items()}

    def now(self) -> "dict[str, int]":
        return {name: getattr(self, name) for name, _ in self._fields_}


@functools.cache
def library() -> pathlib.Path:
    """Both doubles as one shared library, kept by the hash of its sources."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in (*SOURCES, ROOT / "tests/fakes/doubles.h", *sorted((ROOT / "csrc/core").glob("*.h"))):
        digest.update(path.read_bytes())
    folder = pathlib.Path(tempfile.gettempdir()) / f"shardstep-doubles-{os.getuid()}-{digest.hexdigest()[:16]}"
    made = folder / "libdoubles.so"
    if not made.exists():
        folder.mkdir(exist_ok=True, mode=0o700)
        building = folder / f"{os.getpid()}.so"
        command = ["gcc", *FLAGS, f"-I{ROOT / 'csrc'}", "-o", str(building), *map(str, SOURCES)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert built.returncode == 0, built.stderr
        building.rename(made)
    return made


@functools.cache
def loaded() -> ctypes.CDLL:
    doubles = ctypes.CDLL(str(library()))
    doubles.dd_device.restype = ctypes.c_void_p
    return doubles


def nccl() -> Counts:
    return Counts.in_dll(loaded(), "nccl_double_now")


def device() -> object:
    """The capsule that the C core takes."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(loaded().dd_device(), b"shardstep.device", None)


@contextlib.contextmanager
def gpus(rank: int, identity: "str | None" = None, library_path: "str | None" = None):
    from shardstep import _device

    real, named = _device.device_of, os.environ.get("SHARDSTEP_NCCL")
    double = _device.Device(device(), identity or f"double of a GPU {rank}")
    _device.device_of = lambda parameters: double
    os.environ["SHARDSTEP_NCCL"] = library_path or str(library())
    try:
        yield nccl()
    finally:
        _device.device_of = real
        if named is None:
            del os.environ["SHARDSTEP_NCCL"]
        else:
            os.environ["SHARDSTEP_NCCL"] = named


def gpus_for(transport: str, rank: int) -> "contextlib.AbstractContextManager":
    """The doubles where ``transport`` is ``"nccl"``; nothing where it is another."""
    return gpus(rank) if transport == "nccl" else contextlib.nullcontext()


def wrap(rank: int, *arguments, transport: str, **options):
    """shardstep.wrap; over the doubles where ``transport`` is ``"nccl"``."""
    import shardstep

    with gpus_for(transport, rank):
        return shardstep.wrap(*arguments, transport=transport, **options)
