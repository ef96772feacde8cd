"""Searches for the workloads of large runs that others measured: what is found beside the plan that won there.

    python -m benchmarks.frontier_search --rows ROWS.json --groups GROUPS.json --models FOLDER --write docs/results/frontier_search.md
    python -m benchmarks.frontier_search --rows ROWS.json --groups GROUPS.json --models FOLDER --only 0 17 --resume FILE

A search gets the workload and the cluster alone, and ``--seconds`` of time. Both times are predictions: *found* of the best plan that is
expected to fit, *won* of the plan that the source measured as the fastest. Where that one is expected to lack memory, it says by how much.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.frontier_plans import ADAM_STATES, Row, graph_of, kernels_of, said, strategy_of, topology_of
from benchmarks.large import priced
from benchmarks.pages import give
from soap import api
from soap.errors import SoapError
from soap.files import write_text_atomically
from soap.search.options import DEFAULT_BUDGET, SearchOptions

SECONDS = 280.0
"""Of a search: five minutes with what comes before and after it."""


@dataclass(frozen=True)
class Found:
    """A workload's search. ``number``: the workload's in the file. ``over_bytes``: by which the plan that won is expected to exceed a
    device's memory. ``seconds``, ``core_seconds``: of the search, all of it. ``lacking``: why there is none."""

    number: int
    workload: str
    won_ms: float = 0.0
    over_bytes: int = 0
    name: str = ""
    found_ms: float = 0.0
    seconds: float = 0.0
    core_seconds: float = 0.0
    lacking: str = ""

    @property
    def is_as_good(self) -> bool:
        """Whether the search found a plan that is expected to be as fast as the one that won, or that one does not fit."""
        return not self.lacking and (self.over_bytes > 0 or self.found_ms <= self.won_ms)


def searched(number: int, group: Mapping[str, Any], row: Row, models: Path, seconds: float, budget: int) -> Found:
    """The search for the workload of which this row has the fastest plan."""
    warnings.simplefilter("ignore")
    workload = f"{group['model']}, {group['gpus']} {group['gpu']}, {group['global_batch']} x {group['seq']} {group['extra']}".strip()
    own = said(row)
    try:
        graph, topology = graph_of(row, own, models), topology_of(row)
        simulator = api.simulator_for(graph, topology, costs="estimate", optimizer_states=ADAM_STATES, kernels=kernels_of(row))
        won_ns, peak_bytes, available_bytes = priced(simulator, strategy_of(row, own, graph, topology))
        wall, core = time.monotonic(), time.process_time()
        options = SearchOptions(costs="estimate", optimizer_states=ADAM_STATES, kernels=kernels_of(row), seconds=seconds, budget=budget)
        found = api.find(graph, topology, options).result
        took = round(time.monotonic() - wall), round(time.process_time() - core)
        best = min((start for start in found.starts if start.fits), key=lambda start: start.cost_ns, default=None)
        name = "none of the starts" if best is None else best.name
        found_ns = priced(simulator, found.strategy)[0]
    except SoapError as error:
        return Found(number, workload, lacking=str(error))
    return Found(number, workload, won_ns / 1e6, max(0, peak_bytes - available_bytes), name, found_ns / 1e6, *took)


def page(found: Sequence[Found], command: str) -> str:
    """The page."""
    good = sum(own.is_as_good for own in found)
    lines = [
        "# Searches for large runs", "", (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), "", f"`{command}`", "",
        f"As fast as the plan that won, or that one is expected to lack memory: {good} of {len(found)}.", "",
        "| workload | won, s | found, s | best start | the winner lacks, GiB | seconds | of a core |", "|---|--:|--:|---|--:|--:|--:|",
    ]  # fmt: skip
    for own in found:
        if own.lacking:
            lines.append(f"| {own.workload} | {own.lacking} | | | | | |")
            continue
        lacks = f"{own.over_bytes / 2**30:.1f}" if own.over_bytes else "-"
        times = f"{own.won_ms / 1e3:.2f} | {own.found_ms / 1e3:.2f}"
        lines.append(f"| {own.workload} | {times} | {own.name} | {lacks} | {own.seconds:.0f} | {own.core_seconds:.0f} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="frontier_search", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="the rows, as JSON")
    parser.add_argument("--groups", type=Path, required=True, metavar="FILE", help="workloads with several plans each, as JSON")
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where exported models are, or are put")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these workloads, by their numbers in the file, from 0")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for each search ({SECONDS:.0f})")
    parser.add_argument("--budget", type=int, default=DEFAULT_BUDGET, help=f"proposals beside the starts ({DEFAULT_BUDGET})")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="do not search anew what stands in this JSON file; the rest is added")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    args = parser.parse_args(argv)
    rows, groups = (json.loads(path.read_text(encoding="utf-8")) for path in (args.rows, args.groups))
    by_id = {row["id"]: row for row in rows}
    args.models.mkdir(parents=True, exist_ok=True)
    known = dict[int, Found]()
    if args.resume is not None and args.resume.exists():
        known = {own["number"]: Found(**own) for own in json.loads(args.resume.read_text(encoding="utf-8"))}
    for number in range(len(groups)) if args.only is None else args.only:
        if number not in known:
            known[number] = searched(number, groups[number], by_id[groups[number]["winner"]], args.models, args.seconds, args.budget)
            print(known[number], file=sys.stderr, flush=True)
            if args.resume is not None:
                write_text_atomically(args.resume, json.dumps([asdict(own) for own in known.values()], indent=1))
    give(page([known[number] for number in sorted(known)], "python -m benchmarks.frontier_search"), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
