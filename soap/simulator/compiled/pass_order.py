"""The order of micro-batches' passes on each device (compiled): the counterpart of ``lowering._Lowering.keep_order``.

Each pass waits for the one before it on its device, ``State.follow``. These edges belong to no block. A change takes all of them away, and
puts them back for the changed strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soap.plan.pass_order import PassOrder
from soap.plan.syncs.gathering import repeats, turns
from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.graph_arrays import Ints
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.second_runs import weights_slot
from soap.simulator.compiled.state import SLOTS
from soap.simulator.compiled.trial import Trial
from soap.simulator.compiled.variants import CELLS, PARTS
from soap.simulator.compiled.world import World
from soap.strategy.config import OpConfig


class PassTables(NamedTuple):
    """The actions of an order: ``group`` (a kind of a chunk), ``part`` (micro-batch). A group has the passes ``which`` (FORWARD, BACKWARD:
    the whole one or input gradients, WEIGHTS) of ``operator`` from ``ptr[group]`` to ``ptr[group + 1]``, in their order. ``count``:
    micro-batches; 1 if there is no order. ``divided``: by operator, whether its backward pass is in two. ``epilogue``: the operators of the
    loss's, which run behind all actions. ``back_rank``: [operator, micro-batch], the place of the action of its backward pass, or the first
    half of it (``PassOrder.rank``); 0 if there is no order. ``repeats``: by operator, ``gathering.repeats``.
    ``chunk``: by operator, its chunk; 0 if there is no order. ``turns``: ``gathering.turns``, each as twice a number, and 1 more for the
    backward pass; the number is that of the micro-batch, and as many more as there are micro-batches for each chunk before."""

    count: Ints  # type: ignore[assignment]  # not tuple's method
    group: Ints
    part: Ints
    ptr: Ints
    operator: Ints
    which: Ints
    divided: Ints
    epilogue: Ints
    back_rank: Ints
    repeats: Ints
    chunk: Ints
    turns: Ints


FORWARD, BACKWARD, WEIGHTS = range(3)


def pass_tables(order: PassOrder | None, operators: int) -> PassTables:
    """An order of so many operators as arrays; None for none."""
    ints = lambda values: np.array(list(values), np.int32)  # noqa: E731
    count = 1 if order is None else order.cut.count
    own_turns = ints(2 * (own.chunk * count + own.part) + own.backward for own in turns(order))
    if order is None:
        whole = ints([0] * operators)
        return PassTables(ints([1]), ints([]), ints([]), ints([0]), ints([]), ints([]), whole, ints([]), *(whole,) * 3, own_turns)
    own: Sequence[Sequence[str]] = ["F"] * operators, order.backward, order.weights
    groups: dict[tuple[str, int], int] = {key: number for number, key in enumerate(sorted({action[:2] for action in order.actions}))}
    members: list[list[tuple[int, int]]] = [[] for _ in groups]
    for op in range(operators):
        for which in (FORWARD, BACKWARD, WEIGHTS)[: 0 if op in order.cut.graph.epilogue else 2 + (op in order.divided)]:
            group = members[groups[own[which][op], order.chunks[op]]]
            group.insert(len(group) if which == FORWARD else 0, (op, which))
    ranks = np.zeros((len(groups), order.cut.count), np.int32)
    for action, rank in order.ranks.items():
        ranks[groups[action[:2]], action.microbatch] = rank
    back = ranks[[groups[key] for key in zip(order.backward, order.chunks, strict=True)]]
    uncut = [order.cut.parts(op) == 1 for op in range(operators)]
    back[uncut] = back[uncut, -1:]  # an operator that is not cut has its one rank for all micro-batches
    return PassTables(
        count=ints([count]),
        group=ints(groups[action[:2]] for action in order.actions),
        part=ints(action.microbatch for action in order.actions),
        ptr=ints(np.cumsum([0, *map(len, members)])),
        operator=ints(op for found in members for op, _ in found),
        which=ints(which for found in members for _, which in found),
        divided=ints(op in order.divided for op in range(operators)),
        epilogue=ints(sorted(order.cut.graph.epilogue)),
        back_rank=back.ravel(),
        repeats=ints(repeats(order, op) for op in range(operators)),
        chunk=ints(order.chunks),
        turns=own_turns,
    )


def repeated(config: OpConfig, parts: int) -> tuple[int, ...]:
    """The devices of an operator's tiles in ``parts`` micro-batches."""
    own = len(config.devices) // config.replicas
    return tuple(device for r in range(config.replicas) for device in config.devices[r * own : (r + 1) * own] * parts)


