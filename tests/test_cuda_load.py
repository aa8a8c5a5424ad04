"""The loader of the CUDA kernels, with small libraries in the place of a real one: it refuses by number and names a remedy."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from c_build import CSRC, ROOT, build_shared
from cuda_kernels import build_cuda

FUNCTIONS = 15


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("rank", ctypes.c_int), ("bucket", ctypes.c_int), ("message", ctypes.c_char * 1024)]


class Cuda(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_void_p), ("functions", ctypes.c_void_p * FUNCTIONS)]


@pytest.fixture(scope="module")
def loader():
    path = build_shared("cuda_load", ["csrc/core/status.c", "csrc/cuda/load.c"], [f"-I{ROOT / 'cuda'}", "-ldl"])
    yield ctypes.CDLL(str(path))
    shutil.rmtree(path.parent)


@pytest.fixture
def fake(tmp_path):
    """Builds a double with these versions; gives its path."""

    def build(runtime=13000, driver=13000, result=0, **options):
        path = tmp_path / "_cuda.so"
        defined = {"RUNTIME": runtime, "DRIVER": driver, "RESULT": result, **options}
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-I{CSRC}", f"-I{ROOT / 'cuda'}", *(f"-D{k}={v}" for k, v in defined.items()),
             str(ROOT / "tests/c/fake_cuda.c"), "-o", str(path)], check=True,
        )
        return path

    return build


def load(loader, path, torch_cuda="13.0"):
    """The message, None where it was loaded; unloads it."""
    cuda, error = Cuda(), Error()
    torch_cuda = torch_cuda and torch_cuda.encode()
    code = loader.ss_cuda_load(str(path).encode(), torch_cuda, ctypes.byref(cuda), ctypes.byref(error))
    assert bool(code) == (cuda.handle is None) == (not any(cuda.functions))
    if code == 0:
        assert all(cuda.functions)
        loader.ss_cuda_unload(ctypes.byref(cuda))
        assert cuda.handle is None
        return None
    return error.message.decode()


@pytest.mark.parametrize(
    "runtime, driver, torch_cuda", [(13000, 13000, "13.0"), (13010, 13000, "13.2"), (12080, 13010, "12.6")]
)
def test_a_library_that_fits_is_loaded(loader, fake, runtime, driver, torch_cuda):
    assert load(loader, fake(runtime, driver), torch_cuda) is None


def test_no_library(loader, tmp_path):
    message = load(loader, tmp_path / "_cuda.so")
    assert message.startswith("shardstep is installed without its CUDA kernels (there is no ")
    assert "install it again where nvcc of CUDA 13 is on PATH or in CUDA_HOME" in message


def test_no_library_of_ours(loader, tmp_path):
    (tmp_path / "_cuda.so").write_text("")
    assert load(loader, tmp_path / "_cuda.so").startswith("cannot load the CUDA kernels: ")


def test_another_interface_version(loader, fake):
    message = load(loader, fake(ABI=7))
    assert message.endswith("have interface version 7 and this shardstep needs 1: install shardstep again")


def test_a_function_is_missing(loader, fake):
    assert load(loader, fake(LACKS_ADOPT=1)).endswith("lack ss_cuda_adopt: install shardstep again")


def test_no_driver(loader, fake):
    assert load(loader, fake(driver=0)) == (
        "there is no NVIDIA driver on this host: CUDA tensors need one for CUDA 13 or newer"
    )


def test_a_driver_too_old(loader, fake):
    assert load(loader, fake(driver=12080)) == (
        "the NVIDIA driver is for CUDA 12.8 and older, shardstep's kernels are built with CUDA 13.0: "
        "update the driver to one for CUDA 13"
    )


def test_torch_of_another_major_version(loader, fake):
    assert load(loader, fake(driver=13010), "12.8") == (
        "torch is built with CUDA 12.8 and shardstep's kernels with CUDA 13.0: "
        "install shardstep again with the nvcc of CUDA 12"
    )


def test_torch_without_cuda(loader, fake):
    assert load(loader, fake(), None) == "this torch is built without CUDA"


@pytest.mark.skipif(build_cuda.find_nvcc() is None, reason="needs nvcc")
def test_the_library_itself_is_loaded_or_wants_a_driver(loader):
    library, _ = build_cuda.build(build_cuda.folder(werror=True), werror=True)
    cuda = build_cuda.cuda_version(build_cuda.find_nvcc())
    expected = f"there is no NVIDIA driver on this host: CUDA tensors need one for CUDA {cuda.split('.')[0]} or newer"
    assert load(loader, library, cuda) == (None if torch.cuda.is_available() else expected)


def test_a_failure_of_the_library_is_told_with_its_number(loader, fake):
    assert load(loader, fake(result=35)) == "asking for CUDA's versions failed: a fake failure (CUDA error 35)"
