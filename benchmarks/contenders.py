"""What ``benchmarks.runtime`` compares: training steps of SOAP's runtime, and of PyTorch's own ways to do the same. Runs on every rank."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import soap
from benchmarks.models import Made, make_model
from soap import api
from soap.cli.updating import TIMED_LEARNING_RATE
from soap.cluster.topology import DeviceKind, Topology
from soap.measure.iteration import peak_memory
from soap.model.graph import OperatorGraph
from soap.runtime.comm.launched import world_size
from soap.runtime.comm.world import choose_device, close_world, open_world
from soap.runtime.trainer import Trainer
from soap.simulator.reference import execution_order
from soap.strategy.config import Strategy
from soap.zoo.gpt import GPT, Block

LEARNING_RATE = 0.01
ADAM_RATE = TIMED_LEARNING_RATE
"""With 0.01 it is chance which side first makes numbers so small that a processor multiplies them several times as slowly."""
KEEPING_STATES = ("ZeroRedundancyOptimizer", "fully_shard", "fully_shard + checkpoint_wrapper")
"""Peers that are about the optimizer's states, or more."""
Placed = TypeVar("Placed", Tensor, nn.Module)
Rest = ParamSpec("Rest")
Found = TypeVar("Found")
Step = Callable[[], float]
"""One training iteration; gives the loss."""


@dataclass(frozen=True)
class Contest:
    """One model and the ways to train it. ``ours``: classical strategy; ``theirs``: name in ``PEERS``. ``path``: the exported model.
    ``device``: kind of device, which all ranks share if there are fewer of them. Both sides train with SGD, or with Adam where its states
    are what is compared."""

    model: str
    path: Path
    ours: str
    theirs: str
    options: Mapping[str, Any]
    """Of ``soap.api.load``."""
    device: DeviceKind = "cpu"
    settled: bool = False
    """Whether memory counts from when a side is ready to train: where each rank makes the whole model and keeps a part of it."""

    @property
    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """What makes the optimizer of parameters."""
        return partial(torch.optim.Adam, lr=ADAM_RATE) if self.theirs in KEEPING_STATES else partial(torch.optim.SGD, lr=LEARNING_RATE)

    def strategy(self, graph: OperatorGraph, topology: Topology) -> Strategy:
        """Our plan."""
        return api.classical(self.ours, graph, topology)

    def step(self, ours: bool) -> Step:
        """The training iteration of a side, made ready."""
        return soap_step(self) if ours else PEERS[self.theirs](self)

    @property
    def here(self) -> torch.device:
        """This rank's device."""
        return choose_device(self.device, int(os.environ["LOCAL_RANK"]))

    def place(self, tensor: Placed) -> Placed:
        """A tensor or module on this rank's device."""
        return tensor.to(self.here)


def batch_of(contest: Contest) -> Made:
    """The model and its global batch, the same on every rank."""
    torch.manual_seed(0)
    module, inputs = make_model(contest.model)
    return contest.place(module), tuple(contest.place(tensor) for tensor in inputs)


def soap_step(contest: Contest) -> Step:
    """SOAP's runtime by a classical strategy; every rank is given the global batch."""
    model = api.load(str(contest.path), **contest.options)
    topology = soap.load_cluster(f"local:{dist.get_world_size()}")
    strategy = contest.strategy(model.graph, topology)
    simulation = api.simulator_for(model.graph, topology).run(strategy)
    order = execution_order(simulation.tasks, simulation.schedule)
    trainer = Trainer(model, (strategy, topology), order, optimizer=contest.optimizer, device_kind=contest.device, take_over=True)
    inputs = [contest.place(tensor) for tensor in model.example_inputs]
    return lambda: trainer.step(*inputs)


def data_parallel_step(contest: Contest) -> Step:
    """``DistributedDataParallel`` with its defaults; every rank has its share of the batch."""
    return _plain_step(*_replicated(contest))


def sharded_step(contest: Contest) -> Step:
    """``DistributedDataParallel`` with ``ZeroRedundancyOptimizer``, which keeps the states of whole parameters on one rank each, and
    broadcasts values in one buffer for each rank."""
    module, inputs = _replicated(contest)
    kind, options = contest.optimizer.func, contest.optimizer.keywords  # type: ignore[attr-defined]
    optimizer = ZeroRedundancyOptimizer(module.parameters(), kind, parameters_as_bucket_view=True, **options)  # type: ignore[no-untyped-call]
    return _plain_step(module, inputs, optimizer)


