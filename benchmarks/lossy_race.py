"""Our plans and PyTorch's ``DistributedDataParallel`` with its communication hooks, on emulated hosts, in turns. Runs on every rank.

An emulated device is slower than this machine's cores: a rank sleeps before it communicates (``soap.runtime.system.clock``). Our runtime
does that by itself; for the peers a hook of ours does it before each of their buckets, and the step does it at its end. What the bfloat16
hook computes behind its sum runs on another thread, at this machine's speed: that is in its favour.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.default_race import gathered
from benchmarks.models import make_model
from soap import api
from soap.cli.training import Job, batches_of, make_trainer
from soap.cli.trials import turned
from soap.emulation.placement import run_evenly
from soap.errors import SoapWarning
from soap.measure.iteration import measure_steps
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.system import clock

WARM_UP_STEPS = 3
LEARNING_RATE = 0.01
POWERSGD_RANK = 2
"""As our own default."""

Hook = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LossyRace:
    """``job``: our plans by name; ``job.steps`` of a turn are timed. ``model``: its name in ``benchmarks.models``, for the peers."""

    job: Job
    model: str
    rounds: int


def race(own: LossyRace) -> dict[str, tuple[int, ...]]:
    """By contender, nanoseconds of each timed step of the slowest rank, of all rounds; an entry for ``launch``."""
    job = own.job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SoapWarning)
        model = api.load(job.model, **job.reading)
    batches = batches_of(job, model)
    world = open_world(job.topology.device_count, job.topology.devices[0].type.kind, job.backend)
    try:
        names = [*job.strategies, *PEERS]
        times: dict[str, list[int]] = {name: [] for name in names}
        for number in range(own.rounds):
            for name in turned(names, number):
                gc.collect()
                if name in PEERS:
                    times[name] += _peer_turn(own.model, job.steps, PEERS[name])
                    continue
                trainer = make_trainer(job, model, name)
                try:
                    times[name] += measure_steps(trainer, batches, job.steps, WARM_UP_STEPS).times_ns
                finally:
                    trainer.comm.close()
        return {name: tuple(found) for name, found in times.items()}
    finally:
        close_world(world)


def _plain(state: None, bucket: Any) -> Any:
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def _halved(state: None, bucket: Any) -> Any:
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


class _OneAfterTheOther:
    """``torch.distributed`` for PowerSGD's hook, whose sums are waited for where they begin. So what the hook computes after a sum runs on
    the thread that waits, as part of the emulated device's work; on gloo's thread it would run at this machine's speed. Nor could several
    buckets be under way: the hook begins its second sum in a callback, ranks would call gloo in different orders, and that ends in an
    abort."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, *args: Any, **named: Any) -> Any:
        """The same, done."""
        clock.catch_up()
        work = dist.all_reduce(*args, **named)
        assert work is not None
        work.wait()
        clock.resume()
        return work


def _low_rank(state: Any, bucket: Any) -> Any:
    with patch.object(powerSGD_hook, "dist", _OneAfterTheOther()):
        return powerSGD_hook.powerSGD_hook(state, bucket)


def _hooks() -> Mapping[str, tuple[Callable[[], Any], Hook]]:
    """Name -> how its state is made, and the hook."""

    def low_rank() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)

    def nothing() -> None:
        return None

    return {
        "DDP": (nothing, _plain),
        "DDP, bf16": (nothing, _halved),
        f"DDP, PowerSGD {POWERSGD_RANK}": (low_rank, _low_rank),
    }


PEERS = _hooks()


def _peer_turn(name: str, steps: int, peer: tuple[Callable[[], Any], Hook]) -> list[int]:
    with clock.paused():
        step = _peer_step(name, peer)
    run_evenly()  # all groups' threads exist now
    times = []
    for _ in range(WARM_UP_STEPS + steps):
        _barrier()
        start = perf_counter_ns()
        step()
        clock.catch_up()
        times.append(perf_counter_ns() - start)
        _barrier()
    return [max(own) for own in zip(*gathered(times), strict=True)][WARM_UP_STEPS:]


def _barrier() -> None:
    clock.catch_up()
    dist.barrier()
    clock.resume()


def _peer_step(name: str, peer: tuple[Callable[[], Any], Hook]) -> Callable[[], float]:
    torch.manual_seed(0)
    module, inputs = make_model(name)
    rank, size = dist.get_rank(), dist.get_world_size()
    own: tuple[Tensor, ...] = tuple(tensor.tensor_split(size)[rank].contiguous() for tensor in inputs)
    wrapped = DistributedDataParallel(module)
    make_state, hook = peer
    wrapped.register_comm_hook(make_state(), _caught_up(hook))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss: Tensor = wrapped(*own)
        torch.autograd.backward(loss)  # it waits for all sums at its end
        clock.resume()
        optimizer.step()
        return float(loss.detach())

    return step


def _caught_up(hook: Hook) -> Hook:
    """The hook, once the device has come so far. Without annotations: torch wants its own ones or none."""

    def caught_up(state, bucket):  # type: ignore[no-untyped-def]
        clock.catch_up()
        return hook(state, bucket)

    return caught_up


def step_ns(times: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The middle step of each contender."""
    return {name: int(median(own)) for name, own in times.items()}
