"""Large runs that others measured, predicted: which plan of a workload wins, which run out of memory, how long a step takes.

    python -m benchmarks.frontier --rows ROWS.json --groups GROUPS.json --models FOLDER
    python -m benchmarks.frontier --rows ROWS.json --groups GROUPS.json --models FOLDER --tier A --resume FILE --json

Predictions come from data sheets alone, and nothing is fitted to the rows. Models are exported into the folder once, without values. What a
row asks for that cannot be said as a strategy yet is named; such a row counts in no figure but ``said``.

- *winners*: workloads of which the plan that is predicted to be fastest, of those that are expected to fit, is the measured one or within
  5% of it by the source's figures. A plan that ran out of memory is no winner.
- *pairs*: two plans of a workload, in the order in which they were measured. Those that are equal within 1% are left out.
- *time*: predicted / measured - 1. *Refused*: plans that are expected to lack memory, of those that did and of those that ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frontier_plans import ADAM_STATES, Row, Said, graph_of, kernels_of, said, strategy_of, topology_of
from benchmarks.large import priced
from benchmarks.pages import give
from soap import api
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.files import write_text_atomically
from soap.model.graph import OperatorGraph
from soap.simulator.kernels import Kernels
from soap.simulator.simulate import Simulation

NEAR = 0.05
"""A plan that is slower than the fastest one by at most this share is as good."""
EQUAL = 0.01
"""Plans whose measured times differ by less are not ordered."""


@dataclass(frozen=True)
class Outcome:
    """A row's prediction. ``lacking``: what cannot be said of it yet, or why it was refused. ``peak_bytes``, ``available_bytes``: of the
    fullest device. ``took_seconds``: of a core, without reading the model."""

    id: str
    lacking: str = ""
    step_ms: float = 0.0
    peak_bytes: int = 0
    available_bytes: int = 0
    took_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether no device is expected to lack memory."""
        return self.peak_bytes <= self.available_bytes


def predicted(row: Row, models: Path) -> Outcome:
    """A row's outcome."""
    warnings.simplefilter("ignore")
    own = said(row)
    if own.lacking:
        return Outcome(row["id"], ", ".join(own.lacking))
    try:
        return outcome_of(row, own, graph_of(row, own, models), topology_of(row), kernels_of(row))
    except SoapError as error:
        return Outcome(row["id"], f"refused: {error}")


def outcome_of(row: Row, own: Said, graph: OperatorGraph, topology: Topology, kernels: Kernels, *, flows: bool = True) -> Outcome:
    """A row's outcome with these kernels. ``flows``: steps flow into each other where the row says so."""
    begin = time.process_time()
    simulator = api.simulator_for(graph, topology, costs="estimate", optimizer_states=ADAM_STATES, kernels=kernels)
    strategy = strategy_of(row, own, graph, topology)
    step_ns, peak_bytes, available_bytes = priced(simulator, strategy)
    if own.flows and flows:
        step_ns = flowing_ns(simulator.run(strategy))
    return Outcome(row["id"], "", step_ns / 1e6, peak_bytes, available_bytes, round(time.process_time() - begin, 2))


def flowing_ns(found: Simulation) -> int:
    """How long a step takes, in ns, if each device and link begins its next one as soon as it has ended the last: what the one takes that
    does so latest behind its own beginning. All that waits for another keeps its distance."""
    first, last = dict[int, int](), dict[int, int]()
    for task, start_ns, end_ns in zip(found.tasks.tasks, found.schedule.start_ns.tolist(), found.schedule.end_ns.tolist(), strict=True):
        for resource in task.resources:
            first[resource] = min(first.get(resource, start_ns), start_ns)
            last[resource] = max(last.get(resource, end_ns), end_ns)
    return max(last[resource] - first[resource] for resource in first)


