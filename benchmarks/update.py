"""What the parts cost that are no communication: the update, the hooks, wrap().

    python benchmarks/update.py --quick
    python benchmarks/update.py                 (about three minutes)

Three tables:
- AdamW in C against torch's fused and foreach AdamW on as many elements, one thread per rank, one rank or several at a
  time. The limit is a plain loop that reads and writes the same 28 bytes per element; "of limit" by minima.
- A micro-batch under no_sync against the same one of the bare module, which accumulates into .grad as well, in CPU time; and
  per parameter what the hooks cost, beside an empty Python hook: best seen in the model of tensors with nothing to compute.
- Time and memory of wrap() by number of parameters. Memory is beyond the parameters themselves; a parameter here has 16
  elements, that is 64 bytes of weights, 64 of gradients and 128 of AdamW's state.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Job, Verdict, median, parser, picture, print_verdicts, rounds, save, slowest, table, take_turns, warn_if_busy
from native import build

UPDATE_BYTES = 28  # per element: param, exp_avg, exp_avg_sq read and written, grad read


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "update")
    options.add_argument("--world", type=int, nargs="+", default=[1, 2], help="ranks that update at the same time")
    options.add_argument("--elements", type=int, help="that each updates (default 13.5 million: half of 27; quick: 4)")
    options.add_argument("--model", nargs="+", default=["tensors", "many", "gpt"],
                         help="models for the micro-batches (default tensors, which is 2,000 of 16 elements, many, gpt)")
    options.add_argument("--parameters", type=int, nargs="+", help="for wrap (default 1,000 to 100,000)")
    options.add_argument("--repetitions", type=int, help="per round (default 10; quick: 5)")
    args = options.parse_args()
    args.elements = args.elements or (4_000_000 if args.quick else 13_500_000)
    args.parameters = args.parameters or ([1_000, 10_000] if args.quick else [1_000, 10_000, 100_000])
    args.repetitions = args.repetitions or (5 if args.quick else 10)
    return args


def jobs(args: argparse.Namespace, library: Path) -> list[Job]:
    def job(name: str, world: int, *arguments: Any) -> Job:
        return Job(name, "update_rank.py", world, arguments, "processes")

    repeat = ("--repetitions", args.repetitions)
    found = [
        job(f"update, W = {world}", world, "update", "--library", library, "--elements", args.elements, *repeat)
        for world in args.world
    ]
    found += [job(f"micro-batches of {model}", 1, "micro_batches", "--model", model, *repeat) for model in args.model]
    found += [job(f"wrap {n:,}", 1, "wrap", "--elements", n) for n in args.parameters]
    return found


def update_point(world: int, elements: int, turns: list[list[dict]]) -> dict:
    def times(name: str) -> list[float]:
        return [s for ranks in turns for s in slowest([rank[name] for rank in ranks])]

    names = turns[0][0].keys()
    return {
        "world": world,
        "elements": elements,
        "medians": {name: median(times(name)) for name in names},
        "minima": {name: min(times(name)) for name in names},
    }


def update_rows(point: dict) -> list[list[Any]]:
    elements, medians, minima = point["elements"], point["medians"], point["minima"]
    return [
        [
            f"W = {point['world']}: {name}", medians[name] * 1e3, minima[name] * 1e3, elements / medians[name] / 1e6,
            UPDATE_BYTES * elements / medians[name] / 1e9, minima["limit"] / minima[name],
            minima["torch fused"] / minima[name],
        ]
        for name in medians
    ]


def micro_batch_point(model: str, turns: list[list[dict]]) -> dict:
    names = turns[0][0]["seconds"]
    times = {name: [s for ranks in turns for s in ranks[0]["seconds"][name]] for name in names}
    return {
        "model": model,
        "parameters": turns[0][0]["parameters"],
        "medians": {name: median(values) for name, values in times.items()},
        "minima": {name: min(values) for name, values in times.items()},
    }


def micro_batch_rows(point: dict) -> list[list[Any]]:
    medians, minima = point["medians"], point["minima"]
    return [
        [
            f"{point['model']}: {name}", point["parameters"], medians[name] * 1e3, minima[name] * 1e3,
            medians[name] / medians["bare"], minima[name] / minima["bare"],
            (minima[name] - minima["bare"]) / point["parameters"] * 1e6,
        ]
        for name in medians
    ]


def wrap_point(parameters: int, turns: list[list[dict]]) -> dict:
    return {
        "parameters": parameters,
        "seconds": min(ranks[0]["seconds"] for ranks in turns),
        "bytes": min(ranks[0]["bytes"] for ranks in turns),
    }


def verdicts(results: dict[str, list[dict]]) -> Iterator[Verdict]:
    for kind in ("medians", "minima"):
        for point in results["update"]:
            times = point[kind]
            yield Verdict(f"W = {point['world']}: AdamW, fraction of the limit, {kind}",
                          times["limit"] / times["shardstep"], ">=", 0.8)
        for point in results["micro_batches"]:
            times, n = point[kind], point["parameters"]
            if point["model"] == "tensors":
                each = (times["wrapped"] - times["bare"]) / n
                yield Verdict(f"both hooks, us per parameter, {kind}", each * 1e6, "<=", 0.6)
            elif point["model"] == "gpt":
                ratio = times["wrapped"] / times["bare"]
                yield Verdict(f"{point['model']}: no_sync micro-batch to a bare one, {kind}", ratio, "<=", 1.01)
    for point in results["wrap"]:
        if point["parameters"] == 100_000:
            yield Verdict("wrap() of 100,000 parameters, s", point["seconds"], "<", 2.0)


def draw_all(results: dict[str, list[dict]]):
    def draw(figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3)
        width = 0.8 / len(results["update"])
        for i, point in enumerate(results["update"]):
            names = list(point["minima"])
            rates = [point["elements"] / point["minima"][name] / 1e6 for name in names]
            left.bar([k + i * width for k in range(len(names))], rates, width, label=f"W = {point['world']}")
            left.set_xticks([k + 0.4 - width / 2 for k in range(len(names))], names)
        left.set(title="AdamW (minima)", ylabel="million elements per second and rank")
        left.legend()
        for point in results["micro_batches"]:
            minima = point["minima"]
            ratios = [minima[name] / minima["bare"] for name in minima]
            middle.plot(list(minima), ratios, "o-", label=f"{point['model']}, {point['parameters']:,} parameters")
        middle.set(title="micro-batch to a bare one (minima)")
        middle.legend()
        sizes = [point["parameters"] for point in results["wrap"]]
        right.plot(sizes, [point["seconds"] for point in results["wrap"]], "o-")
        right.set(title="wrap()", xlabel="parameters", ylabel="seconds", xscale="log", yscale="log")

    return draw


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    turns = take_turns(jobs(args, build()), rounds(args))
    results = {
        "update": [update_point(world, args.elements, turns[f"update, W = {world}"]) for world in args.world],
        "micro_batches": [micro_batch_point(model, turns[f"micro-batches of {model}"]) for model in args.model],
        "wrap": [wrap_point(n, turns[f"wrap {n:,}"]) for n in args.parameters],
    }
    update_headers = ["AdamW", "median ms", "min ms", "M elements/s", "GB/s", "of limit", "x torch fused"]
    print("\n" + table(update_headers, [row for point in results["update"] for row in update_rows(point)]))
    headers = ["micro-batch (CPU time)", "parameters", "median ms", "min ms", "to bare", "of mins", "us/parameter"]
    print("\n" + table(headers, [row for point in results["micro_batches"] for row in micro_batch_rows(point)]))
    wraps = [
        [f"{p['parameters']:,} parameters", p["seconds"], p["seconds"] / p["parameters"] * 1e6,
         p["bytes"] / p["parameters"]]
        for p in results["wrap"]
    ]
    print("\n" + table(["wrap()", "s", "us/parameter", "bytes/parameter"], wraps))
    found = list(verdicts(results))
    print_verdicts(found)
    picture(save(args, {**results, "verdicts": found}), draw_all(results), size=(14, 4.5))


if __name__ == "__main__":
    main()
