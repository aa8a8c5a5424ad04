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
FAKES = ROOT / "tests/fakes"
C = "gcc -std=c11 -O2".split()
CPP = "g++ -std=c++20 -O1 -ffp-contract=off -fno-math-errno -fno-trapping-math -D_GLIBCXX_USE_CXX11_ABI=1 -x c++".split()
COMMON = f"-fPIC -pthread -fvisibility=hidden -Wall -Wextra -Werror -I{ROOT / 'csrc'} -I{ROOT / 'cuda'} -I{FAKES}".split()
SOURCES = [FAKES / "device_double.c", FAKES / "nccl_double.c", FAKES / "kernels_double.cpp", FAKES / "torch_stream.cpp",
           ROOT / "csrc/core/status.c", *sorted((ROOT / "cuda").glob("*.cu"))]


class Counts(ctypes.Structure):
    """Settings of the double of NCCL, and what it has counted in this process (nccl_double.c)."""

    _fields_ = [(name, ctypes.c_int) for name in (
        "version", "busy", "fail_at", "groups", "collectives", "largest_group", "mem_alloc", "mem_free", "registered",
        "deregistered", "windows", "windows_gone", "finalized", "destroyed", "aborted", "outside_group", "errors", "ahead")]

    def since(self, before: "dict[str, int]") -> "dict[str, int]":
        return {name: value - before[name] for name, value in self.now().items()}

    def now(self) -> "dict[str, int]":
        return {name: getattr(self, name) for name, _ in self._fields_}


@functools.cache
def library() -> pathlib.Path:
    """All doubles as one shared library, kept by the hash of its sources."""
    import torch

    package = pathlib.Path(torch.__file__).parent
    included = ("core/device.h", "core/dtype.h", "core/region.h", "core/status.h", "cuda/load.h", "kernels/kernels.h",
                "kernels/numeric.h")
    headers = [*FAKES.glob("*.h"), *(ROOT / "cuda").glob("*.h"), *(ROOT / "csrc" / name for name in included)]
    digest = hashlib.sha256(repr((C, CPP, COMMON, torch.__version__)).encode())
    for path in sorted([*SOURCES, *headers]):
        digest.update(path.read_bytes())
    folder = pathlib.Path(tempfile.gettempdir()) / f"shardstep-doubles-{os.getuid()}-{digest.hexdigest()[:16]}"
    made = folder / "libdoubles.so"
    if made.exists():
        return made
    folder.mkdir(exist_ok=True, mode=0o700)
    include = ["-isystem", str(package / "include")]
    building = []
    for number, source in enumerate(SOURCES):
        compiler = C if source.suffix == ".c" else [*CPP, *(include if source.name == "torch_stream.cpp" else [])]
        target = folder / f"{os.getpid()}-{number}.o"
        command = [*compiler, *COMMON, "-c", str(source), "-o", str(target)]
        building.append((target, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    for _, process in building:
        _, messages = process.communicate(timeout=250)
        assert process.returncode == 0, messages
    linked = folder / f"{os.getpid()}.so"
    objects = [str(target) for target, _ in building]
    libraries = [f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{package / 'lib'}"]
    subprocess.run(["g++", "-shared", "-pthread", "-o", str(linked), *objects, *libraries], check=True, timeout=60)
    linked.rename(made)
    for target in objects:
        os.unlink(target)
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
    _device.device_of = lambda names, parameters: double
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
    """shardstep.wrap; over the doubles where ``transport`` is ``"nccl"``. The test's own process had better have built them."""
    import shardstep

    with gpus_for(transport, rank):
        return shardstep.wrap(*arguments, transport=transport, **options)


@contextlib.contextmanager
def stream(number: int):
    """What this thread's torch does meanwhile counts as work on that stream of the device's double."""
    before = loaded().dd_set_current(number)
    try:
        yield
    finally:
        loaded().dd_set_current(before)