def fully_sharded_step(contest: Contest, recompute: bool = False) -> Step:
    """``fully_shard`` of each block of a transformer, and of the rest, with its defaults; every rank has its share of the batch.

    ``recompute``: each block in a ``checkpoint_wrapper``, with its defaults: it keeps the block's input alone.
    """
    module, inputs = batch_of(contest)
    mesh, blocks = init_device_mesh(contest.device, (dist.get_world_size(),)), _blocks(module)
    for place, block in enumerate(blocks):
        if recompute:
            blocks[place] = checkpoint_wrapper(block)  # type: ignore[no-untyped-call]
        fully_shard(blocks[place], mesh=mesh)
    fully_shard(module, mesh=mesh)
    return _plain_step(module, _share(inputs), contest.optimizer(module.parameters()))


def _blocks(module: nn.Module) -> nn.ModuleList:
    """The blocks of a transformer: its only list of modules."""
    (blocks,) = (own for own in module.modules() if isinstance(own, nn.ModuleList))
    return blocks


def _replicated(contest: Contest) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module on all ranks, and this rank's share of the batch."""
    module, inputs = batch_of(contest)
    return DistributedDataParallel(module), _share(inputs)


def _share(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This rank's share of the batch."""
    return tuple(tensor.tensor_split(dist.get_world_size())[dist.get_rank()].contiguous() for tensor in inputs)


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


def _plain_step(module: nn.Module, inputs: Sequence[Tensor], optimizer: torch.optim.Optimizer | None = None) -> Step:
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

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
    "ZeroRedundancyOptimizer": sharded_step,
    "fully_shard": fully_sharded_step,
    "fully_shard + checkpoint_wrapper": partial(fully_sharded_step, recompute=True),
}
"""PyTorch's own ways, by name."""


def among_ranks(work: Callable[Concatenate[Contest, Rest], Found]) -> Callable[Concatenate[Contest, Rest], Found]:
    """The same work within a process group. What it has made is gone before the group is: a ``DistributedDataParallel`` that holds the last
    reference waits for threads of the group which wait for it."""

    @wraps(work)
    def run(contest: Contest, *args: Rest.args, **named: Rest.kwargs) -> Found:
        world = open_world(world_size(os.environ), contest.device, "gloo")
        try:
            found = work(contest, *args, **named)
            gc.collect()
            return found
        finally:
            close_world(world)

    return run


@among_ranks
def race(contest: Contest, rounds: int, steps: int, theirs_first: bool) -> list[tuple[float, float]]:
    """Seconds per step of (ours, theirs) in each round, of the slowest rank, in turn in the same processes.

    ``theirs_first``: who is made first gets other memory than who comes second, which is worth a percent or two.
    """
    runners = [contest.step(ours) for ours in ((False, True) if theirs_first else (True, False))]
    for step in runners * 2:
        _seconds(step, steps)
    times = [tuple(_seconds(step, steps) for step in runners)[:: -1 if theirs_first else 1] for _ in range(rounds)]
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [(float(a), float(b)) for a, b in slowest]


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


@among_ranks
def sent_bytes(contest: Contest, ours: bool, steps: int = 3) -> int:
    """Bytes that a rank sends in a step over its connections, as the kernel counts what was acknowledged; the mean of all ranks."""
    step = contest.step(ours)
    step()
    dist.barrier()
    before = _acknowledged()
    for _ in range(steps):
        step()
    dist.barrier()
    sent = torch.tensor([_acknowledged() - before], dtype=torch.float64)
    dist.all_reduce(sent)
    return round(float(sent) / steps / dist.get_world_size())


def _acknowledged() -> int:
    """Bytes that were acknowledged on all TCP connections of this process (``tcpi_bytes_acked`` of Linux's ``struct tcp_info``)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                    total += int.from_bytes(info[120:128], sys.byteorder) if len(info) >= 128 else 0
        except OSError:  # no socket, or none any more
            continue
    return total


@among_ranks
def curves(contest: Contest, steps: int) -> tuple[list[float], list[float]]:
    """Losses of (ours, theirs) over some steps on the same batch."""
    ours, theirs = contest.step(True), contest.step(False)
    return [ours() for _ in range(steps)], [theirs() for _ in range(steps)]


@among_ranks
def peak_bytes(contest: Contest, ours: bool) -> int:
    """Most tensor memory that a rank holds at once, from before it has the model (``settled``: from when it is ready to train) to the end
    of the third step; the worst rank's."""
    with peak_memory(contest.here) as peak:
        step = contest.step(ours)
        gc.collect()
        if contest.settled:
            peak.restart()
        for _ in range(3):
            step()
    worst = torch.tensor(peak.bytes)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return int(worst)
