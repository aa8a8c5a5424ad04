"""Builds ``shardstep._C``: a C11 core, and the few C++ files of csrc/shim that see torch's headers; and the CUDA kernels beside
it (cuda/build_cuda.py), where torch is built with CUDA and there is an nvcc of the same major version.

Everything but the extension is declared in pyproject.toml. The build takes its switches from the environment:

``SHARDSTEP_TORCH``       the torch package to build against (the folder that holds ``version.py``)
``DEBUG=1``               -O0 -g3, assertions on
``SANITIZE=address``      AddressSanitizer and UndefinedBehaviorSanitizer; ``SANITIZE=thread`` for ThreadSanitizer
``SHARDSTEP_WERROR=1``    warnings are errors
``SHARDSTEP_CUDA=0``      no CUDA kernels
``CUDA_HOME``             where nvcc is, if not on PATH
``CC``, ``CXX``, ``CFLAGS``, ``CXXFLAGS``, ``LDFLAGS``    as everywhere
"""

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cuda"))
import build_cuda  # noqa: E402

OLDEST_TORCH = (2, 10)
WERROR = os.environ.get("SHARDSTEP_WERROR", "0") not in ("", "0")
C_FOLDERS = ("core", "cuda", "kernels", "transport", "python")
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("csrc/**/*.h"), *ROOT.glob("cuda/*")) if path.is_file())
# The shim first: a file that includes torch compiles for half a minute, so it had better not start last.
SOURCES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/shim/*.cpp"))] + [
    str(path.relative_to(ROOT)) for folder in C_FOLDERS for path in sorted(ROOT.glob(f"csrc/{folder}/*.c"))
]

SANITIZERS = {
    # vptr wants the type information of torch's classes, which a hidden-visibility build does not share.
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}

NO_TORCH = """no torch to build against.

shardstep compiles against the torch it will run with, so torch has to be installed first. If it is, the build does
not see it, because the installer hides it from builds. Either of these shows it:

    pip install --no-build-isolation .           (needs setuptools in the environment)
    uv pip install --no-build-isolation .        (likewise)

or name its folder: SHARDSTEP_TORCH=/path/to/site-packages/torch pip install ."""


class Torch(NamedTuple):
    """An installed torch, found without importing it."""

    path: Path
    version: str  # as torch.__version__, e.g. "2.13.0+cpu"
    cuda: "str | None"  # as torch.version.cuda, e.g. "13.0"

    @property
    def include_flags(self) -> list[str]:
        include = self.path / "include"
        folders = (include, include / "torch/csrc/api/include")
        return [flag for folder in folders for flag in ("-isystem", str(folder))]


def find_torch() -> Torch:
    path = next((path for path in torch_candidates() if (path / "version.py").is_file()), None)
    if path is None:
        raise PlatformError(NO_TORCH)
    text = (path / "version.py").read_text()
    found = re.search(r"^__version__ = ['\"]((\d+)\.(\d+)[^'\"]*)['\"]", text, re.M)
    if found is None:
        raise PlatformError(f"cannot read torch's version from {path / 'version.py'}")
    version, major, minor = found.groups()
    if (int(major), int(minor)) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise PlatformError(f"torch {version} in {path} is too old: shardstep needs torch {oldest} or newer")
    cuda = re.search(r"^cuda\b[^=\n]*= ['\"]([\d.]+)['\"]", text, re.M)
    return Torch(path, version, cuda and cuda.group(1))


def torch_candidates():
    """Where torch may be, best first. The last two show the environment through pip's isolated builds."""
    named = os.environ.get("SHARDSTEP_TORCH")
    if named:
        if not (Path(named) / "version.py").is_file():
            raise PlatformError(f"SHARDSTEP_TORCH={named} is not a torch package: it holds no version.py")
        yield Path(named).resolve()
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        yield Path(spec.submodule_search_locations[0])
    for key in ("platlib", "purelib"):
        yield Path(sysconfig.get_path(key)) / "torch"


class Toolchain:
    """The compiler commands for one variant of the build (release, debug, or sanitized)."""

    def __init__(self, torch: Torch):
        environment = os.environ.get
        debug = environment("DEBUG", "0") not in ("", "0")
        sanitizer = environment("SANITIZE", "")
        if sanitizer and sanitizer not in SANITIZERS:
            raise PlatformError(f"SANITIZE={sanitizer}: choose from {', '.join(SANITIZERS)}")
        self.variant = (sanitizer or ("debug" if debug else "release")) + ("-werror" if WERROR else "")

        instrument = SANITIZERS.get(sanitizer, [])
        common = ["-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
        common += ["-Icsrc", "-Icuda", "-isystem", sysconfig.get_path("include")]
        common += [f'-DSHARDSTEP_TORCH_VERSION="{torch.version}"']
        if WERROR:
            common += ["-Werror"]
        if debug:
            optimize_c = optimize_cpp = ["-O0", "-g3"]
        elif sanitizer:
            optimize_c = optimize_cpp = ["-O1", "-g", "-fno-omit-frame-pointer"]
        else:
            optimize_c, optimize_cpp = ["-O3", "-DNDEBUG"], ["-O2", "-DNDEBUG"]

        cc, cxx = shlex.split(environment("CC", "gcc")), shlex.split(environment("CXX", "g++"))
        cflags, cxxflags = shlex.split(environment("CFLAGS", "")), shlex.split(environment("CXXFLAGS", ""))
        # Contraction would make a fused multiply-add out of a*b+c on some machines and not on others. The other two
        # change no result; without them a loop with a square root or a comparison in it is not vectorised.
        arithmetic = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
        self.compile_c = [*cc, "-std=c11", *optimize_c, *arithmetic, *common, *instrument, *cflags]
        self.compile_cpp = [*cxx, "-std=c++20", *optimize_cpp, *common, *torch.include_flags, *instrument, *cxxflags]
        # torch 2.10 and later come with the C++11 ABI only, but a distribution's compiler may default to the old one.
        self.compile_cpp += ["-D_GLIBCXX_USE_CXX11_ABI=1"]
        self.link = [*cxx, "-shared", "-pthread", *instrument, *shlex.split(environment("LDFLAGS", ""))]

    def compile_command(self, source: str, target: Path) -> list[str]:
        compiler = self.compile_cpp if source.endswith(".cpp") else self.compile_c
        return [*compiler, "-MMD", "-MF", str(target.with_suffix(".d")), "-c", source, "-o", str(target)]


def is_current(target: Path, prerequisites: list[Path], command: list[str]) -> bool:
    """Whether ``command`` made ``target``, and no prerequisite has changed since."""
    record = target.with_suffix(".command")
    if not target.is_file() or not record.is_file() or record.read_text() != shlex.join(command):
        return False
    made = target.stat().st_mtime_ns
    return all(path.is_file() and path.stat().st_mtime_ns <= made for path in prerequisites)


def make(target: Path, command: list[str]) -> None:
    record = target.with_suffix(".command")
    record.unlink(missing_ok=True)
    print(shlex.join(command), flush=True)
    started = time.time_ns()
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        target.unlink(missing_ok=True)
        raise CompileError(f"cannot make {target.name}; the compiler's messages are above")
    os.utime(target, ns=(started, started))  # a source saved while it was compiling is newer than its object
    record.write_text(shlex.join(command))


def included_files(target: Path) -> list[Path]:
    """What the object was made from, as the compiler saw it (system headers, torch's among them, left out)."""
    dependencies = target.with_suffix(".d")
    if not dependencies.is_file():
        return []
    rule = dependencies.read_text().replace("\\\n", " ")
    return [ROOT / name for name in shlex.split(rule.partition(":")[2])]


class BuildExtension(build_ext):
    """Compiles with one command per language, in parallel, and only what changed."""

    def run(self):
        super().run()
        torch = find_torch()
        why_not = build_cuda.left_out(torch.version, torch.cuda)
        if why_not is not None:
            print(f"without the CUDA kernels: {why_not}", flush=True)
            return
        print("building the CUDA kernels", flush=True)
        try:
            library, _ = build_cuda.build(build_cuda.folder(WERROR), WERROR)
        except RuntimeError as error:
            raise CompileError(str(error)) from error
        shutil.copy(library, Path(self.get_ext_fullpath("shardstep._C")).parent)

    def build_extension(self, ext):
        if sys.platform != "linux":
            raise PlatformError(f"shardstep runs on Linux only for now, not on {sys.platform}")
        torch = find_torch()
        toolchain = Toolchain(torch)
        print(f"building {ext.name} ({toolchain.variant}) against torch {torch.version} in {torch.path}", flush=True)

        # Not setuptools' own folder for objects: that is a new temporary one in every editable install.
        objects = ROOT / "build" / "objects" / f"{sys.implementation.cache_tag}-{toolchain.variant}"
        objects.mkdir(parents=True, exist_ok=True)
        with open(objects / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one checkout take turns
            library = self.link(self.compile(ext, toolchain, objects), toolchain, torch, objects)
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(library), str(target))

    def compile(self, ext, toolchain: Toolchain, objects: Path) -> list[Path]:
        def compile_one(source: str) -> Path:
            target = objects / (source.replace("/", "-") + ".o")
            command = toolchain.compile_command(source, target)
            if not is_current(target, [ROOT / source, *included_files(target)], command):
                make(target, command)
            return target

        with ThreadPoolExecutor(self.parallel or min(4, os.cpu_count() or 1)) as pool:
            return list(pool.map(compile_one, ext.sources))

    def link(self, objects: list[Path], toolchain: Toolchain, torch: Torch, folder: Path) -> Path:
        torch_lib = torch.path / "lib"
        search = ["$ORIGIN/../torch/lib"]  # torch is a neighbour in site-packages ...
        if self.editable_mode or self.inplace:
            search.append(str(torch_lib))  # ... unless the package is used from its source tree
        target = folder / "_C.so"
        command = [*toolchain.link, *map(str, objects), f"-L{torch_lib}"]
        command += [f"-Wl,-rpath,{path}" for path in search]
        command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-lm", "-ldl", "-o", str(target)]
        if not is_current(target, objects, command):
            make(target, command)
        return target


setup(
    ext_modules=[Extension("shardstep._C", sources=SOURCES, depends=HEADERS)],
    cmdclass={"build_ext": BuildExtension},
)
