"""``soap-report``: a page to look at of a strategy: one HTML file that needs no network."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from soap import api, outputs
from soap.cli import inputs, reporting, timelines
from soap.cli.command import Parser, UsageError, entry_point
from soap.cli.inputs import add_asked, check_inputs, read_file
from soap.cli.options import cluster_of
from soap.plan.compression.training import PLAIN, for_scaling
from soap.simulator.analysis.comparison import compare
from soap.simulator.analysis.timeline_file import loads

PROG = "soap-report"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Write a page that shows a strategy: time beside other strategies, operators, timeline, memory, links, what else there is.",
        f"{PROG} zoo:gpt:tiny --cluster p100-4x4 --builtin megatron -o report.html",
    )
    add_asked(parser)
    parser.add_argument("--measured", metavar="FILE", help="what soap-run --timeline wrote of this strategy: shown beside the prediction")
    parser.add_argument(
        "--on",
        metavar="SPEC",
        action="append",
        help="another cluster of as many devices to try the plan on (repeatable; default: a few presets, if the plan is small)",
    )
    parser.add_output("-o", "--output", kind=outputs.PAGE, required=True, help="where the page goes (HTML)")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Simulate and draw."""
    reporting.check(args.output)
    check_inputs(args)
    measured = timelines.read(args.measured, "measured") if args.measured else None
    topology = cluster_of(args, args.cluster)
    graph = inputs.load_graph(args, topology)
    strategy, graph = read_file(args, graph, topology)
    simulator = api.simulator_for(graph, topology, costs=args.costs, training=for_scaling(PLAIN, args.autocast))
    strategy = api.simulated_name(args.builtin, simulator) if strategy is None else strategy
    if strategy.stale:
        raise UsageError(f"a stale strategy ({strategy.consistency}) has no iteration of the whole batch, which is what a report shows")
    simulation = simulator.predict(strategy)
    more: dict[str, Any] = {}
    if measured is not None:
        (predicted,) = loads(timelines.predicted_text(graph, strategy, simulation, simulator.costs_hash))
        more = {"measured": measured, "comparison": compare(predicted, measured)}
    from soap.report import write

    title = reporting.titled(args.builtin or Path(args.strategy).name, simulator)
    write(args.output, reporting.plan_contents(title, simulator, strategy, simulation, on=args.on, costs=args.costs, **more))
    print(f"wrote {args.output}")
    return 0


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
