"""Builds C programs of the core and its tests."""

import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build_program(name: str, sources: list[str], flags: tuple[str, ...] = ()) -> Path:
    """Compiles ``sources`` (relative to the repository) to a program in a new temporary folder; returns its path.

    ``flags`` come after the usual ones. The caller removes the folder, ``path.parent``.
    """
    program = Path(tempfile.mkdtemp(prefix="shardstep-")) / name
    command = [compiler() or "cc", *FLAGS, "-Icsrc", "-Itests/c", "-pthread", *flags, "-o", str(program), *sources, "-lm"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode != 0:
        shutil.rmtree(program.parent)
        raise RuntimeError(f"{' '.join(command)}\n{built.stderr}")
    return program
