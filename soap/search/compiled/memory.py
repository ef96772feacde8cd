"""The arrays of a compiled chain: its state, its log, and room for the candidates of a move."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Floats, Ints, Longs

MOVES = ("redraw", "place", "swap", "informed", "group", "segment", "run", "sync", "recompute", "prefetch")
REDRAW, PLACE, SWAP, INFORMED, GROUP, SEGMENT, RUN, SYNC, RECOMPUTE, PREFETCHING = range(len(MOVES))

STEP, RANDOM, SWAPPED, COST, START, BEST, LOGGED, PENDING, WANTED_OPERATOR, WANTED_GRID, ESTIMATES, BEFORE, USUAL = range(13)
BEST_PREFETCH = 13
"""Places in ``ChainTables.at``. ``STEP``: steps done. ``RANDOM``: state of the random generator. ``BEFORE``: that state at the end of the
last step. ``SWAPPED``: 1 if the engine's two trials have changed places. ``COST``: current cost, ns. ``START``: the cost that beta is
relative to, ns. ``BEST``: best cost, ns. ``LOGGED``: proposals in the log. ``PENDING``: whether a step waits for an answer about memory.
``WANTED_OPERATOR``, ``WANTED_GRID``: the variant that is missing. ``ESTIMATES``: estimates made. ``USUAL``:
current makespan under the most likely costs, ns, which is the cost if there are no draws. ``BEST_PREFETCH``: of the best strategy."""

NOTHING, ASKED, GRANTED, REFUSED = range(4)
"""Values of ``at[PENDING]``."""

CANDIDATES = 8
"""Candidates that an informed, group or run move draws beside the current configuration."""

LONGEST_RUN = 8
"""The most operators in a run."""

MOST_LISTED = 96
"""The most suggestions that an operator gets from its neighbours and from reference strategies; further ones are left out."""


class ChainTables(NamedTuple):
    """The arrays of one chain.

    By operator: ``grid``, its current grid (-1: outside of the space); ``structured``, 1 if its placement is structured. ``variant``: by
    operator and grid, in the order of ``GridTables.estimate``; -1 if not made yet. By move: ``weight``, how often it is drawn;
    ``proposed``, ``accepted``. ``best_…``: the best strategy, as in ``State`` (``best_sync``: by parameter).

    The log, one entry per evaluated proposal: ``log_move``, ``log_operator`` (the first operator; -1 - parameter if a parameter changes, or
    the prefetch, for which the first gathered one stands), ``log_count`` (operators), ``log_cost`` (ns; -1 if over the bound),
    ``log_accepted``.

    Candidates: slot k has the grid ``c_grid[k]``, the devices ``c_dev[k * devices:]`` and ``c_log[k]``, the logarithm of its weight. Slot 0
    is the current configuration. Slots 1 to ``CANDIDATES`` are drawn by the move. Further slots are suggestions of neighbours and reference
    strategies. ``held``: the current devices of each operator inside of the space, those of one micro-batch, from
    ``held[operator * devices]`` on. ``edited``: grids of the edit's operators. ``where``, ``stamp``: by device, scratch memory of
    estimates. ``order``: devices, scratch memory for drawing distinct ones.

    A run (``compiled.runs``): its operators ``r_op``. The operator at place i was reached from the one at place ``r_from[i]``, and
    ``r_edge[i]`` is its own edge back to that. ``r_place``: by operator, its place in the run (-1: not in it). Candidate k gives the
    operator at place i the grid ``r_grid[k * LONGEST_RUN + i]`` on the devices ``r_dev[(k * LONGEST_RUN + i) * devices:]``.
    """

    at: Longs
    grid: Ints
    structured: Ints
    variant: Ints
    weight: Floats
    proposed: Longs
    accepted: Longs
    best_variant: Ints
    best_replicas: Ints
    best_dev_ptr: Ints
    best_dev: Ints
    best_sync: Ints
    best_marked: Ints
    log_move: Ints
    log_operator: Ints
    log_count: Ints
    log_cost: Longs
    log_accepted: Ints
    c_grid: Ints
    c_dev: Ints
    c_log: Floats
    c_weight: Floats
    held: Ints
    edited: Ints
    where: Ints
    stamp: Longs
    order: Ints
    r_op: Ints
    r_from: Ints
    r_edge: Ints
    r_place: Ints
    r_grid: Ints
    r_dev: Ints


def make_chain(operators: int, parameters: int, devices: int, configurations: int, tiles: int, log: int) -> ChainTables:
    """Allocate the arrays of a chain. ``configurations``: length of ``GridTables.estimate``. ``tiles``: the most tiles of any strategy.
    ``log``: the most proposals."""
    slots = 1 + CANDIDATES + MOST_LISTED
    sizes = {"at": 16, "variant": configurations, "best_dev_ptr": operators + 1, "best_dev": tiles, "best_sync": parameters}
    sizes |= {"c_dev": slots * devices, "held": operators * devices}
    sizes |= dict.fromkeys(("weight", "proposed", "accepted"), len(MOVES))
    sizes |= dict.fromkeys(("c_grid", "c_log", "c_weight"), slots)
    sizes |= dict.fromkeys(("where", "stamp"), devices)
    sizes |= dict.fromkeys(("r_op", "r_from", "r_edge"), LONGEST_RUN)
    sizes |= {"r_grid": LONGEST_RUN * (1 + CANDIDATES), "r_dev": LONGEST_RUN * (1 + CANDIDATES) * devices}
    kinds = {"Longs": np.int64, "Floats": np.float64, "Ints": np.int32}
    fields: dict[str, Any] = {}
    for name, annotation in ChainTables.__annotations__.items():
        kind = next(own for key, own in kinds.items() if key in str(annotation))
        fields[name] = np.zeros(sizes.get(name, log if name.startswith("log_") else operators) + 1, kind)
    found = ChainTables(**fields)
    found.variant[:] = found.r_place[:] = -1
    return found._replace(order=np.arange(devices, dtype=np.int32))
