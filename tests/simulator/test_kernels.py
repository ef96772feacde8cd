"""Joined calls: bytes in and out of the group, one launch, and what crosses the group's edge kept. Held by hand on small operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soap import api
from soap.cluster.presets import device_types
from soap.errors import ProfileError
from soap.model.graph import Operator, OperatorGraph
from soap.plan.tiling import whole_tile
from soap.profiles.work import backward_work, forward_work
from soap.search.options import SearchOptions
from soap.simulator.kernels import KERNELS, joined
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import single_device
from soap.strategy.megatron import hybrid
from soap.strategy.recomputation import PRODUCTS
from soap.tracing.importer import import_program
from tests.strategies import CPU, cluster

B, WIDTH = 32, 64
SIZE = 2 * B * WIDTH
"""Bytes of an activation in bfloat16."""
ONE = cluster([1], device_types()["h200"])


class Layers(nn.Module):
    """Two layers in bfloat16 with a function between them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(3))
        self.gate, self.up, self.down = layers
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return torch.sum(self.down(self.between(self.gate(x), self.up(x))), dtype=torch.float32)


def graph_of(between: Callable[[Tensor, Tensor], Tensor]) -> OperatorGraph:
    exported = torch.export.export(Layers(between), (torch.zeros(B, WIDTH, dtype=torch.bfloat16),))
    return import_program(exported, name="layers", autocast_device="cuda").graph


def named(graph: OperatorGraph, name: str) -> tuple[Operator, Any]:
    (position,) = (i for i, op in enumerate(graph.operators) if op.name == name)
    return graph.operators[position], whole_tile(graph, position)


