"""How layout and step scale with the number of ranks, and of parameters.

    python benchmarks/scale.py --quick
    python benchmarks/scale.py

First table: time to lay out a model of many tensors of random sizes, and the padding that equal, aligned segments cost,
for up to 8,192 ranks. Second: what the cost model (cost.py) says a step takes beyond its micro-batches on this host,
from rates of streaming loops and the latency of an exchange measured in the same run, beside a step of the shm
transport and the fused update at W = 2, 3, 4 (minima, without computing). Third: the model for ranks on hosts of their
own, for the links given by --link, where nothing can be measured here.
"""

import argparse
import ctypes
import os
import random
from pathlib import Path
from typing import Any

from common import Job, parser, picture, rounds, save, slowest, table, take_turns, warn_if_busy
from cost import Host, Network
from native import build, load


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "scale")
    options.add_argument("--parameters", type=int, help="of the layout (default 100,000; quick: 10,000)")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 1024, 8192], help="of the layout")
    options.add_argument("--world", type=int, nargs="+", default=[2, 3, 4], help="ranks of measured steps")
    options.add_argument("--elements", type=int, default=27_000_000, help="parameters of the model that steps")
    options.add_argument("--bucket-mb", type=float, default=25.0)
    options.add_argument("--repetitions", type=int, help="per round (default 15; quick: 5)")
    options.add_argument(
        "--link", type=float, nargs=2, action="append", metavar=("MICROSECONDS", "GB_PER_SECOND"),
        help="a network link (default: 20 1.25 and 3 25, about 10 Gbit/s Ethernet and 200 Gbit/s InfiniBand)",
    )
    args = options.parse_args()
    args.parameters = args.parameters or (10_000 if args.quick else 100_000)
    args.repetitions = args.repetitions or (5 if args.quick else 15)
    args.link = args.link or [[20.0, 1.25], [3.0, 25.0]]
    return args


# -- layout -------------------------------------------------------------------------------------------------------


def sizes(n: int) -> list[int]:
    """Log-normal, a median of 1,000 elements: a few matrices hold most of the parameters."""
    random.seed(0)
    return [max(1, int(random.lognormvariate(6.9, 2.0))) for _ in range(n)]


def layouts(library: Path, args: argparse.Namespace) -> list[dict]:
    native = load(library)
    numel = sizes(args.parameters)
    array = (ctypes.c_int64 * len(numel))(*numel)
    laid, buckets = ctypes.c_int64(), ctypes.c_int64()
    points = []
    for world in args.ranks:
        seconds = min(
            native.bench_layout(
                world, len(numel), array, int(args.bucket_mb * 2**20), ctypes.byref(laid), ctypes.byref(buckets)
            )
            for _ in range(5)
        )
        points.append({
            "world": world, "seconds": seconds, "buckets": buckets.value, "elements": sum(numel),
            "padding": laid.value / sum(numel) - 1,
        })
    return points


# -- step ---------------------------------------------------------------------------------------------------------


