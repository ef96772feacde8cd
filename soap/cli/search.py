"""``soap-search``: find a strategy for a model on a cluster and write it to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from soap import api, outputs
from soap.api import ahead
from soap.cli import at_hand, clusters, explain, plan_summary, reporting, rows, search_report, served_search, spare_plans, two_plans
from soap.cli.clusters import Candidate
from soap.cli.command import Parser, UsageError, check_outputs, note, run_command
from soap.cli.first_measuring import Measured
from soap.cli.options import add_cluster, add_costs, add_explain, add_model, add_outputs, add_rows, cluster_of, reading
from soap.cli.search_options import add_budget, add_choices, add_runs, add_servers, search_options
from soap.cli.stopping import Stopping
from soap.cli.timelines import predicted_text
from soap.cli.updating import Updating, add_optimizer
from soap.cluster.kinds import has_gpus
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, StoppedBySignal
from soap.files import write_text_atomically
from soap.model.graph import OperatorGraph
from soap.search.deciding import FASTEST, SAFE, Answer
from soap.search.options import SearchOptions
from soap.search.plot import check_plot

PROG = "soap-search"
OUTPUT = "strategy.json"
HASTY_DRAWS = 8
"""By which it is decided which plan is kept if the user has ended the search."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Find the parallelization strategy with the shortest predicted training iteration. Ctrl-C or SIGTERM saves the best one so far.",
        f"{PROG} zoo:rnnlm:tiny --cluster local:4 --budget 200 -o strategy.json",
    )
    add_model(parser, positional=True)
    add_cluster(parser, several=True, note=f"default {LOCAL}; repeated: each is searched, and the best one's strategy is written")
    parser.add_argument(
        "--objective",
        choices=clusters.OBJECTIVES,
        default=clusters.TIME,
        help="what the best of several clusters is: the one with the shortest iteration, or with the lowest cost of training, which takes "
        "price_per_hour in cluster files; on each the fastest strategy is searched (default %(default)s)",
    )
    add_costs(parser)
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
    clusters.check_different(args.cluster)
    if args.consistency:
        served_search.check_alone(args, make_parser())
    elif args.workers is not None:
        raise UsageError(f"--workers {args.workers} without --consistency, how far they may be apart; add --consistency bounded:D")
    if len(args.cluster) > 1:
        if args.spare_plans:
            raise UsageError("--spare-plans with several clusters; expected one, whose devices may be lost")
        at_hand.check_none_asked(args.profile, args.verify)
    else:
        at_hand.check_asked(args.cluster[0], args.profile, args.verify, args.costs)
    two_plans.check(args.output, _outputs(args)[1:])
    with Stopping() as stopping:
        try:
            if args.consistency:
                return served_search.search(PROG, args, stopping)
            return _search(args, stopping) if len(args.cluster) == 1 else _search_several(args, stopping)
        except KeyboardInterrupt:
            note(PROG, "interrupted")
            return stopping.exit_code


def _explain(args: argparse.Namespace) -> int:
    devices = api.load_cluster(args.cluster[0]) if args.autocast and args.cluster else None  # whose list of casts counts
    found = explain.document(rows.load_graph(args, devices))
    print(plan_summary.dump(found) if args.json else explain.text(found))
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.plot:
        check_plot(args.plot)
    reporting.check(args.report)


def _outputs(args: argparse.Namespace) -> list[str]:
    return [path for path in (args.output, args.timeline, args.plot, args.report) if path]


def _search(args: argparse.Namespace, stopping: Stopping) -> int:
    _check_outputs(args)
    topology = cluster_of(args, args.cluster[0])
    clusters.check_priced(args.objective, {args.cluster[0]: topology})
    wish = at_hand.wish(topology, args.profile, args.verify, args.costs)
    if wish.problem:
        note(PROG, wish.problem)
    if not wish.profile_s:
        ahead.begin()
    graph = rows.load_graph(args, topology)
    updating = Updating(tuple(args.optimizer or ("adam",)))
    options = search_options(args, updating, graph)  # refuse impossible options before anything is measured
    measured: Measured | None = None
    if wish.profile_s:
        measured, wish = at_hand.profile(PROG, args.model, reading(args, topology), graph, topology, wish, stopping, options)
    outcome = _decided_for(graph, options, stopping, topology)
    interrupted = outcome.result.interrupted or stopping.number is not None
    verified_s: float | None = None
    if wish.finalists and not interrupted:
        with stopping.saving():
            two_plans.save(args.output, outcome)  # before the runs, which may fail
        try:
            outcome, verified_s = at_hand.verify(PROG, outcome, args.model, reading(args, topology), args.seed, args.data, wish, updating)
        except (KeyboardInterrupt, StoppedBySignal) as error:
            note(PROG, f"interrupted while verifying: what the search chose by its predictions is in {args.output}")
            return 128 + error.number if isinstance(error, StoppedBySignal) else stopping.exit_code
        except RuntimeFailure as error:
            raise RuntimeFailure(f"{error}; what the search chose by its predictions is in {args.output}") from None
    files = _save(args, outcome, stopping)
    _report(args, outcome, files, measured, verified_s)
    if args.spare_plans and not interrupted:
        spare = partial(_decided_for, graph, options, stopping)
        written = spare_plans.write(args.spare_plans, topology, spare, lambda: stopping.number is not None)
        note(PROG, f"wrote {len(written)} plans for one device less into {args.spare_plans}")
    if interrupted:
        note(PROG, f"interrupted after {outcome.result.evaluations} evaluations: the best strategy so far is in {args.output}")
        return stopping.exit_code
    return 0


