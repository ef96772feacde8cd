"""Strategies by name, and strategy files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from soap import outputs
from soap.api.models import Cluster, Model, graph_of, topology_of
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.files import read_text, write_text_atomically
from soap.model import sparse_shares
from soap.model.graph import OperatorGraph
from soap.search.layer_placement import LEAST_GAIN, LayerPlacement, layer_placement
from soap.search.pipelining import best_pipeline
from soap.search.space import build_space
from soap.simulator.simulate import Simulator
from soap.strategy import json_file
from soap.strategy.config import Strategy
from soap.strategy.json_file import StrategyContents, StrategyHeader
from soap.strategy.mismatch import cluster_differences
from soap.strategy.named import PIPELINE, base_of, check_name, named, warn_without_effect
from soap.strategy.ralp import RALP

T = TypeVar("T")


def classical(name: str, model: Model, cluster: Cluster) -> Strategy:
    """The strategy of this name, such as ``data_parallel``, ``megatron`` or ``megatron+zero1``; StrategyError if there is none. On one
    device, where nothing can be divided, it is ``single_device``, perhaps with operators that are recomputed."""
    return named(name, graph_of(model), topology_of(cluster))


def simulated_name(name: str, simulator: Simulator) -> Strategy:
    """``classical`` that also knows ``pipeline``: the best of those pipelines that rough costs find promising, by simulation, and ``ralp``
    (``placed_layers``). StrategyError if there is none; a warning if it divides nothing here, or less than its name says."""
    graph, topology = simulator.graph, simulator.topology
    check_name(name)
    if base_of(name)[0] == RALP:
        return named(name, graph, topology, placed_layers(name, simulator).strategy)
    if base_of(name)[0] != PIPELINE:
        strategy = named(name, graph, topology)
        warn_without_effect(name, topology)
        return strategy
    from soap.simulator.incremental import IncrementalSimulator  # compiled code

    found = best_pipeline(build_space(graph, topology.device_count), topology, IncrementalSimulator(simulator))
    if found is None:
        raise StrategyError(
            f"strategy {name!r}: model {graph.name!r} has no pipeline on {topology.device_count} devices; expected several devices and "
            "samples"
        )
    return named(name, graph, topology, found.strategy)


def placed_layers(name: str, simulator: Simulator, least_gain: float = LEAST_GAIN) -> LayerPlacement:
    """What stands behind ``ralp``, or ``ralp:N`` with N of the servers' devices: the cut of the model whose last layers run on servers, and
    what it gains. A model that gains less than the share ``least_gain`` of a step stays with plain servers. StrategyError in one line if
    the cluster has no servers, or fewer devices of servers."""
    from soap.simulator.incremental import IncrementalSimulator

    evaluator, (_, count) = IncrementalSimulator(simulator), base_of(name)
    return layer_placement(simulator.graph, simulator.topology, evaluator, simulator.costs, count=count, least_gain=least_gain)


def load_strategy(path: str | Path, model: Model, cluster: Cluster, *, any_cluster: bool = False) -> Strategy:
    """Load a strategy from a file. StrategyError in one line, with the differences, if it was made for another model or cluster.

    ``any_cluster``: accept a strategy that was made for another cluster with the same number of devices.
    """
    topology = topology_of(cluster)
    graph = graph_of(model, topology)
    return _read_strategy(path, lambda text: json_file.loads(text, graph, topology, any_cluster=any_cluster)[0])


def load_strategy_header(path: str | Path) -> StrategyHeader:
    """The header of a strategy file; needs neither model nor cluster."""
    return _read_strategy(path, json_file.load_header)


def require_cluster(path: str | Path, topology: Topology) -> None:
    """StrategyError in one line, with the differences, if a strategy file was made for another cluster; needs no model."""
    header = load_strategy_header(path)
    theirs = {"name": header.cluster, "hash": header.cluster_hash, "devices": list(header.devices)}
    if differences := cluster_differences(theirs, topology):
        raise StrategyError(f"{path}: {'; '.join(differences)}; search again for this cluster")


def with_recorded_rows(graph: OperatorGraph, path: str | Path) -> OperatorGraph:
    """The graph with the touched rows of sparse parameters that the search of a strategy file had counted."""
    found = load_strategy_contents(path).record.get("sparse", {})
    if not isinstance(found, Mapping):
        raise StrategyError(f"{path}: the record of sparse parameters is no object; search again")
    try:
        return sparse_shares.with_document(graph, found)
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None


def load_strategy_contents(path: str | Path) -> StrategyContents:
    """The contents of a strategy file; needs neither model nor cluster."""
    return _read_strategy(path, json_file.load_contents)


def save_strategy(
    path: str | Path, strategy: Strategy, model: Model, cluster: Cluster, record: Mapping[str, Any] | None = None
) -> None:
    """Write a strategy for ``load_strategy``. ``record``: plain values to save with it."""
    outputs.check(path, outputs.STRATEGY)
    topology = topology_of(cluster)
    write_text_atomically(path, json_file.dumps(strategy, graph_of(model, topology), topology, record))


def _read_strategy(path: str | Path, read: Callable[[str], T]) -> T:
    text = read_text(path, what="strategy file", error=StrategyError)
    try:
        return read(text)
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None
