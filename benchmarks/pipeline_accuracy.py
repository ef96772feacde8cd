"""Pipelines on emulated hosts: predicted against measured, and whether what a search finds beats the best plan without micro-batches.

    python -m benchmarks.pipeline_accuracy --results cells.json --write docs/results/pipelines.md
    python -m benchmarks.pipeline_accuracy --results cells.json --rates 200Mbit/s --profile 0 --rounds 1 --steps 4

On four hosts, for each rate of their links: ``PLANS``, pipelines by layers as people write them; what a search finds; what it finds where
pipelines are forbidden; and data parallelism. All run in the same processes, in turn, as in ``benchmarks.accuracy``, whose rounds these
are: computations and links are measured again, every plan is predicted, every plan runs. Predicted and measured are medians of the rounds.
Needs root, as emulation does. Rounds are kept in ``--results`` as soon as they are known, and found plans beside that file; the same
command goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import kept
from benchmarks.accuracy import OPTIMIZER, emulated, measure, profiled, refined, soap_profile
from benchmarks.accuracy_report import FOUND, HEAD, USUAL, WITHIN, Plan, in_rounds, line_of, report
from benchmarks.end_to_end import machine
from benchmarks.layers import by_layers
from benchmarks.models import export_model
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap import api
from soap.cli.options import not_negative, positive
from soap.cli.updating import states_of
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.files import check_writable
from soap.model.graph import OperatorGraph
from soap.search.options import SearchOptions
from soap.strategy.config import Strategy

HOSTS = 4
RATES = ("1Gbit/s", "200Mbit/s")
MODEL = "emulated-gpt"
UNPIPELINED = "found without pipelines"
MEDIAN, GAIN = 0.05, 1.3
"""Aimed at: the median error, and by what factor the found plan is faster than the best one without micro-batches."""
VERSION = 1


class Shape(NamedTuple):
    """A pipeline by layers; ``tensor``: devices that split matrices together, the others of a stage divide samples."""

    stages: int
    tensor: int
    microbatches: int
    schedule: str

    @property
    def name(self) -> str:
        """In tables."""
        inside = f" x tensor {self.tensor}" * (self.tensor > 1)
        return f"{self.stages} stages{inside}, {self.microbatches} micro-batches, {self.schedule}"


PLANS = (
    Shape(4, 1, 4, "gpipe"), Shape(4, 1, 8, "gpipe"), Shape(4, 1, 8, "1f1b"),
    Shape(2, 1, 4, "1f1b"), Shape(2, 1, 4, "interleaved:2"), Shape(2, 2, 4, "1f1b"),
)  # fmt: skip
PIPELINES = frozenset(shape.name for shape in PLANS)

_TIMES = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}, "required": [FOUND, UNPIPELINED, USUAL]}
_CELL = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("model", "rate", "machine")},
        "number": {"type": "integer", "minimum": 0},
        "predicted_ns": _TIMES,
        "measured_ns": _TIMES,
        "others_share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "required": ["model", "rate", "number", "predicted_ns", "measured_ns", "machine", "others_share"],
    "additionalProperties": False,
}
INTRO = """# Pipelines on emulated hosts

Steps of `{model}` (Adam) on {hosts} hosts that this machine emulates, as predicted and as measured: pipelines by layers, what a search
finds, what it finds without pipelines, and data parallelism. Times are medians of the rounds' medians, in milliseconds. *Others used*: the
share of this machine's cores that other programs had meanwhile; above a tenth a line says little.

    python -m benchmarks.pipeline_accuracy --results FILE --write docs/results/pipelines.md
