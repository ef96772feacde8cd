"""``soap-search``: find a strategy for a model on a cluster and write it to a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from soap import api
from soap.cli import explain, report
from soap.cli.command import Parser, UsageError, note, run_command
from soap.cli.options import (
    add_cluster,
    add_model,
    add_outputs,
    not_negative,
    positive,
    positive_number,
    reading,
    refuse_overwriting,
)
from soap.cli.stopping import Stopping
from soap.files import check_writable, write_text_atomically
from soap.search.metropolis import DEFAULT_BETA
from soap.search.starts import DYNAMIC, RANDOM
from soap.simulator.timeline import chrome_trace
from soap.strategies import CLASSICAL

PROG = "soap-search"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Find the parallelization strategy with the shortest predicted training iteration. Ctrl-C or SIGTERM saves the best one so far.",
        f"{PROG} zoo:rnnlm:tiny --cluster local:4 --budget 200 -o strategy.json",
    )
    add_model(parser, positional=True)
    add_cluster(parser, required=False)
    parser.add_argument("-o", "--output", metavar="FILE", help="where the strategy goes (JSON)")
    parser.add_argument(
        "--explain-graph",
        action="store_true",
        help="list the model's operators, what each may be split along and why not further, and stop; needs no cluster",
    )
    parser.add_argument("--budget", metavar="N", type=positive, default=api.DEFAULT_BUDGET, help="strategies to try (default %(default)s)")
    parser.add_argument("--seed", metavar="S", type=not_negative, default=0, help="equal seeds give equal results (default %(default)s)")
    parser.add_argument(
        "--beta",
        metavar="B",
        type=positive_number,
        default=DEFAULT_BETA,
        help="how strictly slower strategies are refused on the way (default %(default)g)",
    )
    parser.add_argument(
        "--start",
        metavar="NAME",
        action="append",
        choices=[*CLASSICAL, RANDOM, DYNAMIC],
        help=f"begin with this strategy (repeatable; default: {', '.join(CLASSICAL)}, and dynamic if that takes seconds); "
        "data_parallel is always among them",
    )
    add_outputs(parser, timeline="write the predicted iteration as a trace for Perfetto")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Search, save, report; stopped by Ctrl-C or SIGTERM, save and report the best so far."""
    if args.explain_graph:
        return _explain(args)
    missing = [option for option, value in (("--cluster", args.cluster), ("-o/--output", args.output)) if value is None]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)} ({PROG} --help shows the options)")
    refuse_overwriting({"MODEL": args.model, "--cluster": args.cluster}, {"--output": args.output, "--timeline": args.timeline})
    with Stopping() as stopping:
        try:
            return _search(args, stopping)
        except KeyboardInterrupt:
            note(PROG, "interrupted")
            return stopping.exit_code


def _explain(args: argparse.Namespace) -> int:
    graph = api.load(args.model, plan_only=True, **reading(args)).graph
    found = explain.document(graph)
    print(report.dump(found) if args.json else explain.text(found))
    return 0


def _search(args: argparse.Namespace, stopping: Stopping) -> int:
    for path in filter(None, (args.output, args.timeline)):
        check_writable(path)
    topology = api.load_cluster(args.cluster)
    graph = api.load(args.model, plan_only=True, **reading(args)).graph
    outcome = api.search(graph, topology, budget=args.budget, seed=args.seed, beta=args.beta, starts=args.start, progress=True)
    with stopping.saving():
        outcome.save(args.output)
        if args.timeline:
            trace = chrome_trace(outcome.simulation.tasks, outcome.simulation.schedule)
            write_text_atomically(args.timeline, json.dumps(trace) + "\n")
    summary = report.document(outcome.simulator, outcome.strategy, outcome.simulation)
    if args.json:
        searched = {key: outcome.record["search"][key] for key in ("seed", "budget", "beta", "evaluations", "interrupted")}
        bound_ns = None if outcome.bound is None else outcome.bound.bound_ns
        print(report.dump({**summary, "search": searched, "bound_ns": bound_ns, "strategy": args.output}))
    else:
        print(report.text(summary, report.FOUND))
        print(f"\n{report.optimality(outcome)}")
        print(f"\nwrote {args.output}" + (f" and {args.timeline}" if args.timeline else ""))
    if outcome.result.interrupted:
        note(PROG, f"interrupted after {outcome.result.evaluations} evaluations: the best strategy so far is in {args.output}")
        return stopping.exit_code
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(make_parser(), execute, argv)


if __name__ == "__main__":
    sys.exit(main())
