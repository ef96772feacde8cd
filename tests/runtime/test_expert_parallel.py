"""Plans that divide experts among devices train like one process, however unevenly rows choose them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from soap.cluster.topology import Topology
from soap.strategy.named import named
from soap.tracing.export import export_model
from tests.runtime.pool import Pool
from tests.runtime.sparse_plans import hosts
from tests.runtime.traced import adam, checked, traced
from tests.test_strategies import split
from tests.tracing.test_experts import CHOSEN, EXPERTS, TOKENS, WIDTH, Experts, sorted_and_back
from tests.tracing.test_routing import SAMPLES, WORDS, Sentences
from tests.transformers_models import MODELS

CASES = [(hosts(2), ""), (hosts(4), ""), (hosts(2, 2), "+hsdp"), (hosts(4), "+fsdp+recompute")]
CLIP_NORM, ACCUMULATE = 0.05, 2


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two products of experts, of which one gets a row of each token, and another none at all. (torch exports them in bfloat16 alone.)"""
    torch.manual_seed(0)
    module, x = Experts(sorted_and_back).bfloat16(), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        module.gate.bias.copy_(torch.tensor([50.0, 0.0, 0.0, -50.0]))
    rows = torch.bincount(module.gate(x).topk(CHOSEN).indices.flatten(), minlength=EXPERTS).tolist()
    assert rows[0] == TOKENS and rows[3] == 0 and sum(rows) == CHOSEN * TOKENS
    path = tmp_path_factory.mktemp("experts") / "uneven.pt2"
    export_model(module, (x,), path=path)
    return str(path)


def assert_trains(four: Pool, path: str, products: int, cases: Sequence[tuple[Topology, str]] = CASES) -> None:
    graph = traced(path, "float64").graph
    for topology, added in cases:
        strategy = named(f"expert_parallel{added}", graph, topology)
        divided = [degrees for degrees, _ in split(graph, strategy).values() if "e" in degrees]
        assert [degrees["e"] for degrees in divided] == [min(EXPERTS, topology.device_count // len(topology.hosts))] * products
        given = (path, "float64", strategy, topology, 2, adam, ACCUMULATE, CLIP_NORM)
        result = four.run(checked, *given, ranks=topology.device_count)[0]
        assert result.passed and result.tolerance == 1e-9, (added, topology.device_count, result.worst)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of samples with several tokens each: rows are routed."""
    torch.manual_seed(0)
    module, x = Sentences(sorted_and_back).bfloat16(), torch.randn(SAMPLES, WORDS, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        module.gate.bias.copy_(torch.tensor([50.0, 0.0, 0.0, -50.0]))
    path = tmp_path_factory.mktemp("sentences") / "sentences.pt2"
    export_model(module, (x,), path=path)
    return str(path)


def test_routed_rows(four: Pool, sentences: str) -> None:
    """One expert gets a row of each token, and another none."""
    graph = traced(sentences, "float64").graph
    assert graph.routed
    assert_trains(four, sentences, 3, CASES[:2])
    for name in ("megatron:2+experts:4", "megatron:2+experts:2x2+zero1", "megatron:2x2+experts:2+microbatches:2+recompute"):
        given = (sentences, "float64", named(name, graph, hosts(4)), hosts(4), 2, adam, ACCUMULATE, CLIP_NORM)
        result = four.run(checked, *given, ranks=4)[0]
        assert result.passed and result.tolerance == 1e-9, (name, result.worst)


def test_uneven_loads(four: Pool, uneven: str) -> None:
    assert_trains(four, uneven, 2)


@pytest.mark.long
def test_mixtral(four: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, inputs = MODELS["mixtral"]()
    path = str(tmp_path / "mixtral.pt2")
    export_model(module, (), inputs, path=path)
    assert_trains(four, path, 4)
