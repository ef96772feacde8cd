"""Plans of one model and PyTorch's ``DistributedDataParallel``, trained in turns in the same processes. Runs on every rank.

A round is a turn of each, one right behind the other, in another order every time. For each turn what trains is made anew: where its
tensors lie in memory, which is worth a percent or two, is then drawn again in each round instead of once.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.default_cells import PEER
from benchmarks.small_models import Small, make_small
from soap import api
from soap.cli.training import Job, make_trainer
from soap.cli.trials import turned
from soap.errors import SoapWarning
from soap.measure.iteration import measure_steps
from soap.runtime.comm.world import close_world, open_world
from soap.tracing.execute import TracedModel

WARM_UP_STEPS = 3
"""Whatever has just been made still asks the system for memory."""


@dataclass(frozen=True)
class Race:
    """``job``: our plans by name; ``job.steps`` of a turn are timed. ``peer``: the small model that ``DistributedDataParallel`` trains;
    None if it takes no part."""

    job: Job
    peer: str | None
    rounds: int


@dataclass(frozen=True)
class Raced:
    """``times_ns``: of each contender, round by round, the median step of the slowest rank. ``unused``: parameters that have no gradient on
    some rank, for which the peer is told to look (``find_unused_parameters``)."""

    times_ns: Mapping[str, tuple[int, ...]]
    unused: int


def race(own: Race) -> Raced:
    """All rounds; an entry for ``launch``."""
    job = own.job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SoapWarning)  # the search has shown them
        model = api.load(job.model, **job.reading)
    world = open_world(job.topology.device_count, job.topology.devices[0].type.kind, job.backend)
    try:
        unused = 0 if own.peer is None else max(gathered(without_gradient(share_of(make_small(own.peer), world.device))))
        names = [*job.strategies, *([] if own.peer is None else [PEER])]
        times: dict[str, list[int]] = {name: [] for name in names}
        for number in range(own.rounds):
            for name in turned(names, number):
                gc.collect()
                if name == PEER:
                    assert own.peer is not None
                    times[name].append(_peer_turn(job, own.peer, world.device, find_unused=unused > 0))
                else:
                    times[name].append(_our_turn(job, model, name))
        return Raced({name: tuple(own) for name, own in times.items()}, unused)
    finally:
        close_world(world)


def _our_turn(job: Job, model: TracedModel, name: str) -> int:
    trainer = make_trainer(job, model, name)
    try:
        return measure_steps(trainer, lambda step: model.example_inputs, job.steps, WARM_UP_STEPS).median_ns
    finally:
        trainer.comm.close()


def _peer_turn(job: Job, name: str, device: torch.device, *, find_unused: bool) -> int:
    """As ``measure_steps`` measures ours: between barriers, the slowest rank's."""
    optimizer = job.updating.recipe().optimizer
    assert not isinstance(optimizer, Mapping)  # one for all parameters
    step = peer_step(share_of(make_small(name), device), optimizer, find_unused=find_unused)
    times = []
    for _ in range(WARM_UP_STEPS + job.steps):
        dist.barrier()
        start = perf_counter_ns()
        step()  # its loss is a number: the device has finished the forward pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter_ns() - start)
        dist.barrier()
    slowest = [max(own) for own in zip(*gathered(times), strict=True)]
    return int(median(slowest[WARM_UP_STEPS:]))


def share_of(small: Small, device: torch.device) -> Small:
    """The model with this rank's part of its batch."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def part(tensor: Tensor) -> Tensor:
        return tensor.tensor_split(size)[rank].contiguous().to(device)

    return Small(small.module.to(device), tuple(map(part, small.args)), {name: part(own) for name, own in small.inputs.items()}, small.loss)


def peer_step(small: Small, optimizer: Callable[[Any], torch.optim.Optimizer], *, find_unused: bool) -> Callable[[], float]:
    """A training iteration by ``DistributedDataParallel``, otherwise with its defaults; gives this rank's loss."""
    wrapped = DistributedDataParallel(small.module, find_unused_parameters=find_unused)
    updates = optimizer([own for own in small.module.parameters() if own.requires_grad])

    def step() -> float:
        updates.zero_grad()
        loss = loss_of(small, wrapped)
        torch.autograd.backward(loss)
        updates.step()
        return float(loss.detach())

    return step


def loss_of(small: Small, module: Callable[..., Any]) -> Tensor:
    """The loss of the model's batch. ``module``: the model, wrapped or not."""
    output = module(*small.args, **small.inputs)
    loss: Tensor = output if small.loss is None else small.loss(output)
    return loss


def without_gradient(small: Small) -> int:
    """How many trainable parameters have no gradient after a step on the batch."""
    torch.autograd.backward(loss_of(small, small.module))
    return sum(own.requires_grad and own.grad is None for own in small.module.parameters())


def gathered(value: Any) -> Sequence[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
