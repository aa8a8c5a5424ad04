"""Builds shared libraries from the C sources, so that tests can call them through ctypes."""

import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

#: The flags csrc/kernels/dispatch.c asks for. Symbols stay visible: the tests look them up.
FLAGS = (
    "-std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -Wall -Wextra -Werror".split()
)


def build_shared(name, sources, flags=()):
    """Compiles ``sources`` (paths relative to the repository root) and returns the path of the shared library.

    Every call builds into a new temporary folder; the caller removes its parent.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("building the test libraries needs gcc or cc on PATH")
    library = Path(tempfile.mkdtemp(prefix="shardstep-test-")) / f"{name}.so"
    command = [compiler, *FLAGS, *flags, f"-I{CSRC}", "-shared", "-o", str(library)]
    command += [str(ROOT / source) for source in sources] + ["-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{built.stderr}")
    return library
