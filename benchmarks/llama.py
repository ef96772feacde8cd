"""A plan for Llama 3 8B (bfloat16, 8 sequences of 8192 tokens, Adam): what is found, beside the best of the usual ways that fit.

    python -m benchmarks.llama --write docs/results/llama.md
    python -m benchmarks.llama --clusters h200-8 --budget 50

``STARTS`` are ZeRO-1, FSDP, Megatron and FSDP with full recomputation. Found is what a search gives with one core. Expected: it is at
least as fast as the best of them that fits, and fits itself. Costs are data sheets alone; seconds are processor time, without exporting.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.fits import LARGE, LLAMA, loaded
from benchmarks.pages import give
from soap import api
from soap.cli import explanation
from soap.cli.options import positive
from soap.search.options import SearchOptions
from soap.strategy.named import named
from soap.strategy.recomputation import STAYS, with_marks
from soap.units import format_bytes

STARTS = ("zero1", "fsdp", "megatron", "fsdp+recompute")
FURTHER = ("fsdp+selective", "megatron+fsdp", "megatron+fsdp+selective")
TOKENS = 8 * 8192


@dataclass(frozen=True)
class Line:
    """A strategy, and what is predicted of it."""

    name: str
    time_ns: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Outcome:
    """A cluster's lines; the last one was found. ``again``: which operators are recomputed there and why, as ``--explain`` says it; empty
    if none is. ``lacking_bytes``: what devices would lack if all were kept, added up; ``kept_ns``: how long that would take."""

    cluster: str
    lines: tuple[Line, ...]
    best_start: str
    again: str
    kept_ns: int
    lacking_bytes: int
    evaluations: int
    seconds: float
    resident_bytes: int

    @property
    def ratio(self) -> float:
        """Throughput of what was found by that of the best of ``STARTS`` that fits; infinite if none does."""
        best = min((line.time_ns for line in self.lines if line.name in STARTS and line.fits), default=None)
        return float("inf") if best is None else best / self.lines[-1].time_ns


def outcome(cluster: str, budget: int) -> Outcome:
    """Search for a cluster."""
    torch.set_num_threads(1)
    graph, topology = loaded(LLAMA), api.load_cluster(cluster)
    simulator = api.simulator_for(graph, topology, costs="estimate")
    begin = time.process_time()
    found = api.find(graph, topology, SearchOptions(budget=budget, cores=1, costs="estimate", risk=None)).result
    seconds = time.process_time() - begin
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    strategies = {name: named(name, graph, topology) for name in (*STARTS, *FURTHER)} | {"found": found.strategy}
    lines = []
    for name, strategy in strategies.items():
        own = simulator.predict(strategy)
        lines.append(Line(name, own.makespan_ns, max(own.peak_bytes), own.fits))
    kept = simulator.predict(with_marks(found.strategy, found.strategy.operators, STAYS))
    unkept = explanation.unkept_document(api.explain_unkept(simulator, found.strategy))
    best = min((start for start in found.starts if start.fits), key=lambda start: start.cost_ns).name
    again, kept_figures = explanation.unkept_text(unkept, lines[-1].time_ns), (kept.makespan_ns, kept.overflow_bytes)
    return Outcome(cluster, tuple(lines), best, again, *kept_figures, found.evaluations, seconds, resident)


def section(own: Outcome) -> str:
    """A cluster's part of the page."""
    rows = [
        f"| `{line.name}` | {line.time_ns / 1e6:,.1f} ms | {TOKENS / line.time_ns * 1e9:,.0f} tokens/s | {format_bytes(line.peak_bytes)} | "
        f"{'yes' if line.fits else 'no'} |"
        for line in own.lines
    ]
    lacking = f"{format_bytes(own.lacking_bytes)} would be missing on all devices together" if own.lacking_bytes else "it would fit"
    again = f"Without recomputation it would take {own.kept_ns / 1e6:,.1f} ms, and {lacking}.\n\n```\n{own.again}\n```"
    return "\n".join(
        [
            f"## {own.cluster}",
            "",
            "| strategy | iteration | throughput | fullest device | fits |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Found ÷ best of {', '.join(STARTS)} that fits: {own.ratio:.3f}. Best start: `{own.best_start}`; {own.evaluations} "
            f"evaluations, {own.seconds:.0f} s of a core, {format_bytes(own.resident_bytes)} resident at most.",
            again if own.again else "Nothing is recomputed.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="llama", description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", nargs="+", default=LARGE)
    parser.add_argument("--budget", type=positive, default=300)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    args = parser.parse_args(argv)
    parts = [
        "# Llama 3 8B where memory binds\n",
        "bfloat16, 8 sequences of 8192 tokens, Adam; predicted from data sheets alone. *Fullest device*: memory to expect at its peak.\n",
        f"`python -m benchmarks.llama --clusters {' '.join(args.clusters)} --budget {args.budget}`, {datetime.now(UTC):%Y-%m-%d}.\n",
    ]
    for cluster in args.clusters:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            parts.append(section(pool.submit(outcome, cluster, args.budget).result()))
        print(parts[-1], file=sys.stderr, flush=True)
    give("\n".join(parts), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
