"""Builds C programs of the core and its tests."""

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build_program(name: str, sources: list[str], flags: tuple[str, ...] = ()) -> Path:
    """Compiles ``sources`` (relative to the repository) to a program in a new temporary folder; returns its path.

    ``flags`` come after the usual ones. The caller removes the folder, ``path.parent``.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardstep-"))
    start = [compiler() or "cc", *FLAGS, "-Icsrc", "-Itests/c", "-pthread", *flags]

    def run(command: list[str]) -> None:
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{built.stderr}")

    try:
        objects = [str(folder / f"{number}.o") for number in range(len(sources))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source, target: run([*start, "-c", source, "-o", target]), sources, objects))
        run([*start, "-o", str(folder / name), *objects, "-lm"])
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder / name
