"""Virtual workers that train on ranks: every start, every sum and every byte is as WSP says, and values are those of plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soap.elastic.clocks import waves_needed
from soap.elastic.faults import ElasticError
from soap.elastic.messages import Kind, Message
from soap.elastic.worker import Source
from soap.errors import RuntimeFailure, StrategyError
from soap.mixed.partitioning import Partitioner
from soap.mixed.planned import WavePlan, strategy_of, wave_plan
from soap.mixed.run.stage_program import Updates
from soap.mixed.run.training import Job, Outcome, WaveServer, train
from soap.profiles.roofline import RooflineCosts
from soap.runtime.comm.launch import launch
from soap.tracing.calls import TileContext
from soap.tracing.load import load_model
from tests.mixed.test_partitioning import mixed
from tests.mixed.wsp import Emulation

RATE = 0.05
PAIR, FOUR = ((0,), (1,)), ((0, 1), (2, 3))
SAMPLES = 4
"""Of a minibatch."""


@dataclass(frozen=True)
class Drawn:
    """Batches like a model's example inputs, with other numbers for each."""

    inputs: tuple[Tensor, ...]
    most: int = 10

    def __len__(self) -> int:
        return 2**40

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """See ``soap.elastic.worker.Batches``."""
        drawing = torch.Generator().manual_seed(indices[0])
        return [
            torch.randn(own.shape, dtype=own.dtype, generator=drawing)
            if own.is_floating_point()
            else torch.randint(0, self.most, own.shape, dtype=own.dtype, generator=drawing)
            for own in self.inputs
        ]


def plan_for(model: str, groups: Sequence[Sequence[int]], in_flight: int, bound: str, servers: int | None = None) -> WavePlan:
    """Of workers on these devices, the last one quicker than the first."""
    topology = mixed([2**30] * sum(map(len, groups)))
    minibatch = load_model(f"zoo:{model}@{SAMPLES}", plan_only=True, dtype="float64").graph
    partitioner = Partitioner(minibatch, topology, RooflineCosts(topology))
    plans = [partitioner.plan(own, in_flight) for own in groups]
    graph = load_model(f"zoo:{model}@{SAMPLES * len(groups)}", plan_only=True, dtype="float64").graph
    found = [own for own in plans if own is not None]
    return wave_plan(strategy_of(found, graph, servers or topology.device_count, bound, topology.device_count), graph, topology)


def job_for(model: str, plan: WavePlan, minibatches: Sequence[int], **options: object) -> Job:
    """Trains by SGD, and brings all values back."""
    spec = f"zoo:{model}@{SAMPLES}"
    batches = Drawn(tuple(load_model(spec, dtype="float64").example_inputs))
    ranks = sum(map(len, plan.workers))
    job = Job(plan, Source(spec, "float64"), batches, partial(torch.optim.SGD, lr=RATE), tuple(minibatches), ranks, parameters=True)
    return replace(job, **options)  # type: ignore[arg-type]


def run(job: Job) -> Outcome:
    """On ranks of this machine."""
    found = launch(job.ranks, train, (job,), limit_s=240)[0]
    assert found is not None
    return found


def emulated(job: Job, outcome: Outcome, **options: float) -> Emulation:
    """Plain loops over what the run has told of its starts."""
    count = len(job.plan.workers)
    starts = [outcome.of(worker, 0).starts for worker in range(count)]
    batches = {
        (worker, p): job.batches.batch([(p - 1) * count + worker]) for worker in range(count) for p in range(1, len(starts[worker]) + 1)
    }
    rates = dict.fromkeys(range(1, 1 + max(map(len, starts))), RATE)
    found = Emulation(job.source.load(), starts, batches, job.plan.in_flight, rates)
    return replace(found, **options)  # type: ignore[arg-type]


