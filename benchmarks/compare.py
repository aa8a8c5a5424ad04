"""One optimizer step, end to end, of shardstep and its peers.

    python benchmarks/compare.py --quick
    python benchmarks/compare.py
    python benchmarks/compare.py --model gpt --world 2 --accumulate 1 4 --dtype float32 --measure time

Peers take turns: in each round torchrun starts each once, which makes some steps at one grid point after the other, with
a new model where model or dtype change. The points that have a goal go first, and for longer; the rest of the grid
follows, then memory. Results are saved after every run, and --minutes ends it in time. `local` computes the same
micro-batches and meets the others at one barrier per step, without communication and update; what a peer takes beyond
`local` is its overhead. torch allocates the gradients of `local` anew in every step, and glibc
gives freed memory back in between: tens of thousands of page faults per step of the GPT. Peers have others, for
temporaries. Overheads contain the difference, and may be negative.

Memory is looked at in runs of
its own, with next to no activations: the peak over two micro-batches and a step, beyond what the process had before the
model and beyond what forward and backward of the bare module need for a moment, averaged over ranks. There the
allocator gives large blocks back when they are freed (MALLOC_MMAP_THRESHOLD_), so that what it would keep is not taken
for a peer's.

Columns: step median and minimum; overhead by medians and by minima, and each as a ratio to DDP's; time in the update
itself; bytes a rank receives per step; peak memory, and as a ratio to shardstep's budget for the model, which is
8 + 8/W bytes per parameter in FP32 and 6 + 12/W in bfloat16 with FP32 masters.
"""

import argparse
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    warn_if_busy,
)

PEERS = ("local", "shardstep", "ddp", "zero", "fsdp2", "fsdp2-best", "deepspeed-1", "deepspeed-2")
MODELS = ("gpt", "mlp", "many", "tiny")
HEADERS = (
    "", "step ms", "min ms", "overhead ms", "of mins", "to DDP's", "of mins", "update ms", "wire MB", "memory MB",
    "bytes/param", "to budget",
)
TO_DDP, TO_BUDGET = 0.30, 1.03
#: Seconds that a peer computes for a micro-batch, and that it communicates in a step, about: for the plan only.
EXPECTED = {"gpt": (0.15, 0.5), "mlp": (0.04, 0.25), "many": (0.03, 0.1), "tiny": (0.01, 0.05)}
STARTING = 2.5  # seconds of one rank


class Point(NamedTuple):
    model: str
    dtype: str
    world: int
    accumulate: int

    @property
    def has_goal(self) -> bool:
        return self[:2] == ("gpt", "float32") and self[2:] in ((2, 1), (2, 4), (4, 4))

    def budget(self, parameters: int) -> float:
        return parameters * (8 + 8 / self.world if self.dtype == "float32" else 6 + 12 / self.world)

    def __str__(self) -> str:
        return f"{self.model}, W = {self.world}, K = {self.accumulate}, {self.dtype}"


@dataclass(frozen=True)
class Turn:
    """Every peer is started once, and goes through these points, which have one world size."""

    name: str
    points: list[Point]
    peers: list[str]
    seconds: float  # per point and peer
    memory: bool = False

    def jobs(self) -> Iterator[tuple[str, Job]]:
        points = json.dumps([[p.model, p.dtype, p.accumulate] for p in self.points])
        arguments = ["--points", points, "--seconds", self.seconds, *["--memory"] * self.memory]
        for peer in self.peers:
            environment = {"DS_ACCELERATOR": "cpu"} if peer.startswith("deepspeed") else {}
            if self.memory:
                environment["MALLOC_MMAP_THRESHOLD_"] = str(2**17)  # named, it does not grow
            yield peer, Job(
                peer, "compare_rank.py", self.points[0].world, ["--peer", peer, *arguments], environment=environment
            )

    def estimate(self) -> float:
        """Seconds that this will take, about."""
        world = self.points[0].world
        crowded = max(1.0, world / (os.cpu_count() or 1))
        steps = 0.0
        for (model, _), points in itertools.groupby(self.points, key=lambda p: (p.model, p.dtype)):
            compute, communicate = EXPECTED[model]
            steps += 4 * (compute + communicate) * crowded
            for point in [] if self.memory else points:
                one = (compute * point.accumulate + communicate) * crowded
                steps += one + max(one, min(self.seconds, 10 * one))
        return len(self.peers) * (STARTING * crowded + steps)


