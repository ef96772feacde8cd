"""Zoo models under one classical and one random strategy on four ranks train like one process; ``test_zoo_plans`` is the large suite."""

from __future__ import annotations

import random

import pytest

from soap.cluster.presets import local_topology
from soap.strategy.classical import CLASSICAL, LONG_CONTEXT, random_strategy
from soap.zoo import names
from tests.extent import often
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced

FOUR = local_topology(4)
OFTEN = ("dlrm",)
"""Of the others, `make test` has one plan each in ``test_zoo_plans``."""
"""The others take longer, having more operators even when tiny."""


@pytest.mark.parametrize("name", often(names(), OFTEN))
def test_zoo_models_train_like_one_process(four: Pool, name: str) -> None:
    spec = f"zoo:{name}:tiny"
    graph = traced(spec, "float64").graph
    for strategy in (CLASSICAL["megatron"](graph, FOUR), random_strategy(graph, FOUR, random.Random(name))):
        result = four.run(checked, spec, "float64", strategy, FOUR)[0]
        assert result.passed, result.worst


@pytest.mark.parametrize("kind", LONG_CONTEXT)
@pytest.mark.parametrize("name", often(names(), ("gpt",)))
def test_zoo_models_with_split_sequences_train_like_one_process(four: Pool, name: str, kind: str) -> None:
    spec = f"zoo:{name}:tiny"
    result = four.run(checked, spec, "float64", LONG_CONTEXT[kind](traced(spec, "float64").graph, FOUR), FOUR)[0]
    assert result.passed, result.worst


def test_a_loss_of_several_parts_is_known_to_all_ranks(four: Pool) -> None:
    """Each works it out from the sums of the parts."""
    graph = traced("zoo:rnnlm:tiny", "float64").graph
    result = four.run(checked, "zoo:rnnlm:tiny", "float64", CLASSICAL["data_parallel"](graph, FOUR), FOUR)[0]
    assert result.passed, result.worst