def _decided_for(graph: OperatorGraph, options: SearchOptions, stopping: Stopping, topology: Topology) -> api.SearchOutcome:
    return _decided(api.find(graph, topology, options, progress=True, stopped=lambda: stopping.number is not None), stopping)


def _search_several(args: argparse.Namespace, stopping: Stopping) -> int:
    """Search for each cluster, and keep the best one's strategy. Nothing is measured or run: at most one of them is this machine."""
    _check_outputs(args)
    topologies = {spec: cluster_of(args, spec) for spec in args.cluster}
    clusters.check_priced(args.objective, topologies)
    if any(family(spec) for spec in args.cluster):
        note(PROG, "several clusters are compared by predictions: nothing is measured or run")
    args.confidence = args.confidence or 0.0  # so that this machine is compared like the others
    ahead.begin()
    kinds = {has_gpus(one): one for one in topologies.values()}  # autocast has another list of casts for GPUs
    models = {gpus: rows.load_graph(args, one) for gpus, one in kinds.items()}
    updating = Updating(tuple(args.optimizer or ("adam",)))
    options = {gpus: search_options(args, updating, graph) for gpus, graph in models.items()}

    def stopped() -> bool:
        return stopping.number is not None

    def find(one: Topology) -> api.SearchOutcome:
        return _decided(api.find(models[has_gpus(one)], one, options[has_gpus(one)], progress=True, stopped=stopped), stopping)

    found = clusters.search_each(topologies, find, stopped)
    interrupted = stopped()
    with stopping.saving():
        chosen = clusters.best_of(found, args.objective)
        assert chosen.outcome is not None
        files = _save(args, chosen.outcome, stopping)
    _report_several(args, found, chosen.outcome, files)
    finished = sum(one.is_finished for one in found)
    if interrupted:
        best = f"the best strategy so far, of {chosen.spec}, is in {args.output}"
        note(PROG, f"interrupted after {finished} of {len(found)} clusters: {best}")
        return stopping.exit_code
    return 0


def _decided(outcome: api.SearchOutcome, stopping: Stopping) -> api.SearchOutcome:
    """The outcome with its decision made, which takes seconds for large models, so that saving, which nothing ends, does not make it.
    After Ctrl-C or SIGTERM, be it meanwhile, it is made by ``HASTY_DRAWS``; a further signal ends that, and nothing is saved."""
    if stopping.number is None:
        try:
            _ = outcome.decision
            return outcome
        except KeyboardInterrupt:
            pass
    outcome = replace(outcome, draws=HASTY_DRAWS)
    _ = outcome.decision
    return outcome


def _save(args: argparse.Namespace, outcome: api.SearchOutcome, stopping: Stopping) -> dict[Answer, str]:
    """Returns the file of the fastest and that of the safe plan; where plans were run, both are what is kept."""
    with stopping.saving():
        files = two_plans.save(args.output, outcome)
        if args.timeline:
            simulator = outcome.simulator
            picture = predicted_text(simulator.graph, outcome.strategy, outcome.simulation, simulator.costs_hash)
            write_text_atomically(args.timeline, picture)
        if args.plot:
            outcome.plot(args.plot)
    return files


def _report(
    args: argparse.Namespace, outcome: api.SearchOutcome, files: dict[Answer, str], measured: Measured | None, verified_s: float | None
) -> None:
    """Print what was found, see ``search_report``."""
    found = search_report.document(outcome, files, explain=args.explain, measured=measured, verified_s=verified_s, warmed=args.warm_up)
    if args.report:
        reporting.write_search(args.report, args.output, outcome, found, args.costs)
    if args.json:
        print(plan_summary.dump(found))
        return
    at_hand_now = family(args.cluster[0]) is not None
    told, lossy = _told(args), args.lossy
    print(search_report.text(outcome, found, told=told, lossy=lossy, at_hand=at_hand_now, measured=measured, verified_s=verified_s))
    print(_wrote(args, files))


def _wrote(args: argparse.Namespace, files: dict[Answer, str]) -> str:
    if files[FASTEST] == files[SAFE]:
        return f"\nwrote {' and '.join(_outputs(args))}"
    *first, last = [*(f"{path} ({answer})" for answer, path in files.items()), *_outputs(args)[1:]]
    return f"\nwrote {', '.join(first)} and {last}"


def _report_several(
    args: argparse.Namespace, candidates: Sequence[Candidate], chosen: api.SearchOutcome, files: dict[Answer, str]
) -> None:
    """Print all clusters, and what was found for the best one."""
    found = search_report.document(chosen, files, explain=args.explain, warmed=args.warm_up)
    if args.report:
        reporting.write_search(args.report, args.output, chosen, found, args.costs)
    if args.json:
        compared = clusters.document(candidates, args.objective, search_report.document)
        print(plan_summary.dump({**found, **compared}))
        return
    print(f"{clusters.text(candidates, args.objective)}\n\n{search_report.text(chosen, found, told=_told(args), lossy=args.lossy)}")
    print(_wrote(args, files))


def _told(args: argparse.Namespace) -> list[str]:
    told = [f"{option} {pattern}={spec}" for option in ("pin", "forbid") for pattern, spec in getattr(args, option)]
    return told + [f"lossy {method.word}" for method in args.lossy]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(make_parser(), execute, argv)


if __name__ == "__main__":
    sys.exit(main())
