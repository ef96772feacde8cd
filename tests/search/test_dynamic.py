from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.api import simulator_for
from soap.model.regions import intersect, volume
from soap.profiles.roofline import RooflineCosts
from soap.search.dynamic import MAX_CANDIDATES, MOST_SINGLES, Additive, additive_costs, candidates, dynamic_strategy, minimise, pair_count
from soap.search.rough_costs import RoughCosts
from soap.search.space import build_space
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig
from tests.extent import FEW, MANY
from tests.graph_builder import mlp, transformer
from tests.search.toys import layers
from tests.strategies import cluster, graphs


@st.composite
def problems(draw: st.DrawFn, *, reducible: bool) -> Additive:
    """Chains whose edges are replaced by parallel branches or longer ones (reducible), or any edges at all."""
    counts, edges = [draw(st.integers(1, 3)), draw(st.integers(1, 3))], [(0, 1)]
    for _ in range(draw(st.integers(0, 5))):
        i, j = draw(st.sampled_from(edges))
        counts.append(draw(st.integers(1, 3)))
        new = len(counts) - 1
        if not draw(st.booleans()):  # the edge is replaced, or gets a branch beside it
            edges.remove((i, j))
        edges += [(i, new), (min(j, new), max(j, new))]
    if not reducible:
        edges += [(i, j) for i in range(len(counts)) for j in range(i + 1, len(counts)) if draw(st.booleans())]
    rng = random.Random(draw(st.integers(0, 2**20)))
    cost = {(i, j): np.array([[rng.randint(0, 9) * 1.0 for _ in range(counts[j])] for _ in range(counts[i])]) for i, j in set(edges)}
    return Additive([np.array([rng.randint(0, 9) * 1.0 for _ in range(n)]) for n in counts], cost)


def total(problem: Additive, chosen: list[int]) -> float:
    """The sum for one candidate per operator."""
    whole = sum(float(own[c]) for own, c in zip(problem.nodes, chosen, strict=True))
    return whole + sum(float(own[chosen[i], chosen[j]]) for (i, j), own in problem.edges.items())


def least(problem: Additive) -> float:
    return min(total(problem, list(chosen)) for chosen in product(*(range(len(own)) for own in problem.nodes)))


@given(problems(reducible=True))
@MANY
def test_series_and_parallel_edges_are_eliminated_exactly(problem: Additive) -> None:
    chosen, exact = minimise(problem)
    assert exact and total(problem, chosen) == least(problem)


@given(problems(reducible=False))
def test_what_is_called_exact_is_the_minimum(problem: Additive) -> None:
    chosen, exact = minimise(problem)
    assert total(problem, chosen) == least(problem) if exact else total(problem, chosen) >= least(problem)


def test_four_operators_that_all_know_each_other_are_not_exact() -> None:
    costs = {(i, j): np.eye(2) for i in range(4) for j in range(i + 1, 4)}
    assert not minimise(Additive([np.zeros(2)] * 4, costs))[1]
    assert minimise(Additive([np.zeros(2)] * 3, {pair: costs[pair] for pair in ((0, 1), (0, 2), (1, 2))}))[1]


@given(graphs(max_moves=4), st.integers(2, 4))
@FEW
def test_strategies_are_legal_and_structured(graph, device_count) -> None:  # type: ignore[no-untyped-def]
    topology = cluster([device_count])
    space = build_space(graph, device_count)
    strategy = dynamic_strategy(space, RoughCosts(Shared(space.graph, topology, RooflineCosts(topology))))
    strategy.validate(graph, device_count)
    for op, own in zip(graph.operators, space.operators, strict=True):
        assert own.log_weight(strategy.operators[op.name]) == 0.0


def test_costs_of_one_device_are_the_simulated_time() -> None:
    """On one device nothing overlaps, so the sum is the prediction."""
    graph, topology = mlp(), cluster([1])
    costs = RooflineCosts(topology)
    problem, choices = additive_costs(build_space(graph, 1), RoughCosts(Shared(graph, topology, costs)))
    assert [len(own) for own in choices] == [1] * len(graph.operators)
    expected_ns = Simulator(graph, topology, costs).makespan_ns(data_parallel(graph, topology))
    assert 1e9 * total(problem, [0] * len(choices)) == pytest.approx(expected_ns)


