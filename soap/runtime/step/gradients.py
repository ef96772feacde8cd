"""All gradients of a rank's shards, and its part in every synchronization, whatever the methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from soap.plan.plan import Plan
from soap.plan.syncs.amounts import Group, reading_groups
from soap.runtime.comm.parcels import Parcels, bytes_of, start_exchange
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.dgc import clip_locally, local_limit, scale_of
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.program.actions import WHOLE_STEP, ActionKind, MicroBatch, part_of
from soap.runtime.program.program import Program
from soap.runtime.step.early_start import EarlyStart, SyncSchedule
from soap.runtime.sync.compressed import CompressedSum, hosts_sum
from soap.runtime.sync.row_requests import asking_devices
from soap.runtime.sync.row_update import RowGradient
from soap.runtime.sync.seam import Gradient, SyncContext, ranks_part
from soap.runtime.sync.shards import ShardStore
from soap.runtime.sync.sparse_rows import RowSync
from soap.runtime.sync.sums import BucketedSum
from soap.runtime.system.memory_room import MemoryRoom
from soap.runtime.trace import Watch, watch_nothing


class Gradients:
    """The gradients of one rank. One object serves all programs of a trainer: their plans have the same shards and synchronizations.

    ``room``: looked at when a gradient has come, where memory is short. ``of``: position in ``Plan.syncs`` -> the method. ``by_rows``: the
    same, for synchronizations by rows. ``early``: starts exchanges within segments. ``read_apart``: see ``TracedModel``.
    ``dense``, ``rows``: owned shard -> its gradient, complete after a step's last micro-batch and ``add_up``.
    """

    def __init__(
        self,
        program: Program,
        shards: ShardStore,
        comm: Communicator,
        dtype_of: Callable[[str], torch.dtype],
        compressing: CompressedTraining = AS_IT_IS,
        room: MemoryRoom | None = None,
        read_apart: Container[str] = (),
    ) -> None:
        plan = program.plan
        self.early = EarlyStart(self.start, room)
        self.context = context = SyncContext(plan, comm, shards, dtype_of, self.early, compressing, read_apart)
        self.of = ranks_part(context)
        self._methods = list(dict.fromkeys(self.of.values()))
        self.by_rows = {number: method for number, method in self.of.items() if isinstance(method, RowSync)}
        self._asks = comm.rank in asking_devices(plan)
        self._after_update = part_of(program.after_update, comm.rank)
        self._started: dict[tuple[ActionKind, int], None] = {}
        self._clip_norm = compressing.clip_norm
        self.serves_early = False
        """Whether steps that are not traced update what servers own as gradients come (``serve``)."""
        brought = [action.subject for action in self._after_update if action.kind is ActionKind.BRING]
        self._served = {
            number: [shard for shard in plan.syncs[number].shards if shard in shards.tensors]
            for number in brought
            if plan.syncs[number].contract.has_servers
        }
        """Synchronizations that servers take part in, in their order -> what this rank serves of each."""
        self._brought: set[int] = set()
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
    def step(
        self, schedule: SyncSchedule, part: MicroBatch = WHOLE_STEP, watch: Watch = watch_nothing, *, served: bool = False
    ) -> Iterator[None]:
        """The time of one micro-batch. The first one drops the last step's gradients; after the last one the gradients are complete, but
        for those that servers get if these are ``served`` as they come."""
        if part.first:
            self.dense, self.rows = {}, {}
            if self._asks:
                self.context.requests.forget()
        self._started.clear()
        for method in self._methods:
            method.serves_early = served
            method.begin(part, watch)
        with self.early.step(schedule, part):
            yield
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        for method in self._methods:
            method.end(part)

    def start(self, kind: ActionKind, number: int) -> None:
        """Start an exchange of gradients unless it has started already in this micro-batch. If ranks clip, it waits for the end."""
        if (kind, number) not in self._started:
            self._started[kind, number] = None
            if self._clip_norm is None:
                self._start(kind, number)

    def _start(self, kind: ActionKind, number: int) -> None:
        method = self.of[number]
        (method.collect if kind is ActionKind.COLLECT else method.synchronize)(number)

    def _clip(self, norm: float) -> None:
        """Clip this rank's gradients together, or its host's, and start what has waited for that, in the program's order."""
        if not self._started:  # not the last micro-batch
            return
        groups, compressed = peer_groups(self.context.plan), self.compressed
        together = compressed is not None and len(groups) < self.context.plan.device_count
        for kind, number in self._started if together else ():
            if kind is ActionKind.COLLECT:
                self._start(kind, number)
        methods = [method for method in self._methods if isinstance(method, BucketedSum) and not (together and method is compressed)]
        own = [buffer for method in methods for buffer in method.own_gradients()]
        if compressed is not None and together:
            clip_hosts(self.context.comm, groups, own, compressed, local_limit(norm, len(groups)))
        else:
            for buffer, small in zip(own, clip_locally(own, norm, len(groups)), strict=True):
                buffer.copy_(small)
        for kind, number in self._started:
            if not together or kind is not ActionKind.COLLECT:
                self._start(kind, number)

    def serve(self, update: Callable[[Sequence[int]], None]) -> None:
        """Wait for what servers get, parameter by parameter, ``update`` this rank's shards, and begin to send them back and to receive."""
        for number, own in self._served.items():
            if own:
                self.add_up(own)
                update(own)
            self.of[number].bring(number)
        self._brought.update(self._served)
        self.context.comm.finish_sends()

    def refresh(self, watch: Watch = watch_nothing) -> None:
        """Send new values to readers that keep copies of them, unless ``serve`` has sent them. Waits until all have arrived."""
        if not self._after_update:
            return
        for method in self._methods:
            method.watch = watch
        for action in self._after_update:
            if action.kind is not ActionKind.BRING:
                self.of[action.subject].hand_on(action.subject)
            elif action.subject not in self._brought:
                self.of[action.subject].bring(action.subject)
        self._brought.clear()
        for method in self._methods:
            method.arrived()
        self.context.comm.finish_sends()

    def add_up(self, shards: Collection[int] | None = None) -> None:
        """Add up the readers' gradients for these shards of this rank; None: for all that were not added up yet."""
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

    @property
    def compressed(self) -> CompressedSum | None:
        """This rank's part in the synchronization of compressed parameters; None if it has none."""
        return next((method for method in self._methods if isinstance(method, CompressedSum)), None)

    def whole(self, plan: Plan) -> dict[int, torch.Tensor]:
        """Shard -> dense gradient, with zeros for rows without gradient."""
        boxes = {number: plan.shards[number].box[0] for number in self.rows}
        return {**self.dense, **{i: own.dense(boxes[i][0], boxes[i][1] - boxes[i][0]) for i, own in self.rows.items()}}

    def state(self) -> dict[int, Mapping[str, torch.Tensor]]:
        """Owned shard -> the state that methods keep from step to step, by name; called on all ranks at once."""
        return {shard: own for method in self._methods for shard, own in method.state().items()}

    def restore(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Go on from such a state; called on all ranks at once."""
        for method in self._methods:
            method.restore({shard: state[shard] for shard in method.shards if shard in state})


def peer_groups(plan: Plan) -> list[Group]:
    """The devices in groups that compress as one peer: those of each host, or each alone. All that is compressed is compressed so."""
    compressed = next((sync for sync in plan.syncs if sync.contract.compresses), None)
    return [(device,) for device in range(plan.device_count)] if compressed is None else reading_groups(compressed)


def clip_hosts(
    comm: Communicator, groups: Sequence[Group], gradients: Sequence[torch.Tensor], compressed: CompressedSum, limit: float
) -> None:
    """Scale down, in place, this rank's ``gradients`` and the host's sums of what is compressed, so that the norm of all that the host
    gives to the total is at most ``limit``. Called on all ranks at once, once what is compressed is being collected."""
    [group] = [group for group in groups if comm.rank in group]
    sums = _added_up(comm, group, gradients)
    own = compressed.hosts_gradients() if comm.rank == group[0] else []
    scale = torch.ones(1, dtype=torch.float64, device=comm.device)
    if comm.rank == group[0]:
        scale.fill_(scale_of([*sums, *own], limit))
    _give(comm, group, scale)
    for tensor in (*gradients, *own):
        tensor.mul_(scale.to(tensor.dtype))


def _added_up(comm: Communicator, group: Group, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """On the first of a group its ranks' gradients, summed in their order; on others what they have themselves."""
    peer, *others = group
    places = {device: [torch.empty_like(own) for own in gradients] for device in others if comm.rank == peer}
    for dtype in dict.fromkeys(own.dtype for own in gradients):
        chosen = [i for i, own in enumerate(gradients) if own.dtype == dtype]
        parcels = {} if comm.rank == peer else {peer: [gradients[i] for i in chosen]}
        _exchange(comm, parcels, {device: [own[i] for i in chosen] for device, own in places.items()}, gradients[chosen[0]])
    return [hosts_sum([own, *(parts[i] for parts in places.values())]) for i, own in enumerate(gradients)]


def _give(comm: Communicator, group: Group, scale: torch.Tensor) -> None:
    """From the first of a group to its others."""
    peer, *others = group
    parcels: Parcels = {device: [scale] for device in others} if comm.rank == peer else {}
    _exchange(comm, parcels, {} if comm.rank == peer else {peer: [scale]}, scale)


def _exchange(comm: Communicator, parcels: Parcels, places: Parcels, like: torch.Tensor) -> None:
    comm.traffic.handed_bytes += bytes_of(parcels) + bytes_of(places)
    start_exchange(comm, tuple(range(comm.world_size)), parcels, places, like.new_empty(0)).wait()
