"""Reduce-scatter and all-gather over shared memory, against Gloo and MPICH.

    python benchmarks/transport.py --quick
    python benchmarks/transport.py              (about five minutes)

Sizes are those of the whole buffer in FP32, of which each rank reduces or contributes 1/W; "all_gather bf16" is of as
many elements in half the bytes. GB/s are bytes of the whole buffer over time. The limit is a plain streaming loop that
reads and writes as many bytes in each rank's own memory, outside its core's caches, by as many ranks at a time, on this
machine and in this run. A
repetition takes as long as its slowest rank; times are medians, ratios to shm are of medians and of minima. Goals hold
from 4 MB up, so the size is looked at that is farthest from each.

MPICH needs `pip install mpi4py` and Debian's `mpich` (its library and mpiexec); it is left out where they are missing.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import (
    Job,
    Verdict,
    median,
    parser,
    picture,
    print_verdicts,
    rounds,
    save,
    slowest,
    table,
    take_turns,
    warn_if_busy,
)
from native import build

SIZES = (64e3, 512e3, 4e6, 27e6, 108e6, 400e6)
QUICK_SIZES = (64e3, 4e6, 108e6)
MPICH_LIBRARY = "libmpich.so.12"
GOALS = {
    (2, "gloo", "pair fp32"): 10, (2, "gloo", "all_reduce fp32"): 4, (2, "mpich", "pair fp32"): 4,
    (4, "gloo", "pair fp32"): 10, (4, "gloo", "all_reduce fp32"): 3, (4, "mpich", "pair fp32"): 3,
    **{(world, "limit", "pair fp32"): 0.6 for world in (2, 3, 4)},
}
OPERATIONS = ("reduce_scatter fp32", "all_gather fp32", "pair fp32", "all_gather bf16", "all_reduce fp32")


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "transport")
    options.add_argument("--world", type=int, nargs="+", help="numbers of ranks (default 2 3 4; quick: 2)")
    options.add_argument("--sizes", type=float, nargs="+", help="bytes of the FP32 buffer (default 64e3 ... 400e6)")
    options.add_argument("--peers", nargs="+", choices=["gloo", "mpich"], default=["gloo", "mpich"])
    options.add_argument("--bucket-mb", type=float, default=25.0, help="of shm, which moves buffers in buckets")
    options.add_argument("--repetitions", type=int, default=30, help="at most, per round; large buffers get fewer")
    args = options.parse_args()
    args.world = args.world or ([2] if args.quick else [2, 3, 4])
    args.sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    return args


@contextlib.contextmanager
def mpich():
    """The environment in which mpi4py's wheel, which asks for libmpi.so.12, finds MPICH's library; None without one."""
    missing = []
    if importlib.util.find_spec("mpi4py") is None:
        missing.append("pip install mpi4py")
    if shutil.which("mpiexec") is None:
        missing.append("apt install mpich")
    library = find_library(MPICH_LIBRARY)
    if library is None:
        missing.append(f"a {MPICH_LIBRARY}")
    if missing:
        print(f"mpich is left out, it needs: {', '.join(missing)}")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="shardstep-bench-") as folder:
        (Path(folder) / "libmpi.so.12").symlink_to(library)
        path = os.environ.get("LD_LIBRARY_PATH")
        yield {"LD_LIBRARY_PATH": folder if path is None else f"{folder}{os.pathsep}{path}"}


def find_library(name: str) -> "Path | None":
    """Where the dynamic linker finds a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    with open("/proc/self/maps") as lines:
        found = {line.split()[-1] for line in lines if name in line}
    return Path(found.pop()) if found else None


def jobs(args: argparse.Namespace, world: int, library: Path, mpi: "dict[str, str] | None") -> list[Job]:
    elements = [max(world, int(size / 4)) for size in args.sizes]
    arguments = ["--elements", *elements, "--repetitions", args.repetitions]

    def job(peer: str, launcher: str, *more: Any, environment: "dict[str, str] | None" = None) -> Job:
        return Job(peer, "transport_rank.py", world, ["--peer", peer, *arguments, *more], launcher, environment or {})

    found = [job("shm", "processes", "--library", library, "--bucket-mb", args.bucket_mb)]
    if "gloo" in args.peers:
        found.append(job("gloo", "torchrun"))
    if mpi is not None:
        found.append(job("mpich", "mpiexec", environment=mpi))
    return found


def reduced(turns: list[list[dict]], elements: str, of: Callable[[list[float]], float]) -> dict[str, float]:
    """The median or minimum of each operation; the pair is a reduce-scatter and an all-gather."""
    times: dict[str, list[float]] = {}
    for ranks in turns:
        for name in ranks[0]["times"][elements]:
            times.setdefault(name, []).extend(slowest([rank["times"][elements][name] for rank in ranks]))
    found = {name: of(values) for name, values in times.items()}
    for prefix in ("", "limit of "):
        if f"{prefix}reduce_scatter fp32" in found:
            pair = found[f"{prefix}reduce_scatter fp32"] + found[f"{prefix}all_gather fp32"]
            found[f"{prefix}pair fp32"] = pair
    return found


