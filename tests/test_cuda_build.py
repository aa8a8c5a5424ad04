"""What can be known of the CUDA kernels without a GPU: they compile without a warning for every architecture, export what the
header says and nothing else, keep everything in registers, and move 16 bytes at a time."""

import itertools
import os
import re
import shutil
import subprocess

import pytest
from c_programs import build_program
from cuda_kernels import ROOT, build_cuda

nvcc = build_cuda.find_nvcc()
needs_nvcc = pytest.mark.skipif(nvcc is None, reason="needs nvcc")
HEADER = ROOT / "cuda/shardstep_cuda.h"


@pytest.fixture(scope="module")
def built():
    """The library, with warnings as errors, and ptxas' report."""
    return build_cuda.build(build_cuda.folder(werror=True), werror=True)


def declared():
    return set(re.findall(r"^SS_CUDA_EXPORT .*?(ss_cuda_\w+)\(", HEADER.read_text(), re.M))


@needs_nvcc
def test_exports_are_those_of_the_header(built):
    table = re.findall(r" T (\w+)$", subprocess.run(
        ["nm", "-D", "--defined-only", str(built[0])], capture_output=True, text=True, check=True).stdout, re.M)
    assert set(table) == declared() and len(table) == len(declared())


def test_the_loaders_list_is_that_of_the_header():
    listed = HEADER.read_text().partition("#define SS_CUDA_FUNCTIONS(X)")[2]
    assert {f"ss_cuda_{name}" for name in re.findall(r"X\((\w+)\)", listed)} == declared()


@needs_nvcc
def test_no_kernel_spills_or_needs_a_stack(built, capsys):
    kernels = build_cuda.figures(built[1])
    demangled = subprocess.run(["c++filt"], input="\n".join(k[0] for k in kernels), capture_output=True, text=True).stdout
    rows: dict[str, dict[str, int]] = {}
    for name, (_, architecture, registers, stack, spills) in zip(demangled.splitlines(), kernels, strict=True):
        name = name.partition("ss_blocks<")[2].rpartition(">(")[0].strip()
        rows.setdefault(name, {})[architecture] = registers
        assert stack == 0 and spills == 0, f"{name} on {architecture}: {stack} bytes of stack, {spills} of spills"
    names = [f"sm_{number}" for number in build_cuda.architectures(nvcc)]
    with capsys.disabled():
        print("\nregisters per thread".ljust(33), *(name.rjust(7) for name in names))
        for name, registers in sorted(rows.items()):
            print(name.ljust(32), *(str(registers[name]).rjust(7) for name in names))
    assert "update<adam, bf16, f32>" in rows
    assert all(max(registers.values()) <= 80 for registers in rows.values())  # three blocks of 256 threads reside


def images(library):
    """(is PTX, architecture) of what is in the library's fat binary: magic number, sizes, then one header for each image."""
    data, found, at = library.read_bytes(), [], 0
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        end = at + 16 + int.from_bytes(data[at + 8 : at + 16], "little")
        at += int.from_bytes(data[at + 6 : at + 8], "little")
        while at < end:
            kind = int.from_bytes(data[at : at + 2], "little")
            header, size = int.from_bytes(data[at + 4 : at + 8], "little"), int.from_bytes(data[at + 8 : at + 16], "little")
            found.append((kind == 1, int.from_bytes(data[at + 28 : at + 32], "little")))
            at += header + size
    return found


@needs_nvcc
def test_every_architecture_and_ptx_of_the_oldest_are_in_the_library(built):
    architectures = build_cuda.architectures(nvcc)
    if int(build_cuda.cuda_version(nvcc).split(".")[0]) >= 13:
        assert architectures == [75, 80, 90, 100, 120]
    assert set(images(built[0])) == {(False, number) for number in architectures} | {(True, architectures[0])}


@needs_nvcc
def test_memory_is_accessed_16_bytes_at_a_time(tmp_path):
    ptx = tmp_path / "update.ptx"
    source = str(ROOT / "cuda/update.cu")
    subprocess.run([nvcc, *build_cuda.FLAGS, "-arch=compute_75", "-ptx", source, "-o", str(ptx)], cwd=ROOT, check=True)
    found = {}
    for entry in re.split(r"\.entry ", ptx.read_text())[1:]:
        kernel = re.search(r"6updateI\d(adam|sgd)\d(none|bf16|f16)(?:\d(f32|bf16)|S\w?_)E", entry.partition("(")[0])
        if kernel:
            rule, low, grad = kernel.groups()
            found[rule, low, grad or low] = [len(re.findall(rf"\b{op}\.global(?:\.wb)?\.v4\.", entry)) for op in ("ld", "st")]
    expected = {}
    for rule, low, grad in itertools.product(("adam", "sgd"), ("none", "bf16", "f16"), ("f32", "bf16")):
        written = 2 * (1 + {"adam": 3, "sgd": 1}[rule]) + (low != "none")  # 8 elements of weights, states, low weights
        expected[rule, low, grad] = [written + {"f32": 2, "bf16": 1}[grad], written]
    assert found == expected


def test_the_header_is_c():
    source = '#include "shardstep_cuda.h"\n'
    flags = ["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-Icuda"]
    subprocess.run(["gcc", *flags, "-fsyntax-only", "-x", "c", "-"], input=source, text=True, check=True, cwd=ROOT)


def test_same_bits_as_the_cpu_kernels_on_random_tables_under_sanitizers():
    flags = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-math-errno")
    sources = ["csrc/kernels/kernels_portable.c", "tests/c/test_cuda_on_host.cpp"]
    program = build_program("program", [*(f"cuda/{path.name}" for path in build_cuda.SOURCES), *sources], flags)
    done = subprocess.run([str(program), "200"], capture_output=True, text=True, timeout=120)
    shutil.rmtree(program.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "200 turns\n"


# ---- What an installation does ----


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """CUDA_HOME with an nvcc that says it is of CUDA 12.8."""
    compiler = tmp_path / "bin/nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("SHARDSTEP_CUDA", raising=False)
    return str(compiler)


def test_installed_with_kernels_beside_a_torch_of_the_same_cuda(fake_nvcc):
    assert build_cuda.left_out("2.11.0+cu126", "12.6") is None


def test_installed_without_kernels_beside_another_torch(fake_nvcc, monkeypatch):
    assert build_cuda.left_out("2.13.0+cpu", None) == "torch 2.13.0+cpu is built without CUDA"
    assert build_cuda.left_out("2.11.0", "13.0") == (
        f"torch 2.11.0 is built with CUDA 13.0, and {fake_nvcc} is of CUDA 12.8"
    )
    monkeypatch.setenv("SHARDSTEP_CUDA", "0")
    assert build_cuda.left_out("2.11.0", "12.8") == "SHARDSTEP_CUDA=0"


def test_installed_without_kernels_where_there_is_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_cuda.left_out("2.11.0", "13.0") == "there is no nvcc in CUDA_HOME or on PATH"
    with pytest.raises(RuntimeError, match="the CUDA kernels need nvcc: in CUDA_HOME/bin, or on PATH"):
        build_cuda.build(tmp_path / "out", werror=False)
    assert not os.listdir(tmp_path)
