"""Builds C programs of the core and its tests."""

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
C, CPP = ("-std=c11",), ("-std=c++17", "-x", "c++")


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build_program(name: str, sources: list[str], flags: tuple[str, ...] = ()) -> Path:
    """Compiles ``sources`` (relative to the repository) to a program in a new temporary folder; returns its path.

    What does not end in .c is C++. ``flags`` come after the usual ones. The caller removes the folder, ``path.parent``.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardstep-"))
    common = [*FLAGS, "-Icsrc", "-Icuda", "-Itests/c", "-pthread", *flags]

    def run(command: list[str]) -> None:
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{built.stderr}")

    def compile_one(source: str, target: str) -> None:
        language = [compiler() or "cc", *C] if source.endswith(".c") else ["g++", *CPP]
        run([*language, *common, "-c", source, "-o", target])

    try:
        objects = [str(folder / f"{number}.o") for number in range(len(sources))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        linker = compiler() or "cc" if all(source.endswith(".c") for source in sources) else "g++"
        run([linker, *common, "-o", str(folder / name), *objects, "-lm"])
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder / name
