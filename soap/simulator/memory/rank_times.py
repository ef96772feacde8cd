"""A played iteration once more, in the order in which ranks run it, on arrays. Predicted memory is that of this order.

A simulation takes tile by tile, as soon as what a tile needs is there. From it comes the order that ranks follow, but they keep it
(``rank_order``): each device runs its tiles forward in one fixed order, and backward segment by segment. A segment begins when all
gradients from elsewhere are there that its tiles need, and then nothing comes between its tiles. So products of two segments overlap less
than tiles do that take turns, and what is gathered for a segment is there for a shorter time.

What waits only so that it does not come too early waits in ranks for the passes before the first one that needs it: gathers of values, and
what is offloaded or made again. Where a simulated wait is for a later pass than that, it is left out here.

With micro-batches the passes of a device have one order anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.cluster.topology import Topology
from soap.plan.plan import Plan
from soap.simulator.memory.grouped import Bools, Longs, distinct, rows_of
from soap.simulator.memory.plan_arrays import PlanArrays
from soap.simulator.memory.played import KINDS, NONE, Played
from soap.simulator.memory.rank_order import RankOrder, rank_order
from soap.simulator.tasks import TaskKind

BACKWARD, COPY, RECOMPUTE = (KINDS[kind] for kind in (TaskKind.BACKWARD, TaskKind.COPY, TaskKind.RECOMPUTE))
LATE = [KINDS[kind] for kind in (TaskKind.SYNC, TaskKind.COPY, TaskKind.RECOMPUTE)]
"""Kinds of tasks that may be late: one that is no pass but a pass waits for it: a gather, a copy, or a need (``second_runs``). What is
gathered or summed again may be, too."""
NO_NEED = 1 << 62


class Waits(NamedTuple):
    """Pairs of tasks, sorted: ``task`` waits for ``other``."""

    task: Longs
    other: Longs


def as_ranks_run(played: Played, plan: Plan, arrays: PlanArrays, topology: Topology) -> tuple[Played, RankOrder]:
    """The iteration as ranks run it: other times and waits, if its passes do not have that order anyway; and the order."""
    forward = np.argsort(played.start[played.forward], kind="stable")  # ids order these as tiles
    back = np.argsort(-arrays.tiles.operator, kind="stable")
    back = back[played.backward[back] != NONE]  # as ids order these
    backward = back[np.argsort(played.start[played.backward[back]], kind="stable")]
    order = rank_order(plan, arrays, forward, backward, turns=plan.order is None)
    passes = _Passes(played, arrays, order) if plan.order is None else None
    if passes is None or passes.are_kept():
        return played, order
    from soap.simulator.replay import replayed  # compiled code

    waits = passes.waits()
    begins = np.searchsorted(waits.task, np.arange(len(played.tile) + 1))

    def waits_of(tasks: Longs) -> tuple[Longs, Longs]:
        place, row = rows_of(begins, tasks)
        return place, waits.other[row]

    played = played._replace(waits_of=waits_of)
    start, end = replayed(played, topology)
    return played._replace(start=start, end=end), order


class _Passes:
    """The passes of all tiles in the order in which ranks run them.

    ``_turn``: task of a pass -> its place in the order, which all tiles of a segment share; NONE if it is no pass. ``_chain``: all passes,
    device by device. ``_first``: task -> the first pass of its segment's backward pass, if that has several, else NONE.
    """

    def __init__(self, played: Played, arrays: PlanArrays, order: RankOrder) -> None:
        self._played = played
        self._waits = Waits(*played.waits_of(np.arange(len(played.tile))))
        self._turn, within = self._turns(order)
        passes = np.flatnonzero(self._turn != NONE)
        self._device = np.full(len(played.tile), NONE)
        self._device[passes] = arrays.tiles.device[played.tile[passes]]
        self._chain = passes[np.lexsort((within[passes], self._turn[passes], self._device[passes]))]
        back = self._chain[played.kind[self._chain] == BACKWARD]
        turns = self._turn[back]
        begins = np.flatnonzero(np.append(True, turns[1:] != turns[:-1])) if len(back) else turns
        counts = np.diff(begins, append=len(back))
        self._first = np.full(len(played.tile), NONE)
        self._first[back] = np.repeat(np.where(counts > 1, back[begins], NONE), counts)

    def _turns(self, order: RankOrder) -> tuple[Longs, Longs]:
        """(``_turn``, by task its place among those of one turn)."""
        played, segments, tiles = self._played, order.segments, len(order.forward)
        turn, within = np.full((2, len(played.tile)), NONE)
        place = np.empty(tiles, np.int64)
        place[order.forward] = np.arange(tiles)
        turn[played.forward] = place
        simulated = np.flatnonzero((played.backward != NONE) & ~order.active.tiles)
        turn[played.backward[simulated]] = 2 * tiles - simulated  # of the epilogue
        own, second_turns = np.flatnonzero((played.backward != NONE) & order.active.tiles), order.second_turns(order.turns)
        last, second = 2 * tiles + 1, len(second_turns) + 1
        turn[played.backward[own]] = last + second * (order.turns[segments.number[own]] + 1) - 1
        within[played.backward[own]] = -place[own]
        again = np.full(len(segments.first), NONE)
        at, segment = second_turns.T
        again[segment] = last + second * at + np.arange(len(at)) - np.searchsorted(at, at)
        own = np.flatnonzero((played.again != NONE) & order.active.tiles)
        turn[played.again[own]] = again[segments.number[own]]
        within[played.again[own]] = place[own]
        return self._pulled(turn, within)

    def _pulled(self, turn: Longs, within: Longs) -> tuple[Longs, Longs]:
        """Let second runs come right before passes that wait for them, if they had no place, or a later one: of the loss's epilogue."""
        waits, played = self._waits, self._played
        again = (played.kind == RECOMPUTE) & (played.tile != NONE)
        early = again[waits.other] & (turn[waits.task] != NONE) & ((turn[waits.other] == NONE) | (turn[waits.other] > turn[waits.task]))
        if not early.any():
            return turn, within
        ptr = np.searchsorted(waits.task, np.arange(len(turn) + 1))
        found, rank = np.full(len(turn), NONE), played.replayable().rank
        passes = np.flatnonzero(turn != NONE)
        ordered = passes[np.lexsort((within[passes], turn[passes]))]
        count = 0

        def run(own: list[int]) -> None:
            nonlocal count
            own = [task for task in own if found[task] == NONE]
            for task in own:
                for other in sorted(waits.other[ptr[task] : ptr[task + 1]].tolist(), key=rank.__getitem__):
                    if again[other] and found[other] == NONE and other not in own:
                        run([other])
            found[own] = count
            count += 1

        for own in np.split(ordered, np.flatnonzero(np.diff(turn[ordered])) + 1):
            run(own.tolist())
        return found, within

    def _entered(self) -> Waits:
        """The waits of segments before their first pass: for all from elsewhere that their tiles need, but for what comes back from hosts,
        which comes when a tile needs it."""
        task, other = self._waits
        first = self._first[task]
        enters = (first != NONE) & (self._first[other] != first) & (self._played.kind[other] != COPY)
        return Waits(first[enters], other[enters])

    def _in_turn(self) -> Waits:
        """Passes wait for the one before on their device."""
        device = self._device[self._chain]
        follows = device[1:] == device[:-1]
        return Waits(self._chain[1:][follows], self._chain[:-1][follows])

    def _not_before(self) -> Waits:
        """What is gathered or summed again comes right before the first pass that reads it: it waits for the one before that segment."""
        device, turn = self._device[self._chain], self._turn[self._chain]
        begins = np.append(True, (device[1:] != device[:-1]) | (turn[1:] != turn[:-1]))[: len(turn)]
        first = np.maximum.accumulate(np.where(begins, np.arange(len(turn)), 0))
        place = np.full(len(self._turn), NONE)
        place[self._chain] = first
        task, other = self._waits
        reads = self._again()[other] & (self._turn[task] != NONE) & (2 * self._turn[task] == self._needs()[other])
        at = place[task[reads]]
        there = (at > 0) & (device[at] == device[at - 1])
        return Waits(other[reads][there], self._chain[at[there] - 1])

    def _again(self) -> Bools:
        """By task, whether it is the second time of a carrier or a sum."""
        found = np.zeros(len(self._turn), np.bool_)
        for own in (self._played.gathered, self._played.summed_again):
            found[own[own != NONE]] = True
        return found

    def are_kept(self) -> bool:
        """Whether the passes have this order as they were played, so that ranks wait for nothing else."""
        start, end = self._played.start, self._played.end
        return all(bool((end[own.other] <= start[own.task]).all()) for own in (self._in_turn(), self._entered()))

    def waits(self) -> Waits:
        """The waits of tasks in ranks."""
        kept = self._kept()
        own = (Waits(self._waits.task[kept], self._waits.other[kept]), self._in_turn(), self._entered(), self._not_before())
        count = len(self._played.tile)
        pairs = distinct(np.concatenate([each.task * count + each.other for each in own]))
        return Waits(pairs // count, pairs % count)

    def _kept(self) -> Bools:
        """By wait, whether ranks have it, too. Second runs come at their turn, whatever has arrived by then."""
        task, other = self._waits
        need, turn = self._needs()[task], self._turn[other]
        needed, within = need // 2, need % 2 == 1  # see ``_needs``
        again = self._played.kind[task] == RECOMPUTE
        holds: Bools = np.where(turn == NONE, within | ~again, np.where(within, turn <= needed, turn < needed))
        free: Bools = need == NO_NEED
        return holds | free

    def _needs(self) -> Longs:
        """By task, twice the turn of the first pass that waits for it, if it may be late; one more if it may come while that turn's passes
        run, as copies do. Else NO_NEED."""
        played, (task, other) = self._played, self._waits
        found = np.full(len(played.tile), NO_NEED)
        late = (played.tile[other] == NONE) & (np.isin(played.kind[other], LATE) | self._again()[other])
        direct = late & (self._turn[task] != NONE)
        own = other[direct]
        np.minimum.at(found, own, 2 * self._turn[task[direct]] + (played.kind[own] == COPY))
        chained = np.flatnonzero(late & (self._turn[task] == NONE))
        chained = chained[np.argsort(-played.start[task[chained]], kind="stable")]
        one, before, needs = task[chained].tolist(), other[chained].tolist(), found.tolist()
        for after, earlier in zip(one, before, strict=True):  # what waits for a task begins after it, so it comes first here
            needs[earlier] = min(needs[earlier], needs[after])
        return np.array(needs)