@compiled
def own_devices(W: World, op: int, target: Ints, at: int) -> int:
    """Copy the devices of an operator's tiles in one micro-batch to ``target[at:]``: the reverse of ``repeated``. Returns how many."""
    V, C = W.variants, W.state
    cells = V.rows[C.variant[op], CELLS]
    own = cells // V.rows[C.variant[op], PARTS]
    for replica in range(C.replicas[op]):
        first = C.dev_ptr[op] + replica * cells
        copy(target, at + replica * own, C.dev, first, first + own)
    return int(C.replicas[op] * own)


@compiled
def unlink_passes(W: World) -> None:
    """Take the edges of the order away."""
    C = W.state
    if W.order.count[0] == 1:
        return
    for slot in range(C.used[SLOTS]):
        if C.follow[slot] > 0:
            C.waits[C.follow[slot]] -= 1
            C.follow[slot] = 0


@compiled
def link_passes(W: World) -> None:
    """Add the edges of the order, none of which is there."""
    A, V, C, S = W.order, W.variants, W.state, W.scratch
    if A.count[0] == 1:
        return
    devices = len(C.busy)
    fill(C.head, 0, devices, 0)
    fill(S.last_pass, 0, devices, 0)
    for action in range(len(A.part)):
        for i in range(A.ptr[A.group[action]], A.ptr[A.group[action] + 1]):
            op, which = A.operator[i], A.which[i]
            block = weights_slot(C, op) if which == WEIGHTS else C.tile_slot[op] + which * C.tiles[op]
            cells, parts = V.rows[C.variant[op], CELLS], V.rows[C.variant[op], PARTS]
            part = A.part[action]
            if parts == 1:
                if part != (A.count[0] - 1 if which else 0):
                    continue
                part = 0
            _link_tiles(C, S, op, block, cells, part * (cells // parts), (part + 1) * (cells // parts))
    for op in A.epilogue:
        _link_tiles(C, S, op, C.tile_slot[op], V.rows[C.variant[op], CELLS], 0, V.rows[C.variant[op], CELLS])


@compiled
def _link_tiles(C, S, op, block, cells, start, stop):  # type: ignore[no-untyped-def]
    """Add the passes of the cells ``start`` to ``stop`` of all replicas behind those that are linked. ``block``: first slot of all."""
    for replica in range(C.replicas[op]):
        for cell in range(start, stop):
            slot = block + replica * cells + cell
            if not C.alive[slot]:
                continue
            device = C.resource[slot]
            before = S.last_pass[device]
            if before > 0:
                C.follow[before] = slot
                C.waits[slot] += 1
            else:
                C.head[device] = slot
            S.last_pass[device] = slot


@compiled
def note_order(W: World) -> None:
    """Save the edges of the order before a change."""
    C, U = W.state, W.undo
    if W.order.count[0] > 1:
        for slot in range(C.used[SLOTS]):
            U.follow[slot] = C.follow[slot]
        for device in range(len(C.busy)):
            U.head[device] = C.head[device]


@compiled
def first_reordered(W: World, P: Trial, slots: int, place: int) -> int:
    """The first place, in the order of an earlier simulation, of a pass that another one follows now than did before the change; ``place``
    if that is earlier. 0 if a device begins with another pass. ``slots``: how many there were."""
    C, U = W.state, W.undo
    if W.order.count[0] == 1:
        return place
    for device in range(len(C.busy)):
        if C.head[device] != U.head[device]:
            return 0
    for slot in range(slots):
        if C.follow[slot] != U.follow[slot] and P.place[slot] >= 0:
            place = min(place, P.place[slot])
    return place
