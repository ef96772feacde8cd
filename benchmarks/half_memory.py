"""With half of the memory that data parallelism needs: is the found plan the measured best of those that fit? On four emulated hosts.

    python -m benchmarks.half_memory --results cells.json --write docs/results/half_memory.md
    python -m benchmarks.half_memory --results cells.json --only emulated-gpt

For each model: computations and links are measured as ``soap-profile`` does, a search plans for devices that have half of what data
parallelism is predicted to need, and what it finds trains beside the plans with names that fit there, and the fastest others, in turns in
the same processes on the emulated hosts (``benchmarks.accuracy.measure``). Then every rank's peak memory under each plan is measured, as
``benchmarks.memory`` does. Needs root, as emulation does. Cells are kept in ``--results`` as soon as they are known: the same command goes
on with those that are missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import kept, memory
from benchmarks.accuracy import OPTIMIZER, READING, emulated, measure, profile_found, profiled, soap_profile
from benchmarks.accuracy_report import FOUND, USUAL, Plan
from benchmarks.end_to_end import machine
from benchmarks.lossy_emulated import MOST_OF_OTHERS
from benchmarks.models import EMULATED_MODELS, export_model
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap import api
from soap.cli.options import not_negative, part_of_the_box, positive
from soap.cli.updating import states_of
from soap.cli.verification import verify
from soap.cluster.memory_budget import with_memory_budget
from soap.errors import SoapError
from soap.files import check_writable
from soap.model.graph import OperatorGraph
from soap.runtime.comm.launch import launch
from soap.search.options import SearchOptions
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import named, saving_names
from soap.units import format_bytes

MODELS = ("emulated-gpt", "emulated-rnnlm", "emulated-resnet50")
CLUSTER = "emulated:4x1@1Gbit/s"
SHARE = 0.5
"""Of what data parallelism needs: what plans may use."""
ALWAYS = ("zero1", "fsdp", "fsdp+recompute", "megatron+zero1", "megatron+fsdp")
"""What everybody would try. ZeRO-2 is ``zero1``, and ``hsdp`` with one device a host is no plan of its own."""
SLOWEST_OVER_FOUND = 4.0
"""What is predicted to take more than so many times as long is not run: it would only cost time."""
VERIFIED, VERIFY_SECONDS = 6, 45
"""How many of the best ones found run beforehand, and for how long together: a user who has the cluster would do so."""
WITHIN = 0.10
"""Of what was measured: what predictions aim at."""
HEAD = ("model", "plan", "predicted, ms", "measured, ms", "error", "rounds apart", "rank", "peak, predicted", "measured", "of the limit")
INTRO = f"""# Half of the memory

What a search finds for devices that have half of the memory which data parallelism is predicted to need ({OPTIMIZER}), beside the plans
with names that fit there too and the fastest others that do, the search's next best ones included: on four emulated hosts with
a device each and links of 1 Gbit/s (`{CLUSTER}`). As by `soap-search --verify {VERIFIED}`, so many of its best plans ran once
before, and the fastest of them is what was found. Times are medians of the rounds, all plans in turns in the same processes.
*Peak* is that of the rank that holds most: tensors from before its shards are made to the end of the third step. *Rank*: by
measured time.

    python -m benchmarks.half_memory --results FILE --write docs/results/half_memory.md
