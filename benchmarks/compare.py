"""One optimizer step, end to end, of shardstep and its peers.

    python benchmarks/compare.py --quick
    python benchmarks/compare.py --model gpt mlp many --world 2 4 --accumulate 1 4 16 --dtype float32 bfloat16

Peers take turns: in each round each is started once by torchrun and makes some steps. `local` computes the same
micro-batches and meets the others at one barrier per step, without communication and update; what a peer takes beyond
`local` is its overhead. Memory is looked at in a run of its own, with next to no activations: the peak over two
micro-batches and a step, beyond what the process had before the model, averaged over ranks.

Columns: step median and minimum; overhead by medians and by minima, and each as a ratio to DDP's; time in the update
itself; bytes a rank receives per step; peak memory, and as a ratio to shardstep's budget for the model, which is
8 + 8/W bytes per parameter in FP32 and 6 + 12/W in bfloat16 with FP32 masters.
"""

import argparse
import importlib.util
import itertools
from typing import Any

from common import Job, median, parser, rounds, save, slowest, table, take_turns, warn_if_busy

PEERS = ("local", "shardstep", "ddp", "zero", "fsdp2", "fsdp2-best", "deepspeed-1", "deepspeed-2")
MODELS = ("gpt", "mlp", "many", "tiny")
HEADERS = (
    "", "step ms", "min ms", "overhead ms", "of mins", "to DDP's", "of mins", "update ms", "wire MB", "memory MB",
    "bytes/param", "to budget",
)


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "compare")
    options.add_argument("--model", choices=MODELS, nargs="+", default=["gpt"])
    options.add_argument("--world", type=int, nargs="+", default=[2], help="numbers of ranks")
    options.add_argument("--accumulate", type=int, nargs="+", default=[1], help="micro-batches per step")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32"])
    options.add_argument("--peers", choices=PEERS, nargs="+", default=PEERS)
    options.add_argument("--steps", type=int, help="measured steps per peer and round (default 10; quick: 5)")
    options.add_argument("--no-memory", action="store_true", help="leave memory out, as --quick does")
    args = options.parse_args()
    args.steps = args.steps or (5 if args.quick else 10)
    args.peers = [peer for peer in PEERS if peer in {*args.peers, "local"} and installed(peer)]
    return args


def installed(peer: str) -> bool:
    if peer.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        print(f"{peer} is left out: pip install deepspeed")
        return False
    return True


def job(peer: str, point: dict[str, Any], steps: int, memory: bool) -> Job:
    arguments = ["--peer", peer, "--model", point["model"], "--dtype", point["dtype"], "--steps", steps]
    # Memory does not depend on how many micro-batches there are, but on whether there are several.
    arguments += ["--accumulate", min(point["accumulate"], 2) if memory else point["accumulate"]]
    environment = {"DS_ACCELERATOR": "cpu"} if peer.startswith("deepspeed") else {}
    return Job(peer, "compare_rank.py", point["world"], arguments + ["--memory"] * memory, environment=environment)


def summary(turns: list[list[dict]]) -> dict[str, Any]:
    steps = [s for ranks in turns for s in slowest([rank["seconds"] for rank in ranks])]
    updates = [s for ranks in turns for s in slowest([rank["update_seconds"] for rank in ranks])]
    wire = [rank["wire_bytes"] for ranks in turns for rank in ranks]
    return {
        "median": median(steps), "minimum": min(steps), "update": median(updates),
        "wire_bytes": sum(wire) / len(wire), "steps": steps,
        "round_medians": [median(slowest([rank["seconds"] for rank in ranks])) for ranks in turns],
    }


def budget(parameters: int, point: dict[str, Any]) -> float:
    world = point["world"]
    return parameters * (8 + 8 / world if point["dtype"] == "float32" else 6 + 12 / world)


def add_memory(peers: dict[str, dict], memory: dict[str, list[list[dict]]], point: dict[str, Any]) -> None:
    for name, (ranks,) in memory.items():
        peers[name]["memory_bytes"] = sum(rank["peak_bytes"] for rank in ranks) / len(ranks)
        peers[name]["memory_per_parameter"] = peers[name]["memory_bytes"] / ranks[0]["parameters"]
        peers[name]["memory_to_budget"] = peers[name]["memory_bytes"] / budget(ranks[0]["parameters"], point)


def add_ratios(peers: dict[str, dict]) -> None:
    local = peers["local"]
    for peer in peers.values():
        peer["overhead"] = peer["median"] - local["median"]
        peer["overhead_of_minima"] = peer["minimum"] - local["minimum"]
        peer["exposed"] = max(0.0, peer["overhead"] - peer["update"])
    if "ddp" in peers:
        for name, peer in peers.items():
            if name != "local":
                peer["to_ddp"] = peer["overhead"] / peers["ddp"]["overhead"]
                peer["to_ddp_of_minima"] = peer["overhead_of_minima"] / peers["ddp"]["overhead_of_minima"]


def rows(peers: dict[str, dict]) -> list[list[Any]]:
    def scaled(peer: dict, key: str, factor: float) -> "float | None":
        return None if peer.get(key) is None else peer[key] * factor

    return [
        [
            name, peer["median"] * 1e3, peer["minimum"] * 1e3, peer["overhead"] * 1e3, peer["overhead_of_minima"] * 1e3,
            peer.get("to_ddp"), peer.get("to_ddp_of_minima"), peer["update"] * 1e3, peer["wire_bytes"] / 1e6,
            scaled(peer, "memory_bytes", 1e-6), peer.get("memory_per_parameter"), peer.get("memory_to_budget"),
        ]
        for name, peer in peers.items()
    ]


def draw_all(results: list[dict]):
    def draw(figure: Any) -> None:
        axes = figure.subplots(len(results), 1, squeeze=False)[:, 0]
        for axis, point in zip(axes, results, strict=True):
            draw_point(axis, point)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)

    return draw


def draw_point(axis: Any, point: dict) -> None:
    names = list(point["peers"])
    left = [0.0] * len(names)
    compute = point["peers"]["local"]["median"]
    parts = {
        "compute (local)": [compute for _ in names],
        "exposed communication": [point["peers"][name]["exposed"] for name in names],
        "update": [point["peers"][name]["update"] for name in names],
    }
    for (label, seconds), color in zip(parts.items(), ("0.75", "tab:red", "tab:blue"), strict=True):
        milliseconds = [1e3 * s for s in seconds]
        axis.barh(names, milliseconds, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, milliseconds, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="ms per step (medians)", title=title(point))


def title(point: dict) -> str:
    return f"{point['model']}, W = {point['world']}, K = {point['accumulate']}, {point['dtype']}"


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    results = []
    for model, world, accumulate, dtype in itertools.product(args.model, args.world, args.accumulate, args.dtype):
        point: dict[str, Any] = {"model": model, "world": world, "accumulate": accumulate, "dtype": dtype}
        turns = take_turns([job(peer, point, args.steps, False) for peer in args.peers], rounds(args))
        peers = {name: summary(result) for name, result in turns.items()}
        if not (args.no_memory or args.quick):
            add_memory(peers, take_turns([job(peer, point, args.steps, True) for peer in args.peers], 1), point)
        add_ratios(peers)
        point["peers"] = peers
        results.append(point)
        print(f"\n{title(point)}\n{table(HEADERS, rows(peers))}")
    save(args, {"points": results}, draw_all(results), size=(9, 0.8 + 3.2 * len(results)))


if __name__ == "__main__":
    main()
