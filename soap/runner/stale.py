"""Training by ranks that are apart: each is a worker with its own batches, and a server of a part of every table.

The fully connected cluster of ``soap.elastic``, in the processes that are there: no Ray, and no rank may be lost.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from soap.elastic.cut import Cut
from soap.elastic.layout import lay_out
from soap.elastic.store import Keeping, Server
from soap.elastic.worker import InMemory, Owners, Source, Worker
from soap.runner.config import RunnerConfig
from soap.runtime.comm import signs
from soap.runtime.comm.handing_out import from_first
from soap.runtime.comm.world import World, own_address
from soap.strategy.consistency import parse
from soap.tracing.execute import TracedModel

ENDED = 2**62
"""The clock of a rank that takes no more steps: nobody waits for it."""


@dataclass(frozen=True)
class _Given(Source):
    """A model that is here already."""

    model: TracedModel | None = field(default=None, repr=False)

    def load(self, *, plan_only: bool = False) -> TracedModel:
        """The model."""
        assert self.model is not None
        return self.model


class RankClocks:
    """How many steps each rank has finished, in the process group's store. ``bound``: how far a rank may be ahead of the slowest; None:
    without end. ``run``: of this training alone, the same on all ranks. ``missing``: by step begun, how many of the slowest other rank's
    were not finished -> how often."""

    def __init__(self, world: World, bound: int | None, run: str) -> None:
        self._bound = bound
        self._store: Any = dist.distributed_c10d._get_default_store()
        keys = [f"soap-clock-{run}-{rank}" for rank in range(world.size)]
        self._own, self._others = keys[world.rank], [key for key in keys if key != keys[world.rank]]
        self.finished_steps = 0
        self.missing: Counter[int] = Counter()
        self._tell(0)

    def wait(self) -> None:
        """Until the next step may begin, however long others take for theirs. RankLost in one line if one of them is gone."""
        slowest = self._slowest()

        def may_begin() -> bool:
            nonlocal slowest
            if self._is_ahead(slowest):
                slowest = self._slowest()
            return not self._is_ahead(slowest)

        if not may_begin():
            signs.wait(may_begin)
        self.missing[max(0, self.finished_steps - slowest)] += 1

    def finished(self) -> None:
        """A step is done."""
        self.finished_steps += 1
        self._tell(self.finished_steps)

    def end(self) -> None:
        """There will be no more steps."""
        self._tell(ENDED)

    def _is_ahead(self, slowest: int) -> bool:
        return self._bound is not None and slowest < self.finished_steps - self._bound

    def _tell(self, step: int) -> None:
        self._store.set(self._own, str(step))

    def _slowest(self) -> int:
        """The fewest steps that another rank has finished, by one question to the store."""
        return min(map(int, self._store.multi_get(self._others)), default=ENDED) if self._others else ENDED


class StaleTraining:
    """Made on all ranks at once. ``model``: this rank's own, for a batch of its own; values are rank 0's."""

    def __init__(self, model: TracedModel, world: World, config: RunnerConfig) -> None:
        cut = Cut(model)
        self._layout, self._world = lay_out(*cut.shapes, world.size), world
        self._secret, run = from_first(lambda: (secrets.token_bytes(32), secrets.token_hex(8)))
        initial = self._from_first_rank(model.parameters)
        frozen = {name: self._shared(model.parameters[name]) for name in cut.frozen}
        model.parameters = {name: value.detach() for name, value in model.parameters.items()} | frozen
        assert callable(config.optimizer)
        self._folder = TemporaryDirectory(prefix="soap-server-")
        source, keeping = _Given("", seed=config.seed, model=model), Keeping(self._folder.name, config.optimizer)
        self._server = Server(world.rank, self._layout, source, keeping, self._secret, own_address(), initial=initial)
        self._addresses: list[tuple[str, int]] = [("", 0)] * world.size
        dist.all_gather_object(self._addresses, self._server.address())
        self._worker = Worker(source, InMemory(()), self._layout, self._addresses.__getitem__, self._secret)
        self._clocks = RankClocks(world, parse(config.consistency).bound, run)
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
        signs.meet()  # all have pushed
        found: dict[str, torch.Tensor] = {}
        if self._world.rank == 0:
            found = Owners(self._layout, self._addresses.__getitem__, self._secret).parameters()
        signs.meet()
        return found

    def close(self, *, together: bool = True) -> None:
        """End. ``together``: servers answer until all ranks are here, however long these take."""
        self._clocks.end()
        if together:
            signs.meet()
            dist.barrier()  # whoever has the store leaves last
        self._worker.close()
        self._server.close()
        self._folder.cleanup()

    def _from_first_rank(self, parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Values of this rank's partitions, as rank 0 has them, which sends each owner its own alone: tables may be larger than a rank's
        memory has room for twice."""
        if self._world.rank == 0:
            for server in range(1, self._world.size):
                for piece in self._layout.initial(server, parameters):
                    dist.send(self._on_wire(piece), server)
        own = [piece.detach() for piece in self._layout.initial(self._world.rank, parameters)]
        if self._world.rank:
            for number, piece in enumerate(own):
                came = torch.empty(piece.shape, dtype=piece.dtype, device=self._on_wire(piece.new_empty(0)).device)
                dist.recv(came, 0)
                own[number] = came.cpu()
        return own

    def _shared(self, value: torch.Tensor) -> torch.Tensor:
        """Rank 0's value."""
        wire = self._on_wire(value.clone())
        dist.broadcast(wire, 0)
        return wire.to(value.device)

    def _on_wire(self, value: torch.Tensor) -> torch.Tensor:
        """Where the backend can send it."""
        return value.detach().contiguous().to(self._world.device if self._world.backend == "nccl" else "cpu")
