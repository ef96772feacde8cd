"""What launched ranks do in tests; at the top of a module, so that it can be pickled."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from soap.elastic.processes import Listener, listeners
from soap.errors import ModelError
from soap.plan.plan import Plan
from soap.runtime.comm.world import close_world, open_world, own_address
from soap.runtime.trainer import Trainer
from tests.runtime.cases import Outcome, optimizer, train
from tests.runtime.handmade import HandModel


def add_ranks(start: int) -> int:
    world = open_world(2)
    total = torch.tensor(start + world.rank)
    dist.all_reduce(total)
    close_world(world)
    return int(total)


@dataclass(frozen=True)
class Mark:
    """Notes where each rank was put, before it does anything else."""

    text: str

    def __call__(self, rank: int) -> None:
        os.environ["MARK"] = f"{self.text} {rank} {dist.is_initialized()}"


def tell_mark() -> tuple[str, str]:
    world = open_world(2)
    dist.barrier()  # one that left now would be missed by the other, which may still be connecting
    close_world(world)
    return os.environ["MARK"], os.environ["MASTER_ADDR"]


def tell_listeners() -> tuple[list[Listener], str]:
    """Where this rank and its launcher listen once ranks are connected, and the address at which other ranks reach this one."""
    world = open_world(2)
    dist.all_reduce(torch.ones(1))
    launcher = multiprocessing.parent_process()
    assert launcher is not None and launcher.pid is not None
    address, found = own_address(), listeners([os.getpid(), launcher.pid])
    dist.barrier()
    close_world(world)
    assert {own.process for own in found} == {os.getpid(), launcher.pid}, "both listen"
    return found, address


def refuse_place(rank: int) -> None:
    raise ModelError(f"no place for rank {rank}")


def train_launched(plan: Plan) -> Outcome:
    return train(plan)


def fail_in_rank_one() -> None:
    open_world(2)
    if os.environ["RANK"] == "1":
        raise ModelError("operator 'x' has\nno rule")
    dist.barrier()


def raise_this(error: Exception) -> NoReturn:
    raise error


def crash_in_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.abort()
    time.sleep(100)


def hang_in_tile(*_: object) -> NoReturn:
    time.sleep(100)
    raise AssertionError("nobody has ended this rank")


def hang_in_second_step(plan: Plan) -> None:
    """Rank 1 does not come out of a tile, for which rank 0 waits 20 seconds."""
    model = HandModel(plan.graph)
    with Trainer(model, plan, optimizer=optimizer, dtype=torch.float64, timeout_s=20) as trainer:
        trainer.step(*model.inputs(0))
        if trainer.rank == 1:
            model.run_tile = hang_in_tile  # type: ignore[method-assign]
        trainer.step(*model.inputs(1))


def wait_forever(folder: str) -> None:
    open_world(2)
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "0":
        dist.barrier()
    time.sleep(100)
