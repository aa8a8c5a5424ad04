"""On GPUs: the fused update, and whole steps of GPT-2 beside torch's DDP and FSDP2.

    python benchmarks/gpu.py --quick
    python benchmarks/gpu.py                  (about fifteen minutes on one GPU)

Two tables:
- AdamW by the CUDA kernels against a copy of as many bytes on the same GPU, and against torch's fused AdamW; in FP32, and with
  FP32 masters of bfloat16 weights, which torch's needs a copy for. Scale, clip coefficient and skip flag are in device memory.
- A step of GPT-2 in bfloat16 with FP32 masters, one rank per GPU: seconds, and the most memory.

Times are the device's own (events). Without a GPU nothing is measured; --device cpu is for trying the program itself.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Job, Verdict, median, parser, picture, print_verdicts, rounds, save, slowest, table, take_turns
from gpu_rank import GPT2, LIBRARY, PEERS, build_for_host


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "gpu")
    options.add_argument("--elements", type=int, help="to update (default 124 million; quick: 16)")
    options.add_argument("--models", nargs="+", choices=GPT2, help="(default 124M 350M 1.3B; quick: 124M)")
    options.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    options.add_argument("--world", type=int, help="ranks (default: every GPU)")
    options.add_argument("--accumulate", type=int, nargs="+", default=[1, 4], help="micro-batches per step")
    options.add_argument("--batch", type=int, default=4, help="sequences of 1,024 tokens per micro-batch")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--repetitions", type=int, help="per round (default 20; quick: 5)")
    args = options.parse_args()
    args.elements = args.elements or (16_000_000 if args.quick else 124_000_000)
    args.models = args.models or (["124M"] if args.quick else ["124M", "350M", "1.3B"])
    args.repetitions = args.repetitions or (5 if args.quick else 20)
    args.world = args.world or torch.cuda.device_count() or 1
    return args


def why_not(args: argparse.Namespace) -> "str | None":
    gpus = torch.cuda.device_count()
    if args.device == "cpu":
        return None
    if gpus == 0:
        return f"torch {torch.__version__} finds no GPU here"
    if args.world > gpus:
        return f"{args.world} ranks need a GPU each, and there are {gpus}"
    if not LIBRARY.is_file():
        return "shardstep is installed without its CUDA kernels; install it again with nvcc on PATH"
    return None


def step_points(args: argparse.Namespace) -> list[tuple[str, int]]:
    return [(model, accumulate) for model in args.models for accumulate in args.accumulate]


def jobs(args: argparse.Namespace, library: Path) -> list[Job]:
    repeat = ("--repetitions", args.repetitions, "--device", args.device)
    elements = ("--elements", args.elements, "--library", library)
    found = [Job("update", "gpu_rank.py", 1, ("update", *elements, *repeat), "processes")]
    for model, accumulate in step_points(args):
        for peer in args.peers:
            options = ("--model", model, "--peer", peer, "--accumulate", accumulate, "--batch", args.batch, *repeat)
            found.append(Job(f"{peer} {model} {accumulate}", "gpu_rank.py", args.world, ("steps", *options)))
    return found


def update_points(turns: list[list[dict]]) -> list[dict]:
    found = []
    for dtype in turns[0][0]:
        names = turns[0][0][dtype]["seconds"]
        times = {name: [s for ranks in turns for s in ranks[0][dtype]["seconds"][name]] for name in names}
        found.append({
            "dtype": dtype,
            "bytes": turns[0][0][dtype]["bytes"],
            "medians": {name: median(values) for name, values in times.items()},
            "minima": {name: min(values) for name, values in times.items()},
        })
    return found


def update_rows(point: dict) -> list[list[Any]]:
    medians, minima = point["medians"], point["minima"]
    return [
        [f"{point['dtype']}: {name}", medians[name] * 1e3, minima[name] * 1e3, point["bytes"] / medians[name] / 1e9,
         medians["copy"] / medians[name], medians["torch fused"] / medians[name]]
        for name in medians
    ]


def step_point(args: argparse.Namespace, model: str, accumulate: int, turns: dict[str, list[list[dict]]]) -> dict:
    peers = {}
    for peer in args.peers:
        results = turns[f"{peer} {model} {accumulate}"]
        times = [s for ranks in results for s in slowest([rank["seconds"] for rank in ranks])]
        peers[peer] = {
            "median": median(times),
            "minimum": min(times),
            "peak_bytes": max(rank["peak_bytes"] for ranks in results for rank in ranks),
        }
    tokens = args.world * results[0][0]["tokens"]
    return {"model": model, "accumulate": accumulate, "world": args.world, "tokens": tokens, "peers": peers}


def step_rows(point: dict) -> list[list[Any]]:
    best = min((peer["median"] for name, peer in point["peers"].items() if name != "shardstep"), default=math.nan)
    return [
        [f"GPT-2 {point['model']}, W = {point['world']}, K = {point['accumulate']}: {name}", peer["median"] * 1e3,
         peer["minimum"] * 1e3, point["tokens"] / peer["median"], peer["median"] / best, peer["peak_bytes"] / 1e9]
        for name, peer in point["peers"].items()
    ]


def verdicts(updates: list[dict]) -> Iterator[Verdict]:
    for point in updates:
        for kind in ("medians", "minima"):
            times, dtype = point[kind], point["dtype"]
            yield Verdict(f"{dtype}: AdamW, fraction of the copy's bandwidth, {kind}", times["copy"] / times["shardstep"],
                          ">=", 0.9)
            if dtype == "bfloat16":
                yield Verdict(f"{dtype}: AdamW, times as fast as torch's with masters, {kind}",
                              times["torch fused"] / times["shardstep"], ">=", 1.5)


def draw_all(results: dict[str, Any]):
    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for i, point in enumerate(results["update"]):
            names = list(point["medians"])
            rates = [point["bytes"] / point["medians"][name] / 1e9 for name in names]
            left.bar([k + 0.4 * i for k in range(len(names))], rates, 0.4, label=point["dtype"])
            left.set_xticks([k + 0.2 for k in range(len(names))], names)
        left.set(title="AdamW (medians)", ylabel="GB/s")
        left.legend()
        points = results["steps"]
        peers = list(points[0]["peers"])
        width = 0.8 / len(peers)
        for i, peer in enumerate(peers):
            seconds = [1e3 * point["peers"][peer]["median"] for point in points]
            right.bar([k + i * width for k in range(len(points))], seconds, width, label=peer)
        labels = [f"{point['model']}\nK = {point['accumulate']}" for point in points]
        right.set_xticks([k + 0.4 - width / 2 for k in range(len(points))], labels)
        right.set(title="GPT-2 in bfloat16 (medians)", ylabel="ms per step")
        right.legend()

    return draw


def gpu(device: str) -> "dict[str, Any] | None":
    if device == "cpu":
        return None
    found = torch.cuda.get_device_properties(0)
    return {"name": found.name, "memory_bytes": found.total_memory, "count": torch.cuda.device_count(),
            "compute_capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def main() -> None:
    args = parse_arguments()
    reason = why_not(args)
    if reason is not None:
        sys.exit(f"not measured: {reason}")
    if args.device == "cpu":
        print("on the CPU, by the kernels' source compiled for it: this tries the program and measures nothing of a GPU")
    library = LIBRARY if args.device == "cuda" else build_for_host()
    turns = take_turns(jobs(args, library), rounds(args))
    updates = update_points(turns["update"])
    points = [step_point(args, model, accumulate, turns) for model, accumulate in step_points(args)]
    headers = ["AdamW", "median ms", "min ms", "GB/s", "of copy", "x torch fused"]
    print("\n" + table(headers, [row for point in updates for row in update_rows(point)]))
    headers = ["step", "median ms", "min ms", "tokens/s", "to the best peer", "peak GB"]
    print("\n" + table(headers, [row for point in points for row in step_rows(point)]))
    found = list(verdicts(updates)) if args.device == "cuda" else []
    print_verdicts(found)
    results = {"gpu": gpu(args.device), "update": updates, "steps": points, "verdicts": found}
    picture(save(args, results), draw_all(results), size=(12, 4.5))


if __name__ == "__main__":
    main()