@pytest.mark.parametrize("kernels", ["compiled", "fused"])
def test_a_gate_before_a_product_is_one_kernel(kernels: Any) -> None:
    """By hand: silu and mul pass one activation to each other, which joined kernels keep in registers, and one to the product."""
    eager = graph_of(lambda gate, up: nn.functional.silu(gate) * up)
    own = joined(eager, kernels)
    (before, tile), (after, _) = named(eager, "down"), named(own, "down")
    assert before.saved_bytes - before.fused_bytes == 2 * SIZE and after.saved_bytes - after.fused_bytes == SIZE
    assert (forward_work(eager, tile)[0].apart_bytes, forward_work(own, tile)[0].apart_bytes) == (4 * SIZE, 2 * SIZE)
    assert len(before.calls) - before.views == 3 and len(after.calls) - after.views == 2
    kept, kept_then = (graph.footprints["down"][0] for graph in (eager, own))
    assert (kept.kept_bytes, kept_then.kept_bytes) == (2 * SIZE, SIZE)
    assert kept_then.keeps == kept.keeps and eager.hash == own.hash
    parts, parts_then = (graph.part_footprints["down"] for graph in (eager, own))
    assert [part.kept_bytes for part in parts_then.values()] == [-(-part.kept_bytes // 2) for part in parts.values()] != []


def test_a_chain_without_a_product_reads_and_writes_its_ends_once() -> None:
    """A softmax of scaled numbers in float32: compiled it passes nothing on, and keeps its input where it kept more of its own."""
    eager = graph_of(lambda gate, up: torch.softmax((gate * 0.5).float(), -1).to(torch.bfloat16) + up)
    own = joined(eager, "compiled")
    op, tile = next((o, whole_tile(eager, i)) for i, o in enumerate(eager.operators) if o.kind == "softmax")
    after = own.operators[eager.index[op.name]]
    assert op.saved_bytes > op.fused_bytes and after.saved_bytes == after.fused_bytes and len(after.calls) - after.views == 1
    assert all(kernel.apart_bytes == 0 for kernel in (*forward_work(own, tile), *backward_work(own, tile)))
    sizes = [sum(graph.footprints[op.name][0].sizes_bytes) for graph in (eager, own)]
    assert sizes[1] < sizes[0]


def test_a_hand_written_softmax_leaves_the_dropout_behind_it_to_a_kernel_of_its_own() -> None:
    """By hand: the softmax's result, and a mask of a byte for each number, are written and read."""
    eager = graph_of(lambda gate, up: nn.functional.dropout(torch.softmax(gate * 0.5, -1), 0.1) + up)
    op, tile = next((o, whole_tile(eager, i)) for i, o in enumerate(eager.operators) if o.kind == "softmax")
    apart = [forward_work(joined(eager, kernels), tile)[0].apart_bytes for kernels in ("compiled", "fused")]
    size = sum(eager.tensors[operand.tensor].bytes for operand in op.outputs)
    assert op.drawn and apart == [0, 2 * (size + size // 2)]
    launches = [own.calls - own.views for kernels in ("compiled", "fused") for own in forward_work(joined(eager, kernels), tile)]
    assert launches == [1, 2]


def test_hand_written_are_those_of_known_kinds() -> None:
    graph = graph_of(lambda gate, up: torch.cumsum(gate, -1).sin().cos() + up)
    others = [op for op, own in zip(graph.operators, joined(graph, "fused").operators, strict=True) if op is own]
    assert {op.kind for op in others} >= {"cumsum", "sum"} and joined(graph, "eager") is graph


def test_predictions_follow_the_kernels() -> None:
    graph = graph_of(lambda gate, up: nn.functional.silu(gate) * up)
    strategy = single_device(graph, ONE)
    found = {kernels: api.simulate(graph, ONE, strategy, costs="estimate", kernels=kernels) for kernels in KERNELS}
    assert found["compiled"].makespan_ns == found["fused"].makespan_ns < found["eager"].makespan_ns
    assert max(found["compiled"].peak_bytes) <= max(found["eager"].peak_bytes)
    measured = api.simulate(graph, ONE, strategy, kernels="compiled")  # what is measured is of eager kernels
    assert measured.makespan_ns == found["compiled"].makespan_ns
    costs = [found[kernels].simulator.costs for kernels in KERNELS]
    assert len({own.hash for own in costs}) == 3 and costs[1].description == "estimate (roofline of data sheet, compiled kernels)"


@pytest.mark.parametrize("devices", [2, 4])
def test_what_overlaps_with_a_product_is_hidden_but_for_its_last_part(devices: int) -> None:
    """Each gathering and each scattered sum takes what is left of it once all parts but one have been computed on: gradients of what is
    gathered return while those of weights are computed."""
    topology = cluster([devices], device_types()["h200"])
    graph = api.load("zoo:gpt:tiny", plan_only=True).graph
    strategy = hybrid(graph, topology, tensor=devices, scatters=True)
    alone, both = (api.simulator_for(graph, topology, costs="estimate", kernels=own).run(strategy) for own in ("fused", "fused+overlap"))
    plan, places = alone.tasks.plan, alone.tasks.places
    usual, own = (made.tasks.tasks for made in (alone, both))
    taken = {(task.kind, task.tile): task.duration_ns for task in usual if task.tile is not None}

    def overlaps_ns(kind: TaskKind, tiles: Sequence[int]) -> int:
        return sum(taken[kind, tile] for tile in tiles if plan.operator(plan.tiles[tile]).kind in PRODUCTS)

    expected = {}
    for kind, gathered, summed in (
        (TaskKind.FORWARD, places.brought, places.summed),
        (TaskKind.BACKWARD, places.returned, places.summed_back),
    ):
        for (number, _), task in gathered.items():
            readers, peers = [tile for tile, _ in plan.fetches[number].consumers], len(plan.fetches[number].pieces)
            own_ns = overlaps_ns(kind, readers) - (kind is TaskKind.BACKWARD and overlaps_ns(TaskKind.FORWARD, readers))
            expected[task] = (peers - 1) * own_ns // peers
        for place, task in summed.items():
            reduction, peers = plan.reductions[place], len(plan.reductions[place].devices)
            expected[task] = (peers - 1) * overlaps_ns(kind, reduction.tiles[:1]) // peers if reduction.cells else 0
    for task, (before, after) in enumerate(zip(usual, own, strict=True)):
        assert (before.name, after.duration_ns) == (after.name, max(1, before.duration_ns - expected.get(task, 0)))
    assert sum(ns > 0 for ns in expected.values()) >= 8 and both.makespan_ns < alone.makespan_ns


def test_wrong_kernels_are_refused_in_one_line() -> None:
    graph = graph_of(lambda gate, up: gate + up)
    with pytest.raises(ProfileError, match=r"kernels 'fast': expected one of eager, compiled, fused, to which .* \+overlap or \+flash2"):
        SearchOptions(kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=r"kernels 'compiled' on .*: expected GPUs"):
        api.simulator_for(graph, cluster([1], CPU), kernels="compiled")
