"""Buffers that the forward pass moves: plans on two and four ranks train and leave buffers as eager PyTorch does, with equal copies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from soap.graph import OperatorGraph
from soap.presets import local_topology
from soap.strategies import CLASSICAL, random_strategy
from soap.strategy import Strategy
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.extent import so_many
from tests.runtime.exact_modules import train_plainly, worst
from tests.runtime.pool import Pool
from tests.runtime.state_modules import EXAMPLES, batches_of, module_of, train

TOLERANCE = 1e-9
SAMPLES = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each example exported in float64."""
    folder = tmp_path_factory.mktemp("state")
    for name in EXAMPLES:
        export_model(module_of(name), batches_of(name, [SAMPLES])[0], path=folder / f"{name}.pt2")
    return {name: str(folder / f"{name}.pt2") for name in EXAMPLES}


def strategies(graph: OperatorGraph, ranks: int, randoms: int) -> dict[str, Strategy]:
    topology = local_topology(ranks)
    result = {name: CLASSICAL[name](graph, topology) for name in ("data_parallel", "model_parallel", "megatron")}
    return result | {f"random {i}": random_strategy(graph, topology, random.Random(i)) for i in range(randoms)}


def assert_exact(
    pool: Pool, path: str, name: str, ranks: int, sizes: Sequence[Sequence[int]], options: Mapping[str, Any] | None = None, randoms: int = 1
) -> None:
    given = iter(batches_of(name, [size for step in sizes for size in step]))
    steps = [[next(given) for _ in step] for step in sizes]
    expected = train_plainly(module_of(name), [[tuple(part) for part in parts] for parts in steps])
    for kind, strategy in strategies(load_model(path).graph, ranks, randoms).items():
        results = pool.run(train, path, strategy, ranks, steps, options, ranks=ranks)
        expected.losses = expected.losses[: len(steps) - 1]
        assert worst(results[0].trained, expected) < TOLERANCE, (kind, worst(results[0].trained, expected))
        for result in results:
            for buffer in load_model(path).state.values():
                assert torch.equal(result.buffers[buffer], results[0].buffers[buffer]), (kind, buffer)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_plan_moves_buffers_as_eager_does(four: Pool, files: dict[str, str], name: str, ranks: int) -> None:
    assert_exact(four, files[name], name, ranks, [[SAMPLES]] * 4, randoms=so_many(1, 6))