def size_name(size: float) -> str:
    return f"{size / 1e6:g} MB" if size >= 1e6 else f"{size / 1e3:g} KB"


def summary(world: int, sizes: "list[float]", results: dict[str, list[list[dict]]]) -> list[dict]:
    points = []
    for size in sizes:
        point: dict[str, Any] = {"world": world, "bytes": size}
        for kind, of in (("medians", median), ("minima", min)):
            peers = {name: reduced(turns, str(max(world, int(size / 4))), of) for name, turns in results.items()}
            shm = peers["shm"]
            limit = {name.removeprefix("limit of "): shm.pop(name) for name in list(shm) if name.startswith("limit")}
            point[kind] = {**peers, "limit": limit}
        points.append(point)
    return points


def ratios(point: dict, operation: str, name: str) -> list["float | None"]:
    """How many times as long as shm a peer (or the limit) takes, by medians and by minima. An all-reduce is held
    against shm's pair, which brings about as much."""
    ours = "pair fp32" if operation.startswith("all_reduce") else operation
    times = [point[kind] for kind in ("medians", "minima")]
    return [t[name][operation] / t["shm"][ours] if operation in t[name] else None for t in times]


def rows(points: list[dict]) -> list[list[Any]]:
    found = []
    for point in points:
        for operation in OPERATIONS:
            size = point["bytes"] * (0.5 if operation.endswith("bf16") else 1.0)
            row: list[Any] = [f"{size_name(point['bytes'])} {operation}"]
            for times in point["medians"].values():
                seconds = times.get(operation)
                row += [seconds and seconds * 1e3, seconds and size / seconds / 1e9]
            for name in list(point["medians"])[1:]:
                row += ratios(point, operation, name)
            found.append(row)
    return found


def headers(point: dict) -> list[str]:
    peers = list(point["medians"])
    columns = [column for name in peers for column in (f"{name} ms", "GB/s")]
    compared = [column for name in peers[1:] for column in (f"{name} / shm", "of mins")]
    return [f"W = {point['world']}", *columns, *compared]


def verdicts(points: list[dict]) -> Iterator[Verdict]:
    """For every goal the size at which it is reached least."""
    for (world, name, operation), goal in GOALS.items():
        for kind, of in (("medians", 0), ("minima", 1)):
            found = [(ratios(point, operation, name)[of], point["bytes"]) for point in points
                     if point["world"] == world and point["bytes"] >= 4e6 and name in point[kind]]
            if found:
                ratio, size = min(found)
                what = "fraction of the limit" if name == "limit" else f"{name}'s {operation.split()[0]} to shm's pair"
                yield Verdict(f"W = {world}: {what}, {kind}, at {size_name(size)}", ratio, ">=", goal)


def draw_all(points: list[dict]):
    def draw(figure: Any) -> None:
        worlds = sorted({point["world"] for point in points})
        operations = [name for name in OPERATIONS if not name.startswith("all_reduce")]
        grid = figure.subplots(len(worlds), len(operations), sharex=True, squeeze=False)
        for line, world in zip(grid, worlds, strict=True):
            here = [point for point in points if point["world"] == world]
            for axis, operation in zip(line, operations, strict=True):
                draw_operation(axis, here, operation)
                axis.set_title(f"{operation}, W = {world}", fontsize=10)
        grid[0][0].legend(fontsize=8)
        figure.supxlabel("bytes of the FP32 buffer")
        figure.supylabel("GB/s")

    return draw


def draw_operation(axis: Any, points: list[dict], operation: str) -> None:
    scale = 0.5 if operation.endswith("bf16") else 1.0
    sizes = [point["bytes"] for point in points]
    for name in points[0]["medians"]:
        rates = [scale * point["bytes"] / point["medians"][name][operation] / 1e9 for point in points]
        style = "k:" if name == "limit" else "o-"
        axis.plot(sizes, rates, style, markersize=3, label=name)
    axis.set(xscale="log", yscale="log")
    axis.grid(alpha=0.3)


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    points = []
    library = build()
    with mpich() if "mpich" in args.peers else contextlib.nullcontext() as mpi:
        for world in args.world:
            found = summary(world, args.sizes, take_turns(jobs(args, world, library, mpi), rounds(args)))
            points += found
            print(f"\n{table(headers(found[0]), rows(found))}", flush=True)
            save(args, {"points": points})
    print("\nlimit / shm is the fraction of the limit; all_reduce is held against shm's pair")
    found = list(verdicts(points))
    print_verdicts(found)
    picture(save(args, {"points": points, "verdicts": found}), draw_all(points), size=(13, 1 + 3 * len(args.world)))


if __name__ == "__main__":
    main()
