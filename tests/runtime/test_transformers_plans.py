"""Small models of ``transformers``, exported as users do, train on four ranks under classical and random strategies like one process.

A random strategy is a function of the model's name and its number alone; the test's name repeats all of one model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.runtime.check import TOLERANCES
from soap.strategy.classical import LONG_CONTEXT, NAMED, random_strategy
from soap.tracing.export import export_model
from soap.tracing.load import DTYPES
from tests.extent import so_many
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced
from tests.transformers_models import MODELS

pytest.importorskip("transformers")

FOUR = local_topology(4)
NAMES = ("data_parallel", "megatron", *LONG_CONTEXT)
STRATEGIES = [("float64", None)] * so_many(1, 5) + [("float32", None)] + [("float64", name) for name in NAMES]
"""Dtype, and name of a strategy or None for a random one."""
OFTEN: tuple[str, ...] = ()
"""All, and many more, are for ``make test-all``; ``test_architectures`` has one of the library in ``make test``."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in OFTEN else pytest.mark.long) for n in MODELS])
def test_model_trains_like_one_process(four: Pool, tmp_path: Path, name: str, record_property: Callable[[str, object], None]) -> None:
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    path = str(tmp_path / f"{name}.pt2")
    export_model(module, (), inputs, path=path)
    whole = [op.name for op in traced(path, "float64").graph.operators if not op.partitionable]
    assert not whole
    for number, (dtype, classical) in enumerate(STRATEGIES):
        graph = traced(path, dtype).graph
        strategy = NAMED[classical](graph, FOUR) if classical else random_strategy(graph, FOUR, random.Random(f"{name}/{number}"))
        results = four.run(checked, path, dtype, strategy, FOUR)
        record_property("tally", ["transformers models under strategies: worst error", f"{name} {dtype}", results[0].worst.error])
        assert results[0].tolerance == TOLERANCES[DTYPES[dtype]]
        assert results[0].passed, f"strategy {classical or number} in {dtype}: {results[0].worst}"
        assert all(result == results[0] for result in results)
