"""The functions that take longest to compile, and arguments for them, made without calling any: an engine and a chain for a model of one
operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from soap.cluster.presets import preset
from soap.model.graph import Operand, Operator, OperatorGraph, Tensor, TensorKind
from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.chain import advance
from soap.search.compiled.memory import make_chain
from soap.search.compiled.runner import CompiledSpace
from soap.search.compiled.space_arrays import SearchTables
from soap.search.space import build_space
from soap.simulator.compiled.evaluate import evaluate
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.memory import bound_memory
from soap.simulator.compiled.rebuild import lower_all
from soap.simulator.engine import Engine
from soap.simulator.memory.bound import NO_TABLES

SLOW: tuple[Callable[..., Any], ...] = (advance, evaluate, bound_memory, lower_all)
"""The functions that take longest to compile. What a search calls last comes first, with the two that it calls by itself: so whoever
compiles them in this order, and the search, which begins with the last one, do not wait for one another."""


def slow_functions() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """(one of ``SLOW``, arguments of the types that a search passes). The arguments' types are all that they are good for."""
    graph, topology = _model(), preset("local:2")
    costs = RooflineCosts(topology)
    engine = Engine(graph, topology, costs)
    space = CompiledSpace(build_space(graph, topology.device_count), topology, costs)
    grids, neighbours, groups = space.handles
    chain = make_chain(len(graph.operators), len(graph.parameters), topology.device_count, len(space.grids.estimate), 1, 1)
    tables = handle(SearchTables(grids=grids, neighbours=neighbours, groups=groups, chain=chain))
    whole = np.zeros(1, np.int32)
    arguments: tuple[tuple[Any, ...], ...] = (
        (*engine.handles(), tables, NO_TABLES, engine.drawing, 0, 0.0, 0.0, False),
        (*engine.handles(), 0),
        (engine.world, NO_TABLES),
        (engine.world, whole, whole, whole, whole),
    )
    yield from zip(SLOW, arguments, strict=True)


def _model() -> OperatorGraph:
    made = Tensor("y", (), "float32", 4, TensorKind.ACTIVATION)
    operator = Operator("y", "zeros", factors=(), inputs=(), parameters=(), outputs=(Operand("y", ()),))
    return OperatorGraph("model", (operator,), {"y": made}, "y")
