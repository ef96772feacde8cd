"""``python -m benchmarks.preprocess_nodes [--rows N]``: how preprocessing scales over nodes of one core each.

Every task's time is measured on one node with one worker. From these times the same spreading of units over nodes gives the time on 1, 2
and 4 nodes; each dictionary merges on one of them. Two nodes are also run, as two resource managers with one worker each, beside one node,
in turns. Results: docs/results/preprocess.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.quiet import Watch
from soap.preprocessing import engine
from soap.preprocessing.engine import Options, spread_over
from soap.preprocessing.generate import generate
from soap.preprocessing.inputs import find_units
from soap.preprocessing.manager import Limits, Machine, Manager, Sample
from soap.preprocessing.node import Node, NodesTogether
from soap.preprocessing.processes import Processes
from soap.preprocessing.spec import PRESETS
from soap.preprocessing.work import MERGE, Done, Work

NODES = (1, 2, 4)


class OneCore(Machine):
    """A node's own core, which the other nodes leave alone."""

    def sample(self, own: object) -> Sample:
        return Sample(1, 0, 2**33, 2**34, 2**40)


@dataclass
class Watched:
    """A run: when each step began, and what each task took."""

    wall_s: float = 0.0
    begins: list[tuple[str, float]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    def begun(self, step: str, tasks: int, size: int) -> None:
        self.begins.append((step, time.perf_counter()))

    def seen(self, done: Done | None, limits: Limits) -> None:
        self.done += [done] if done is not None else []

    def steps(self) -> dict[str, list[Done]]:
        return {step: sorted((d for d in self.done if d.task.step == step), key=lambda d: d.task.number) for step, _ in self.begins}


def run(files: Sequence[Path], out: Path, nodes: int) -> Watched:
    """Preprocess on so many nodes of one worker each."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    found, options = Watched(), Options(workers=1, parquet=False)

    def make(work: Work) -> NodesTogether:
        return NodesTogether([Node(Processes(work), Manager({}, 1), OneCore(work.path), found.seen) for _ in range(nodes)])

    begin = time.perf_counter()
    engine.run(PRESETS["criteo-kaggle"], files, out, options, make, found.begun)
    found.wall_s = time.perf_counter() - begin
    return found


def makespan(done: Sequence[Done], nodes: int, step: str) -> float:
    """Seconds of a step whose tasks take as long as these did, on nodes of one core."""
    groups: dict[int, list[Done]] = {}
    for one in done:
        groups.setdefault(one.task.number if step == MERGE else one.task.unit, []).append(one)
    seconds = {one.task.number: one.seconds for one in done}
    spread = spread_over([[one.task for one in group] for group in groups.values()], nodes)
    return max(sum(seconds[task.number] for task in own) for own in spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for data and results (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder)
        generate(root / "raw", args.rows, files=args.files, wrote=lambda count: None)
        files = [Path(unit.path) for unit in find_units([root / "raw"])]
        watch, rounds = Watch(), []
        for number in range(args.rounds):
            pair = {nodes: run(files, root / "out", nodes) for nodes in ((1, 2) if number % 2 else (2, 1))}
            rounds.append(pair)
            print({nodes: round(own.wall_s, 2) for nodes, own in pair.items()}, file=sys.stderr, flush=True)
        print(f"{args.rows} rows in {args.files} files; others used {watch.others_share() or 0:.0%} of the cores")
    steps = [pair[1].steps() for pair in rounds]
    rest = [pair[1].wall_s - sum(d.seconds for d in pair[1].done) for pair in rounds]
    print("| step | tasks | " + " | ".join(f"{nodes} node{'s' * (nodes > 1)}" for nodes in NODES) + " |\n|---|---:|" + "---:|" * len(NODES))
    whole = {nodes: statistics.median(rest) for nodes in NODES}
    for step in steps[0]:
        found = {nodes: statistics.median(makespan(own[step], nodes, step) for own in steps) for nodes in NODES}
        whole = {nodes: whole[nodes] + found[nodes] for nodes in NODES}
        print(f"| {step} | {len(steps[0][step])} | " + " | ".join(f"{own:.2f} s" for own in found.values()) + " |")
    print("| start, cut, put in place | | " + " | ".join([f"{statistics.median(rest):.2f} s"] * len(NODES)) + " |")
    print("| whole | | " + " | ".join(f"{own:.2f} s ({whole[1] / own:.2f}x)" for own in whole.values()) + " |")
    ratios = [pair[1].wall_s / pair[2].wall_s for pair in rounds]
    print(f"measured: 2 nodes {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    longest = statistics.median(max(d.seconds for d in own[MERGE]) for own in steps)
    print(f"the longest merge, which no node shortens: {longest:.2f} s; without start: " + ", ".join(
        f"{(whole[1] - statistics.median(rest)) / (own - statistics.median(rest)):.2f}x" for own in whole.values()))


if __name__ == "__main__":
    main()
