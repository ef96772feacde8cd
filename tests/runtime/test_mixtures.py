"""Random mixtures of owners, recomputation, offloaded states, splits and micro-batches train like one process in float64: 27 of zoo models
and 30 of models of ``transformers``, on two to four ranks, with Adam, clipping and accumulation.

A failing one is repeated by its name: ``SOAP_TESTS=all python -m pytest "tests/runtime/test_mixtures.py::test_zoo_models[gpt-1]"``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from soap.model.graph import FactorKind
from soap.strategy.recomputation import ALL_LEVELS
from soap.tracing.export import export_model
from soap.zoo import names
from tests.graph_builder import transformer
from tests.runtime.mixtures import COUNTS, TOPOLOGIES, Mixture
from tests.runtime.pool import Pool
from tests.runtime.test_zoo_plans import LARGE
from tests.runtime.traced import adam, checked, traced
from tests.transformers_models import MODELS

CLIP_NORM, ACCUMULATE, STEPS = 0.05, 2, 2
"""A norm below that of any model's first gradients."""
ZOO = [Mixture(name, number) for name in names() for number in range(1 if name in LARGE else 2)]
OFTEN = {("dlrm", 1), ("rnntc", 1)}
"""Tables and recurrent layers; those that cost least."""
PER_FAMILY = 2


def assert_trains(four: Pool, spec: str, mixture: Mixture, record_property: Callable[[str, object], None], kind: str) -> None:
    """The mixture trains the model like one process, and all ranks say so."""
    topology = mixture.topology
    strategy = mixture.strategy(traced(spec, "float64").graph)
    given = (spec, "float64", strategy, topology, STEPS, adam, ACCUMULATE, CLIP_NORM)
    results = four.run(checked, *given, ranks=topology.device_count)
    record_property("tally", [f"{kind} models under mixtures: worst error", mixture.model, results[0].worst.error])
    assert results[0].tolerance == 1e-9
    assert results[0].passed, f"{mixture} on {topology.device_count} ranks: {results[0].worst}"
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    "mixture",
    [pytest.param(own, id=f"{own.model}-{own.number}", marks=() if (own.model, own.number) in OFTEN else pytest.mark.long) for own in ZOO],
)
def test_zoo_models(four: Pool, mixture: Mixture, record_property: Callable[[str, object], None]) -> None:
    assert_trains(four, f"zoo:{mixture.model}:tiny", mixture, record_property, "zoo")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", MODELS)
def test_transformers(four: Pool, tmp_path: Path, name: str, record_property: Callable[[str, object], None]) -> None:
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    path = str(tmp_path / f"{name}.pt2")
    export_model(module, (), inputs, path=path)
    for number in range(PER_FAMILY):
        assert_trains(four, path, Mixture(name, number), record_property, "transformers")


def test_mixtures_have_all_of_it() -> None:
    """Of one model, in so few mixtures as there are of two: every owner, payload and residence, copies inside hosts, states on hosts,
    operators that run again and that do not, all ways to split, numbers of micro-batches, and all clusters."""
    graph, drawn = transformer(), [Mixture("transformer", number) for number in range(12)]
    strategies = [own.strategy(graph) for own in drawn]
    for own, strategy in zip(drawn, strategies, strict=True):
        strategy.validate(graph, own.topology.device_count)
    syncs = [sync for strategy in strategies for sync in strategy.parameters.values()]
    assert {sync.word for sync in syncs} >= {"allreduce", "zero", "fsdp", "hsdp", "parameter_server"}
    assert {sync.offload for sync in syncs} == {sync.within == "host" for sync in syncs} == {True, False}
    assert {config.recompute for strategy in strategies for config in strategy.operators.values()} == {*ALL_LEVELS}
    assert {strategy.prefetch for strategy in strategies} == {0, 1, 2}
    assert {strategy.microbatches for strategy in strategies} == {*COUNTS}
    split = {
        factor.kind
        for strategy in strategies
        for op in graph.operators
        for factor, degree in zip(op.factors, strategy.operators[op.name].degrees, strict=True)
        if degree > 1
    }
    assert split == {*FactorKind}
    assert {own.topology for own in drawn} == {*TOPOLOGIES}
