"""What ``benchmarks.runtime`` compares: training steps of SOAP's runtime, and of PyTorch's own ways to do the same. Runs on every rank."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import soap
from benchmarks.models import Made, make_model
from soap import api
from soap.cluster.topology import DeviceKind
from soap.measure.memory import peak_memory
from soap.runtime.comm.world import choose_device, close_world, open_world, world_size
from soap.runtime.trainer import Trainer
from soap.simulator.reference import execution_order
from soap.zoo.gpt import GPT, Block

LEARNING_RATE = 0.01
Placed = TypeVar("Placed", Tensor, nn.Module)
Step = Callable[[], float]
"""One training iteration; gives the loss."""


@dataclass(frozen=True)
class Contest:
    """One model and the ways to train it. ``ours``: classical strategy; ``theirs``: name in ``PEERS``. ``path``: the exported model.
    ``device``: kind of device, which all ranks share if there are fewer of them."""

    model: str
    path: Path
    ours: str
    theirs: str
    options: Mapping[str, Any]
    """Of ``soap.api.load``."""
    device: DeviceKind = "cpu"

    def place(self, tensor: Placed) -> Placed:
        """A tensor or module on this rank's device."""
        return tensor.to(choose_device(self.device, int(os.environ["LOCAL_RANK"])))


def batch_of(contest: Contest) -> Made:
    """The model and its global batch, the same on every rank."""
    torch.manual_seed(0)
    module, inputs = make_model(contest.model)
    return contest.place(module), tuple(contest.place(tensor) for tensor in inputs)


def soap_step(contest: Contest) -> Step:
    """SOAP's runtime by a classical strategy; every rank is given the global batch."""
    model = api.load(str(contest.path), **contest.options)
    topology = soap.load_cluster(f"local:{dist.get_world_size()}")
    strategy = api.classical(contest.ours, model.graph, topology)
    simulation = api.simulator_for(model.graph, topology).run(strategy)
    order = execution_order(simulation.tasks, simulation.schedule)
    sgd = partial(torch.optim.SGD, lr=LEARNING_RATE)
    trainer = Trainer(model, (strategy, topology), order, optimizer=sgd, device_kind=contest.device, take_over=True)
    inputs = [contest.place(tensor) for tensor in model.example_inputs]
    return lambda: trainer.step(*inputs)


def data_parallel_step(contest: Contest) -> Step:
    """``DistributedDataParallel`` with its defaults; every rank has its share of the batch."""
    module, inputs = batch_of(contest)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = tuple(tensor.tensor_split(size)[rank].contiguous() for tensor in inputs)
    return _plain_step(DistributedDataParallel(module), own)


def plain_step(contest: Contest) -> Step:
    """The module itself, on one device."""
    return _plain_step(*batch_of(contest))


def tensor_parallel_step(contest: Contest) -> Step:
    """``parallelize_module`` with the plan of Megatron for the zoo's GPT; every rank has the global batch."""
    module, inputs = batch_of(contest)
    size = dist.get_world_size()
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i, block in enumerate(cast(GPT, module).blocks):
        cast(Block, block).attention.heads //= size
        plan |= {f"blocks.{i}.attention.{layer}": ColwiseParallel() for layer in ("query", "key", "value")}
        plan |= {f"blocks.{i}.attention.output": RowwiseParallel()}
        plan |= {f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
    return _plain_step(parallelize_module(module, init_device_mesh(contest.device, (size,)), plan), inputs)


def _plain_step(module: nn.Module, inputs: Sequence[Tensor]) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss: Tensor = module(*inputs)
        torch.autograd.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return step


PEERS: dict[str, Callable[[Contest], Step]] = {
    "plain": plain_step,
    "DistributedDataParallel": data_parallel_step,
    "parallelize_module": tensor_parallel_step,
}
"""PyTorch's own ways, by name."""


def race(contest: Contest, rounds: int, steps: int, theirs_first: bool) -> list[tuple[float, float]]:
    """Seconds per step of (ours, theirs) in each round, of the slowest rank, in turn in the same processes.

    ``theirs_first``: who is made first gets other memory than who comes second, which is worth a percent or two.
    """
    world = open_world(world_size(os.environ), contest.device, "gloo")
    try:
        makers = [soap_step, PEERS[contest.theirs]]
        runners = [make(contest) for make in (makers[::-1] if theirs_first else makers)]
        for step in runners * 2:
            _seconds(step, steps)
        times = [tuple(_seconds(step, steps) for step in runners)[:: -1 if theirs_first else 1] for _ in range(rounds)]
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [(float(a), float(b)) for a, b in slowest]
    finally:
        close_world(world)


def _seconds(step: Step, steps: int) -> float:
    """Median time of a step, between barriers."""
    times = []
    for _ in range(steps):
        dist.barrier()
        start = perf_counter_ns()
        step()  # its loss is a number: the device has finished the forward pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((perf_counter_ns() - start) / 1e9)
    return median(times)


def curves(contest: Contest, steps: int) -> tuple[list[float], list[float]]:
    """Losses of (ours, theirs) over some steps on the same batch."""
    world = open_world(world_size(os.environ), contest.device, "gloo")
    try:
        ours, theirs = soap_step(contest), PEERS[contest.theirs](contest)
        return [ours() for _ in range(steps)], [theirs() for _ in range(steps)]
    finally:
        close_world(world)


def peak_bytes(contest: Contest, ours: bool) -> int:
    """Most tensor memory that a rank holds at once, from before it has the model to the end of the third step; the worst rank's."""
    world = open_world(world_size(os.environ), contest.device, "gloo")
    try:
        with peak_memory(world.device) as peak:
            step = (soap_step if ours else PEERS[contest.theirs])(contest)
            gc.collect()
            for _ in range(3):
                step()
        worst = torch.tensor(peak.bytes)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return int(worst)
    finally:
        close_world(world)
