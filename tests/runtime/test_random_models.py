"""Random small models × random legal strategies on two to four ranks train two steps like one process."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.strategy.classical import random_strategy
from tests.runtime.pool import Pool
from tests.runtime.random_modules import random_model
from tests.runtime.traced import checked, traced

STRATEGIES_PER_MODEL = 4


def examples(four: Pool, seed: int, folder: Path) -> None:
    module, args = random_model(seed)
    path = folder / f"{seed}.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of the attributes that LSTMs assign
        torch.export.save(torch.export.export(module, args), path)
    graph = traced(str(path), "float64").graph
    assert all(op.partitionable for op in graph.operators)
    for number in range(STRATEGIES_PER_MODEL):
        rng = random.Random(f"{seed}/{number}")
        used = local_topology(2 + number % 3)  # ranks beyond these hold nothing, but take part
        strategy = random_strategy(graph, used, rng)
        result = four.run(checked, str(path), "float64", strategy, local_topology(4))[0]
        assert result.passed, (seed, number, result.worst)


@pytest.mark.parametrize("seed", range(1))
def test_random_models(four: Pool, seed: int, tmp_path: Path) -> None:
    examples(four, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 31))
def test_many_random_models(four: Pool, seed: int, tmp_path: Path) -> None:
    """With the one above: 31 models, 124 examples."""
    examples(four, seed, tmp_path)
