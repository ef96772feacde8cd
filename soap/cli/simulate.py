"""``soap-simulate``: predict what one training iteration of a given strategy costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from soap import api
from soap.cli import explanation, iteration, report
from soap.cli.command import Parser, run_command
from soap.cli.options import EXPLAIN_HELP, add_cluster, add_model, add_outputs, reading, refuse_overwriting
from soap.files import check_writable, write_text_atomically
from soap.simulator.simulate import Simulation
from soap.simulator.timeline import chrome_trace
from soap.strategies import CLASSICAL

PROG = "soap-simulate"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Predict time, memory and traffic of one training iteration.",
        f"{PROG} zoo:gpt:tiny --cluster p100-4x4 --builtin megatron --timeline trace.json",
    )
    add_model(parser, positional=True)
    add_cluster(parser, required=True)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--strategy", metavar="FILE", help="a strategy that soap-search wrote")
    which.add_argument("--builtin", metavar="NAME", choices=list(CLASSICAL), help=f"a classical strategy: {', '.join(CLASSICAL)}")
    parser.add_argument("--explain", action="store_true", help=EXPLAIN_HELP)
    add_outputs(parser, timeline="write the iteration as a trace for Perfetto")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Simulate and report."""
    refuse_overwriting(
        {"MODEL": args.model, "--cluster": args.cluster, "--strategy": args.strategy}, {"--timeline": args.timeline}
    )
    if args.timeline:
        check_writable(args.timeline)
    topology = api.load_cluster(args.cluster)
    graph = api.load(args.model, plan_only=True, **reading(args)).graph
    strategy = api.classical(args.builtin, graph, topology) if args.builtin else api.load_strategy(args.strategy, graph, topology)
    simulator = api.simulator_for(graph, topology)
    simulation = simulator.predict(strategy)
    if args.timeline:
        trace = chrome_trace(simulation.tasks, simulation.schedule, memory=simulation.memory_over_time)
        write_text_atomically(args.timeline, json.dumps(trace) + "\n")
    summary = {**report.document(simulator, strategy, simulation), "iteration": iteration.document(simulation)}
    if args.explain:
        lines = api.explain(simulator, strategy, simulation if isinstance(simulation, Simulation) else None)
        summary["explanation"] = explanation.document(graph, lines, simulation.makespan_ns)
    if args.json:
        print(report.dump(summary))
    else:
        print(report.text(summary, args.builtin or Path(args.strategy).name) + "\n\n" + iteration.text(summary["iteration"]))
        if args.explain:
            print("\n" + explanation.text(summary["explanation"], simulation.makespan_ns, topology))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(make_parser(), execute, argv)


if __name__ == "__main__":
    sys.exit(main())
