"""Stages of virtual workers are the best of all that fit, one by one; memory counts every version of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.mixed.partitioning import Partitioner, WorkerPlan, kept_minibatches, parameter_copies
from soap.model.graph import OperatorGraph, TensorKind
from soap.profiles.roofline import RooflineCosts
from soap.search.stage_groups import StageGroups
from soap.tracing.load import load_model
from tests.elastic.stars import star
from tests.strategies import GPU

MODELS = ("zoo:alexnet:tiny", "zoo:vgg16:tiny", "zoo:gpt:tiny")
SPEEDS = (1.0, 0.5, 0.25)


def graph_of(name: str) -> OperatorGraph:
    return load_model(name, plan_only=True).graph


def mixed(memory: Sequence[int], bytes_per_second: float = 1e9) -> Topology:
    """Devices of unequal speed and memory, each on a host of its own."""
    types = []
    for number, size in enumerate(memory):
        rates = {dtype: rate * SPEEDS[number % 3] for dtype, rate in GPU.flops_per_second.items()}
        types.append(replace(GPU, name=f"type{number % 3}", flops_per_second=rates, memory_bytes=size))
    return star(types, bytes_per_second, 1e-5)


def of_layers(partitioner: Partitioner, devices: Sequence[int]) -> Sequence[tuple[int, int, int, int]]:
    """[device][layer]: what the partitioner takes for known of a layer alone: ns, bytes of parameters, of buffers, of activations."""
    costs = partitioner._priced(partitioner._groups(devices))
    kinds = partitioner._groups(devices).kinds
    chain = costs.chain
    return [
        [
            (
                int(chain.layer_ns[kinds[d], n]),
                int(costs.trained_bytes[kinds[d], n]),
                int(chain.kept_bytes[kinds[d], n] - 2 * costs.trained_bytes[kinds[d], n]),
                int(chain.activation_bytes[kinds[d], n]),
            )
            for n in range(chain.layer_count)
        ]
        for d in range(len(devices))
    ]


def passing(partitioner: Partitioner, groups: StageGroups, first: int, end: int, came: int, kept: int) -> int:
    """What a stage of these layers holds of what passes its borders, and while it computes."""
    graph, costs = partitioner.graph, partitioner._priced(groups)
    inputs = sum(tensor.bytes for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT)
    forward, back = ([at_first, *map(int, row), 0] for at_first, row in zip((inputs, 0), costs.sent_bytes, strict=True))
    operators = graph.operators[costs.firsts[first] : costs.firsts[end] if end < len(costs.firsts) else None]
    largest = max(graph.tensors[own.tensor].bytes for op in operators for own in (*op.inputs, *op.outputs))
    read = 2 * inputs if first else 0  # its own, and those of the next minibatch; the first stage's are what comes to it
    return (came + 1) * forward[first] + back[first] + (kept + 1) * back[end] + 2 * largest + read


def exhaustive(partitioner: Partitioner, devices: Sequence[int], in_flight: int) -> tuple[int, int] | None:
    """The least (slowest stage or message, sum of all), over all orders of devices and all cuts."""
    groups = partitioner._groups(devices)
    order = [device for (device,) in groups.devices]
    layers, chain = of_layers(partitioner, order), partitioner._priced(groups).chain
    best: tuple[int, int] | None = None
    count = chain.layer_count
    versions = 1 if in_flight == 1 else in_flight + 1  # values of each, and the wave's sum
    for places in permutations(range(len(order))):
        for cuts in combinations(range(1, count), len(order) - 1):
            times, fits = [], True
            for stage, (place, first, end) in enumerate(zip(places, (0, *cuts), (*cuts, count), strict=True)):
                own = layers[place][first:end]
                kept = 1 if stage == len(order) - 1 else max(1, in_flight - stage)
                came = in_flight if stage == 0 else max(1, in_flight - stage + 1)
                needed = sum((versions + 1) * p + buffers + kept * a for _, p, buffers, a in own)
                needed += passing(partitioner, groups, first, end, came, kept)
                fits &= needed <= partitioner.topology.memory_limits[order[place]]
                times.append(sum(ns for ns, *_ in own))
            times += [
                int(chain.message_ns[groups.kinds[a], groups.kinds[b], cut - 1])
                for a, b, cut in zip(places, places[1:], cuts, strict=False)
            ]
            if fits and (best is None or (max(times), sum(times)) < best):
                best = max(times), sum(times)
    return best


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(own, marks=pytest.mark.long) for own in MODELS[1:])])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_stages_are_the_exhaustive_minimum(name: str, in_flight: int) -> None:
    """On two and three unequal devices, with memory that is enough, and with some that binds."""
    graph = graph_of(name)
    outcomes = set()
    for share in (100.0, 2.2, 1.2, 0.3):
        for count in (2, 3):
            whole = sum(tensor.bytes for tensor in graph.parameters) + sum(
                graph.tensors[output.tensor].bytes for op in graph.operators for output in op.outputs
            )
            partitioner = partitioner_of(graph, [int(share * whole / (1 + d)) for d in range(count)])
            expected = exhaustive(partitioner, range(count), in_flight)
            found = partitioner.plan(range(count), in_flight)
            outcomes.add("none" if expected is None else "fits")
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found.slowest_ns == expected[0]
                require_whole(graph, partitioner, found, range(count))
    assert outcomes == {"none", "fits"}


def partitioner_of(graph: OperatorGraph, memory: Sequence[int]) -> Partitioner:
    topology = mixed(memory)
    return Partitioner(graph, topology, RooflineCosts(topology))


def require_whole(graph: OperatorGraph, partitioner: Partitioner, plan: WorkerPlan, devices: Sequence[int]) -> None:
    """All of the model is in the stages, each on a device of its own that has room for it."""
    assert sorted(own.device for own in plan.stages) == sorted(devices)
    assert sum(own.parameter_bytes for own in plan.stages) == sum(t.bytes for t in graph.parameters if t.requires_grad)
    assert all(own.needed_bytes <= partitioner.topology.memory_limits[own.device] for own in plan.stages)
    assert plan.stages[0].first == 0 and plan.stages[-1].sent_bytes == (0, 0)
    assert max(own.busy_ns for own in plan.stages) <= plan.slowest_ns


def test_what_stages_keep() -> None:
    assert kept_minibatches(4, 4) == (4, 3, 2, 1)
    assert kept_minibatches(4, 7) == (7, 6, 5, 1)
    assert kept_minibatches(4, 1) == (1, 1, 1, 1)
    assert kept_minibatches(1, 3) == (1,)
    assert [parameter_copies(n) for n in (1, 2, 7)] == [2, 4, 9]


def test_less_memory_means_fewer_in_flight_and_then_nothing() -> None:
    graph = graph_of(MODELS[0])
    whole = sum(tensor.bytes for tensor in graph.parameters)
    most = [partitioner_of(graph, [share * whole] * 2).most_in_flight(range(2), 8) for share in (10, 60, 100, 400)]
    assert most == sorted(most) and most[0] == 0 and most[-1] == 8 and 0 < most[2] < 8
    partitioner_of(graph, [400 * whole] * 2).require_fits(range(2))
    expected = r"^a worker on d0, d1 fits no stages.* need .*, the devices have .*; the largest layer alone, from '.*' on, needs "
    with pytest.raises(ElasticError, match=expected):
        partitioner_of(graph, [whole] * 2).require_fits(range(2))


def test_devices_that_are_alike_get_the_same_stages() -> None:
    """Which devices these are does not matter, but for their kinds; nor does the order in which they are named."""
    graph = graph_of(MODELS[0])
    partitioner = partitioner_of(graph, [2**30] * 6)
    one, other = partitioner.plan((0, 1), 2), partitioner.plan((1, 0), 2)
    assert one is not None and one == other


def test_a_stage_works_with_its_values_beside_its_passes() -> None:
    """Its gradients, its update, two sums and values are so many passes over its parameters, in units of what an update passes over."""
    topology = mixed([10**10])
    graph = graph_of("zoo:alexnet:tiny")
    partitioner = Partitioner(graph, topology, RooflineCosts(topology))
    (stage,) = partitioner.given([(0, 0)], 1).stages
    plain = partitioner._prices.costs(partitioner._groups([0]), 1, partitioner._whole)
    passes_ns, update_ns = int(plain.backward_ns.sum()), plain.upkeep_ns
    assert update_ns.sum() > 0
    assert stage.backward_ns == passes_ns + int((update_ns * 13 // 3).sum())
    assert stage.forward_ns == int(plain.forward_ns.sum())
