"""One training step of one rank: the program's actions, forward and backward, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.program.actions import LAST_ONLY, Action, ActionKind, part_of
from soap.runtime.program.fused_tiles import units_of
from soap.runtime.program.prepared import PreparedTiles
from soap.runtime.program.program import Program
from soap.runtime.program.sync_schedule import sync_schedule
from soap.runtime.program.task_names import task_name
from soap.runtime.step.backward import BackwardPass
from soap.runtime.step.forward import ForwardPass
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.halves import Halves
from soap.runtime.step.kept_on_host import KeptOnHost
from soap.runtime.step.label_counts import LabelCounts
from soap.runtime.step.micro_batch import WHOLE_STEP, MicroBatch
from soap.runtime.step.state import StepState
from soap.runtime.step.step_inputs import StepInputs
from soap.runtime.step.value_store import ValueStore
from soap.runtime.sync.look_ups import LookUps
from soap.runtime.sync.shards import ShardStore
from soap.runtime.system.memory_room import MemoryRoom
from soap.runtime.trace import Recorder
from soap.tracing.model import TileContext, TracedModel

_NUMBERS = count()
"""A number for each runner: none is given twice."""


class StepRunner:
    """Executes a program on one rank, step after step. After a step's last micro-batch, ``gradients`` holds the complete gradients.

    ``gradients``: another runner's, if both have the same shards and work on the same steps. ``compiled``: fuse tiles by ``torch.compile``.
    ``recorder``: times every task. ``room``: looked at between actions, where memory is short.
    """

    def __init__(
        self,
        program: Program,
        model: TracedModel,
        comm: Communicator,
        shards: ShardStore,
        dtype_of: Callable[[str], torch.dtype],
        recorder: Recorder | None = None,
        gradients: Gradients | None = None,
        compiled: bool = False,
        compressing: CompressedTraining = AS_IT_IS,
        room: MemoryRoom | None = None,
    ) -> None:
        self.program, self.model, self.comm, self.shards = program, model, comm, shards
        self.dtype_of, self.recorder = dtype_of, recorder
        self.gradients = gradients or Gradients(program, shards, comm, dtype_of, compressing, room, model.read_apart)
        self._room, self._number = room, next(_NUMBERS)
        self._units = units_of(program, model, comm.rank) if compiled else {}
        self._prepared = PreparedTiles(program, shards, comm.rank, dtype_of)
        self._schedule = sync_schedule(program, comm.rank, early=recorder is None, messages_apart=comm.messages_apart)
        self._forward, self._backward = _calls(program.forward, comm.rank), _calls(program.backward, comm.rank)
        if program.interleaved:  # there is no moment between both passes
            self._forward, self._backward = [], _calls(program.interleaved, comm.rank)
        self._on_host = KeptOnHost(program, comm)
        self._look_ups = LookUps(self._prepared, program.plan, comm.rank)
        self._labels = LabelCounts(self._prepared, program.plan, comm.rank)
        self._task_name = partial(task_name, program)
        last_only = {kind.name for kind in LAST_ONLY}
        self._without_sync = [call for call in self._backward if call[0] not in last_only]

    def run(
        self,
        inputs: StepInputs,
        context: TileContext,
        part: MicroBatch = WHOLE_STEP,
    ) -> Callable[[], float]:
        """Run forward and backward pass. Returns a function that waits for the loss, so that the parameters can be updated meanwhile."""
        prepared = self._prepared
        values = ValueStore(prepared.readers, prepared.takers, prepared.second_readers, self.program.dropped)
        state = StepState(self.program, values, self.comm, self.dtype_of, self.recorder, part.share)
        gradients = self.gradients
        on_host, asked = self._on_host, self._look_ups
        if inputs.own is not None:
            context = replace(context, counts=self._labels.begin(self.model, inputs, state))
        forward = ForwardPass(state, self.model, prepared, self.shards, inputs, context, asked, gradients, on_host, self._units)
        halves = Halves(self.shards.leaves.values() if self.program.plan.divided else ())
        backward = BackwardPass(state, gradients, prepared, on_host, halves)
        handlers = _handlers(forward, backward, gradients)
        if self._room is not None:
            self._room.begin((self._number, part.last))
            handlers = {kind: _looking(self._room, handler) for kind, handler in handlers.items()}
        HERE.name = self._task_name
        served = gradients.serves_early and part.last and self.recorder is None
        with gradients.step(self._schedule, part, state.watch, served=served):
            for call in self._forward:
                HERE.call = call
                handlers[call[0]](call[1])
            forward.release()
            for call in self._backward if part.last else self._without_sync:
                HERE.call = call
                handlers[call[0]](call[1])
            HERE.call = None
            if not served:  # else when this rank receives what its sends are answered with
                self.comm.finish_sends()  # gradients are still being summed meanwhile
        return forward.loss_value


def _looking(room: MemoryRoom, handler: Callable[[int], None]) -> Callable[[int], None]:
    """A handler that looks at the memory first."""

    def run(subject: int) -> None:
        room.look()
        handler(subject)

    return run


def _calls(actions: Sequence[Action], rank: int) -> list[tuple[str, int]]:
    """The rank's actions as (name of the kind, subject): enum members are slow dictionary keys."""
    return [(action.kind.name, action.subject) for action in part_of(actions, rank)]


def _handlers(forward: ForwardPass, backward: BackwardPass, gradients: Gradients) -> dict[str, Callable[[int], None]]:
    def run_segment(number: int) -> None:
        forward.release()
        backward.run_segment(number)

    handlers: dict[ActionKind, Callable[[int], None]] = {
        ActionKind.TILE: forward.run_tile,
        ActionKind.TRANSFER: forward.transfer,
        ActionKind.EXCHANGE: forward.exchange,
        ActionKind.REDUCE: forward.reduce,
        ActionKind.REDUCE_NUMBERS: forward.reduce_numbers,
        ActionKind.LOSS: forward.tell_loss,
        ActionKind.RECOMPUTE: forward.recompute,
        ActionKind.SEGMENT: run_segment,
        ActionKind.WEIGHTS: backward.run_weights,
        ActionKind.RETURN: backward.return_message,
        ActionKind.RETURN_EXCHANGE: backward.return_exchange,
        ActionKind.REDUCE_GRADIENT: backward.reduce_gradient,
        ActionKind.ASK: forward.ask,
        ActionKind.BRING: gradients.bring,
        ActionKind.BRING_BACK: gradients.bring_back,
        ActionKind.HAND_ON: gradients.hand_on,
        ActionKind.COLLECT: partial(gradients.start, ActionKind.COLLECT),
        ActionKind.SYNC: partial(gradients.start, ActionKind.SYNC),
    }
    return {kind.name: handler for kind, handler in handlers.items()}
