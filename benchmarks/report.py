"""The README's tables from the results of the benchmarks.

    python benchmarks/report.py              prints them
    python benchmarks/report.py --write      and puts them into README.md

Reads compare.json, transport.json, update.json and scale.json, as far as they are there.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import ROOT
from compare import Point

BEGIN, END = "<!-- benchmarks/report.py writes from here -->", "<!-- to here -->"
BEST = ": step to the best peer's, "


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---", *["--:"] * (len(headers) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(results: dict[str, dict]) -> str:
    found = next(iter(results.values()))["machine"]
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "deepspeed", "mpi4py") if found[name])
    return f"{found['processor']}, {found['cores']} cores, {found['date'][:10]}, commit {found['commit']}; {versions}."


def overheads(compare: dict[str, Any]) -> str:
    points = {Point(*(p[key] for key in Point._fields)): p["peers"] for p in compare["points"]}
    points = {point: peers for point, peers in points.items() if point.has_goal and "local" in peers}
    names = list(next(iter(points.values())))

    def cell(peers: dict[str, dict], name: str) -> str:
        peer = peers.get(name, {})
        if name == "local":
            return f"{1e3 * peer['median']:.0f}"
        ratio = f" ({peer['to_ddp']:.2f})" if "to_ddp" in peer else ""
        return f"{1e3 * peer['overhead']:+.0f}{ratio}" if "overhead" in peer else ""

    headers = ["GPT, 27 M parameters, FP32; ms, ratio to DDP", *(f"K = {p.accumulate}, W = {p.world}" for p in points)]
    return markdown(headers, [[name, *(cell(peers, name) for peers in points.values())] for name in names])


def transports(transport: dict[str, Any]) -> str:
    columns = [("shm", "pair fp32"), ("gloo", "pair fp32"), ("gloo", "all_reduce fp32"), ("mpich", "pair fp32"),
               ("mpich", "all_reduce fp32"), ("limit", "pair fp32")]
    points = [point for point in transport["points"] if point["bytes"] == 108e6]

    def cell(point: dict, name: str, operation: str) -> str:
        seconds = point["medians"].get(name, {}).get(operation)
        return f"{1e3 * seconds:.1f}" if seconds else ""

    headers = ["108 MB, FP32, ms", "shm", "Gloo", "its all-reduce", "MPICH", "its all-reduce", "a plain loop"]
    return markdown(headers, [[f"W = {point['world']}", *(cell(point, *c) for c in columns)] for point in points])


def goals(results: dict[str, dict]) -> Iterator[list[str]]:
    for found in results.values():
        for verdict in found.get("verdicts", []):
            if BEST not in verdict["what"]:
                goal = f"{verdict['relation']} {verdict['goal']:g}"
                yield [verdict["what"], f"{verdict['measured']:.3g}", goal, "yes" if verdict["reached"] else "no"]


def best_everywhere(compare: dict[str, Any]) -> Iterator[str]:
    for kind in ("medians", "minima"):
        found = [v for v in compare.get("verdicts", []) if v["what"].endswith(BEST + kind)]
        if found:
            missed = [v["what"].partition(BEST)[0] for v in found if not v["reached"]]
            but = f", not at: {'; '.join(missed)}" if missed else ""
            yield f"By {kind} its step is the fastest at {len(found) - len(missed)} of {len(found)} grid points{but}."


def report(results: dict[str, dict]) -> str:
    parts = [machine(results)]
    if "compare" in results:
        parts += [overheads(results["compare"]), *best_everywhere(results["compare"])]
    if "transport" in results:
        parts.append(transports(results["transport"]))
    rows = list(goals(results))
    if rows:
        parts.append(markdown(["goal", "measured", "to reach", "reached"], rows))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--write", action="store_true", help="into README.md, between its markers")
    args = parser.parse_args()
    results = {}
    for name in ("compare", "transport", "update", "scale"):
        if (args.results / f"{name}.json").exists():
            results[name] = json.loads((args.results / f"{name}.json").read_text())
    if not results:
        raise SystemExit(f"no results in {args.results}")
    text = report(results)
    print(text)
    if args.write:
        readme = ROOT / "README.md"
        before, _, rest = readme.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
