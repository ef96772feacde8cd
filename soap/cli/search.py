"""``soap-search``: find a strategy for a model on a cluster and write it to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soap import api
from soap.cli import at_hand, explain, explanation, first_measuring, guard, report, rows, verification
from soap.cli.command import Parser, UsageError, note, run_command
from soap.cli.first_measuring import Measured
from soap.cli.options import (
    add_cluster,
    add_costs,
    add_explain,
    add_model,
    add_outputs,
    add_rows,
    at_least_one,
    constraint,
    finalists,
    not_negative,
    not_negative_number,
    positive,
    positive_number,
    reading,
    refuse_overwriting,
    sync_method,
)
from soap.cli.stopping import Stopping
from soap.cli.timelines import predicted_text
from soap.cli.updating import Updating, add_optimizer
from soap.cluster.presets import family
from soap.errors import RuntimeFailure, StoppedBySignal
from soap.files import check_writable, write_text_atomically
from soap.model.graph import OperatorGraph
from soap.search.metropolis import DEFAULT_BETA
from soap.search.options import DEFAULT_BUDGET, SearchOptions
from soap.search.plot import check_plot
from soap.search.starts import DYNAMIC, RANDOM
from soap.strategy.classical import CLASSICAL, NAMED

PROG = "soap-search"
PATIENCE = 0.5


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Find the parallelization strategy with the shortest predicted training iteration. Ctrl-C or SIGTERM saves the best one so far.",
        f"{PROG} zoo:rnnlm:tiny --cluster local:4 --budget 200 -o strategy.json",
    )
    add_model(parser, positional=True)
    add_cluster(parser, required=False)
    add_costs(parser)
    add_rows(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="where the strategy goes (JSON)")
    parser.add_argument(
        "--explain-graph",
        action="store_true",
        help="list the model's operators, what each may be split along and why not further, and stop; needs no cluster",
    )
    add_explain(parser)
    _add_runs(parser)
    _add_budget(parser)
    _add_choices(parser)
    add_optimizer(parser, default="adam: as many states in memory, and an elementwise update")
    parser.add_argument("--plot", metavar="FILE", help="draw best cost, starts and acceptance (.png, .svg, .pdf); needs matplotlib")
    add_outputs(parser, timeline="write the predicted iteration as a trace for Perfetto")
    return parser


def _add_runs(parser: Parser) -> None:
    """Options for measuring before the search and running its best strategies afterwards, and the margin if nothing is run."""
    parser.add_argument(
        "--profile",
        metavar="SECONDS",
        type=not_negative_number,
        help="before the search, measure what is not known yet about links and the model's computations, as soap-profile does, for at most "
        f"SECONDS (default {first_measuring.DEFAULT_S:g} with --cluster local:N or emulated:HxD@RATE, which are this machine; 0: do not)",
    )
    parser.add_argument(
        "--verify",
        metavar="K",
        type=finalists,
        nargs="?",
        const=verification.DEFAULT_FINALISTS,
        help="run the K best strategies (default %(const)s), the best start and data parallelism for real, and keep the fastest; if the "
        f"cluster is this machine, that is done by default, for at most {verification.DEFAULT_S:g} seconds, and for up to "
        f"{verification.ASKED_S:g} if asked for (0: do not)",
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        type=at_least_one,
        help="take a plan that was not run instead of data parallelism only if it is predicted to be more than X times as fast "
        "(default: the factor by which such predictions are known to err; 1: whatever is predicted to be faster)",
    )


def _add_budget(parser: Parser) -> None:
    """Options for the length of the search and its random draws."""
    parser.add_argument("--budget", metavar="N", type=positive, default=DEFAULT_BUDGET, help="strategies to try (default %(default)s)")
    parser.add_argument("--seconds", metavar="S", type=positive_number, help="stop trying after S seconds (results may then differ)")
    parser.add_argument(
        "--patience",
        metavar="P",
        type=positive_number,
        default=PATIENCE,
        help="stop when this share of the budget has brought nothing better (default %(default)g; 1: never)",
    )
    parser.add_argument("--seed", metavar="S", type=not_negative, default=0, help="equal seeds give equal results (default %(default)s)")
    parser.add_argument(
        "--beta",
        metavar="B",
        type=positive_number,
        default=DEFAULT_BETA,
        help="how strictly the search refuses slower strategies on its way (default %(default)g)",
    )


def _add_choices(parser: Parser) -> None:
    """Options for the starts of the search and what it may choose."""
    parser.add_argument(
        "--start",
        metavar="NAME",
        action="append",
        choices=[*NAMED, RANDOM, DYNAMIC],
        help=f"begin with this strategy (repeatable; default: {', '.join(CLASSICAL)}, and those that "
        "other methods of synchronization allow, and dynamic if it takes seconds only); data_parallel is always among them",
    )
    parser.add_argument(
        "--pin",
        metavar="GLOB=SPEC",
        type=constraint,
        action="append",
        default=[],
        help="fix operators and search the rest: 'layers.*=sample:4,channel:2', 'loss=replicas:2'; @0-3, alone or behind that, fixes the "
        "devices (repeatable; factors by name or kind)",
    )
    parser.add_argument(
        "--forbid",
        metavar="GLOB=SPEC",
        type=constraint,
        action="append",
        default=[],
        help="rule something out for operators: '*=reduction' splitting such factors, '*=replicas' copies, '*=@3' a device (repeatable)",
    )
    parser.add_argument(
        "--sync",
        metavar="METHOD",
        type=sync_method,
        action="append",
        default=[],
        help="allow this method of synchronizing parameters beside all-reduce: parameter_server:P (on servers in P partitions; +local "
        "behind it: each host adds up first), or allgather (of sparse parameters' rows); allreduce allows nothing else (repeatable; "
        "default: any method for sparse parameters, all-reduce for dense ones)",
    )


def execute(args: argparse.Namespace) -> int:
    """Search, save and report; after Ctrl-C or SIGTERM, save and report the best strategy so far. Returns the exit code."""
    if args.explain_graph:
        return _explain(args)
    missing = [option for option, value in (("--cluster", args.cluster), ("-o/--output", args.output)) if value is None]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)} ({PROG} --help shows the options)")
    at_hand.check_asked(args.cluster, args.profile, args.verify, args.costs)
    outputs = {"--output": args.output, "--timeline": args.timeline, "--plot": args.plot}
    refuse_overwriting({"MODEL": args.model, "--cluster": args.cluster}, outputs)
    with Stopping() as stopping:
        try:
            return _search(args, stopping)
        except KeyboardInterrupt:
            note(PROG, "interrupted")
            return stopping.exit_code


def _explain(args: argparse.Namespace) -> int:
    found = explain.document(rows.load_graph(args, api.load_cluster(args.cluster) if args.cluster else None))
    print(report.dump(found) if args.json else explain.text(found))
    return 0


def _search(args: argparse.Namespace, stopping: Stopping) -> int:
    written = [path for path in (args.output, args.timeline, args.plot) if path]
    for path in written:
        check_writable(path)
    if args.plot:
        check_plot(args.plot)
    topology = api.load_cluster(args.cluster)
    graph = rows.load_graph(args, topology)
    wish = at_hand.wish(topology, args.profile, args.verify, args.costs)
    if wish.problem:
        note(PROG, wish.problem)
    updating = Updating(tuple(args.optimizer or ("adam",)))
    options = search_options(args, updating, graph)  # refuse impossible options before anything is measured
    measured: Measured | None = None
    if wish.profile_s:
        measured, wish = at_hand.profile(PROG, args.model, reading(args, topology), graph, topology, wish, stopping)
    outcome = api.find(graph, topology, options, progress=True, stopped=lambda: stopping.number is not None)
    verified_s: float | None = None
    if wish.finalists and not outcome.result.interrupted:
        with stopping.saving():
            outcome.save(args.output)  # before the runs, which may fail
        try:
            outcome, verified_s = at_hand.verify(PROG, outcome, args.model, reading(args, topology), args.seed, args.data, wish, updating)
        except (KeyboardInterrupt, StoppedBySignal) as error:
            note(PROG, f"interrupted while verifying: what the search chose by its predictions is in {args.output}")
            return 128 + error.number if isinstance(error, StoppedBySignal) else stopping.exit_code
        except RuntimeFailure as error:
            raise RuntimeFailure(f"{error}; what the search chose by its predictions is in {args.output}") from None
    with stopping.saving():
        outcome.save(args.output)
        if args.timeline:
            picture = predicted_text(graph, outcome.strategy, outcome.simulation, outcome.simulator.costs_hash)
            write_text_atomically(args.timeline, picture)
        if args.plot:
            outcome.plot(args.plot)
    _report(args, outcome, measured, verified_s)
    if outcome.result.interrupted:
        note(PROG, f"interrupted after {outcome.result.evaluations} evaluations: the best strategy so far is in {args.output}")
        return stopping.exit_code
    return 0


def _report(args: argparse.Namespace, outcome: api.SearchOutcome, measured: Measured | None, verified_s: float | None) -> None:
    """Print what was found. ``measured``: what was measured before the search, None if nothing. ``verified_s``: seconds spent on running
    plans, None if none was to be run."""
    graph, topology = outcome.simulator.graph, outcome.simulator.topology
    summary = report.document(outcome.simulator, outcome.strategy, outcome.simulation)
    why: dict[str, Any] = {}
    if args.explain:
        why["explanation"] = explanation.document(graph, outcome.explanation, outcome.time_ns)
        why["synchronization"] = explanation.synchronization(outcome.synchronization)
    tried: dict[str, Any] = {}
    if measured is not None:
        tried["profiled"] = measured.document
    if outcome.kept is not None and verified_s is not None:
        tried["measured"] = verification.document(outcome.runs, outcome.kept, verified_s)
    elif outcome.guard is not None:
        tried["guard"] = guard.document(outcome.guard)
    if args.json:
        recorded = outcome.record["search"]
        keys = ("seed", "budget", "beta", "evaluations", "interrupted", "pins", "forbidden")
        searched = {key: recorded[key] for key in keys if key in recorded}
        bound_ns = None if outcome.bound is None else outcome.bound.bound_ns
        print(report.dump({**summary, "search": searched, "bound_ns": bound_ns, "strategy": args.output, **tried, **why}))
        return
    print(report.text(summary, report.FOUND))
    print(f"\n{report.optimality(outcome)}")
    if measured is not None:
        print(f"\n{measured.text}")
    obeyed = [f"{option} {pattern}={spec}" for option in ("pin", "forbid") for pattern, spec in getattr(args, option)]
    if obeyed:
        print(f"as the search was told: --{', --'.join(obeyed)}; the other strategies above were not")
    if "measured" in tried:
        print("\n" + verification.text(tried["measured"]))
    elif verified_s is not None and outcome.kept is None:
        print("\nran nothing: every other plan is predicted to be slower than data parallelism, by more than predictions err")
    if "guard" in tried:
        print("\n" + guard.text(tried["guard"], at_hand=bool(family(args.cluster))))
    if args.explain:
        print("\n" + explanation.text(why["explanation"], outcome.time_ns, topology))
        if why["synchronization"]:
            print("\n" + explanation.synchronization_text(why["synchronization"], outcome.time_ns))
    print(f"\nwrote {' and '.join(path for path in (args.output, args.timeline, args.plot) if path)}")


def search_options(args: argparse.Namespace, updating: Updating, graph: OperatorGraph) -> SearchOptions:
    """The search options that the arguments ask for. Without ``--optimizer`` it is Adam, which is known; trying another needs torch."""
    options = SearchOptions(
        budget=args.budget,
        seed=args.seed,
        seconds=args.seconds,
        patience=args.patience,
        beta=args.beta,
        starts=args.start,
        pins=args.pin,
        forbidden=args.forbid,
        syncs=args.sync,
        costs=args.costs,
        margin=args.margin,
    )
    if not args.optimizer:
        return options
    from soap.runtime.updates.trial import optimizer_states

    tried = updating.tried(graph)
    states = optimizer_states(tried, sparse=bool(graph.sparse))
    return replace(options, optimizer_states=states, measured_updates=tried.measured, uncut=tried.whole, together=tried.coupled)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(make_parser(), execute, argv)


if __name__ == "__main__":
    sys.exit(main())