"""


@dataclass(frozen=True)
class Round:
    """All plans on hosts with links of one rate, run once. ``others_share``: of all cores' time, what other programs used during the run;
    None: unknown."""

    model: str
    rate: str
    number: int
    predicted_ns: Mapping[str, int]
    measured_ns: Mapping[str, int]
    machine: str
    others_share: float | None

    @property
    def plans(self) -> list[Plan]:
        """One for each plan."""
        times = ((name, own, self.measured_ns[name]) for name, own in self.predicted_ns.items())
        return [Plan(self.rate, self.model, name, own, measured, (measured,)) for name, own, measured in times]


def cluster_of(rate: str) -> str:
    """The emulated cluster."""
    return f"emulated:{HOSTS}x1@{rate}"


def strategies_of(file: Path, rate: str, folder: Path, graph: OperatorGraph, args: argparse.Namespace) -> dict[str, Strategy]:
    """All plans by name. ``folder``: where found ones are kept, or found again."""
    cluster, topology = cluster_of(rate), api.load_cluster(cluster_of(rate))
    found = {}
    for name, pipelines in ((FOUND, None), (UNPIPELINED, False)):
        path = folder / f"{rate.replace('/', ' per ')} {name}.json"
        if not path.exists():
            options = SearchOptions(budget=args.budget, seed=args.seed, pipelines=pipelines)
            refined(file, cluster, args.profile, partial(api.find, graph, topology, options)).save(path)
        found[name] = api.load_strategy(path, graph, topology)
    return by_hand(graph, topology) | found | {USUAL: api.classical(USUAL, graph, topology)}


def by_hand(graph: OperatorGraph, topology: Topology) -> dict[str, Strategy]:
    """``PLANS`` by name."""
    return {
        own.name: by_layers(graph, topology, stages=own.stages, microbatches=own.microbatches, schedule=own.schedule, tensor=own.tensor)
        for own in PLANS
    }


def finished(
    file: Path, rate: str, number: int, graph: OperatorGraph, strategies: Mapping[str, Strategy], args: argparse.Namespace
) -> Round:
    """One round: measure what plans are made of, predict them, run them."""
    cluster, topology = cluster_of(rate), api.load_cluster(cluster_of(rate))
    if args.profile:
        with tempfile.TemporaryDirectory() as temporary:
            for strategy in strategies.values():
                path = Path(temporary) / "plan.json"
                api.save_strategy(path, strategy, graph, topology)
                seconds = max(1, args.profile // len(strategies))
                soap_profile([str(file), "--cluster", cluster, "--strategy", str(path), "--budget", str(seconds), "--again"])
        soap_profile(["links", *emulated(cluster, 1.0), "--within-steps", "--again"])
    simulator = api.simulator_for(graph, topology, optimizer_states=states_of(OPTIMIZER))
    watch = Watch()
    plans = measure(simulator, rate, args.model, file, strategies, args.steps, 1)
    predicted, measured = ({own.strategy: time for own, time in zip(plans, times, strict=True)} for times in _columns(plans))
    return Round(args.model, rate, number, predicted, measured, machine(), watch.others_share())


def _columns(plans: Sequence[Plan]) -> tuple[list[int], list[int]]:
    return [plan.predicted_ns for plan in plans], [plan.measured_ns for plan in plans]


def page(rounds: Sequence[Round]) -> str:
    """Markdown."""
    plans: list[Plan] = []
    gains = []
    for rate in dict.fromkeys(own.rate for own in rounds):
        own = in_rounds([one.plans for one in rounds if one.rate == rate])
        plans += own
        gains.append(gain_line(rate, {plan.strategy: plan.measured_ns for plan in own}))
    table = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *map(line_of, plans)]
    by_layer = [plan for plan in plans if plan.strategy in PIPELINES]
    errors = [abs(plan.error) for plan in by_layer]
    most = f"most {max(errors):.1%} (aim {WITHIN:.0%})"
    aim = f"{len(by_layer)} pipelines by layers: median error {median(errors):.1%} (aim {MEDIAN:.0%}), {most}"
    shares = [own.others_share for own in rounds if own.others_share is not None]
    beside = f"{len(rounds)} rounds; others used {max(shares, default=0.0):.0%} at most."
    where = "\n\n".join(f"{own}." for own in dict.fromkeys(one.machine for one in rounds))
    head = INTRO.format(model=rounds[0].model, hosts=HOSTS)
    parts = [head, where, "", beside, "", *table, "", aim, "", *report(by_layer), "", "## Found and without pipelines", "", *gains, ""]
    return "\n".join(parts)


def gain_line(rate: str, measured_ns: Mapping[str, int]) -> str:
    """What was found beside the best plan without micro-batches."""
    best = min((UNPIPELINED, USUAL), key=lambda name: measured_ns[name])
    times = f"{measured_ns[FOUND] / 1e6:.1f} ms, best without micro-batches ({best}) {measured_ns[best] / 1e6:.1f} ms"
    return f"- {rate}: found {times}: {measured_ns[best] / measured_ns[FOUND]:.2f} times as fast (aim {GAIN} at {RATES[-1]})"


def read(path: Path) -> list[Round]:
    """The rounds of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [Round(**own) for own in kept.read(path, _CELL, VERSION, "benchmarks.pipeline_accuracy")]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="pipeline_accuracy", description="Pipelines on emulated hosts, predicted and measured.")
    parser.add_argument("--model", default=MODEL, help="of benchmarks.models, a transformer of 4 layers (default %(default)s)")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of the hosts' links (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=positive, default=10, help="of each plan in a round, warm-up included (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=1000, help="proposals of each search (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=180, help="seconds, before searches and rounds (default %(default)s)")
    parser.add_argument("--seed", type=not_negative, default=0)
    parser.add_argument("--results", type=Path, metavar="FILE", required=True, help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        rounds = read(args.results)
        with tempfile.TemporaryDirectory() as temporary:
            file = export_model(args.model, Path(temporary))
            graph = api.load(file, plan_only=True).graph
            for rate in args.rates:
                _complete(rounds, file, rate, graph, args)
        give(page(rounds), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


def _complete(rounds: list[Round], file: Path, rate: str, graph: OperatorGraph, args: argparse.Namespace) -> None:
    """Add the rounds of a rate that are missing, each kept at once."""
    missing = sorted({*range(args.rounds)} - {own.number for own in rounds if (own.model, own.rate) == (args.model, rate)})
    if not missing:
        return
    folder = args.results.with_suffix(".plans")
    folder.mkdir(exist_ok=True)
    if args.profile:
        profiled(file, cluster_of(rate), args.profile)
    strategies = strategies_of(file, rate, folder, graph, args)
    for number in missing:
        rounds.append(finished(file, rate, number, graph, strategies, args))
        kept.write(args.results, map(asdict, rounds), VERSION)
        print("\n".join(map(line_of, in_rounds([rounds[-1].plans]))), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
