"""``soap-search``: find a strategy for a model on a cluster and write it to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from soap import api, outputs
from soap.cli import explanation, first_measuring, inputs, plan_summary, reporting, search_report, served_search, spare_plans
from soap.cli.command import Parser, UsageError, check_outputs, entry_point, note, one_line
from soap.cli.first_measuring import Measured
from soap.cli.inputs import check_inputs
from soap.cli.options import (
    add_cluster,
    add_costs,
    add_explain,
    add_float8,
    add_kernels,
    add_model,
    add_outputs,
    add_rows,
    cluster_of,
    reading,
)
from soap.cli.plain_text import left_last, milliseconds
from soap.cli.search_options import add_budget, add_choices, add_runs, add_servers, search_options
from soap.cli.stopping import Stopping
from soap.cli.timelines import predicted_text
from soap.cli.updating import Updating, add_optimizer
from soap.cluster.kinds import has_gpus
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import InfeasibleError, RuntimeFailure, SoapError, StoppedBySignal, TopologyError
from soap.files import write_text_atomically
from soap.model.graph import OperatorGraph
from soap.search.deciding import FASTEST, SAFE, Answer
from soap.search.options import SearchOptions
from soap.search.plot import check_plot
from soap.time_limit import TimeIsUp

TIME, COST = "time", "cost"
OBJECTIVES = (TIME, COST)
NOT_SEARCHED = "not searched"


@dataclass(frozen=True)
class Candidate:
    """A cluster, as the user named it, and what was found for it. ``problem``: why there is no outcome, in one line."""

    spec: str
    topology: Topology
    outcome: api.SearchOutcome | None = None
    problem: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the search has come to its end."""
        return not self.outcome.result.interrupted if self.outcome is not None else self.problem != NOT_SEARCHED

    def value(self, objective: str) -> float:
        """What is compared: nanoseconds or money per iteration. There must be an outcome."""
        assert self.outcome is not None
        each = self.outcome.throughput.cost_per_step
        return float(self.outcome.time_ns) if objective == TIME or each is None else each


def check_priced(objective: str, clusters: Mapping[str, Topology]) -> None:
    """TopologyError if the objective is cost and a cluster has no price, or prices are in several currencies."""
    if objective != COST:
        return
    prices = {spec: topology.price for spec, topology in clusters.items()}
    unpriced = next((spec for spec, price in prices.items() if price is None), None)
    if unpriced is not None:
        raise TopologyError(
            f"--objective cost: cluster {unpriced!r} has no price; expected price_per_hour in its file (of a preset: "
            f"a file with 'preset: NAME' and 'price_per_hour: 2.5')"
        )
    currencies = sorted({price.currency for price in prices.values() if price is not None})
    if len(currencies) > 1:
        shown = ", ".join(currency or "none" for currency in currencies)
        raise TopologyError(f"--objective cost: prices in several currencies ({shown}); expected the same currency in all cluster files")


def check_different(specs: Sequence[str]) -> None:
    """UsageError if a cluster is given twice."""
    twice = next((spec for number, spec in enumerate(specs) if spec in specs[:number]), None)
    if twice is not None:
        raise UsageError(f"--cluster {twice} is given twice; expected different clusters")


def search_each(
    clusters: Mapping[str, Topology], find: Callable[[Topology], api.SearchOutcome], stopped: Callable[[], bool]
) -> list[Candidate]:
    """Search for each cluster in turn. Ctrl-C or SIGTERM ends the search that is under way, with its best so far; clusters behind it are
    not searched. KeyboardInterrupt if nothing is known then; InfeasibleError if the model fits on none of the clusters."""
    outcomes: dict[str, api.SearchOutcome] = {}
    problems: dict[str, str] = {}
    try:
        for spec, topology in clusters.items():
            try:
                outcomes[spec] = find(topology)
            except InfeasibleError as error:
                if not stopped():  # a search that was ended may not have come to what fits
                    problems[spec] = str(error)
            except SoapError as error:
                error.args = (f"cluster {spec!r}: {error}", *error.args[1:])
                raise
            if stopped():
                break
    except KeyboardInterrupt:
        if not outcomes:
            raise
    if not outcomes:
        if len(problems) < len(clusters):
            raise KeyboardInterrupt
        raise InfeasibleError("; ".join(f"cluster {spec!r}: {problem}" for spec, problem in problems.items()))
    return [
        Candidate(spec, topology, outcomes.get(spec), "" if spec in outcomes else problems.get(spec, NOT_SEARCHED))
        for spec, topology in clusters.items()
    ]


