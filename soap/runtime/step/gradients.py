"""All gradients of a rank's shards, and what keeps parameters in step, however each is synchronized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from soap.plan.plan import Plan
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.program.actions import ActionKind, part_of
from soap.runtime.program.program import Program
from soap.runtime.step.early_start import EarlyStart, SyncSchedule
from soap.runtime.step.micro_batch import WHOLE_STEP, MicroBatch
from soap.runtime.sync.row_gradient import RowGradient
from soap.runtime.sync.row_requests import asking_devices
from soap.runtime.sync.seam import Gradient, SyncContext, ranks_part
from soap.runtime.sync.shards import ShardStore
from soap.runtime.sync.sparse_rows import RowSync
from soap.runtime.trace import Watch, watch_nothing


class Gradients:
    """One object serves all programs of a trainer, whose plans have the same shards and synchronizations. ``by_rows``: those of which tiles
    read rows, by position in the plan. ``early``: starts exchanges within segments.

    After a step's last micro-batch, and ``add_up``, ``dense`` and ``rows`` are complete, by shard that this rank owns.
    """

    def __init__(self, program: Program, shards: ShardStore, comm: Communicator, dtype_of: Callable[[str], torch.dtype]) -> None:
        plan = program.plan
        self.early = EarlyStart(self.start)
        self.context = context = SyncContext(plan, comm, shards, dtype_of, self.early)
        self._of = ranks_part(context)
        self._methods = list(dict.fromkeys(self._of.values()))
        self.by_rows = {number: method for number, method in self._of.items() if isinstance(method, RowSync)}
        self._asks = comm.rank in asking_devices(plan)
        self._after_update = part_of(program.after_update, comm.rank)
        self._started: set[tuple[ActionKind, int]] = set()
        parameters = {sync.parameter for sync in plan.syncs if sync.contract.by_rows}
        idle = {i: shards.tensors[i] for i in program.idle_shards if i in shards.tensors}
        no_rows = torch.empty(0, dtype=torch.int64, device=comm.device)
        self._idle: dict[int, Gradient] = {
            i: RowGradient(no_rows, torch.empty_like(tensor[:0], requires_grad=False))
            if plan.shards[i].parameter in parameters
            else torch.zeros_like(tensor, requires_grad=False)
            for i, tensor in idle.items()
        }
        self.dense: dict[int, torch.Tensor] = {}
        self.rows: dict[int, RowGradient] = {}

    @contextmanager
    def step(self, schedule: SyncSchedule, part: MicroBatch = WHOLE_STEP, watch: Watch = watch_nothing) -> Iterator[None]:
        """One forward and backward pass. What an earlier step has left is forgotten; behind the last micro-batch gradients are complete."""
        if part.first:
            self.dense, self.rows = {}, {}
            if self._asks:
                self.context.requests.forget()
        self._started.clear()
        for method in self._methods:
            method.begin(part, watch)
        with self.early.step(schedule, part):
            yield
        for method in self._methods:
            method.end(part)

    def bring(self, number: int) -> None:
        """Begin to bring values to who reads them."""
        self._of[number].bring(number)

    def hand_on(self, number: int) -> None:
        """The same within hosts."""
        self._of[number].hand_on(number)

    def start(self, kind: ActionKind, number: int) -> None:
        """Begin an exchange of gradients, unless that has begun already in this micro-batch."""
        if (kind, number) not in self._started:
            self._started.add((kind, number))
            method = self._of[number]
            (method.collect if kind is ActionKind.COLLECT else method.synchronize)(number)

    def refresh(self, watch: Watch = watch_nothing) -> None:
        """Bring what was updated, or loaded, to readers that keep copies of what others own."""
        if not self._after_update:
            return
        for method in self._methods:
            method.watch = watch
        for action in self._after_update:
            (self.bring if action.kind is ActionKind.BRING else self.hand_on)(action.subject)
        for method in self._methods:
            method.arrived()
        self.context.comm.finish_sends()

    def add_up(self, shards: Collection[int] | None = None) -> None:
        """Sum what readers have given to this rank, for several of its shards at once: for these, or all for which it was not done yet."""
        known = self.dense.keys() | self.rows.keys()
        for method in self._methods:
            self._note(method.gradients([i for i in method.shards if i not in known and (shards is None or i in shards)]))
        if shards is None:
            self._note(self._idle)

    def _note(self, gradients: Mapping[int, Gradient]) -> None:
        for shard, gradient in gradients.items():
            if isinstance(gradient, RowGradient):
                self.rows[shard] = gradient
            else:
                self.dense[shard] = gradient

    def whole(self, plan: Plan) -> dict[int, torch.Tensor]:
        """All of them by shard, with zeros for rows that have none."""
        boxes = {number: plan.shards[number].box[0] for number in self.rows}
        return {**self.dense, **{i: own.dense(boxes[i][0], boxes[i][1] - boxes[i][0]) for i, own in self.rows.items()}}

    def state(self) -> dict[int, Mapping[str, torch.Tensor]]:
        """What methods keep from step to step beside the optimizer, by shard that this rank owns; on all ranks at once."""
        return {shard: own for method in self._methods for shard, own in method.state().items()}

    def restore(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Go on from such a state; on all ranks at once."""
        for method in self._methods:
            method.restore({shard: state[shard] for shard in method.shards if shard in state})