"""

VERSION = 1
_NUMBER = {"type": "integer", "minimum": 1}
_PLAN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        **{name: _NUMBER for name in ("predicted_ns", "measured_ns", "predicted_bytes", "measured_bytes")},
        "rounds_ns": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1},
    },
    "required": ["name", "predicted_ns", "measured_ns", "rounds_ns", "predicted_bytes", "measured_bytes"],
    "additionalProperties": False,
}
_CELL = {
    "type": "object",
    "properties": {
        "model": {"type": "string"},
        "needed_bytes": _NUMBER,
        "limit_bytes": _NUMBER,
        "plans": {"type": "array", "items": _PLAN, "minItems": 1},
        "others_share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
        "machine": {"type": "string"},
    },
    "required": ["model", "needed_bytes", "limit_bytes", "plans", "others_share", "machine"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Run:
    """A plan that fits, as predicted and measured. ``rounds_ns``: each round's median step. Bytes: of the rank that holds most."""

    name: str
    predicted_ns: int
    measured_ns: int
    rounds_ns: Sequence[float]
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the predicted time, relative to what was measured."""
        return self.predicted_ns / self.measured_ns - 1


@dataclass(frozen=True)
class Cell:
    """One model. ``needed_bytes``: predicted peak of data parallelism. ``plans``: the found one first. ``others_share``: of all cores'
    time, what other programs used while plans were timed; None: unknown."""

    model: str
    needed_bytes: int
    limit_bytes: int
    plans: Sequence[Run]
    others_share: float | None
    machine: str

    @property
    def found(self) -> Run:
        """What the search found."""
        return self.plans[0]

    @property
    def best_other(self) -> Run | None:
        """The measured best of all others; None if nothing else fits."""
        return min(self.plans[1:], key=lambda own: own.measured_ns, default=None)


def finished(model: str, file: Path, args: argparse.Namespace) -> Cell:
    """Measure, search, run, weigh."""
    begun = time.monotonic()

    def said(what: str) -> None:
        print(f"{model}: {what}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    if args.profile:
        profiled(file, CLUSTER, args.profile, args.scale)
        said("measured")
    graph, states = api.load(file, plan_only=True).graph, states_of(OPTIMIZER)
    usual = api.simulator_for(graph, CLUSTER, optimizer_states=states).run(api.classical(USUAL, graph, api.load_cluster(CLUSTER)))
    needed = max(usual.peak_bytes)
    limit = int(SHARE * needed)
    options = SearchOptions(budget=args.budget, seed=0, memory_budget=f"{limit} B", optimizer_states=states)
    outcome = api.find(graph, CLUSTER, options)
    said("searched")
    if args.profile:  # the same minutes' costs as the runs', with what was found among the first that are measured
        profile_found(outcome, file, CLUSTER, args.profile, "--again")
        soap_profile(["links", *emulated(CLUSTER, args.scale), "--within-steps", "--again"])
        said("measured again")
        outcome = api.find(graph, CLUSTER, options)
        said("searched again")
    if args.verify:
        outcome = verify(outcome, args.verify, str(file), READING, 0, optimizer=OPTIMIZER, scale=args.scale, seconds=VERIFY_SECONDS)
        said("verified")
    topology = with_memory_budget(api.load_cluster(CLUSTER), options.memory_budget)
    simulator = api.simulator_for(graph, topology, optimizer_states=states)
    plans = contenders(simulator, outcome, args.most)
    watch = Watch()
    timed = measure(simulator, CLUSTER, model, file, plans, args.steps, args.rounds, scale=args.scale)
    others = watch.others_share()
    said(f"ran {len(plans)} plans")
    runs = weighed(file, simulator, plans, timed)
    said("weighed them")
    return Cell(model, needed, limit, runs, others, machine())


def contenders(simulator: Simulator, outcome: api.SearchOutcome, most: int) -> dict[str, Strategy]:
    """Plans that fit, all different, at most so many: the found one, those of ``ALWAYS``, then the fastest others by their predictions."""
    found = {FOUND: outcome.strategy}
    limit_ns = SLOWEST_OVER_FOUND * simulator.makespan_ns(outcome.strategy)
    others: dict[str, Strategy] = {}
    for name, strategy in _candidates(simulator.graph, simulator, outcome):
        known = strategy in [*found.values(), *others.values()]
        if not known and simulator.overflow_bytes(strategy) == 0 and simulator.makespan_ns(strategy) <= limit_ns:
            (found if name in ALWAYS else others)[name] = strategy
    fastest = sorted(others, key=lambda name: simulator.makespan_ns(others[name]))
    return found | {name: others[name] for name in fastest[: max(0, most - len(found))]}


def _candidates(graph: OperatorGraph, simulator: Simulator, outcome: api.SearchOutcome) -> Iterator[tuple[str, Strategy]]:
    """Names and plans: with names, those with which the search began, and its best ones."""
    topology = simulator.topology
    for name in dict.fromkeys((*ALWAYS, *saving_names(topology))):
        yield name, named(name, graph, topology)
    for start in outcome.result.starts:
        yield start.name, start.strategy
    for number, finalist in enumerate(outcome.result.finalists, 1):
        yield f"{FOUND} {number}", finalist.strategy


def weighed(file: Path, simulator: Simulator, plans: Mapping[str, Strategy], timed: Sequence[Plan]) -> list[Run]:
    """What was timed, with the peak memory of each plan, as predicted and measured: on plain ranks, as memory is the same at any speed."""
    cases = []
    for name, strategy in plans.items():
        run = simulator.run(strategy)
        order = execution_order(run.tasks, run.schedule)
        cases.append(memory.Case(str(file), name, strategy, order, run.peak_bytes))
    held = launch(simulator.topology.device_count, memory.measure, (cases, simulator.topology, OPTIMIZER))
    return [
        Run(
            name=case.name,
            predicted_ns=own.predicted_ns,
            measured_ns=own.measured_ns,
            rounds_ns=own.rounds_ns,
            predicted_bytes=max(case.predicted),
            measured_bytes=max(peaks[number].bytes for peaks in held.values()),
        )
        for number, (case, own) in enumerate(zip(cases, timed, strict=True))
    ]


def lines(cell: Cell) -> list[str]:
    """Of the table: a plan each, the found one first."""
    order = sorted(own.measured_ns for own in cell.plans)
    rows = []
    for own in cell.plans:
        times = [f"{own.predicted_ns / 1e6:.1f}", f"{own.measured_ns / 1e6:.1f}", f"{own.error:+.1%}"]
        apart = (max(own.rounds_ns) - min(own.rounds_ns)) / own.measured_ns
        peaks = [format_bytes(own.predicted_bytes), format_bytes(own.measured_bytes), f"{own.measured_bytes / cell.limit_bytes:.0%}"]
        rows.append([cell.model, own.name, *times, f"{apart:.1%}", str(1 + order.index(own.measured_ns)), *peaks])
    return [f"| {' | '.join(row)} |" for row in rows]


def conclusion(cell: Cell) -> str:
    """What a model's plans say, in a line."""
    best, count = cell.best_other, len(cell.plans)
    beside = "nothing else fits"
    if best is not None:
        ratio = best.measured_ns / cell.found.measured_ns
        place = "the measured best" if ratio >= 1 else "not the measured best"
        rounds = [theirs / own for own, theirs in zip(cell.found.rounds_ns, best.rounds_ns, strict=True)]
        spread = f"{min(rounds):.2f} to {max(rounds):.2f} by rounds"
        beside = f"the found plan is {place} of {count} that fit: {best.name} takes {ratio:.3f} times as long ({spread})"
    close = sum(abs(own.error) <= WITHIN for own in cell.plans)
    over = sum(own.measured_bytes > cell.limit_bytes for own in cell.plans)
    held = f"{over} of {count} held more than the limit" if over else "none held more than the limit"
    memory_said = f"{format_bytes(cell.limit_bytes)} of {format_bytes(cell.needed_bytes)}"
    share = "?" if cell.others_share is None else f"{cell.others_share:.0%}"
    note = " (too much for times to be worth anything)" if cell.others_share and cell.others_share > MOST_OF_OTHERS else ""
    return (
        f"- {cell.model}, {memory_said}: {beside}. {close} of {count} predictions are within {WITHIN:.0%}; {held}. "
        f"Others used {share} of the cores{note}."
    )


