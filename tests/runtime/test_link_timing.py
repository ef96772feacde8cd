from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from soap.cluster.presets import local_topology
from soap.measure.link_probes import BLOCK_BYTES, COLD_PENALTIES, IN_STEPS, STEP_BYTES, LinkTiming, Operation, Probe
from soap.measure.link_timing import LEAST_ROUNDS, STEPS, TURNS, chain_model, chain_strategy, measure_links
from soap.plan.delivery import exchange_rounds
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.tasks import TaskKind
from tests.runtime.pool import Pool


def timed(probes: Sequence[Probe], ranks: int) -> tuple[list[LinkTiming], list[Probe]]:
    done: list[LinkTiming] = []
    known = probes if dist.get_rank() == 0 else probes[1:]  # another rank may know of what rank 0 does not
    found = measure_links(known, ranks, backend="gloo", seconds_per_probe=0.001, on_probe=done.append)
    return found, [timing.probe for timing in done]


@pytest.mark.slow
def test_all_ranks_see_the_same_times_of_all_probes(pool: Pool) -> None:
    probes = [Probe(operation, (0, 2), 4096) for operation in Operation if operation not in IN_STEPS]
    probes += [Probe(operation, (0, 1, 2), 4096) for operation in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL)]
    results = pool.run(timed, probes, 3)
    assert results[0][0] == results[1][0] == results[2][0]
    assert [done for _, done in results] == [probes, [], []]
    for probe, timing in zip(probes, results[0][0], strict=True):
        assert timing.probe == probe and len(timing.seconds) >= LEAST_ROUNDS and min(timing.seconds) > 0
        assert timing.cpu_seconds > 0


def some(probes: Sequence[Probe], ranks: int, count: int) -> int:
    """How many of the probes are measured if rank 0 has enough behind so many; the others would go on."""
    done: list[LinkTiming] = []
    is_first = dist.get_rank() == 0
    measure = measure_links(
        probes, ranks, backend="gloo", seconds_per_probe=0.001, on_probe=done.append, enough=lambda: is_first and len(done) >= count
    )
    return len(measure)


@pytest.mark.slow
def test_all_ranks_end_when_the_first_has_enough(pool: Pool) -> None:
    probes = [Probe(Operation.ALL_REDUCE, (0, 1, 2), size) for size in (1024, 4096, 16384)]
    for count in (2, 0):
        assert pool.run(some, probes, 3, count) == [count] * 3


@pytest.mark.long
@pytest.mark.slow
def test_what_is_timed_within_steps(pool: Pool) -> None:
    """Parts of a chain's operators are added up behind each of them; alone, the same chain communicates nothing."""
    probes = [Probe(Operation.STEP_MESSAGE, (0, 2), STEP_BYTES)]
    probes += [Probe(operation, (0, 1, 2), STEP_BYTES) for operation in (Operation.STEP_SUM, Operation.STEP_EXCHANGE)]
    probes += [Probe(operation, (0, 1, 2), 2 * BLOCK_BYTES) for operation in COLD_PENALTIES]
    results = pool.run(timed, probes, 3)
    assert results[0][0] == results[1][0] == results[2][0]
    for probe, timing in zip(probes, results[0][0], strict=True):
        turns = TURNS - 1 if probe.operation in COLD_PENALTIES else TURNS
        assert timing.probe == probe and len(timing.seconds) == STEPS * turns and timing.cpu_seconds > 0


@pytest.mark.parametrize(
    ("operation", "sums", "exchanges", "messages"),
    [
        (Operation.STEP_SUM, 3, 0, 0),
        (Operation.STEP_MESSAGE, 0, 0, 3),
        (Operation.STEP_EXCHANGE, 0, 2, 2),
        (Operation.STEP_WAIT, 0, 0, 7),  # two devices send to each other twice; what three of the last tiles made goes to the first device
    ],
)
def test_a_chain_communicates_between_all_its_operators(operation: Operation, sums: int, exchanges: int, messages: int) -> None:
    """What is exchanged is sent to one device in the end. What is read of the operator before the last one is there."""
    devices = (0, 2) if operation is Operation.STEP_MESSAGE else (0, 1, 2)
    model = chain_model(operation, 4, len(devices))
    for across in (False, True):
        plan = build_plan(model.graph, chain_strategy(model, operation, devices, across=across), local_topology(3))
        found = len(plan.reductions), len(plan.exchanges), len(plan.messages)
        assert found == ((sums, exchanges, messages) if across else (0, 0, 0))


def test_so_many_bytes_are_exchanged() -> None:
    devices = (0, 1, 2)
    model = chain_model(Operation.STEP_EXCHANGE, 4, len(devices), size_bytes=1024)
    plan = build_plan(model.graph, chain_strategy(model, Operation.STEP_EXCHANGE, devices, across=True), local_topology(3))
    for exchange in plan.exchanges[:-1]:  # the last one brings all to one device as well
        ((flows, _),) = exchange_rounds(plan, exchange, exchange.parts, gradient=False)
        assert flows == tuple((a, b, 1024) for a in devices for b in devices if a != b)


def test_messages_have_so_many_bytes() -> None:
    devices = (0, 2)
    model = chain_model(Operation.STEP_MESSAGE, 4, len(devices), size_bytes=1024)
    topology, strategy = local_topology(3), chain_strategy(model, Operation.STEP_MESSAGE, devices, across=True)
    tasks = lower(build_plan(model.graph, strategy, topology), topology, RooflineCosts(topology))
    assert [task.bytes for task in tasks.tasks if task.kind is TaskKind.TRANSFER] == [1024] * 6
