"""All gradients of a rank's shards, however they are synchronized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from soap.model.regions import lengths
from soap.plan.plan import Plan
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.program.program import Program
from soap.runtime.step.early_start import SyncSchedule
from soap.runtime.step.micro_batch import WHOLE_STEP, MicroBatch
from soap.runtime.sync.all_reduce import GradientSync
from soap.runtime.sync.row_gradient import RowGradient
from soap.runtime.sync.row_update import parallel
from soap.runtime.sync.servers import DenseServing
from soap.runtime.sync.shards import ShardStore
from soap.runtime.sync.sparse_tables import TableSync
from soap.runtime.trace import Watch, watch_nothing


class Gradients:
    """``sums``: those that are summed over devices or stay on one; ``tables``: of rows of sparse parameters; ``served``: of dense ones that
    servers keep.

    One object serves all programs of a trainer, whose plans have the same shards. After a step's last micro-batch, and ``add_up``,
    ``dense`` and ``rows`` are complete, by shard; of what servers keep they are on the server alone.
    """

    def __init__(self, program: Program, shards: ShardStore, comm: Communicator, dtype_of: Callable[[str], torch.dtype]) -> None:
        self.sums = GradientSync(program, shards.tensors, comm)
        blanks = [
            torch.empty((0, *lengths(table.box)[1:]), dtype=dtype_of(table.parameter), device=comm.device) for table in program.tables
        ]
        self.tables = TableSync(program.tables, comm, shards.tensors, blanks, self.sums.early)
        self.served = DenseServing(program.plan, comm, shards, self.sums.early)
        no_rows = torch.empty(0, dtype=torch.int64, device=comm.device)
        by_rows = {table.parameter for table in program.tables}
        kept = [(i, program.plan.shards[i].parameter) for i in program.idle_shards if i in shards.tensors]
        self._idle = {i: RowGradient(no_rows, _no_rows(shards.tensors[i])) for i, name in kept if name in by_rows}
        self._elsewhere = bool(program.tables or self.served.regions)
        self.dense: dict[int, torch.Tensor] = {}
        self.rows: dict[int, RowGradient] = {}

    def step(
        self, schedule: SyncSchedule, part: MicroBatch = WHOLE_STEP, watch: Watch = watch_nothing
    ) -> AbstractContextManager[None]:
        """One forward and backward pass. What an earlier step has left is forgotten."""
        return self._step(schedule, part, watch) if self._elsewhere else self.sums.step(schedule, part)

    @contextmanager
    def _step(self, schedule: SyncSchedule, part: MicroBatch, watch: Watch) -> Iterator[None]:
        if part.first:
            self.dense, self.rows = {}, {}
        self.tables.begin(part, watch)
        self.served.begin(part, watch)
        with self.sums.step(schedule, part):
            yield
        self.tables.end()
        self.served.end()

    def add_up(self, shards: Collection[int] | None = None) -> None:
        """Sum what readers have given to this rank, for several of its shards at once: for these, or all for which it was not done yet."""
        if not self._elsewhere:
            self.dense = self.sums.gradients
            return
        by_rows, whole = (
            [i for i in own if i not in known and (shards is None or i in shards)]
            for own, known in ((self.tables.shards, self.rows), (self.served.shards, self.dense))
        )
        self.rows.update(zip(by_rows, parallel(self.tables.gradient, by_rows), strict=True))
        self.dense.update(zip(whole, parallel(self.served.gradient, whole), strict=True))
        if shards is None:
            self.dense.update(self.sums.gradients)
            self.rows.update(self._idle)

    def whole(self, plan: Plan) -> dict[int, torch.Tensor]:
        """All of them by shard, with zeros for rows that have none."""
        boxes = {number: plan.shards[number].box[0] for number in self.rows}
        return {**self.dense, **{i: own.dense(boxes[i][0], boxes[i][1] - boxes[i][0]) for i, own in self.rows.items()}}


def _no_rows(shard: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(shard[:0], requires_grad=False)
