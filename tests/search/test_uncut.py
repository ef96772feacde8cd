"""Parameters that an optimizer needs whole: no strategy that a search returns cuts them."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, StrategyError
from soap.model.graph import OperatorGraph
from soap.runtime.updates.parts import require_possible
from soap.runtime.updates.trial import Scope, Tried
from soap.search.allowed_space import with_uncut
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import parameter_server, sync_choices
from tests.extent import FEW
from tests.graph_builder import transformer
from tests.search.toys import simulated
from tests.strategies import cluster, graphs

FOUR = cluster([2, 2])
GRAPH = transformer(batch=4, layers=2)
NAMES = tuple(tensor.name for tensor in GRAPH.parameters if tensor.requires_grad)


def runs(graph: OperatorGraph, topology: Topology, strategy: Strategy, scope: Scope) -> bool:
    """Whether a trainer would take it for an optimizer that has this scope for all parameters."""
    names = [tensor.name for tensor in graph.parameters if tensor.requires_grad]
    try:
        require_possible(build_plan(graph, strategy, topology), Tried("X", dict.fromkeys(names, scope), 0, True), lazy_sparse=False)
    except RuntimeFailure:
        return False
    return True


@given(graphs(max_moves=4), st.integers(0, 99), st.sampled_from([Scope.TENSOR, Scope.MODEL]), st.booleans())
@FEW
def test_what_is_found_can_be_trained(graph: OperatorGraph, seed: int, scope: Scope, served: bool) -> None:
    assume(runs(graph, FOUR, CLASSICAL["data_parallel"](graph, FOUR), scope))
    names = [tensor.name for tensor in graph.parameters if tensor.requires_grad]
    together = names if scope is Scope.MODEL else ()
    syncs = [parameter_server(4)] if served and scope is Scope.TENSOR else [SyncConfig()]
    options = SearchOptions(budget=40, seed=seed, uncut=names, together=together, syncs=syncs)
    found = search(graph, FOUR, simulated(graph, FOUR), options)
    assert runs(graph, FOUR, found.strategy, scope)


def test_without_it_a_search_cuts() -> None:
    found = search(GRAPH, FOUR, simulated(GRAPH, FOUR), SearchOptions(budget=60, seed=3))
    assert not all(runs(GRAPH, FOUR, start.strategy, Scope.TENSOR) for start in found.starts)


def test_only_operators_that_would_cut_are_kept_from_it() -> None:
    name = next(name for name in NAMES if "fc1" in name and "weight" in name)
    allowed = with_uncut(GRAPH, FOUR, {}, [name])
    assert list(allowed) == ["0.fc1"]
    op = next(op for op in GRAPH.operators if op.name == "0.fc1")
    assert {op.factors[axis - 1].name for axis in allowed["0.fc1"].whole} == {"n", "k"} and allowed["0.fc1"].grid is None


def test_a_pin_that_cuts_is_refused() -> None:
    name = next(name for name in NAMES if "fc1" in name and "weight" in name)
    with pytest.raises(StrategyError, match=rf"^pins splits operator '0.fc1' so that parameter '{name}' is cut, which the optimizer"):
        search(GRAPH, FOUR, simulated(GRAPH, FOUR), SearchOptions(budget=5, pins=[("0.fc1", "n:4")], uncut=[name]))


def test_servers_keep_them_in_one_partition() -> None:
    choices = sync_choices(GRAPH, FOUR, [parameter_server(4)], uncut=NAMES[:1])
    assert [sync.partitions for sync in choices[NAMES[0]]] == [1, 1] and [sync.partitions for sync in choices[NAMES[1]]] == [1, 4]
    found = search(GRAPH, FOUR, simulated(GRAPH, FOUR), SearchOptions(budget=20, starts=["parameter_server"], uncut=NAMES))
    assert all(sync.partitions == 1 for start in found.starts for sync in start.strategy.parameters.values())
