"""Builds ``native.c`` with the project's C sources and calls it through ctypes. Needs neither torch nor numpy."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, processor

SOURCES = (
    "benchmarks/native.c",
    "csrc/core/balance.c",
    "csrc/core/layout.c",
    "csrc/core/origin.c",
    "csrc/core/status.c",
    *(f"csrc/kernels/{name}.c" for name in ("dispatch", "kernels_portable", "kernels_avx2", "kernels_avx512")),
    *(f"csrc/transport/{name}.c" for name in ("shm", "shm_connect", "shm_wait", "shm_wire")),
)
#: Those of csrc/kernels/dispatch.c. The streaming loops get the whole processor below: they are the limit.
FLAGS = "-std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -fPIC".split()

_double, _int, _long, _pointer = ctypes.c_double, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
SIGNATURES = {
    "bench_open": (_pointer, ctypes.c_char_p, _int, _int, _long, _long, _int),
    "bench_close": (None, _pointer),
    "bench_barrier": (_double, _pointer),
    "bench_rewrite": (None, _pointer),
    "bench_reduce_scatter": (_double, _pointer),
    "bench_all_gather": (_double, _pointer),
    "bench_step": (_double, _pointer),
    "bench_adam": (_double, _pointer, _pointer, _pointer, _pointer, _double, _long),
    "bench_layout": (_double, _int, ctypes.c_int32, _pointer, _long, _pointer, _pointer),
    "bench_stream_sum": (_double, _pointer, _pointer, _int, _long),
    "bench_stream_copy": (_double, _pointer, _pointer, _long),
    "bench_stream_update": (_double, _pointer, _pointer, _pointer, _pointer, _long),
}


def build() -> Path:
    """The path of the library, which is compiled where its sources or the machine have changed."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("the benchmarks build a C library: gcc or cc must be on PATH")
    library = ROOT / "build" / "benchmarks" / f"native-{digest(compiler)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compile_library(compiler, Path(folder)).rename(library)  # builds at the same time do not meet
    return library


def digest(compiler: str) -> str:
    found = hashlib.sha256(repr((compiler, FLAGS, processor())).encode())
    for path in sorted({*(ROOT / source for source in SOURCES), *ROOT.glob("csrc/**/*.h"), Path(__file__)}):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def compile_library(compiler: str, folder: Path) -> Path:
    def compile_one(source: str) -> Path:
        target = folder / f"{Path(source).stem}.o"
        command = [compiler, *FLAGS, f"-I{ROOT / 'csrc'}", "-c", str(ROOT / source), "-o", str(target)]
        tuned = ["-march=native", "-mprefer-vector-width=512"] if source == SOURCES[0] else []
        done = subprocess.run([*command, *tuned], capture_output=True, text=True)
        if done.returncode and tuned:  # not an x86 compiler
            done = subprocess.run([*command, tuned[0]], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    library = folder / "native.so"
    subprocess.run([compiler, "-shared", "-o", str(library), *map(str, objects), "-lm"], check=True)
    return library


def load(library: "str | os.PathLike") -> ctypes.CDLL:
    native = ctypes.CDLL(str(library))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    return native


class Array:
    """``n`` floats that are really in memory, aligned to a page."""

    def __init__(self, n: int):
        self._memory = ctypes.create_string_buffer(4 * n + 8192)
        ctypes.memset(self._memory, 0, len(self._memory))
        self.address = (ctypes.addressof(self._memory) + 4095) // 4096 * 4096


class Ranks:
    """This process as one rank over the shm transport; see ``native.c``. Opening is collective."""

    def __init__(
        self, native: ctypes.CDLL, nonce: str, rank: int, world: int, elements: int, bucket_mb: float, low: bool
    ):
        self.native = native
        bucket = max(1, int(bucket_mb * 2**20) // 4)
        self.handle = native.bench_open(nonce.encode(), rank, world, elements, bucket, int(low))
        if not self.handle:
            raise RuntimeError("the shm transport cannot be opened here")

    def __call__(self, what: str) -> float:
        """Seconds of one ``barrier``, ``reduce_scatter``, ``all_gather`` or ``step``. Collective."""
        seconds = getattr(self.native, f"bench_{what}")(self.handle)
        if seconds < 0:
            raise RuntimeError(f"{what} failed")
        return seconds

    def rewrite(self) -> None:
        self.native.bench_rewrite(self.handle)

    def close(self) -> None:
        self.native.bench_close(self.handle)