def predictions(rows: Sequence[Row], models: Path, processes: int, resume: Path | None) -> dict[str, Outcome]:
    """Outcomes by id. ``resume``: a file with earlier ones, which is kept up to date."""
    known: dict[str, Outcome] = {}
    if resume is not None and resume.exists():
        known = {own["id"]: Outcome(**own) for own in json.loads(resume.read_text(encoding="utf-8"))}
    left = sorted((row for row in rows if row["id"] not in known), key=lambda row: (row["gpus"], row["family"]))
    with get_context("spawn").Pool(processes) as pool:
        for outcome in pool.imap_unordered(partial(predicted, models=models), left):
            known[outcome.id] = outcome
            print(f"{outcome.id}: {outcome.lacking or f'{outcome.step_ms:,.1f} ms, {outcome.took_seconds} s'}", file=sys.stderr, flush=True)
            if resume is not None:
                write_text_atomically(resume, json.dumps([asdict(own) for own in known.values()], indent=1))
    return {row["id"]: known[row["id"]] for row in rows}


@dataclass(frozen=True)
class Decision:
    """A workload's plans. ``chosen``: the one that is predicted to be fastest; None if none can be said. ``over``: its measured time over
    that of the measured fastest, less 1; None if it ran out of memory. ``right``, ``pairs``: pairs in the right order, of all."""

    name: str
    plans: int
    said: int
    chosen: str | None
    over: float | None
    right: int
    pairs: int

    @property
    def is_won(self) -> bool:
        """Whether the chosen plan is as good as the measured fastest one."""
        return self.over is not None and self.over <= NEAR


def decided(group: Mapping[str, Any], rows: Mapping[str, Row], outcomes: Mapping[str, Outcome]) -> Decision:
    """What the predictions say of a workload."""
    ran = [own["id"] for own in group["ranking"]]
    known = [id for id in ran if id in outcomes and not outcomes[id].lacking]
    measured = {id: rows[id]["step_ms"] for id in ran}
    out_of_memory = [id for id in group["oom_ids"] if id in outcomes and not outcomes[id].lacking]
    candidates = [id for id in (*known, *out_of_memory) if outcomes[id].fits] or known
    chosen = min(candidates, key=lambda id: outcomes[id].step_ms, default=None)
    over = None if chosen is None or chosen not in measured else measured[chosen] / min(measured.values()) - 1
    right = total = 0
    for one, other in combinations(known, 2):
        if abs(measured[one] / measured[other] - 1) >= EQUAL:
            total += 1
            right += (measured[one] < measured[other]) == (outcomes[one].step_ms < outcomes[other].step_ms)
    name = f"{group['model']}, {group['gpus']} {group['gpu']}, {group['global_batch']} x {group['seq']} {group['extra']}".strip()
    return Decision(name, len(ran), len(known), chosen, over, right, total)


def errors(rows: Iterable[Row], outcomes: Mapping[str, Outcome]) -> list[float]:
    """Predicted over measured step times, less 1, of the rows that were measured."""
    known = (row for row in rows if row["step_ms"] and not outcomes[row["id"]].lacking)
    return [outcomes[row["id"]].step_ms / row["step_ms"] - 1 for row in known]


def refused(rows: Iterable[Row], outcomes: Mapping[str, Outcome], *, ran: bool) -> tuple[int, int]:
    """(plans that are expected to lack memory, all), of those that ran or of those that did not."""
    known = [outcomes[row["id"]] for row in rows if bool(row["step_ms"]) == ran and not outcomes[row["id"]].lacking]
    return sum(not own.fits for own in known), len(known)


