"""Schedules in which one block repeats (Qi et al., 2405.15362): each micro-batch takes the way of the one before it, a period later.

All actions are taken to last a unit of time, and chunks to be equal: tables follow from numbers of stages and micro-batches alone. A block
says when a stage would do F and I of each of its chunks. Between neighbouring stages pass ``down`` units where a micro-batch goes on to a
later stage, and ``up`` where it goes back to an earlier one; where it turns, as many as let no two passes of a stage fall on one unit of
the period, which is 3 units for each chunk of a stage. How long a chunk's activations live decides how many micro-batches it has in flight,
from F to the end of W.

Stages then begin as early as they can. In each unit a stage does the pass that comes next in the block's order, if it is ready and has
room; else a weight gradient, if one is left; else a later pass that is ready and has room. Once all of its forward passes are done, passes
that are ready go before weight gradients. As each chunk has room of its own, and takes micro-batches in order, no stage waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from soap.schedules.contract import Shape
from soap.schedules.table import Action, Kind

Starts = Mapping[Kind, Sequence[int]]
"""By kind and chunk: the unit in which the first micro-batch's pass would begin."""


def repeated(shape: Shape, *, down: int, up: int, waits: int = 0, room: int = 0) -> list[list[Action]]:
    """By stage: its actions in order.

    ``down``, ``up``: units between stages. ``waits``: so many units a weight gradient may wait for its turn without delaying others.
    ``room``: so many micro-batches for each stage of the pipeline a chunk may have in flight, even if the block has fewer."""
    starts, period = _block(shape, down, up), 3 * shape.chunks
    lives = [back + 1 + waits - there for there, back in zip(starts["F"], starts["I"], strict=True)]
    stages = _Stages(shape, starts, [max(room * shape.stages, -(-own // period)) for own in lives])
    while stages.left:
        for stage, action in enumerate([stages.choice(stage) for stage in range(shape.stages)]):
            if action is not None:
                stages.do(stage, action)
    return stages.actions


def _block(shape: Shape, down: int, up: int) -> Starts:
    """The block with the fewest units at its turns."""
    stage_of = {chunk: stage for stage in range(shape.stages) for chunk in shape.chunks_of(stage)}
    count, period = shape.chunk_count, 3 * shape.chunks
    way = [*range(count), *reversed(range(count))]
    steps = [stage_of[after] - stage_of[before] for before, after in pairwise(way)]
    turns = [i for i, step in enumerate(steps) if step == 0 and i >= count - 1]
    for waits in sorted(product(range(period), repeat=len(turns)), key=sum):
        more, times = dict(zip(turns, waits, strict=True)), [0]
        for i, step in enumerate(steps):
            times.append(times[-1] + (down if step > 0 else up if step < 0 else 1 + more.get(i, 0)))
        if len({(stage_of[chunk], time % period) for chunk, time in zip(way, times, strict=True)}) == len(way):
            return {"F": times[:count], "I": times[:count - 1:-1]}
    raise AssertionError(f"no block with {down} units down and {up} up for {shape}")


class _Stages:
    """Stages while they work. ``room``: by chunk. ``actions``: of each stage, so far. ``left``: how many there are to do."""

    def __init__(self, shape: Shape, starts: Starts, room: Sequence[int]) -> None:
        self._starts, self._room, self._count, self._period = starts, room, shape.microbatches, 3 * shape.chunks
        self._chunks = [shape.chunks_of(stage) for stage in range(shape.stages)]
        self._done: dict[Kind, list[int]] = {kind: [0] * shape.chunk_count for kind in ("F", "I", "W")}
        self._waiting: list[deque[Action]] = [deque() for _ in self._chunks]
        self.actions: list[list[Action]] = [[] for _ in self._chunks]
        self.left = 3 * shape.chunk_count * shape.microbatches

    def choice(self, stage: int) -> Action | None:
        """What a stage does in this unit."""
        done, waiting = self._done, self._waiting[stage]
        heads = sorted(
            (self._starts[kind][chunk] + self._period * done[kind][chunk], kind, chunk)
            for chunk in self._chunks[stage]
            for kind in self._starts
            if done[kind][chunk] < self._count
        )
        ends = all(done["F"][chunk] == self._count for chunk in self._chunks[stage])
        for _, kind, chunk in heads if ends or not waiting else heads[:1]:
            if self._is_ready(kind, chunk):
                return Action(kind, chunk, done[kind][chunk])
        return waiting[0] if waiting else None

    def _is_ready(self, kind: Kind, chunk: int) -> bool:
        forward, inputs, weights = self._done.values()
        if kind == "F":
            return forward[chunk] - weights[chunk] < self._room[chunk] and (chunk == 0 or forward[chunk - 1] > forward[chunk])
        return inputs[chunk] < (inputs[chunk + 1] if chunk + 1 < len(inputs) else forward[chunk])

    def do(self, stage: int, action: Action) -> None:
        """Note that a stage has done an action."""
        self.actions[stage].append(action)
        self._done[action.kind][action.chunk] += 1
        self.left -= 1
        if action.kind == "I":
            self._waiting[stage].append(action._replace(kind="W"))
        elif action.kind == "W":
            self._waiting[stage].popleft()