def best_of(candidates: Sequence[Candidate], objective: str) -> Candidate:
    """The best one by the objective; the first of equally good ones."""
    return min((one for one in candidates if one.outcome is not None), key=lambda one: one.value(objective))


def clusters_document(
    candidates: Sequence[Candidate], objective: str, report: Callable[[api.SearchOutcome], dict[str, Any]]
) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface. ``report``: the document of one search."""
    return {
        "objective": objective,
        "chosen": best_of(candidates, objective).spec,
        "clusters": [
            {"cluster_given": one.spec, "fits": True, **report(one.outcome)}
            if one.outcome is not None
            else {"cluster_given": one.spec, "fits": None if one.problem == NOT_SEARCHED else False, "problem": one.problem}
            for one in candidates
        ],
    }


def clusters_text(candidates: Sequence[Candidate], objective: str) -> str:
    """A table of the clusters, and which one is chosen."""
    rows: list[tuple[str, ...]] = [("cluster", "predicted", "80% of draws", "MFU", "samples/s", "cost per million samples", "")]
    chosen = best_of(candidates, objective)
    for one in candidates:
        if one.outcome is None:
            rows.append((one.spec, "-", "-", "-", "-", "-", one.problem if one.problem == NOT_SEARCHED else "nothing fits into memory"))
            continue
        own = plan_summary.throughput_document(one.outcome.throughput)
        rate, cost = own["samples_per_second"], own["cost_per_million_samples"]
        unknown = "no price" if one.topology.price is None else "-"
        rows.append(
            (
                one.spec,
                milliseconds(one.outcome.time_ns),
                plan_summary.between(one.outcome.range),
                plan_summary.utilisation_text(own["mfu"]),
                "-" if rate is None else plan_summary.rate(rate),
                unknown if cost is None else plan_summary.cost_text(cost, own["currency"]),
                _note(one, chosen),
            )
        )
    word = "fastest" if objective == TIME else "cheapest"
    return f"{left_last(rows)}\n\n{word}: {chosen.spec}; of its strategy:"


def _note(one: Candidate, chosen: Candidate) -> str:
    assert one.outcome is not None
    interrupted = f"interrupted after {one.outcome.result.evaluations} evaluations" if one.outcome.result.interrupted else ""
    return ", ".join(note for note in ("chosen" if one is chosen else "", interrupted) if note)


PROG = "soap-search"
OUTPUT = "strategy.json"
HASTY_DRAWS = 8
"""By which it is decided which plan is kept if the user, or a time limit, has ended the search."""
SEARCHING_SHARE, VERIFYING_SHARE = 0.6, 0.8
"""Parts of the time that is left for a search whose plans are run afterwards, and for these runs."""
FINDING_SHARE, SPARE_SHARE = 0.9, 0.3
"""Parts for the search, before the rest is for the report, and for the search of a spare plan."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Find the parallelization strategy with the shortest predicted training iteration. Ctrl-C or SIGTERM saves the best one so far.",
        f"{PROG} zoo:rnnlm:tiny --cluster local:4 --budget 200 -o strategy.json",
    )
    add_model(parser, positional=True)
    add_float8(parser)
    add_cluster(parser, several=True, note=f"default {LOCAL}; repeated: each is searched, and the best one's strategy is written")
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=TIME,
        help="what the best of several clusters is: the one with the shortest iteration, or with the lowest cost of training, which takes "
        "price_per_hour in cluster files; on each the fastest strategy is searched (default %(default)s)",
    )
    add_costs(parser)
    add_kernels(parser)
    add_rows(parser)
    parser.add_output("-o", "--output", kind=outputs.STRATEGY, help=f"where the strategy goes (default {OUTPUT})")
    parser.add_argument(
        "--explain-graph",
        action="store_true",
        help="list the model's operators, what each may be split along and why not further, and stop; needs no cluster",
    )
    add_explain(parser)
    add_runs(parser)
    add_budget(parser)
    add_choices(parser)
    add_servers(parser)
    add_optimizer(parser, default="adam: as many states in memory, and an elementwise update")
    spare_help = "write a plan for the cluster without one of its devices, for each of them that differs, for soap-run --restarts"
    parser.add_output("--spare-plans", kind=outputs.SPARE_PLANS, help=spare_help)
    parser.add_output("--plot", kind=outputs.PICTURE, help="draw best cost, starts and acceptance (.png, .svg, .pdf); needs matplotlib")
    reporting.add_report(parser, "the plan, its iteration and how it was found")
    add_outputs(parser, timeline="write the predicted iteration as a trace for Perfetto")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Search, save and report; after Ctrl-C or SIGTERM, save and report the best strategy so far. Returns the exit code."""
    if args.explain_graph:
        return _explain(args)
    args.cluster = args.cluster or [LOCAL]
    if args.output is None:
        args.output = OUTPUT
        check_outputs(make_parser(), args)
    check_different(args.cluster)
    if args.consistency:
        served_search.check_alone(args, make_parser())
    elif args.workers is not None:
        raise UsageError(f"--workers {args.workers} without --consistency, how far they may be apart; add --consistency bounded:D")
    if len(args.cluster) > 1:
        if args.spare_plans:
            raise UsageError("--spare-plans with several clusters; expected one, whose devices may be lost")
        first_measuring.check_none_asked(args.profile, args.verify)
    else:
        first_measuring.check_asked(args.cluster[0], args.profile, args.verify, args.costs)
    spare_plans.check_beside(args.output, _outputs(args)[1:])
    with Stopping(args.limit) as stopping:
        try:
            if args.consistency:
                return served_search.search(PROG, args, stopping)
            return _search(args, stopping) if len(args.cluster) == 1 else _search_several(args, stopping)
        except (KeyboardInterrupt, InfeasibleError) as error:
            if stopping.number is None:
                raise
            note(PROG, f"interrupted: {one_line(str(error)) or 'nothing was found yet'}")
            return stopping.exit_code


def _explain(args: argparse.Namespace) -> int:
    devices = api.load_cluster(args.cluster[0]) if args.autocast and args.cluster else None  # whose list of casts counts
    found = explanation.graph_document(inputs.load_graph(args, devices))
    print(plan_summary.dump(found) if args.json else explanation.graph_text(found))
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.plot:
        check_plot(args.plot)
    reporting.check(args.report)
    check_inputs(args)


def _outputs(args: argparse.Namespace) -> list[str]:
    return [path for path in (args.output, args.timeline, args.plot, args.report) if path]


def _search(args: argparse.Namespace, stopping: Stopping) -> int:
    _check_outputs(args)
    topology = cluster_of(args, args.cluster[0])
    check_priced(args.objective, {args.cluster[0]: topology})
    wish = first_measuring.wish(topology, args.profile, args.verify, args.costs)
    if wish.problem:
        note(PROG, wish.problem)
    graph = inputs.load_graph(args, topology)
    updating = Updating(tuple(args.optimizer or ("adam",)))
    options = search_options(args, updating, graph)  # refuse impossible options before anything is measured
    measured: Measured | None = None
    if wish.profile_s:
        measured, wish = first_measuring.profile(PROG, args.model, reading(args, topology), graph, topology, wish, stopping, options)
    outcome = _decided_for(graph, options, stopping, SEARCHING_SHARE if wish.finalists else 1, topology)
    interrupted = outcome.result.interrupted or stopping.number is not None
    verified_s: float | None = None
    if wish.finalists and not stopping.ended:
        outcome, _ = _written(args, outcome, stopping)  # before the runs, which may fail
        try:
            verifying = args.model, reading(args, topology), args.seed, args.data, wish, updating
            outcome, verified_s = first_measuring.verify(PROG, outcome, *verifying, args.limit.seconds(VERIFYING_SHARE))
        except TimeIsUp:
            note(PROG, "the time was over while verifying: the search's choice by predictions stands")
        except (KeyboardInterrupt, StoppedBySignal) as error:
            note(PROG, f"interrupted while verifying: what the search chose by its predictions is in {args.output}")
            return 128 + error.number if isinstance(error, StoppedBySignal) else stopping.exit_code
        except RuntimeFailure as error:
            raise RuntimeFailure(f"{error}; what the search chose by its predictions is in {args.output}") from None
    outcome, files = _save(args, outcome, stopping)
    _report(args, outcome, files, stopping, measured, verified_s)
    if args.spare_plans and not interrupted:
        spare = partial(_decided_for, graph, options, stopping, SPARE_SHARE)
        written = spare_plans.write(args.spare_plans, topology, spare, lambda: stopping.ended)
        note(PROG, f"wrote {len(written)} plans for one device less into {args.spare_plans}")
    if interrupted:
        note(PROG, f"interrupted after {outcome.result.evaluations} evaluations: the best strategy so far is in {args.output}")
        return stopping.exit_code
    return 0


def _decided_for(graph: OperatorGraph, options: SearchOptions, stopping: Stopping, share: float, topology: Topology) -> api.SearchOutcome:
    """Search in this share of the time that is left, and decide."""
    options = replace(options, seconds=stopping.limit.seconds(FINDING_SHARE * share))
    found = api.find(graph, topology, options, progress=True, stopped=lambda: stopping.number is not None)
    return _decided(found, stopping)


def _search_several(args: argparse.Namespace, stopping: Stopping) -> int:
    """Search for each cluster, and keep the best one's strategy. Nothing is measured or run: at most one of them is this machine."""
    _check_outputs(args)
    topologies = {spec: cluster_of(args, spec) for spec in args.cluster}
    check_priced(args.objective, topologies)
    if any(family(spec) for spec in args.cluster):
        note(PROG, "several clusters are compared by predictions: nothing is measured or run")
    args.confidence = args.confidence or 0.0  # so that this machine is compared like the others
    kinds = {has_gpus(one): one for one in topologies.values()}  # autocast has another list of casts for GPUs
    models = {gpus: inputs.load_graph(args, one) for gpus, one in kinds.items()}
    updating = Updating(tuple(args.optimizer or ("adam",)))
    options = {gpus: search_options(args, updating, graph) for gpus, graph in models.items()}

    left = list(topologies)

    def find(one: Topology) -> api.SearchOutcome:
        share = 1 / len(left)
        left.pop()
        return _decided_for(models[has_gpus(one)], options[has_gpus(one)], stopping, share, one)

    found = search_each(topologies, find, lambda: stopping.ended)
    interrupted = stopping.number is not None
    chosen = best_of(found, args.objective)
    assert chosen.outcome is not None
    outcome, files = _save(args, chosen.outcome, stopping)
    _report_several(args, found, outcome, files, stopping)
    finished = sum(one.is_finished for one in found)
    if interrupted:
        best = f"the best strategy so far, of {chosen.spec}, is in {args.output}"
        note(PROG, f"interrupted after {finished} of {len(found)} clusters: {best}")
        return stopping.exit_code
    return 0


