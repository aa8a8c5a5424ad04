"""Compiles the CUDA kernels with nvcc: for setup.py, and by itself.

    python cuda/build_cuda.py            (make cuda)

Every architecture that this nvcc knows of ARCHITECTURES gets code of its own. Those that come between or after them get the PTX
of the oldest, which their driver compiles: the kernels use nothing newer, and memory limits them anyway. CUDA's run time is
linked statically, and nothing but the functions of shardstep_cuda.h is exported.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("cuda/*.cu"))
HEADERS = [*sorted(ROOT.glob("cuda/*.h")), *(ROOT / "csrc" / name for name in ("kernels/numeric.h", "kernels/kernels.h"))]
HEADERS.append(ROOT / "csrc/core/dtype.h")
ARCHITECTURES = (75, 80, 90, 100, 120)
LIBRARY = "_cuda.so"

# Without --fmad=false nvcc would make fused multiply-adds where the rule has none.
FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Icuda", "-Icsrc", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
WERROR = ["-Werror=all-warnings", "-Xcompiler=-Werror"]


def find_nvcc() -> "str | None":
    """nvcc of CUDA_HOME, or on PATH."""
    home = os.environ.get("CUDA_HOME")
    named = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    return named or shutil.which("nvcc")


def folder(werror: bool) -> Path:
    """Where the library is built by default: a folder for each set of flags, or two users would build in turns."""
    return ROOT / "build" / ("cuda-werror" if werror else "cuda")


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cuda_version(nvcc: str) -> str:
    """Of the compiler, e.g. "13.0"."""
    found = re.search(r"release (\d+\.\d+)", _output_of([nvcc, "--version"]))
    if found is None:
        raise RuntimeError(f"cannot read the version of {nvcc}")
    return found.group(1)


def architectures(nvcc: str) -> list[int]:
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", _output_of([nvcc, "--list-gpu-arch"]))}
    return [number for number in ARCHITECTURES if number in known]


def left_out(torch_version: str, torch_cuda: "str | None") -> "str | None":
    """Why an installation beside this torch goes without the kernels; None when it has them."""
    nvcc = find_nvcc()
    if os.environ.get("SHARDSTEP_CUDA") == "0":
        return "SHARDSTEP_CUDA=0"
    if torch_cuda is None:
        return f"torch {torch_version} is built without CUDA"
    if nvcc is None:
        return "there is no nvcc in CUDA_HOME or on PATH"
    version = cuda_version(nvcc)
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return f"torch {torch_version} is built with CUDA {torch_cuda}, and {nvcc} is of CUDA {version}"
    return None


def compile_commands(nvcc: str, out: Path, werror: bool) -> list[list[str]]:
    """One per source; ptxas says what every kernel needs."""
    found = architectures(nvcc)
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in found]
    code.append(f"-gencode=arch=compute_{found[0]},code=compute_{found[0]}")
    flags = [*FLAGS, *code, "-Xptxas=-v", *(WERROR if werror else [])]
    return [[nvcc, *flags, "-c", str(source), "-o", str(out / f"{source.stem}.o")] for source in SOURCES]


def build(out: Path, werror: bool) -> tuple[Path, str]:
    """Builds the library into ``out`` unless it is there and current; returns its path and ptxas' report.

    Raises RuntimeError with the compiler's messages."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("the CUDA kernels need nvcc: in CUDA_HOME/bin, or on PATH")
    out.mkdir(parents=True, exist_ok=True)
    library, report, record = out / LIBRARY, out / "ptxas.txt", out / "made-from"
    commands = compile_commands(nvcc, out, werror)
    objects = [command[-1] for command in commands]
    link = [nvcc, "-shared", "-cudart=static", "-Xlinker=--exclude-libs,ALL", "-o", str(library), *objects]
    made_from = hashlib.sha256(repr([cuda_version(nvcc), *commands, link]).encode())
    for path in (*SOURCES, *HEADERS):
        made_from.update(path.read_bytes())
    if library.is_file() and report.is_file() and record.is_file() and record.read_text() == made_from.hexdigest():
        return library, report.read_text()

    def run(command: list[str]) -> str:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}")
        return done.stdout

    record.unlink(missing_ok=True)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        output = "".join(pool.map(run, commands))
    run(link)
    report.write_text(output)
    record.write_text(made_from.hexdigest())
    return library, output


def figures(report: str) -> list[tuple[str, str, int, int, int]]:
    """Of every kernel in ptxas' report: its name, the architecture, registers, bytes of stack, bytes of spills."""
    found = []
    for part in report.split("Compiling entry function ")[1:]:
        name, architecture = re.match(r"'(\w+)' for '(\w+)'", part).groups()
        stack, stores, loads = map(int, re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        found.append((name, architecture, registers, stack, stores + loads))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the library (default build/cuda, or build/cuda-werror)")
    parser.add_argument("--werror", action="store_true", help="warnings are errors")
    args = parser.parse_args()
    try:
        library, report = build((args.out or folder(args.werror)).resolve(), args.werror)
    except RuntimeError as error:
        sys.exit(str(error))
    kernels = figures(report)
    print(f"{library}: {len(kernels)} kernels, at most {max(k[2] for k in kernels)} registers, "
          f"{sum(k[4] for k in kernels)} bytes of spills")


if __name__ == "__main__":
    main()