def check(job: Job, outcome: Outcome) -> None:
    """Bounds of every start, waves, bytes, and values."""
    plan, workers = job.plan, range(len(job.plan.workers))
    for worker in workers:
        seen = [outcome.of(worker, stage) for stage in range(len(plan.workers[worker]))]
        starts, before = seen[0].starts, 0
        assert [start.minibatch for start in starts] == [*range(1, job.minibatches[worker] + 1)]
        for start in starts:
            needed = waves_needed(start.minibatch - 1, plan.in_flight, plan.bound)
            assert start.version >= needed and start.minibatch - 1 - start.finished < plan.in_flight
            assert start.version == before or before < needed or plan.bound is None, "it pulls when the bound demands it, only then"
            before = start.version
        pulls = len({start.version for start in starts} - {0})
        waves = -(-job.minibatches[worker] // plan.in_flight)
        assert [own.pushes for own in seen] == [waves] * len(seen)
        values = sum(plan.sizes_bytes[name] for stage in plan.workers[worker] for name in stage.parameters)
        assert sum(own.pushed_bytes for own in seen) == waves * values and sum(own.pulled_bytes for own in seen) == pulls * values
        assert sum(own.activation_bytes for own in seen) == job.minibatches[worker] * sum(plan.activation_bytes(worker))
    pieces = [len(plan.held_by(server)) for server in range(len(plan.servers))]
    assert [*outcome.server_pushes] == [count * sum(-(-own // plan.in_flight) for own in job.minibatches) for count in pieces]
    most = None if plan.bound is None else (plan.bound + 2) * plan.in_flight - 2
    assert sum(outcome.missing.values()) == sum(job.minibatches)
    assert most is None or max(outcome.missing) <= most


def check_values(emulation: Emulation, outcome: Outcome, tolerance: float = 1e-9) -> None:
    """All final values, and all losses."""
    assert outcome.parameters is not None
    for name, value in emulation.final().items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=tolerance, atol=tolerance)
    for worker in range(len(emulation.starts)):
        expected = [emulation.losses[worker, p + 1] for p in range(len(emulation.starts[worker]))]
        torch.testing.assert_close(torch.tensor(outcome.losses(worker)), torch.tensor(expected), rtol=1e-6, atol=tolerance)


@pytest.mark.long  # two devices hold the same, and `Nm = 1` each start
def test_two_workers_of_one_device() -> None:
    plan = plan_for("alexnet:tiny", PAIR, 3, "bounded:1")
    job = job_for("alexnet:tiny", plan, (10, 10), delays_s=(0.03, 0.0))
    outcome = run(job)
    check(job, outcome)
    check_values(emulated(job, outcome), outcome)
    assert [start.version for start in outcome.of(1, 0).starts[:8]] == [0] * 8, "3 * (1 + 2) is the first that needs a wave"
    assert outcome.of(1, 0).starts[8].version > 0
    assert max(outcome.missing) == 7, "attained: (D + 1) * Nm + Nm - 2, at the 8th"


@pytest.mark.slow
def test_two_workers_of_two_devices() -> None:
    plan = plan_for("alexnet:tiny", FOUR, 2, "bounded:0")
    assert [len(own) for own in plan.workers] == [2, 2]
    job = job_for("alexnet:tiny", plan, (5, 5), delays_s=(0.02, 0.0))
    outcome = run(job)
    check(job, outcome)
    check_values(emulated(job, outcome), outcome)


@pytest.mark.slow
def test_a_worker_may_end_long_behind_the_others() -> None:
    """By more than ranks wait for each other in a collective: all is kept, and brought back."""
    plan = plan_for("alexnet:tiny", PAIR, 1, "async")
    job = job_for("alexnet:tiny", plan, (2, 2), delays_s=(3.0, 0.0), timeout_s=10.0)
    outcome = run(job)
    check(job, outcome)
    check_values(emulated(job, outcome), outcome)


@pytest.mark.slow
def test_waves_of_one_without_lag_are_synchronous_sgd_bit_for_bit() -> None:
    plan = plan_for("alexnet:tiny", PAIR, 1, "bounded:0")
    job = job_for("alexnet:tiny", plan, (4, 4))
    outcome = run(job)
    check(job, outcome)
    model = job.source.load()
    values = {tensor.name: model.parameters[tensor.name].detach() for tensor in model.graph.parameters if tensor.requires_grad}
    for step in range(4):
        updates = []
        for worker in range(2):
            leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
            loss = model.reference_loss(job.batches.batch([2 * step + worker]), leaves, TileContext(step=2 * step + worker))
            found = torch.autograd.grad(loss, list(leaves.values()))
            updates.append([-RATE / 2 * gradient for gradient in found])
        values = {name: value + (one + other) for (name, value), one, other in zip(values.items(), *updates, strict=True)}
    assert outcome.parameters is not None
    assert all(torch.equal(outcome.parameters[name], value) for name, value in values.items())


@pytest.mark.long
@pytest.mark.parametrize("bound", ["bounded:0", "bounded:4", "async"])
@pytest.mark.parametrize("minibatches", [(7, 7), (9, 3), (2, 8)])
def test_nobody_waits_for_ever(bound: str, minibatches: tuple[int, int]) -> None:
    plan = plan_for("alexnet:tiny", FOUR, 2, bound)
    job = job_for("alexnet:tiny", plan, minibatches, delays_s=(0.0, 0.03))
    outcome = run(job)
    check(job, outcome)
    check_values(emulated(job, outcome), outcome)


MOMENTUM = partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Half the rate after each three minibatches."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


@pytest.mark.long
def test_momentum_rates_and_batch_norm_go_on_after_a_break(tmp_path: Path) -> None:
    plan = plan_for("resnet50:tiny", PAIR, 2, "bounded:1")
    first = job_for("resnet50:tiny", plan, (5, 5), optimizer=MOMENTUM, schedule=halving, save=str(tmp_path), parameters=False)
    before = run(first)
    again = replace(first, minibatches=(4, 4), save=None, resume=str(tmp_path), parameters=True)
    outcome = run(again)
    assert outcome.finished == (9, 9)
    for worker in range(2):
        starts = [*before.of(worker, 0).starts, *outcome.of(worker, 0).starts]
        assert [start.minibatch for start in starts] == [*range(1, 10)]
        assert all(start.version >= waves_needed(start.minibatch - 1, 2, 1) for start in starts)
        outcome.of(worker, 0).starts[:] = starts
        outcome.of(worker, 0).losses[:] = [*before.losses(worker), *outcome.losses(worker)]
    found = emulated(again, outcome, momentum=0.9, decay=0.01)
    found = replace(found, rates={p: RATE * 0.5 ** ((p - 1) // 3) for p in range(1, 10)})
    check_values(found, outcome)
    for name, value in found.buffers(0).items():
        torch.testing.assert_close(outcome.buffers[name], value, rtol=1e-9, atol=1e-9)
    with pytest.raises(RuntimeFailure, match="saved with other stages; expected those of the strategy"):
        run(replace(again, plan=plan_for("resnet50:tiny", ((1,), (0,)), 2, "bounded:1")))


def test_what_is_no_sum_of_updates_is_refused() -> None:
    for make, name in ((torch.optim.Adam, "Adam"), (partial(torch.optim.SGD, maximize=True), "SGD that maximizes")):
        with pytest.raises(RuntimeFailure, match=f"optimizer {name} under virtual workers; expected SGD"):
            Updates(make, None, 2)
    with pytest.raises(RuntimeFailure, match="schedule ReduceLROnPlateau under virtual workers; expected one that asks for no loss"):
        Updates(partial(torch.optim.SGD, lr=RATE), torch.optim.lr_scheduler.ReduceLROnPlateau, 2)


def test_parameters_in_one_part_are_beside_their_stage() -> None:
    plan = plan_for("alexnet:tiny", FOUR, 2, "bounded:0", servers=1)
    for stage in plan.workers[0]:
        places = {plan.servers[piece.server] for name in stage.parameters for piece in plan.pieces[name]}
        assert places == {stage.device}, "each device is on a host of its own"
    spread = plan_for("alexnet:tiny", FOUR, 2, "bounded:0")
    assert all({piece.server for piece in own} == {0, 1, 2, 3} for own in spread.pieces.values() if len(own) > 1)


def test_servers_keep_what_may_be_asked_for_and_say_what_they_do_not_know() -> None:
    plan = plan_for("alexnet:tiny", PAIR, 1, "bounded:1")
    held = plan.held_by(0)
    server = WaveServer(plan, 0, [torch.zeros(piece.span[1] - piece.span[0]) for piece in held])
    numbers = torch.arange(len(held))
    ones = torch.ones(sum(piece.span[1] - piece.span[0] for piece in held))
    for wave in range(2):
        for worker in (1, 0, 0):  # the second time it counts no more
            server.reply(Message.of(Kind.PUSH, worker, [numbers, ones], lease=wave, version=0))
    assert server.pushes == 4 * len(held)
    for version in (0, 1, 2):
        found = server.reply(Message.of(Kind.PULL, 0, [numbers], version=version))
        assert torch.equal(found.tensors()[0], 2 * version * ones)
    server.reply(Message.of(Kind.PULL, 0, [numbers], lease=2, version=2))
    for question, message in (
        (Message.of(Kind.PULL, 0, [numbers], version=1), "values of version 1; expected one of 2"),
        (Message.of(Kind.PULL, 0, [torch.tensor([len(held)])]), "pieces .* were asked for; expected numbers from 0 to"),
        (Message(Kind.START, 0), "a server of waves was asked START; expected PULL, PUSH"),
        (Message.of(Kind.PUSH, 0, [numbers, ones], lease=7), "worker 0 pushes wave 7; expected wave 2"),
    ):
        with pytest.raises(ElasticError, match=message):
            server.reply(question)


@pytest.mark.slow
def test_a_parameter_of_two_stages_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"parameter '.*' is read in stages 0 and 1 of a worker; expected one stage"):
        plan_for("lstm_ptb:tiny", FOUR, 1, "bounded:0")
