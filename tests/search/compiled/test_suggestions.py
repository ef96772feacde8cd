"""What the compiled chain takes from neighbours, against ``search.alignment``; and drawing, against the weights."""

from __future__ import annotations

import random
from collections import Counter
from math import exp, inf

import pytest
from numba import njit

from soap import api
from soap.search.compiled.candidates import draw_any
from soap.search.compiled.memory import MOST_LISTED
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.compiled.suggestions import list_candidates
from soap.search.space import build_space
from soap.search.starts import reference_strategies, starting_strategies
from soap.strategy.config import OpConfig, Strategy
from tests.extent import often
from tests.search.toys import aligned_configs, compiled_space, drawn_from


@njit
def _listed(W, Z, op):  # type: ignore[no-untyped-def]
    return list_candidates(Z, op)


@njit
def _drawn(Z, op):  # type: ignore[no-untyped-def]
    draw_any(Z.grids, Z.chain, op, 1)


def config_in(chain: CompiledChain, space: CompiledSpace, position: int, slot: int) -> OpConfig:
    X, devices = chain.arrays, space.shared.topology.device_count
    grid = space.grid(position, int(X.c_grid[slot]))
    tiles = 1
    for length in grid:
        tiles *= length
    return OpConfig(grid[1:], tuple(X.c_dev[slot * devices : slot * devices + tiles].tolist()), grid[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", often(["nmt", "gpt", "alexnet"], ["gpt", "alexnet"]))
def test_neighbours_suggest_what_alignment_says(model: str) -> None:
    graph, topology = api.load(f"zoo:{model}:tiny", plan_only=True).graph, api.load_cluster("p100-4x4")
    starts = starting_strategies(graph, topology, None, None, 0)
    references = reference_strategies(graph, topology, starts.values())
    space = build_space(graph, 16, references=references)
    compiled = compiled_space(space, topology, api.simulator_for(graph, topology).costs)
    draw = random.Random(5)
    for _ in range(2):
        strategy = Strategy({op.name: drawn_from(own, draw) for op, own in zip(graph.operators, space.operators, strict=True)})
        chain = CompiledChain(compiled, strategy, seed=0, proposals=1)
        for position, (op, own) in enumerate(zip(graph.operators, space.operators, strict=True)):
            given = dict.fromkeys(reference.operators[op.name] for reference in references)
            wanted = [config for config in given if own.log_weight(config) > -inf]
            aligned = aligned_configs(graph, strategy, position, space.edges[position])
            wanted += [config for config in aligned if own.log_weight(config) > -inf]
            count = int(_listed(chain.engine.world, chain.handle, position))
            found = [config_in(chain, compiled, position, 9 + i) for i in range(count)]
            assert found == wanted[:MOST_LISTED]
            assert chain.arrays.c_log[9 : 9 + count].tolist() == pytest.approx([own.log_weight(config) for config in found])


@pytest.mark.slow
def test_draws_follow_the_weights() -> None:
    graph, topology = api.load("zoo:rnnlm:tiny", plan_only=True).graph, api.load_cluster("local:2")
    space = build_space(graph, 2, shuffled=0.5)
    compiled = compiled_space(space, topology, api.simulator_for(graph, topology).costs)
    start = api.classical("single_device", graph, topology)
    chain = CompiledChain(compiled, start, seed=11, proposals=1)
    position = space.movable[0]
    own, counts, total = space.operators[position], Counter[OpConfig](), 40_000
    for _ in range(total):
        _drawn(chain.handle, position)
        config = config_in(chain, compiled, position, 1)
        assert chain.arrays.c_log[1] == pytest.approx(own.log_weight(config))
        counts[config] += 1
    assert sum(exp(own.log_weight(config)) for config in counts) / own.mass == pytest.approx(1)
    distance = sum(abs(count / total - exp(own.log_weight(config)) / own.mass) for config, count in counts.items()) / 2
    assert distance < 0.015
    assert any(own.log_weight(config) < 0 for config in counts)