@dataclass
class Measured:
    """What came of one peer at one point: an entry per round, each of all ranks."""

    times: list[list[dict]] = field(default_factory=list)
    memory: list[dict] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "compare")
    options.add_argument("--model", choices=MODELS, nargs="+", help="(default gpt mlp many; quick: gpt)")
    options.add_argument("--world", type=int, nargs="+", help="numbers of ranks (default 2 4; quick: 2)")
    options.add_argument("--accumulate", type=int, nargs="+", help="micro-batches per step (default 1 4 16; quick: 1 4)")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", help="(default both; quick: float32)")
    options.add_argument("--peers", choices=PEERS, nargs="+", default=PEERS)
    options.add_argument("--measure", choices=["time", "memory"], nargs="+", help="(default both; quick: time)")
    options.add_argument("--seconds", type=float, default=3.0, help="of steps per point with a goal, peer and round")
    options.add_argument("--rest-seconds", type=float, default=1.2, help="at other points")
    options.add_argument("--rest-rounds", type=int, default=1, help="at other points (default 1)")
    options.add_argument("--keep", action="store_true", help="points of the result file that this run does not measure")
    options.add_argument("--minutes", type=float, help="leaves out what would not be done in so many minutes")
    args = options.parse_args()
    args.model = args.model or (["gpt"] if args.quick else ["gpt", "mlp", "many"])
    args.world = args.world or ([2] if args.quick else [2, 4])
    args.accumulate = sorted(args.accumulate or ([1, 4] if args.quick else [1, 4, 16]))
    args.dtype = args.dtype or (["float32"] if args.quick else ["float32", "bfloat16"])
    args.measure = args.measure or (["time"] if args.quick else ["time", "memory"])
    args.peers = [peer for peer in PEERS if peer in {*args.peers, "local"} and installed(peer)]
    return args


def installed(peer: str) -> bool:
    if peer.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        print(f"{peer} is left out: pip install deepspeed")
        return False
    return True


# -- the plan -----------------------------------------------------------------------------------------------------


def grid(args: argparse.Namespace) -> list[Point]:
    return [Point(*point) for point in itertools.product(args.model, args.dtype, args.world, args.accumulate)]


def plan(args: argparse.Namespace) -> list[Turn]:
    def turns(name: str, points: list[Point], peers: list[str], seconds: float, memory: bool = False) -> list[Turn]:
        by_world = ([point for point in points if point.world == world] for world in args.world)
        return [Turn(name, here, peers, seconds, memory) for here in by_world if here]

    points, found = grid(args), []
    if "time" in args.measure:
        goals, rest = [p for p in points if p.has_goal], [p for p in points if not p.has_goal]
        for number in range(1, rounds(args) + 1):
            found += turns(f"round {number}", goals, args.peers, args.seconds)
        for number in range(1, args.rest_rounds + 1):
            for model in args.model:
                here = [point for point in rest if point.model == model]
                found += turns(f"rest of {model}, round {number}", here, args.peers, args.rest_seconds)
    if "memory" in args.measure:
        # It does not depend on how many micro-batches there are, but on whether there are several.
        once = [point for point in points if point.accumulate == args.accumulate[0]]
        found += turns("memory", once, [peer for peer in args.peers if peer != "local"], 0.0, memory=True)
    return found


def take(turns: list[Turn], args: argparse.Namespace, results: dict[Point, dict[str, Measured]]) -> Iterator[None]:
    """Runs them one after the other, as far as time allows; yields after every run."""
    from tqdm import tqdm

    started, planned, slower = time.monotonic(), 0.0, 1.0
    with tqdm(total=sum(len(turn.peers) for turn in turns), unit="run", disable=None) as progress:
        for turn in turns:
            left = 60 * args.minutes - (time.monotonic() - started) if args.minutes else float("inf")
            if turn.estimate() * slower > left:
                progress.write(f"no time for: {turn.name}, W = {turn.points[0].world}")
                progress.update(len(turn.peers))
                continue
            for peer, job in turn.jobs():
                progress.set_description(f"{turn.name}, W = {job.world}: {peer}")
                ranks = [rank["points"] for rank in job.run()]
                for point, outcome in zip(turn.points, zip(*ranks, strict=True), strict=True):
                    add(results, point, peer, turn.memory, list(outcome))
                progress.update()
                yield
            planned += turn.estimate()
            slower = (time.monotonic() - started) / planned


