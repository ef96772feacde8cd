"""From stages and a schedule to one order of passes.

A table lists what each stage does. Its lists become one in the order in which actions would end, if a backward pass took twice as long as a
forward pass, and each half of it as long: each comes behind those that it waits for. Each device follows that list for its own tiles, so
that every stage keeps its own order; and before it begins an action, it is ready for what others send it until the action's end.

In a chunk with barriers each action does what stands before the first of them, and the last micro-batch's the rest, for all micro-batches
(``soap.schedules.dependencies``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.plan.pass_order import PassAction, PassOrder
from soap.schedules.checking import OFFERED
from soap.schedules.dependencies import Barrier
from soap.schedules.named import NamedSchedule, parse
from soap.schedules.play import equal, play
from soap.schedules.table import WORK, Action, Table
from soap.strategy.config import Strategy
from soap.strategy.stages import chunks_of, stage_count

ONE_BY_ONE = "accumulation"
"""The schedule without stages or barriers."""
KEPT_ORDERS = 64
"""Orders that are remembered: more than a search compares at a time."""


class Orders:
    """How strategies of one graph cut steps into micro-batches, and in which order devices run their passes. ``cut``: by the number of
    micro-batches."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.cut = lru_cache(KEPT_ORDERS)(lambda count: MicroBatches(graph, count))
        self._made = lru_cache(KEPT_ORDERS)(self._make)

    def order(self, strategy: Strategy) -> PassOrder | None:
        """The order of a strategy; None without micro-batches. StrategyError if its schedule contradicts a barrier."""
        if strategy.microbatches == 1:
            return None
        return self._made(strategy.microbatches, tuple(strategy.stages.items()), strategy.schedule)

    def _make(self, count: int, stages: tuple[tuple[str, int], ...], schedule: str | None) -> PassOrder:
        cut = self.cut(count)
        found = scheduled(cut, chunks_of(cut.graph, dict(stages)), usual_schedule(cut) if schedule is None else parse(schedule))
        return found if stages or schedule not in (None, ONE_BY_ONE) else replace(found, anew=True)


def usual_schedule(cut: MicroBatches) -> NamedSchedule:
    """One micro-batch after the other, each forward and then backward: as little as possible is kept. With barriers all micro-batches pass
    each barrier together: all forward passes, then all backward passes."""
    return parse(OFFERED if cut.barriers else ONE_BY_ONE)


def scheduled(cut: MicroBatches, chunks: Sequence[int], schedule: NamedSchedule) -> PassOrder:
    """The order of a schedule whose chunks have these operators. StrategyError in one line if there is none, or it contradicts a barrier.

    ``chunks``: by operator.
    """
    return merged(cut, chunks, schedule.table(stage_count(chunks, schedule), cut.count))


def merged(cut: MicroBatches, chunks: Sequence[int], table: Table) -> PassOrder:
    """The lists of a table's stages as one. StrategyError if the table cannot be executed, or contradicts a barrier of the graph."""
    barriers = [Barrier(chunks[cut.graph.index[name]], name) for name in cut.barriers]
    played = play(table, equal(table.chunk_count, forward_ns=1, input_ns=1, weight_ns=1), barriers)
    parts = sorted({*zip(chunks, cut.phases_within(chunks), strict=True)})  # what the actions of a chunk do one after the other
    numbers = {part: number for number, part in enumerate(parts)}
    own = tuple(numbers[part] for part in zip(chunks, cut.phases_within(chunks), strict=True))
    of_chunk: dict[int, list[tuple[int, int]]] = {}
    for number, (chunk, phase) in enumerate(parts):
        of_chunk.setdefault(chunk, []).append((phase, number))
    ends = sorted((end, stage, place) for stage, own_ends in enumerate(played.ends_ns) for place, end in enumerate(own_ends))
    actions = (table.stages[stage][place] for _, stage, place in ends)
    return PassOrder(cut, own, tuple(done for action in actions for done in _done(action, of_chunk.get(action.chunk, ()), cut.count)))


def _done(action: Action, parts: Sequence[tuple[int, int]], count: int) -> Iterator[PassAction]:
    """What an action of a table does. ``parts``: of its chunk, by the number of barriers before them: (that number, their own number)."""
    last = range(count) if action.microbatch == count - 1 else ()
    shares = WORK[action.kind].shares
    if "forward" in shares:
        now, later = [number for phase, number in parts if not phase], [number for phase, number in parts if phase]
    elif "inputs" not in shares:  # all input gradients of the chunk are there
        now, later = [number for _, number in reversed(parts)], []
    else:
        now, later = [number for _, number in parts[-1:]], [number for _, number in reversed(parts[:-1])]
    yield from (PassAction(action.kind, number, action.microbatch) for number in now)
    yield from (PassAction(action.kind, number, microbatch) for number in later for microbatch in last)
