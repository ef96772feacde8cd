"""The compiled simulator against the plain one: every task, its duration, resources, start and end."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap import api
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import Strategy
from soap.strategy.sync import parameter_server
from soap.tracing.importer import import_program
from tests.complex_modules import batches, module_of
from tests.extent import MANY, often
from tests.simulator.compiled.agreement import compiled_tasks, reference_tasks, synchronized
from tests.simulator.examples import batch_split, chain, pairwise_cluster
from tests.strategies import GPU, cases, cluster


def check(engine: Engine, costs: RooflineCosts, strategy: Strategy) -> None:
    engine.load(strategy)
    makespan_ns = engine.simulate()
    expected = reference_tasks(engine.graph, engine.topology, costs, strategy)
    assert compiled_tasks(engine) == expected
    assert makespan_ns == max(end for _, _, _, end, _ in expected.values())


@pytest.mark.slow
@settings(MANY, suppress_health_check=list(HealthCheck))
@given(cases(servers=True), st.sampled_from((0, 2)))
def test_random_cases(case: tuple[OperatorGraph, Topology, Strategy], states: int) -> None:
    """By optimizers that update of tables some rows, or all of them."""
    graph, topology, strategy = case
    costs = RooflineCosts(topology, states)
    check(Engine(Shared(graph, topology, costs)), costs, strategy)


@pytest.mark.parametrize("name", often(["spectral", "operator", "plane"], ["spectral", "operator"], pytest.mark.slow))
def test_models_with_complex_tensors(name: str) -> None:
    """Their sizes and types enter what travels, what is summed together, and what tiles take."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = import_program(torch.export.export(module_of(name), batches(name, 1)[0]), name=name, plan_only=True).graph
    assert any(t.dtype == "complex64" and t.itemsize == 8 for t in graph.tensors.values()) == (name != "spectral")
    topology, draw = api.load_cluster("p100-4x4"), random.Random(name)
    costs = RooflineCosts(topology)
    engine = Engine(Shared(graph, topology, costs))
    strategies = [api.classical(kind, graph, topology) for kind in CLASSICAL]
    strategies += [random_strategy(graph, topology, draw) for _ in range(10)]
    for strategy in strategies:
        check(engine, costs, strategy)
        check(engine, costs, synchronized(strategy, graph, draw))


def test_more_partitions_than_other_tasks_have_numbers() -> None:
    graph, topology = chain(4, 20, 400), cluster([2, 1], GPU)
    strategy = batch_split(graph, [0, 1, 2]).with_parameter("l1.weight", parameter_server(390))
    costs = RooflineCosts(topology)
    engine = Engine(Shared(graph, topology, costs))
    check(engine, costs, strategy)
    first = topology.device_count + len(topology.links)
    on_cores = [held for _, _, held, *_ in compiled_tasks(engine).values() if min(held) >= first]
    assert len(on_cores) == 390 and len(set(on_cores)) == sum(host.cpu_cores for host in topology.hosts)


def test_methods_of_synchronization_are_taken_from_each_strategy() -> None:
    graph, topology = chain(4, 20, 20), pairwise_cluster(1, 1)
    plain = batch_split(graph, [0, 1])
    costs = RooflineCosts(topology)
    engine = Engine(Shared(graph, topology, costs))
    for strategy in (plain, plain.with_parameter("l1.weight", parameter_server(3)), plain):
        check(engine, costs, strategy)
