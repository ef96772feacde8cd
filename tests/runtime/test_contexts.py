"""Plans whose groups share the positions of sequences, beside tensor parallelism and stages, train like one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soap import zoo
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from soap.strategy.megatron import balanced_blocks, hybrid, operator_work, staged
from soap.strategy.stages import stages_of
from soap.tracing.export import export_model
from tests.runtime.pool import Pool
from tests.runtime.sparse_plans import hosts
from tests.runtime.traced import adam, checked, traced
from tests.test_strategies import split


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = zoo.build("gpt:tiny@4")
    path = tmp_path_factory.mktemp("contexts") / "gpt.pt2"
    export_model(model.module, model.args, model.kwargs, path=path)
    return str(path)


def in_stages(graph: OperatorGraph) -> Strategy:
    """Two stages of two devices, which share positions; each micro-batch has one sample."""
    blocks = balanced_blocks(operator_work(graph), 2)
    made = staged(graph, hosts(4), blocks, [(0, 1), (2, 3)], microbatches=4, context=2)
    return replace(made, microbatches=4, stages=stages_of(graph, blocks), schedule="1f1b")


@pytest.mark.parametrize("kind", ["tensor", "samples", "sequence parallel", "stages"])
def test_trains_like_one_process(four: Pool, gpt: str, kind: str) -> None:
    graph = traced(gpt, "float64").graph
    tensor = 1 if kind == "samples" else 2
    found = in_stages(graph) if kind == "stages" else hybrid(
        graph, hosts(4), tensor=tensor, context=2, scatters=kind == "sequence parallel"
    )  # fmt: skip
    attention = next(own for name, own in split(graph, found).items() if name == "blocks.0.attention")
    assert attention[0] == {"stages": {"q": 2}, "samples": {"b": 2, "q": 2}}.get(kind, {"h": 2, "q": 2})
    result = four.run(checked, gpt, "float64", found, hosts(4), 2, adam, 1, None, ranks=4)[0]
    assert result.passed and result.tolerance == 1e-9, result.worst