def page(rows: Sequence[Row], groups: Sequence[Mapping[str, Any]], outcomes: Mapping[str, Outcome], command: str) -> str:
    """The page."""
    by_id, families = {row["id"]: row for row in rows}, defaultdict(list)
    for row in rows:
        families[row["family"]].append(row)
    decisions = [decided(group, by_id, outcomes) for group in groups if all(own["id"] in by_id for own in group["ranking"])]
    judged = [own for own in decisions if own.said == own.plans]
    right, pairs = sum(own.right for own in judged), sum(own.pairs for own in judged)
    lines = [
        "# Large runs that others measured", "", (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), "", f"`{command}`", "",
        f"Said: {sum(not own.lacking for own in outcomes.values())} of {len(rows)} rows; all plans of {len(judged)} of {len(decisions)} "
        f"workloads. Winners: {sum(own.is_won for own in judged)} of {len(judged)}. Pairs in order: {right} of {pairs}.", "",
        "| family | rows | said | time, median | of sizes | lacked memory, refused | ran, refused | seconds, most |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, own in [*sorted(families.items()), ("all", list(rows)), *((f"tier {t}", [r for r in rows if r["tier"] == t]) for t in "AB")]:
        off, (lacked, lacking), (wrong, ran) = errors(own, outcomes), refused(own, outcomes, ran=False), refused(own, outcomes, ran=True)
        times = f"{median(off):+.0%} | {median(map(abs, off)):.0%}" if off else "- | -"
        known = [outcomes[row["id"]] for row in own if not outcomes[row["id"]].lacking]
        most = max((one.took_seconds for one in known), default=0.0)
        lines.append(f"| {name} | {len(own)} | {len(known)} | {times} | {lacked} of {lacking} | {wrong} of {ran} | {most:.1f} |")
    lines += ["", "| workload | plans | pairs in order | chosen | slower than the fastest |", "|---|--:|--:|---|--:|"]
    for one in judged:
        over = "out of memory" if one.over is None else f"{one.over:.0%}"
        lines.append(f"| {one.name} | {one.plans} | {one.right} of {one.pairs} | {one.chosen} | {over} |")
    waiting = Counter(own.lacking for own in outcomes.values() if own.lacking)
    lines += ["", "Not said yet:", "", *(f"- {count}: {text}" for text, count in waiting.most_common())]
    assumed = Counter(text for row in rows if not outcomes[row["id"]].lacking for text in said(row).assumed)
    lines += ["", "Assumed, where sources are silent:", "", *(f"- {count}: {text}" for text, count in assumed.most_common()), ""]
    return "\n".join(lines)


def drawn(rows: Sequence[Row], outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Write a picture: predicted step times by measured ones, a colour for each family."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes, palette = figure.add_subplot(), matplotlib.colormaps["tab20"]
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["step_ms"] and not outcomes[row["id"]].lacking:
            families[row["family"]].append((row["step_ms"] / 1e3, outcomes[row["id"]].step_ms / 1e3))
    for number, (name, points) in enumerate(sorted(families.items())):
        measured, expected = zip(*points, strict=True)
        axes.scatter(measured, expected, s=14, alpha=0.8, label=f"{name} ({len(points)})", color=palette(number % 20))
    every = [value for points in families.values() for point in points for value in point]
    ends = min(every, default=1.0), max(every, default=10.0)
    for share, style in ((1.0, "-"), (1.25, ":"), (0.8, ":")):
        axes.plot(ends, [share * end for end in ends], style, color="#666666", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, s a step", ylabel="predicted, s a step (dotted: 25% more, 20% less)")
    axes.legend(loc="upper left", fontsize=7, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "soap"}):
        figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="frontier", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="the rows, as JSON")
    parser.add_argument("--groups", type=Path, required=True, metavar="FILE", help="workloads with several plans each, as JSON")
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where exported models are, or are put")
    parser.add_argument("--tier", nargs="+", choices=("A", "B"), default=["A", "B"], help="rows of these tiers")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these rows")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="do not predict the rows in this JSON file again; others are added")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="predict so many rows at a time (2)")
    parser.add_argument("--json", action="store_true", help="print outcomes as JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here, and a picture beside it, instead of printing it")
    args = parser.parse_args(argv)
    rows, groups = (json.loads(path.read_text(encoding="utf-8")) for path in (args.rows, args.groups))
    rows = [row for row in rows if row["tier"] in args.tier and (not args.only or row["id"] in args.only)]
    args.models.mkdir(parents=True, exist_ok=True)
    outcomes = predictions(rows, args.models, args.processes, args.resume)
    if args.json:
        print(json.dumps([asdict(own) for own in outcomes.values()], indent=1))
        return 0
    if args.write is not None:
        drawn(rows, outcomes, args.write.with_suffix(".svg"))
    give(page(rows, groups, outcomes, "python -m benchmarks.frontier"), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