def test_an_edge_costs_what_has_to_move() -> None:
    graph, topology = layers(2, rows=4), cluster([2], latency_seconds=1.0)
    problem, choices = additive_costs(build_space(graph, 2), RoughCosts(Shared(graph, topology, RooflineCosts(topology))))
    at = {config: i for i, config in enumerate(choices[0])}
    here, there, split, both = OpConfig((1,), (0,)), OpConfig((1,), (1,)), OpConfig((2,), (0, 1)), OpConfig((1,), (0, 1), 2)
    edge = problem.edges[0, 1]
    assert edge[at[here], at[here]] == edge[at[split], at[split]] == edge[at[both], at[here]] == edge[at[both], at[split]] == 0
    assert edge[at[here], at[there]] == pytest.approx(2.0)  # two links' latencies; inputs have no gradient
    assert edge[at[here], at[split]] == pytest.approx(2.0) == edge[at[split], at[both]]


def test_edges_of_all_pairs_are_those_of_plain_python() -> None:
    """One host after the other: what is read and not held comes from the nearest holder, and the busiest reader counts."""
    graph, topology = transformer(), cluster([2, 2])
    rough, space = RoughCosts(Shared(graph, topology, RooflineCosts(topology))), build_space(graph, 4)
    latency, per_byte = rough.routes
    for j, op in enumerate(graph.operators):
        for k, operand in enumerate(op.inputs):
            if operand.tensor not in graph.producers:
                continue
            i, output = graph.producers[operand.tensor]
            sources, readers = ([rough.lay(n, config) for config in candidates(space.operators[n])[::5]] for n in (i, j))
            found = rough.edges_seconds(operand, output, k, sources, readers)
            tensor = graph.tensors[operand.tensor]
            for a, source in enumerate(sources):
                for b, reader in enumerate(readers):
                    moved = dict[tuple[int, int], int]()
                    for part, holders in enumerate(source.holders):
                        box = tuple(map(tuple, source.cut.boxes[output][part].tolist()))
                        for tile, device in enumerate(reader.devices.tolist()):
                            common = intersect(box, tuple(map(tuple, reader.cut.reads[k][tile].tolist())))
                            if holders[device] or common is None:
                                continue
                            near = min(np.flatnonzero(holders), key=lambda d: latency[d, device] + 2**20 * per_byte[d, device])
                            pair = int(near), device
                            moved[pair] = moved.get(pair, 0) + volume(common) * tensor.itemsize
                    seconds = [sum(latency[p] + moved[p] * per_byte[p] for p in sorted(moved) if p[1] == d) for d in range(4)]
                    assert found[a, b] == (1 + tensor.requires_grad) * max(seconds)
                    assert found[a, b] == rough.edge_seconds(operand, output, k, source, reader)


def test_candidates_are_limited() -> None:
    space = build_space(transformer(), 8)
    for own in space.operators:
        found = candidates(own)
        assert len(found) == len(set(found)) <= MAX_CANDIDATES
        assert set(found) <= set(own.structured())
        every = list(own.structured())
        if len(every) <= MAX_CANDIDATES:
            assert found == every
            continue
        firsts = {(config.replicas, config.degrees): config for config in reversed(every)}
        singles = [config for config in every if len(config.devices) == 1][:MOST_SINGLES]
        assert found == list(dict.fromkeys([*singles, *(config for config in every if config in firsts.values())]))[:MAX_CANDIDATES]
    assert 0 < pair_count(space) < len(space.operators) ** 2 * MAX_CANDIDATES**2


@pytest.mark.slow
def test_it_beats_data_parallelism_where_matrices_are_large() -> None:
    simulator = simulator_for("zoo:alexnet", cluster([2, 2]))
    space = build_space(simulator.graph, 4)
    strategy = dynamic_strategy(space, RoughCosts(Shared(space.graph, simulator.topology, simulator.costs)))
    assert simulator.makespan_ns(strategy) < simulator.makespan_ns(data_parallel(simulator.graph, simulator.topology))
