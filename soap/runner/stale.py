"""Training by ranks that are apart: each is a worker with its own batches, and a server of a part of every table.

The fully connected cluster of ``soap.elastic``, in the processes that are there: no Ray, and no rank may be lost.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from soap.elastic.cut import Cut
from soap.elastic.layout import lay_out
from soap.elastic.owners import Owners, whole
from soap.elastic.server_actor import Keeping, Server
from soap.elastic.worker import InMemory, Source, Worker
from soap.errors import RuntimeFailure
from soap.runner.config import RunnerConfig
from soap.runtime.comm.world import World, own_address
from soap.strategy.consistency import parse
from soap.tracing.execute import ExecutableModel

PAUSE_S = 0.001
ENDED = 2**62
"""The clock of a rank that takes no more steps: nobody waits for it."""


@dataclass(frozen=True)
class _Given(Source):
    """A model that is here already."""

    model: ExecutableModel | None = field(default=None, repr=False)

    def load(self, *, plan_only: bool = False) -> ExecutableModel:
        """The model."""
        assert self.model is not None
        return self.model


class RankClocks:
    """How many steps each rank has finished, in the process group's store. ``bound``: how far a rank may be ahead of the slowest; None:
    without end. ``missing``: by step begun, how many of the slowest other rank's were not finished -> how often."""

    def __init__(self, world: World, bound: int | None, run: str) -> None:
        self._world, self._bound, self._run = world, bound, run
        self._store: Any = dist.distributed_c10d._get_default_store()
        self.finished_steps = 0
        self.missing: Counter[int] = Counter()
        self._tell(0)

    def wait(self) -> None:
        """Until the next step may begin. RuntimeFailure if that takes longer than ranks wait for each other."""
        deadline = time.monotonic() + self._world.timeout.total_seconds()
        slowest = self._slowest()
        while self._bound is not None and slowest < self.finished_steps - self._bound:
            if time.monotonic() > deadline:
                raise RuntimeFailure(f"a rank is at step {slowest}, this one at {self.finished_steps}; expected it to go on: has it ended?")
            time.sleep(PAUSE_S)
            slowest = self._slowest()
        self.missing[max(0, self.finished_steps - slowest)] += 1

    def finished(self) -> None:
        """A step is done."""
        self.finished_steps += 1
        self._tell(self.finished_steps)

    def end(self) -> None:
        """There will be no more steps."""
        self._tell(ENDED)

    def _tell(self, step: int) -> None:
        self._store.set(self._key(self._world.rank), str(step))

    def _slowest(self) -> int:
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        return min((int(self._store.get(self._key(rank))) for rank in others), default=ENDED)

    def _key(self, rank: int) -> str:
        return f"soap-clock-{self._run}-{rank}"


class StaleTraining:
    """Made on all ranks at once. ``model``: this rank's own, for a batch of its own; values are rank 0's."""

    def __init__(self, model: ExecutableModel, world: World, config: RunnerConfig) -> None:
        cut = Cut(model)
        tables, dense = ({name: model.graph.tensors[name].shape for name in names} for names in (cut.tables, cut.dense))
        self._layout, self._world = lay_out(tables, dense, world.size), world
        self._secret: bytes = _from_first(secrets.token_bytes(32))
        model.parameters = _from_first({name: value.detach() for name, value in model.parameters.items()})
        assert callable(config.optimizer)
        self._folder = TemporaryDirectory(prefix="soap-server-")
        source, keeping = _Given("", seed=config.seed, model=model), Keeping(self._folder.name, config.optimizer)
        self._server = Server(world.rank, self._layout, source, keeping, self._secret, own_address())
        self._addresses: list[tuple[str, int]] = [("", 0)] * world.size
        dist.all_gather_object(self._addresses, self._server.address())
        self._worker = Worker(source, InMemory(()), self._layout, self._addresses.__getitem__, self._secret)
        self._clocks = RankClocks(world, parse(config.consistency).bound, self._secret[:8].hex())
        share = 1 / world.size
        self._dense_scale = 1.0 if config.reduce_dense == "sum" else share
        self._sparse_scale = 1.0 if config.reduce_sparse == "sum" else share

    @property
    def missing(self) -> Counter[int]:
        """See ``RankClocks``."""
        return self._clocks.missing

    def step(self, inputs: Sequence[torch.Tensor]) -> float:
        """Train on this rank's batch, when the bound allows it. Returns its loss."""
        self._clocks.wait()
        number = self._clocks.finished_steps * self._world.size + self._world.rank
        found = self._worker.work_on(number, inputs, self._dense_scale, self._sparse_scale)
        self._clocks.finished()
        return found.loss

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All trained values, on rank 0; called on all ranks at once."""
        dist.barrier()  # all have pushed
        found: dict[str, torch.Tensor] = {}
        if self._world.rank == 0:
            owners = Owners(self._layout, self._addresses.__getitem__, self._secret)
            try:
                found = {name: whole(places, owners.values(places)) for name, places in self._layout.tables.items()}
                found.update(owners.pull())
            finally:
                owners.close()
        dist.barrier()
        return found

    def close(self, *, together: bool = True) -> None:
        """End. ``together``: servers answer until all ranks are here."""
        self._clocks.end()
        if together:
            dist.barrier()
        self._worker.close()
        self._server.close()
        self._folder.cleanup()


def _from_first(value: Any) -> Any:
    """Rank 0's value."""
    held = [value]
    dist.broadcast_object_list(held, 0)
    return held[0]