def add(results: dict, point: Point, peer: str, memory: bool, ranks: list[dict]) -> None:
    for other, peers in results.items():
        if memory and other[:3] == point[:3]:
            peers[peer].memory = ranks
        elif other == point:
            peers[peer].times.append(ranks)


def kept(args: argparse.Namespace, without: list[Point]) -> dict[Point, dict[str, Any]]:
    """What an earlier run has found at other points."""
    path = args.out / f"{args.name}.json"
    found = json.loads(path.read_text())["points"] if args.keep and path.exists() else []
    points = {Point(*(point[key] for key in Point._fields)): point for point in found}
    return {point: summary for point, summary in points.items() if point not in without}


# -- what came of it ----------------------------------------------------------------------------------------------


def summary(point: Point, measured: dict[str, Measured]) -> dict[str, Any]:
    peers: dict[str, dict[str, Any]] = {}
    for name, found in measured.items():
        peer = peers[name] = {}
        if found.times:
            peer.update(times_of(found.times))
        if found.memory:
            peer["memory_bytes"] = sum(rank["peak_bytes"] for rank in found.memory) / len(found.memory)
            parameters = found.memory[0]["parameters"]
            peer["memory_per_parameter"] = peer["memory_bytes"] / parameters
            peer["memory_to_budget"] = peer["memory_bytes"] / point.budget(parameters)
    peers = {name: peer for name, peer in peers.items() if peer}
    add_overheads(peers)
    return {**point._asdict(), "peers": peers}


def times_of(turns: list[list[dict]]) -> dict[str, Any]:
    steps = [s for ranks in turns for s in slowest([rank["seconds"] for rank in ranks])]
    updates = [s for ranks in turns for s in slowest([rank["update_seconds"] for rank in ranks])]
    wire = [rank["wire_bytes"] for ranks in turns for rank in ranks]
    return {
        "median": median(steps), "minimum": min(steps), "update": median(updates),
        "wire_bytes": sum(wire) / len(wire), "steps": steps,
        "round_medians": [median(slowest([rank["seconds"] for rank in ranks])) for ranks in turns],
    }


def add_overheads(peers: dict[str, dict]) -> None:
    local = peers.get("local")
    timed = {name: peer for name, peer in peers.items() if local and "median" in peer}
    for peer in timed.values():
        peer["overhead"] = peer["median"] - local["median"]
        peer["overhead_of_minima"] = peer["minimum"] - local["minimum"]
        peer["exposed"] = max(0.0, peer["overhead"] - peer["update"])
    for to, key in {"to_ddp": "overhead", "to_ddp_of_minima": "overhead_of_minima"}.items():
        ddp = timed.get("ddp", {}).get(key, 0.0)
        if ddp > 0:  # else noise is larger
            for name, peer in timed.items():
                if name != "local":
                    peer[to] = peer[key] / ddp


def rows(peers: dict[str, dict]) -> list[list[Any]]:
    columns = (
        ("median", 1e3), ("minimum", 1e3), ("overhead", 1e3), ("overhead_of_minima", 1e3), ("to_ddp", 1),
        ("to_ddp_of_minima", 1), ("update", 1e3), ("wire_bytes", 1e-6), ("memory_bytes", 1e-6),
        ("memory_per_parameter", 1), ("memory_to_budget", 1),
    )
    return [
        [name, *(peer[key] * factor if key in peer else None for key, factor in columns)]
        for name, peer in peers.items()
    ]


