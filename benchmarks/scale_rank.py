"""One rank of scale.py: what the cost model is calibrated by, or a step's communication and update."""

import argparse
import os

import common
import native


def calibrate(library, ranks: native.Ranks, args: argparse.Namespace) -> dict:
    """Minima over repetitions: seconds of an exchange, and of streaming loops over ``args.elements``."""
    n = args.elements
    a, b, c, d = (native.Array(n) for _ in range(4))
    calls = {
        "exchange": lambda: ranks("barrier"),
        "sum": lambda: library.bench_stream_sum(a.address, b.address, 2, n),
        "copy": lambda: library.bench_stream_copy(a.address, b.address, 4 * n),
        "update": lambda: library.bench_stream_update(a.address, b.address, c.address, d.address, n),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.repetitions + 1):
        for name, call in calls.items():
            ranks("barrier")
            times[name].append(call())
    return {name: min(values[1:]) for name, values in times.items()}


def steps(ranks: native.Ranks, args: argparse.Namespace) -> dict:
    times = []
    for _ in range(args.repetitions + 1):
        ranks.rewrite()
        ranks("barrier")
        times.append(ranks("step"))
    return {"seconds": times[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["calibrate", "steps"])
    parser.add_argument("--library", help="native.py's", required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    args = parser.parse_args()
    library = native.load(args.library)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elements = args.elements if args.part == "steps" else 1
    ranks = native.Ranks(library, os.environ["BENCH_NONCE"], rank, world, elements, args.bucket_mb, False)
    common.report(calibrate(library, ranks, args) if args.part == "calibrate" else steps(ranks, args))
    ranks("barrier")
    ranks.close()


if __name__ == "__main__":
    main()