def _decided(outcome: api.SearchOutcome, stopping: Stopping) -> api.SearchOutcome:
    """The outcome with its decision made: by ``HASTY_DRAWS`` if the search was ended, and if that takes long by the search's costs."""

    def decided(one: api.SearchOutcome) -> api.SearchOutcome:
        _ = one.decision
        return one

    hasty = replace(outcome, draws=HASTY_DRAWS, brief=False)
    ways = [] if outcome.brief or stopping.ended else [partial(decided, outcome)]
    return stopping.in_time(*ways, partial(decided, hasty), outcome.shortened)


def _written(args: argparse.Namespace, outcome: api.SearchOutcome, stopping: Stopping) -> tuple[api.SearchOutcome, dict[Answer, str]]:
    """Write what was found; without what would have to be simulated first, if there is no time for that. Returns what was written, and the
    file of the fastest and that of the safe plan; where plans were run, both are what is kept."""

    def simulated() -> api.SearchOutcome:
        _ = outcome.record, outcome.other and outcome.other.record
        return outcome

    if stopping.ended:  # whatever happens from here on, there is a plan
        with stopping.saving():
            spare_plans.save_both(args.output, outcome.shortened())
    written = stopping.in_time(simulated, outcome.shortened)
    with stopping.saving():
        return written, spare_plans.save_both(args.output, written)