def page(cells: Sequence[Cell]) -> str:
    """Markdown."""
    places = {model: number for number, model in enumerate(MODELS)}
    ordered = sorted(cells, key=lambda cell: (places.get(cell.model, len(places)), cell.model))
    where = "\n\n".join(f"{own}." for own in dict.fromkeys(cell.machine for cell in ordered))
    table = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *(line for cell in ordered for line in lines(cell))]
    return "\n".join([INTRO, where, "", *table, "", *map(conclusion, ordered), ""])


def read(path: Path | None) -> list[Cell]:
    """The cells of a file; none if there is no file. SoapError in one line if it is no such file."""
    found = [] if path is None else kept.read(path, _CELL, VERSION, "benchmarks.half_memory")
    return [Cell(**{**own, "plans": [Run(**plan) for plan in own["plans"]]}) for own in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="half_memory", description="Plans that fit into half of the memory, on emulated hosts.")
    parser.add_argument("--only", nargs="+", choices=list(EMULATED_MODELS), default=list(MODELS), help="default %(default)s")
    parser.add_argument("--profile", type=not_negative, default=30, help="seconds of each time a model is measured (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=1000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--verify", type=not_negative, default=VERIFIED, help="best ones that run beforehand (default %(default)s)")
    parser.add_argument("--most", type=positive, default=8, help="plans of a model (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=9, help="of each plan in a round, warm-up included (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="over all plans (default %(default)s)")
    parser.add_argument("--scale", type=part_of_the_box, default=1.0, help="of rates and CPU time (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        cells = read(args.results)
        for model in args.only:
            if model in {cell.model for cell in cells}:
                continue
            with tempfile.TemporaryDirectory() as folder:
                cells.append(finished(model, export_model(model, Path(folder)), args))
            print("\n".join([*lines(cells[-1]), conclusion(cells[-1])]), file=sys.stderr, flush=True)
            if args.results is not None:
                kept.write(args.results, map(asdict, cells), VERSION)
        give(page(cells), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
