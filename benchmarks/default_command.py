"""Does ``soap-search MODEL --cluster local:N -o FILE``, as the README has it, make training slower? Its plan beside data parallelism.

    python -m benchmarks.default_command
    python -m benchmarks.default_command --models gpt2 t5 --clusters local:2 --estimates

exports twelve small models (``benchmarks.small_models``), runs the command with nothing but its defaults,
each model with an empty store of measurements, and then trains by what it wrote and by data parallelism: in processes of their own, in
turns, with trainers that are made anew for each turn. The ratio is data parallelism's time over the plan's, the median of the rounds; 1
where the plan is data parallelism. ``--estimates`` also searches without measuring, running or any confidence, and runs what that finds in
the same turns: what the default command is spared. Each line is printed as soon as it is known, so that what is left can be run later.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import soap
from benchmarks.end_to_end import machine
from benchmarks.quiet import Watch
from benchmarks.small_models import NAMES, export_small
from soap import api
from soap.cli.options import Reading, positive
from soap.cli.run import start
from soap.cli.training import Job
from soap.cli.turns import in_turns, turns_of
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy

CLUSTERS = ("local:2", "local:4")
USUAL, FOUND, ESTIMATED = "data_parallel", "found", "by estimates"
OPTIMIZER = "adam"
"""Whose states predictions count."""
READING: Reading = {"batch_dims": None, "autocast": None, "batch_norm": "global"}
BLIND = ("--costs", "estimate", "--verify", "0", "--confidence", "0")
"""Options of a search that measures and runs nothing, and takes whatever is predicted to be fastest."""
LEAST = 0.96
"""What is aimed at."""

@dataclass(frozen=True)
class Row:
    """One model on one cluster. ``kept``: what the command took. ``gains``: of each round, data parallelism's time over the plan's; none if
    they are the same. ``blind``: predicted gain of the plan found by estimates alone, and its measured ones. ``others``: share of the cores
    that other programs used while plans were timed."""

    cluster: str
    model: str
    kept: str
    seconds: float
    usual_ns: int
    gains: tuple[float, ...]
    others: float | None
    blind: tuple[float, tuple[float, ...]] | None = None

    @property
    def gain(self) -> float:
        """The median; 1 for data parallelism itself."""
        return median(self.gains) if self.gains else 1.0

    @property
    def line(self) -> str:
        """A line of the table."""
        measured = f"**{self.gain:.2f}** ({min(self.gains):.2f} to {max(self.gains):.2f})" if self.gains else "**1** (the same plan)"
        others = "?" if self.others is None else f"{self.others:.0%}"
        blind = ["", ""] if self.blind is None else [f"{self.blind[0]:.2f}", f"{median(self.blind[1]):.2f}" if self.blind[1] else "1"]
        cells = [self.cluster, self.model, self.kept, f"{self.seconds:.0f} s", f"{self.usual_ns / 1e6:.1f}", measured, *blind, others]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "cluster", "model", "kept", "command", "data parallelism, ms", "as many times as fast, measured",
    "by estimates: predicted", "measured", "others",
)  # fmt: skip


def conclusion(rows: Sequence[Row]) -> str:
    """How often what is aimed at was reached."""
    reached = sum(row.gain >= LEAST for row in rows)
    slowest = min(row.gain for row in rows)
    said = f"{reached} of {len(rows)} plans are at least {LEAST} times as fast as data parallelism; the slowest {slowest:.2f}"
    blind = [median(row.blind[1]) if row.blind[1] else 1.0 for row in rows if row.blind is not None]
    return said + (f"; found by estimates alone {sum(one >= LEAST for one in blind)} of {len(blind)}, {min(blind):.2f}" if blind else "")


def compared(name: str, path: Path, cluster: str, args: argparse.Namespace, folder: Path) -> Row:
    """Run the command, then what it wrote."""
    out, blind_out = folder / f"{name}-{cluster}.json".replace(":", "-"), folder / "blind.json"
    began = time.monotonic()
    report = search(path, cluster, out)
    seconds = time.monotonic() - began
    graph, topology = api.load(path, plan_only=True).graph, soap.load_cluster(cluster)
    strategies = {USUAL: api.classical(USUAL, graph, topology), FOUND: api.load_strategy(out, graph, topology)}
    predicted = None
    if args.estimates:
        predicted = search(path, cluster, blind_out, *BLIND)["speedup"]
        strategies[ESTIMATED] = api.load_strategy(blind_out, graph, topology)
    watch = Watch()
    times = timed(path, graph, topology, strategies, args)
    gains = {name: tuple(usual / own for usual, own in zip(times[USUAL], times[name], strict=True)) for name in times if name != USUAL}
    decided = report.get("measured") or report.get("decision") or {"kept": report["same_as"] or FOUND}
    blind = None if predicted is None else (predicted, gains.get(ESTIMATED, ()))
    return Row(cluster, name, decided["kept"], seconds, round(median(times[USUAL])), gains.get(FOUND, ()), watch.others_share(), blind)


def search(path: Path, cluster: str, out: Path, *options: str) -> dict[str, Any]:
    """What the command says."""
    command = [sys.executable, "-m", "soap.cli.search", str(path), "--cluster", cluster, "-o", str(out), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"soap-search failed with exit code {done.returncode}: {' '.join(command)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def timed(
    path: Path, graph: OperatorGraph, topology: Topology, strategies: Mapping[str, Strategy], args: argparse.Namespace
) -> dict[str, list[int]]:
    """Nanoseconds of a step of each different strategy, turn by turn."""
    simulator = api.simulator_for(graph, topology)
    different = {name: own for name, own in strategies.items() if name == USUAL or own != strategies[USUAL]}
    simulations = {name: simulator.run(own) for name, own in different.items()}
    job = Job(
        model=str(path),
        reading=READING,
        topology=topology,
        strategies=in_turns(different, simulations, args.rounds),
        steps=args.steps,
        seed=0,
        optimizer=OPTIMIZER,
    )
    outcome = start(job)
    assert outcome is not None  # not under torchrun
    return {name: [own.median_ns for own in turns_of(outcome.measured, name)] for name in different}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="default_command", description="What the default command finds, beside data parallelism.")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), help="default %(default)s")
    parser.add_argument("--rounds", type=positive, default=7, help="turns of each plan (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=8, help="of a turn, of which the first two are not timed (default %(default)s)")
    parser.add_argument("--estimates", action="store_true", help="also what is found without measuring or running")
    args = parser.parse_args(argv)
    print(f"{machine()}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    rows: list[Row] = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            os.environ["XDG_CACHE_HOME"] = str(Path(temporary) / "cache")  # nothing is known of this machine
            path = export_small(name, Path(temporary))
            for cluster in args.clusters:
                rows.append(compared(name, path, cluster, args, Path(temporary)))
                print(rows[-1].line, flush=True)
    print(f"\n{conclusion(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