def _save(args: argparse.Namespace, outcome: api.SearchOutcome, stopping: Stopping) -> tuple[api.SearchOutcome, dict[Answer, str]]:
    """``_written``, and what is drawn of it."""
    written, files = _written(args, outcome, stopping)
    if written.brief:
        return written, files
    if args.timeline:
        simulator = written.simulator
        picture = predicted_text(simulator.graph, written.strategy, written.simulation, simulator.costs_hash)
        with stopping.saving():
            write_text_atomically(args.timeline, picture)
    if args.plot:
        with stopping.saving():
            written.plot(args.plot)
    return written, files


def _report(
    args: argparse.Namespace,
    outcome: api.SearchOutcome,
    files: dict[Answer, str],
    stopping: Stopping,
    measured: Measured | None,
    verified_s: float | None,
) -> None:
    """Print what was found, see ``search_report``."""

    def made() -> str:
        found = search_report.document(outcome, files, explain=args.explain, measured=measured, verified_s=verified_s, warmed=args.warm_up)
        if args.report:
            reporting.write_search(args.report, args.output, outcome, found, args.costs)
        if args.json:
            return plan_summary.dump(found)
        at_hand_now = family(args.cluster[0]) is not None
        told, lossy = _told(args), args.lossy
        text = search_report.text(outcome, found, told=told, lossy=lossy, at_hand=at_hand_now, measured=measured, verified_s=verified_s)
        return f"{text}\n{_wrote(args, files)}"

    print(stopping.in_time(*([] if outcome.brief else [made]), partial(_briefly, args, outcome)))


