"""A strategy of a model on a cluster, as several commands are asked about one: from a file, or by its name."""

from __future__ import annotations

import argparse

from soap import api
from soap.cli.command import Parser
from soap.cli.options import add_cluster, add_costs, add_memory_budget, add_model, add_rows, builtin
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from soap.strategy.named import forms


def add_asked(parser: Parser, *, required: bool = True) -> None:
    """MODEL, the cluster, the costs, rows of sparse parameters, memory, and ``--strategy FILE`` or ``--builtin NAME``: one of these two, or
    none unless ``required``."""
    add_model(parser, positional=True)
    add_cluster(parser)
    add_costs(parser)
    add_rows(parser)
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--strategy", metavar="FILE", help="a strategy that soap-search wrote")
    which.add_argument("--builtin", metavar="NAME", type=builtin, help=f"a strategy that has a name: {forms()}")
    add_memory_budget(parser)


def read_file(
    args: argparse.Namespace, graph: OperatorGraph, topology: Topology, *, any_cluster: bool = False
) -> tuple[Strategy | None, OperatorGraph]:
    """The strategy of ``--strategy`` (None without), and the graph with the rows that the file records, unless options say something of
    them. StrategyError if it does not fit the graph, or the cluster unless ``any_cluster``."""
    if not args.strategy:
        return None, graph
    strategy = api.load_strategy(args.strategy, graph, topology, any_cluster=any_cluster)
    if args.data or args.alpha or args.alpha_from:
        return strategy, graph
    return strategy, api.with_recorded_rows(graph, args.strategy)
