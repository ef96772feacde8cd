"""The model, cluster and strategy that commands are given: options, and checks of files that are made before anything takes long."""

from __future__ import annotations

import argparse
from pathlib import Path

from soap import api
from soap.cli.command import Parser
from soap.cli.options import add_cluster, add_costs, add_memory_budget, add_model, add_rows, builtin
from soap.cluster import yaml_file
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.model.files import check_exists
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from soap.strategy.named import forms


def check_inputs(args: argparse.Namespace) -> None:
    """Raise at once, without slow imports, what would be said later: of missing files, and of a strategy for another cluster."""
    strategy = getattr(args, "strategy", None)
    header = api.load_strategy_header(strategy) if strategy else None
    if not args.model.startswith("zoo:"):
        check_exists(Path(args.model))
    for spec in args.cluster if isinstance(args.cluster, list) else [args.cluster]:
        if spec is not None and spec != LOCAL:  # how many devices that has takes a while to know
            topology = yaml_file.load_cluster(spec)
            if strategy and header is not None and not _may_fit(len(header.devices), topology, args):
                api.require_cluster(strategy, topology)


def _may_fit(devices: int, topology: Topology, args: argparse.Namespace) -> bool:
    """Whether it is seen later if a strategy for so many devices fits: where the cluster is measured, or ``--what-if`` takes another."""
    return devices == topology.device_count and (family(topology.name) is not None or hasattr(args, "what_if"))


def add_asked(parser: Parser, *, required: bool = True) -> None:
    """MODEL, the cluster, costs, rows, memory, and ``--strategy FILE`` or ``--builtin NAME``: one, or none unless ``required``."""
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
