"""Lowers a whole strategy (compiled), in ``STEPS``."""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.graph_arrays import Ints
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.operator_lowering import lower_operator, place_tiles
from soap.simulator.compiled.pass_order import link_passes
from soap.simulator.compiled.state import ARENA, DEVICES, PULLS
from soap.simulator.compiled.synchronization import begin_updates, count_backward, synchronize
from soap.simulator.compiled.syncs.asking import make_pulls
from soap.simulator.compiled.syncs.exchange import count_rows
from soap.simulator.compiled.task_keys import STATE_FULL
from soap.simulator.compiled.variants import CELLS
from soap.simulator.compiled.world import World


class Held(NamedTuple):
    """A strategy's configurations. ``variants``, ``replicas``, ``marked``: by operator. ``devices``: one operator after the other."""

    variants: Ints
    replicas: Ints
    devices: Ints
    marked: Ints


@entry
def lower_operators(W: World, held: Held) -> None:
    """Begin the state of a strategy: the tasks of its operators, in their order."""
    G, V, C = W.graph, W.variants, W.state
    variants, replicas, devices, marked = held.variants, held.replicas, held.devices, held.marked
    operators = len(G.backward)
    if len(devices) > len(C.dev):
        raise MemoryError(STATE_FULL)
    copy(C.dev, 0, devices, 0, len(devices))
    C.used[ARENA], C.used[DEVICES] = 0, len(devices)
    begin_updates(C)
    fill(C.busy, 0, len(C.busy), 0)
    fill(C.doubtful, 0, len(C.doubtful), 0)
    at = 0
    for op in range(operators):
        C.loose[op] = 1
        C.variant[op], C.replicas[op], C.dev_ptr[op] = variants[op], replicas[op], at
        C.tiles[op], C.marked[op] = V.rows[variants[op], CELLS] * replicas[op], marked[op]
        C.divided[op] = W.order.divided[op]
        at += C.tiles[op]
        place_tiles(W, op)
    for op in range(operators - 1, -1, -1):
        lower_operator(W, op)
        count_backward(G, C, op, 1)
    fill(C.follow, 0, len(C.follow), 0)
    link_passes(W)


@entry
def lower_pulls(W: World, held: Held) -> None:
    """Go on with what operators wait for: rows that they look up, and values."""
    make_pulls(W)
    count_rows(W.state, W.state.pull_slot[0], W.state.used[PULLS], 1)


@entry
def lower_syncs(W: World, held: Held) -> None:
    """Go on with sums of gradients and updates."""
    C = W.state
    synchronize(W)
    for slot in range(len(C.alias)):
        C.alias[slot] = slot


STEPS = (lower_operators, lower_pulls, lower_syncs)
"""In this order. One that ends because a table lacks something has changed no more of the state than ``State.used`` says."""