def measure(library: Path, args: argparse.Namespace) -> dict[str, list[list[dict]]]:
    common_arguments = ["--library", library, "--bucket-mb", args.bucket_mb, "--repetitions", args.repetitions]

    def job(name: str, part: str, world: int, elements: int) -> Job:
        return Job(name, "scale_rank.py", world, [part, *common_arguments, "--elements", elements], "processes")

    # Streams as long as one rank's part of the model at W = 2: rates depend on how much of it the caches hold.
    jobs = [job(f"calibrate {world}", "calibrate", world, args.elements // 2) for world in (1, 2)]
    jobs += [job(f"step {world}", "steps", world, args.elements) for world in args.world]
    return take_turns(jobs, rounds(args))


def host(results: dict[str, list[list[dict]]], elements: int) -> Host:
    """The model's constants from one rank that streams alone, and two that exchange and stream together."""

    def best(job: str, key: str) -> float:
        return min(max(rank[key] for rank in ranks) for ranks in results[job])

    own = 4 * (elements // 2)
    slowdown = sum(best("calibrate 2", key) / best("calibrate 1", key) for key in ("sum", "copy", "update")) / 3
    return Host(
        latency=best("calibrate 2", "exchange"),
        sum_rate=3 * own / best("calibrate 1", "sum"),
        copy_rate=2 * own / best("calibrate 1", "copy"),
        update_rate=7 * own / best("calibrate 1", "update"),
        shared=min(2 / max(1.0, slowdown), os.cpu_count() or 1),
    )


def steps(results: dict[str, list[list[dict]]], model: Host, args: argparse.Namespace) -> list[dict]:
    buckets = -(-args.elements * 4 // int(args.bucket_mb * 2**20))
    points = []
    for world in args.world:
        times = [s for ranks in results[f"step {world}"] for s in slowest([rank["seconds"] for rank in ranks])]
        predicted = model.step(args.elements, buckets, world)
        points.append({"world": world, "predicted": predicted, "measured": min(times), "steps": times})
    return points


def networks(args: argparse.Namespace) -> list[dict]:
    buckets = -(-args.elements * 4 // int(args.bucket_mb * 2**20))
    return [
        {"world": world, "seconds": [Network(us * 1e-6, rate * 1e9).step(args.elements, buckets, world)
                                     for us, rate in args.link]}
        for world in args.ranks if world > 1
    ]


def draw_all(results: dict[str, Any]):
    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3)
        worlds = [point["world"] for point in results["layout"]]
        left.plot(worlds, [100 * point["padding"] for point in results["layout"]], "o-")
        left.set(xscale="log", xlabel="ranks", ylabel="padding, % of the parameters", title="layout")
        worlds = [point["world"] for point in results["steps"]]
        for key in ("predicted", "measured"):
            middle.plot(worlds, [1e3 * point[key] for point in results["steps"]], "o-", label=key)
        middle.set(xlabel="ranks on this host", xticks=worlds, ylabel="ms", title="communication and update", ylim=(0, None))
        middle.legend()
        worlds = [point["world"] for point in results["networks"]]
        for i, (us, rate) in enumerate(results["links"]):
            seconds = [point["seconds"][i] for point in results["networks"]]
            right.plot(worlds, [1e3 * s for s in seconds], "o-", label=f"{us:g} us, {rate:g} GB/s")
        right.set(xscale="log", yscale="log", xlabel="hosts of one rank", ylabel="ms", title="communication, modelled")
        right.legend()

    return draw


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    library = build()
    layout = layouts(library, args)
    measured = measure(library, args)
    model = host(measured, args.elements)
    results = {
        "layout": layout,
        "host": vars(model),
        "steps": steps(measured, model, args),
        "networks": networks(args),
        "links": args.link,
    }

    print("\n" + table(
        [f"{args.parameters:,} parameters", "elements", "buckets", "ms", "padding %"],
        [[f"W = {p['world']:,}", p["elements"], p["buckets"], p["seconds"] * 1e3, p["padding"] * 100] for p in layout],
    ))
    print("\n" + table(
        [f"step of {args.elements / 1e6:g} M parameters", "predicted ms", "measured ms", "measured / predicted"],
        [[f"W = {p['world']}", p["predicted"] * 1e3, p["measured"] * 1e3, p["measured"] / p["predicted"]]
         for p in results["steps"]],
    ))
    print(f"latency {model.latency * 1e6:.1f} us; rates alone: sum {model.sum_rate / 1e9:.1f}, copy "
          f"{model.copy_rate / 1e9:.1f}, update {model.update_rate / 1e9:.1f} GB/s; {model.shared:.2f} ranks at a time")
    print("\n" + table(
        ["model only, ms", *(f"{us:g} us, {rate:g} GB/s" for us, rate in args.link)],
        [[f"W = {p['world']:,}", *(s * 1e3 for s in p["seconds"])] for p in results["networks"]],
    ))
    picture(save(args, results), draw_all(results), size=(14, 4.5))


if __name__ == "__main__":
    main()
