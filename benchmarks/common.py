"""What the benchmarks have in common: starting ranks, taking turns, medians and minima, tables, JSON and pictures.

Peers take turns: one round starts every job once, each in fresh processes, so that what else the machine does falls
on all of them alike. Only ratios of figures from one run mean anything.
"""

import argparse
import ctypes
import datetime
import json
import operator
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent


# -- the command line ---------------------------------------------------------------------------------------------


def parser(description: str, name: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="two minutes: to see that all works, not to compare")
    result.add_argument("--rounds", type=int, help="turns of every peer (default 3; quick: 1)")
    result.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder of the JSON and the picture")
    result.add_argument("--name", default=name, help="their name, without suffix")
    return result


def rounds(args: argparse.Namespace) -> int:
    return args.rounds or (1 if args.quick else 3)


# -- ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One peer to be started: ``world`` processes of ``script``, whose result each rank writes with :func:`report`."""

    name: str
    script: str
    world: int
    arguments: Sequence[Any] = ()
    launcher: str = "torchrun"  # or "processes", or "mpiexec"
    environment: dict[str, str] = field(default_factory=dict)
    timeout: float = 1200.0

    def run(self) -> list[dict]:
        """One result per rank."""
        with tempfile.TemporaryDirectory(prefix="shardstep-bench-") as folder:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",  # ranks share the cores
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "BENCH_RESULTS": folder,
                "BENCH_NONCE": uuid.uuid4().hex,
                **self.environment,
            }
            command = [str(FOLDER / self.script), *map(str, self.arguments)]
            if self.launcher == "processes":
                self._processes([sys.executable, *command], environment)
            else:
                self._one([*self._prefix(), *command], environment)
            results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(self.world)]
        return results

    def _prefix(self) -> list[str]:
        if self.launcher == "mpiexec":
            return [shutil.which("mpiexec") or "mpiexec", "-n", str(self.world), sys.executable]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.world)]
        return [sys.executable, *torchrun]

    def _one(self, command: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=self.timeout
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} failed:\n{done.stdout[-6000:]}")

    def _processes(self, command: list[str], environment: dict[str, str]) -> None:
        ranks = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank), "WORLD_SIZE": str(self.world)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(self.world)
        ]
        try:
            output = [rank.communicate(timeout=self.timeout)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{self.name} failed:\n" + "\n".join(text[-3000:] for text in output))


def report(result: dict, rank: "int | None" = None) -> None:
    """A rank's last call: hands its result to :meth:`Job.run`, and ends it where there is a process group."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    (Path(os.environ["BENCH_RESULTS"]) / f"{rank}.json").write_text(json.dumps(result))
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # peers differ in how well they shut down (Gloo's threads may abort), and it is not what is measured


def take_turns(jobs: Sequence[Job], rounds: int) -> dict[str, list[list[dict]]]:
    """Every job's results: a list of rounds, each a list of ranks."""
    from tqdm import tqdm

    results: dict[str, list[list[dict]]] = {job.name: [] for job in jobs}
    with tqdm(total=rounds * len(jobs), unit="run", disable=None) as progress:
        for turn in range(rounds):
            for job in jobs:
                progress.set_description(f"round {turn + 1}: {job.name}")
                results[job.name].append(job.run())
                progress.update()
    return results


def slowest(ranks: "list[list[float]]") -> list[float]:
    """Per repetition the time of the rank that took longest."""
    return [max(times) for times in zip(*ranks, strict=True)]


# -- memory -------------------------------------------------------------------------------------------------------


def pss() -> int:
    """Bytes of memory of this process, shared memory divided by its sharers; without the files it has mapped, whose
    share depends on what else runs here."""
    fields = {}
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            fields[key] = value
    return sum(1024 * int(fields[key].split()[0]) for key in ("Pss_Anon", "Pss_Shmem"))


def release_memory() -> None:
    """Gives what malloc holds free back to the system, so that the next :func:`pss` does not count it."""
    ctypes.CDLL(None).malloc_trim(0)


# -- results ------------------------------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def machine() -> dict[str, Any]:
    def version(package: str) -> "str | None":
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "shardstep", "deepspeed", "mpi4py")},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
    }


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())


def _commit() -> "str | None":
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.7 * cores:
        print(f"this machine is busy (load {load:.1f} on {cores} cores): look at minima, and measure again later")


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Right-aligned columns, the first one left-aligned."""
    lines = [list(headers), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def formatted(line: list[str]) -> str:
        return "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        ).rstrip()

    return "\n".join([formatted(lines[0]), "-" * len(formatted(["-" * w for w in widths])), *map(formatted, lines[1:])])


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 10 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


class Verdict(NamedTuple):
    """What was measured against what is to be reached."""

    what: str
    measured: float
    relation: str  # "<=", "<" or ">="
    goal: float

    @property
    def reached(self) -> bool:
        return {"<=": operator.le, "<": operator.lt, ">=": operator.ge}[self.relation](self.measured, self.goal)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    if verdicts:
        rows = [[v.what, v.measured, f"{v.relation} {v.goal:g}", "reached" if v.reached else "missed"] for v in verdicts]
        print("\n" + table(["goals", "measured", "to reach", ""], rows))


def save(args: argparse.Namespace, results: dict[str, Any]) -> Path:
    """Writes the JSON."""
    args.out.mkdir(parents=True, exist_ok=True)
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    if "verdicts" in results:
        results["verdicts"] = [{**v._asdict(), "reached": v.reached} for v in results["verdicts"]]
    path = args.out / f"{args.name}.json"
    path.write_text(json.dumps({"machine": machine(), "options": options, **results}, indent=1) + "\n")
    return path


def picture(path: Path, draw: Callable[[Any], None], size: tuple) -> None:
    """Makes the picture that ``draw(figure)`` draws beside the JSON."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(figure)
    print(f"\n{path} and {path.with_suffix('.png').name}")
