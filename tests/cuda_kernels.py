"""The C interface of the CUDA kernels (cuda/shardstep_cuda.h) for tests: on a GPU, or their source compiled for the host."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cuda"))
import build_cuda  # noqa: E402

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
#: As csrc/kernels/dispatch.c asks for: the arithmetic of the rules.
HOST_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-Wall", "-Wextra"]
HOST_FLAGS += ["-Werror", "-fvisibility=hidden", "-Icuda", "-Icsrc"]


class Piece(ctypes.Structure):
    _fields_ = [
        ("n", c_int64),
        ("param", c_void_p),
        ("low", c_void_p),
        ("grad", c_void_p),
        ("state", c_void_p * 3),
        ("step", c_void_p),
        ("grad_scale", c_double),
        ("low_dtype", c_int),
        ("grad_dtype", c_int),
        ("tail", c_int32),
        ("options", c_int32),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        *((name, c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening")),
        *((name, c_int) for name in ("decoupled", "nesterov", "maximize")),
    ]


class Update(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("n_pieces", c_int32),
        ("n_options", c_int32),
        ("pieces", POINTER(Piece)),
        ("options", POINTER(Options)),
        ("scale", c_void_p),
        ("clip", c_void_p),
        ("skip", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class NormRange(ctypes.Structure):
    _fields_ = [("x", c_void_p), ("n", c_int64), ("in_param", c_int64), ("scale", c_double)]


class NormsArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("count", c_int32),
        ("dtype", c_int),
        ("ranges", POINTER(NormRange)),
        ("sums", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class ClipArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("count", c_int32),
        ("only_finite", c_int),
        ("max_norm", c_double),
        ("sums", c_void_p),
        ("scale", c_void_p),
        ("norm", c_void_p),
        ("coefficient", c_void_p),
    ]


class Range(ctypes.Structure):
    _fields_ = [("dst", c_void_p), ("src", c_void_p), ("n", c_int64), ("factor", c_double)]


def build_for_host(*flags: str) -> Path:
    """The kernels' source as a shared library of loops, in a new folder that the caller removes."""
    library = Path(tempfile.mkdtemp(prefix="shardstep-test-")) / "cuda_on_host.so"
    compiler = shutil.which("g++") or "g++"
    command = [compiler, *HOST_FLAGS, *flags, "-shared", "-o", str(library), "-x", "c++", *map(str, build_cuda.SOURCES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return library


class CudaKernels:
    """The library, with tensors for pointers. All tensors of a call are on ``device``; None stands for NULL."""

    def __init__(self, path: Path, device: str):
        self.library, self.device = ctypes.CDLL(str(path)), torch.device(device)
        self.library.ss_cuda_message.restype = c_char_p
        self.library.ss_cuda_norm_workspace.restype = c_size_t
        self.library.ss_cuda_skip.argtypes = [c_void_p] * 4

    def message(self, code: int) -> str:
        return self.library.ss_cuda_message(code).decode()

    def call(self, name: str, *arguments) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        code = getattr(self.library, f"ss_cuda_{name}")(*arguments, c_void_p(stream))
        if code:
            raise RuntimeError(f"ss_cuda_{name}: {self.message(code)} ({code})")

    def scalar(self, value: float, dtype=torch.float64) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device=self.device)

    def update(self, rule: str, pieces: list, options: list, scale=None, clip=None, skip=None, workspace=None) -> None:
        """``rule``: "adam" or "sgd". Pieces and options are dicts of the fields of Piece and Options, with tensors."""
        if workspace is None:
            workspace = torch.empty(max(1, len(pieces)), 64, dtype=torch.uint8, device=self.device)
        table = (Piece * len(pieces))(*(self._piece(**piece) for piece in pieces))
        update = Update(
            size=ctypes.sizeof(Update), n_pieces=len(pieces), n_options=len(options), pieces=table,
            options=(Options * len(options))(*(Options(**o) for o in options)), scale=_pointer(scale), clip=_pointer(clip),
            skip=_pointer(skip), workspace=workspace.data_ptr(), workspace_bytes=workspace.numel(),
        )
        self.call(rule, byref(update))

    @staticmethod
    def _piece(param, grad, state=(), low=None, step=None, grad_scale=1.0, tail=0, options=0, n=None) -> Piece:
        states = (c_void_p * 3)(*(_pointer(s) for s in state))
        return Piece(
            n=param.numel() if n is None else n, param=_pointer(param), low=_pointer(low), grad=_pointer(grad), state=states,
            step=_pointer(step), grad_scale=grad_scale, low_dtype=DTYPES[low.dtype] if low is not None else 0,
            grad_dtype=DTYPES[grad.dtype], tail=tail, options=options,
        )

    def sums_of_squares(self, tensors: list, in_param=None, scales=None) -> torch.Tensor:
        """Of tensors of one dtype; float64 (len(tensors),)."""
        in_param, scales = in_param or [0] * len(tensors), scales or [1.0] * len(tensors)
        ranges = (NormRange * len(tensors))(
            *(NormRange(_pointer(x), x.numel(), at, scale) for x, at, scale in zip(tensors, in_param, scales, strict=True))
        )
        workspace = torch.empty(
            self.library.ss_cuda_norm_workspace(ranges, len(tensors)), dtype=torch.uint8, device=self.device
        )
        sums = torch.full((len(tensors),), -1.0, dtype=torch.float64, device=self.device)
        args = NormsArgs(
            size=ctypes.sizeof(NormsArgs), count=len(tensors), dtype=DTYPES[tensors[0].dtype], ranges=ranges,
            sums=sums.data_ptr(), workspace=workspace.data_ptr(), workspace_bytes=workspace.numel(),
        )
        self.call("norms", byref(args))
        return sums

    def clip(self, sums: torch.Tensor, max_norm: float, scale=None, only_finite=False) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and coefficient, float64 (1,) each."""
        norm, coefficient = self.scalar(-1.0), self.scalar(-1.0)
        args = ClipArgs(
            size=ctypes.sizeof(ClipArgs), count=sums.numel(), only_finite=only_finite, max_norm=max_norm, sums=_pointer(sums),
            scale=_pointer(scale), norm=_pointer(norm), coefficient=_pointer(coefficient),
        )
        self.call("clip", byref(args))
        return norm, coefficient

    def skip(self, norm: torch.Tensor, found_inf=None) -> torch.Tensor:
        flag = self.scalar(-1, torch.int32)
        self.call("skip", _pointer(norm), _pointer(found_inf), _pointer(flag))
        return flag

    def elements(self, name: str, ranges: list, *dtypes: torch.dtype) -> None:
        """``ranges``: (dst, src or None, factor)."""
        table = (Range * len(ranges))(*(Range(_pointer(dst), _pointer(src), dst.numel(), f) for dst, src, f in ranges))
        self.call(name, table, len(ranges), *(DTYPES[dtype] for dtype in dtypes))


def _pointer(tensor) -> "int | None":
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def adam_tail(numel: int, begin: int, end: int) -> int:
    """ss_adam_tail() of csrc/kernels/kernels.h: how many of these elements are among the last numel % 8."""
    return max(0, end - max(begin, numel - numel % 8))