def verdicts(results: dict[Point, dict[str, Any]]) -> Iterator[Verdict]:
    for point, found in results.items():
        ours = found["peers"].get("shardstep", {})
        if {"to_ddp", "to_ddp_of_minima"} <= ours.keys() and point.has_goal:
            kinds = {"to_ddp": "medians", "to_ddp_of_minima": "minima"}
            for key in ("to_ddp", "to_ddp_of_minima") if point.world == 2 else ("to_ddp_of_minima",):
                yield Verdict(f"{point}: overhead to DDP's, {kinds[key]}", ours[key], "<=", TO_DDP)
        if "overhead" in ours and point.accumulate < 16:  # longer steps drown in a machine's noise
            for key, kind in {"median": "medians", "minimum": "minima"}.items():
                others = [peer[key] for name, peer in found["peers"].items()
                          if name not in ("local", "shardstep") and key in peer]
                if others:
                    yield Verdict(f"{point}: step to the best peer's, {kind}", ours[key] / min(others), "<", 1.0)
    seen = {}
    for point, found in results.items():
        if "memory_to_budget" in found["peers"].get("shardstep", {}):
            seen[point[:3]] = found["peers"]["shardstep"]["memory_to_budget"]
    for (model, dtype, world), ratio in seen.items():
        yield Verdict(f"{model}, W = {world}, {dtype}: memory to budget", ratio, "<=", TO_BUDGET)


# -- the picture --------------------------------------------------------------------------------------------------


def draw_all(results: dict[Point, dict[str, Any]], peers: list[str]):
    lines = list(dict.fromkeys(point[:2] for point in results))
    columns = sorted({point[2:] for point in results})

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(lines), len(columns), squeeze=False, sharey=True)
        for (model, dtype), line in zip(lines, grid, strict=True):
            for (world, accumulate), axis in zip(columns, line, strict=True):
                found = results.get(Point(model, dtype, world, accumulate), {"peers": {}})["peers"]
                draw_point(axis, found, peers)
                axis.set_title(f"{model}, {dtype}, W = {world}, K = {accumulate}", fontsize=9)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
        figure.supxlabel("ms per step (medians)")

    return draw


def draw_point(axis: Any, found: dict[str, dict], names: list[str]) -> None:
    left = [0.0] * len(names)
    compute = found.get("local", {}).get("median", 0.0)
    parts = {
        "compute (local)": [compute if "exposed" in found.get(name, {}) else 0.0 for name in names],
        "exposed communication": [found.get(name, {}).get("exposed", 0.0) for name in names],
        "update": [found.get(name, {}).get("update", 0.0) for name in names],
    }
    for (label, seconds), color in zip(parts.items(), ("0.75", "tab:red", "tab:blue"), strict=True):
        milliseconds = [1e3 * s for s in seconds]
        axis.barh(names, milliseconds, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, milliseconds, strict=True)]
    for i, (name, end) in enumerate(zip(names, left, strict=True)):
        if end:
            axis.text(end, i, f" {1e3 * found[name]['median']:.0f}", va="center", fontsize=8)
    axis.set_xlim(0, 1.2 * max(left) or 1)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(labelsize=8)


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    turns = plan(args)
    for turn in turns:
        points = f"{len(turn.points)} points, {len(turn.peers)} peers"
        print(f"{turn.name}, W = {turn.points[0].world}: {points}, about {turn.estimate() / 60:.1f} minutes")
    print(f"in all about {sum(turn.estimate() for turn in turns) / 60:.0f} minutes", flush=True)

    measured = {point: {peer: Measured() for peer in args.peers} for point in grid(args)}
    results = before = kept(args, without=list(measured))
    for _ in take(turns, args, measured):
        results = {**before, **{point: summary(point, peers) for point, peers in measured.items()}}
        save(args, {"points": list(results.values())})
    for point, found in results.items():
        print(f"\n{point}\n{table(HEADERS, rows(found['peers']))}")
    found = list(verdicts(results))
    print_verdicts(found)
    path = save(args, {"points": list(results.values()), "verdicts": found})
    if "time" in args.measure:
        lines, columns = len({point[:2] for point in results}), len({point[2:] for point in results})
        picture(path, draw_all(results, args.peers), size=(1.5 + 3.2 * columns, 1.2 + 2.1 * lines))


if __name__ == "__main__":
    main()
