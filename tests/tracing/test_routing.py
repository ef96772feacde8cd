"""Routed rows: mixtures of experts in which each row goes to its expert, however unevenly, cut in any way."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.model.graph import FactorKind
from soap.model.other_batch import with_samples
from soap.plan.planning import build_plan
from soap.strategy.classical import expert_parallel
from soap.strategy.named import named
from soap.tracing.execute import TracedModel
from soap.tracing.rules.experts import combine, dispatch, expert_product, routed_order
from tests.strategies import cluster
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import imported
from tests.tracing.test_experts import CHOSEN, EXPERTS, INNER, WIDTH, Experts, plainly, same_as_eager, sorted_and_back

SAMPLES, WORDS = 4, 6
ROWS = SAMPLES * WORDS * CHOSEN


class Sentences(Experts):
    """Samples of several tokens each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1))


def traced(loads: list[float] | None = None) -> tuple[Sentences, Tensor, TracedModel]:
    """``loads``: the router's bias."""
    torch.manual_seed(0)
    module, x = Sentences(sorted_and_back).bfloat16(), torch.randn(SAMPLES, WORDS, WIDTH, dtype=torch.bfloat16)
    if loads is not None:
        with torch.no_grad():
            module.gate.bias.copy_(torch.tensor(loads))
    model = imported(module, x)
    module.way = plainly
    return module.double(), x.double(), model


@pytest.mark.parametrize("loads", [None, [50.0, 0.0, 0.0, -50.0]])
def test_rows_go_to_their_experts(loads: list[float] | None) -> None:
    module, x, model = traced(loads)
    graph = model.graph
    kinds = [op.kind for op in graph.operators]
    assert kinds.count("dispatch") == kinds.count("combine") == kinds.count("expert_rows") == 1 and kinds.count("expert_product") == 2
    assert {graph.tensors[name].shape for name in graph.routed} == {(EXPERTS, ROWS // EXPERTS, size) for size in (WIDTH, INNER)}
    products = [op for op in graph.operators if op.kind == "expert_product"]
    free = {("s", FactorKind.SAMPLE), ("e", FactorKind.PARAMETER), ("n", FactorKind.PARAMETER), ("k", FactorKind.REDUCTION)}
    assert [{(factor.name, factor.kind) for factor in op.factors} for op in products] == [free] * 2
    assert not any(factor.summed for op in products for factor in op.factors if factor.name == "e")
    assert MicroBatches(graph, SAMPLES).parts(graph.index[products[0].name]) == SAMPLES
    same_as_eager(module, x, model)
    for seed in range(4):
        compare(model, draw_configs(graph, random.Random(seed)))


def test_what_travels_is_an_all_to_all_of_chosen_rows() -> None:
    graph, topology = traced()[2].graph, cluster([4])
    plan = build_plan(graph, expert_parallel(graph, topology), topology)
    moved = {name: 0 for name in graph.routed}
    for fetch in plan.fetches:
        for piece in fetch.pieces:
            if fetch.tensor in moved and plan.holdings[piece.holding].device != fetch.device:
                (first, last), (start, stop), (left, right) = piece.box
                moved[fetch.tensor] += (last - first) * (stop - start) * (right - left)
    assert [size for size in moved.values() if size] == [3 * ROWS // 4 * WIDTH] * 2  # there and back; nothing between both products
    assert all(graph.tensors[name].shape[-1] == WIDTH for name, size in moved.items() if size)
    assert all(op.kind != "expert_product" for op in (graph.operators[own.operator] for own in plan.reductions))


def test_experts_have_a_mapping_of_their_own() -> None:
    graph, topology = traced()[2].graph, cluster([4])
    for name, experts, columns in (("megatron:2+experts:4", 4, 1), ("megatron:2+experts:2", 2, 1), ("megatron:2", 1, 2)):
        strategy = named(name, graph, topology)
        for op in graph.operators:
            if op.kind == "expert_product":
                degrees = dict(zip([factor.name for factor in op.factors], strategy.operators[op.name].degrees, strict=True))
                assert (degrees["e"], max(degrees["n"], degrees["k"])) == (experts, columns)
                assert degrees["s"] == 4 // (experts * columns) and strategy.operators[op.name].replicas == 1
    plan = build_plan(graph, named("megatron:2+experts:2x2", graph, topology), topology)
    scattered = [own for own in plan.reductions if graph.operators[own.operator].kind == "expert_product"]
    assert [(len(own.devices), len(own.cells)) for own in scattered] == [(2, 2)] * 2  # each sends a half of its experts' rows back


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("data_parallel+experts:2", "is for groups; expected it as in megatron:N[+]experts:E"),
        ("megatron:2+experts:two", "is for groups"),
        ("megatron:2+experts:3", "4 experts in 3 parts of 1 devices, on 4 devices of a stage; expected a divisor"),
    ],
)
def test_mappings_that_cannot_be(name: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        named(name, traced()[2].graph, cluster([4]))


def test_it_stays_routed_with_other_samples() -> None:
    graph = traced()[2].graph
    other = with_samples(graph, 2 * SAMPLES)
    assert not isinstance(other, str) and other.routed == graph.routed
    assert {other.tensors[name].shape[1] for name in other.routed} == {2 * ROWS // EXPERTS}


def test_the_calls_themselves() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([2, 0, 3, 2, 0, 0])
    rows, weight = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    assert routed_order(ids, 0, 4).tolist() == [1, 4, 5, 0, 3, 2] and routed_order(ids, 2, 4).tolist() == [0, 3, 2]
    routed = dispatch(rows, ids, experts=4, unit=4)
    back = combine(expert_product(routed, weight, ids, unit=4), ids, unit=4)
    torch.testing.assert_close(back, torch.stack([row @ weight[e] for row, e in zip(rows, ids.tolist(), strict=True)]))
