"""The model, cluster and strategy that commands are given: options, and checks of files that are made before anything takes long."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soap import api
from soap.api.float8 import in_float8
from soap.api.preprocessed import measure_rows_of
from soap.cli.command import Parser, UsageError
from soap.cli.options import add_cluster, add_costs, add_float8, add_memory_budget, add_model, add_rows, builtin, data_spec, reading
from soap.cli.plain_text import aligned, and_more
from soap.cluster import yaml_file
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.files import check_model_file
from soap.model import sparse_shares
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import forms

if TYPE_CHECKING:
    from soap.cli.training import Job


def check_inputs(args: argparse.Namespace) -> None:
    """Raise at once, without slow imports, what would be said later: of missing files, and of a strategy for another cluster."""
    strategy = getattr(args, "strategy", None)
    header = api.load_strategy_header(strategy) if strategy else None
    if not args.model.startswith("zoo:"):
        check_model_file(Path(args.model))
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
    add_float8(parser)
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


LEGEND = "sparse parameters: a batch looks up rows of them, some of them repeatedly; alpha: share of the rows that it touches"
HEADER = ("parameter", "rows", "look-ups", "touched", "by 1/2, 1/4, 1/8", "alpha", "")
MOST_ROWS = 16
"""Lines of the text; the JSON document has all."""


def load_graph(args: argparse.Namespace, topology: Topology | None) -> OperatorGraph:
    """The model's graph, with rows counted on ``--data``, shares from ``--alpha``, and linear layers in float8 by ``--float8``."""
    graph = _read_graph(args, topology)
    return graph if topology is None or args.float8 is None else in_float8(graph, topology, args.float8)


def _read_graph(args: argparse.Namespace, topology: Topology | None) -> OperatorGraph:
    args.model = sized(args.model, args.alpha_from or folder_of(args.data))
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"reading {args.model}", file=sys.stderr)
    if args.data is None and args.alpha_from is None:
        return sparse_shares.with_alphas(api.planned_graph(args.model, **reading(args, topology)), args.alpha)
    model = api.load(args.model, plan_only=True, **reading(args, topology))
    graph = model.graph
    if args.data is not None:
        from soap.cli.batches import batch_size, user_batches  # imports torch, which reading the model has done already

        batches = user_batches(args.data, batch_size(model))
        graph = api.measure_rows(model, (batches(step) for step in range(args.alpha_batches)))
    if args.alpha_from is not None:
        graph = measure_rows_of(model, args.alpha_from)
    return sparse_shares.with_alphas(graph, args.alpha)


def rows_text(sparse: Mapping[str, Mapping[str, Any]]) -> str:
    """The document of ``sparse_shares`` as a table."""
    rows = [HEADER]
    for name, own in list(sparse.items())[:MOST_ROWS]:
        whole, *parts = map(str, own["touched"])
        rows.append((name, str(own["rows"]), str(own["lookups"]), whole, ", ".join(parts[:3]), f"{own['alpha']:.3g}", own["source"]))
    return "\n".join([LEGEND, "", aligned(rows, indent=""), *(line.lstrip() for line in and_more(len(sparse), MOST_ROWS))])


PREFIX = "preprocessed:"
SIZED = ("zoo:dlrm",)
"""Models whose tables have as many rows as the data, if they are given data."""


def add_data(parser: Parser) -> None:
    """The option of whatever trains."""
    data_help = (
        "yields one sequence of tensors per step, the same on all ranks (compared in the first 8 steps, then in every 8th), "
        "or returns a torch dataset, of which each rank reads its samples; or zoo:NAME; or preprocessed:OUT, what soap-preprocess wrote "
        "(default: drawn like the example inputs, of which whole numbers other than indices and labels, such as offsets and masks, "
        "are taken as they are)"
    )
    parser.add_argument("--data", metavar="PKG.MOD:CALLABLE", type=data_spec, help=data_help)


def folder_of(data: str | None) -> str | None:
    """The folder of ``preprocessed:OUT``."""
    return data.removeprefix(PREFIX) if data is not None and data.startswith(PREFIX) else None


def sized(model: str, folder: str | None) -> str:
    """The model with tables as long as the dictionaries of the data. A model that brings its tables (a file, or ``:tables=``) stays."""
    name, at, batch = model.partition("@")
    if folder is None or not name.startswith(SIZED) or "=" in name:
        return model
    from soap.data import Preprocessed  # torch

    rows = Preprocessed(folder).table_rows
    if not rows:
        raise UsageError(f"{folder!r} has no categories; expected some, one for each table of {model}")
    return f"{name}:tables={'-'.join(str(max(1, count)) for count in rows)}{at}{batch}"


def as_read(topology: Topology, data: str | None) -> Topology:
    """The cluster, which says whether devices are given their own samples of the data of ``--data``: of drawn and preprocessed data. What a
    user's callable returns is not known before the ranks call it; it counts as whole batches."""
    return replace(topology, own_samples=data is None or folder_of(data) is not None)


def simulated(simulator: Simulator, strategies: Mapping[str, Strategy], topology: Topology) -> dict[str, Simulation]:
    """Each strategy as it is played on ``simulator``'s cluster, which is ``topology`` as data are read. Memory is that of whole batches,
    never less than of parts: a rank draws a batch whole and keeps its own."""
    return {name: _holding_whole_batches(simulator.run(strategy), topology) for name, strategy in strategies.items()}


def simulator_of(job: Job, simulation: Simulation, costs: CostSource) -> Simulator:
    """The simulator that has made the simulation of a job, so that other plans are priced as that was."""
    graph = simulation.plan.graph
    return api.simulator_for(
        graph,
        as_read(job.topology, job.data),
        optimizer_states=simulation.optimizer_states,
        costs=costs,
        measured_updates=job.updating.tried(graph).measured,
        training=simulation.plan.training,
    )


def _holding_whole_batches(found: Simulation, topology: Topology) -> Simulation:
    plan = replace(found.plan, own_samples=topology.own_samples)
    return replace(found, plan=plan, tasks=replace(found.tasks, plan=plan, topology=topology))