def _wrote(args: argparse.Namespace, files: dict[Answer, str]) -> str:
    if files[FASTEST] == files[SAFE]:
        return f"\nwrote {' and '.join(_outputs(args))}"
    *first, last = [*(f"{path} ({answer})" for answer, path in files.items()), *_outputs(args)[1:]]
    return f"\nwrote {', '.join(first)} and {last}"


def _report_several(
    args: argparse.Namespace, candidates: Sequence[Candidate], chosen: api.SearchOutcome, files: dict[Answer, str], stopping: Stopping
) -> None:
    """Print all clusters, and what was found for the best one."""

    def made() -> str:
        found = search_report.document(chosen, files, explain=args.explain, warmed=args.warm_up)
        if args.report:
            reporting.write_search(args.report, args.output, chosen, found, args.costs)
        if args.json:
            return plan_summary.dump({**found, **clusters_document(candidates, args.objective, search_report.document)})
        text = search_report.text(chosen, found, told=_told(args), lossy=args.lossy)
        return f"{clusters_text(candidates, args.objective)}\n\n{text}\n{_wrote(args, files)}"

    print(stopping.in_time(*([] if chosen.brief else [made]), partial(_briefly, args, chosen)))


def _briefly(args: argparse.Namespace, outcome: api.SearchOutcome) -> str:
    """The command's output when no time is left for the report."""
    if args.report or (outcome.brief and (args.timeline or args.plot)):
        note(PROG, f"no time was left for pictures; soap-report and soap-simulate make them of {args.output}")
    found = search_report.brief(outcome)
    return plan_summary.dump({**found, "strategy": args.output}) if args.json else search_report.brief_text(found, args.output)


def _told(args: argparse.Namespace) -> list[str]:
    told = [f"{option} {pattern}={spec}" for option in ("pin", "forbid") for pattern, spec in getattr(args, option)]
    return told + [f"lossy {method.word}" for method in args.lossy]


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
