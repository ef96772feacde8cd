"""A strategy and its task graph in compiled form: what a simulation plays, and what a change of the strategy patches.

A *slot* is a task's place in the arrays. Each operator has a block of slots for the forward passes of its tiles, followed by as many for
their backward passes (``alive`` says whether one takes place; the rows that a mark adds follow; weight gradients, if backward passes are in
two, come last), and a block for the tasks that move its outputs and sum its partial results. ``arena`` has the edges, operator by operator:
for each source a row with the slots of its successors. Blocks are never changed, only replaced, so the old ones are still there when a
change is undone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Floats, Ints, LongRows, Longs
from soap.simulator.compiled.marks import MarkTables, mark_tables

SLOTS, ARENA, DEVICES, SYNCS, PULLS = range(5)
"""Places in ``State.used``: how much of slots, ``arena`` and ``dev`` is used; number of synchronization tasks after the backward pass (sums
of gradients, and tasks of parameter servers); number of pulls before the forward pass."""

NONE, FORWARD_TILE, AGAIN_TILE, WEIGHTS_TILE, BACKWARD_TILE, OTHER, UPDATE_DEVICE, ROW = range(8)
"""Kinds of slots (``State.kind``); those up to BACKWARD_TILE are a tile's passes. AGAIN_TILE: its second run. WEIGHTS_TILE: its
weight gradients, if its backward pass is in two. ROW: the first row that a mark adds, unless that is a second run; further ones follow.
Slot d is the update of device d."""

NEVER = 1 << 29
"""Added to ``waits`` of a device's update if there is nothing to update."""

LOW_BITS = 30
"""A number of bytes takes two items of a list of 32-bit numbers; this many of its low bits are the second item."""


class State(NamedTuple):
    """A strategy and its tasks.

    By operator: ``variant``, ``replicas``, ``tiles`` (their number), ``dev_ptr`` (where its devices begin in ``dev``), ``tile_slot`` (first
    slot of its tiles), ``own_slot`` and ``own_count`` (slots of its other tasks), ``row`` (where the rows of its forward tiles, then of its
    other tasks, begin in ``arena``), ``block`` and ``block_end`` (its part of ``arena``), ``sync_row`` (where the rows begin of what
    waits for its tiles' forward, then backward passes to keep parameters in step; -1 if nothing does), ``gather_row`` (the same of
    gathers), ``loose`` (whether it may have tiles without predecessors). ``divided``: whether its
    backward pass is in two. ``marked``: its mark (``marks``); if it runs again, the rows of its second runs come behind those of
    its forward tiles. ``back_row``: by ``GraphTables.reader``, where the rows of that reader's backward tiles begin; ``need_row``: of its
    needs, -1 if they do not count.

    ``sync``: by parameter, its code (``SyncCodes``). ``sync_slot``: first slot of the synchronization tasks after the backward pass.
    ``pull_slot``: first slot of the pulls before the forward pass, and of gathers. ``prefetch``: ``Strategy.prefetch``.

    By slot: ``key``, ``subkey`` (stable identity, breaks ties: ``tasks``); ``duration`` in ns; ``launch`` of a tile, in ns; ``latency``
    of a message, in ns, for which it holds nothing; ``overhead`` of communication, in ns, for which it keeps devices busy that have ports
    at its links; ``resource`` (>= 0: in ``static``, else -1 - place in ``arena``) and ``resource_n``; ``waits`` (number of edges into it);
    ``alive`` (whether it takes place); ``kind``; ``owner`` (operator, -1 after the backward pass); ``index`` (tile, or row of what waits
    for another task); ``claim`` of a need: its precedence (``second_runs``); ``moved`` bytes; ``alias`` (the slot that
    replaces this one in a trial, -1 if none does); ``follow``: of a tile's pass, the one behind it on its device (``pass_order``), or 0.

    By device: ``head``, the first pass in that order, or 0; ``busy``, ns of all its tiles, forward and backward; ``doubtful``, ns of those
    backward passes that may vanish when another operator changes.
    """

    marks: MarkTables
    used: Longs
    variant: Ints
    replicas: Ints
    dev_ptr: Ints
    dev: Ints
    tiles: Ints
    tile_slot: Ints
    own_slot: Ints
    own_count: Ints
    row: Ints
    block: Ints
    block_end: Ints
    sync_row: Ints
    marked: Ints
    divided: Ints
    gather_row: Ints
    back_row: Ints
    need_row: Ints
    sync: Ints
    sync_slot: Ints
    pull_slot: Ints
    prefetch: Ints
    key: Longs
    subkey: Longs
    duration: Longs
    launch: Longs
    latency: Longs
    overhead: Longs
    resource: Longs
    resource_n: Ints
    waits: Ints
    alive: Ints
    kind: Ints
    owner: Ints
    index: Ints  # type: ignore[assignment]  # not tuple's method
    moved: Longs
    claim: Longs
    alias: Ints
    follow: Ints
    head: Ints
    arena: Ints
    busy: Longs
    doubtful: Longs
    loose: Ints


class Lists(NamedTuple):
    """Numbered lists of whole numbers: list k is ``item[ptr[k]:ptr[k + 1]]``. ``table``: a hash table with open addressing, -1 where empty.
    ``missing``: the length of a list that was not found, then the list; ``syncs.pricing.ask_prices`` puts several there, joined."""

    ptr: Longs
    item: Ints
    table: Ints
    missing: Ints


class Groups(NamedTuple):
    """Sets of devices that sum together (``sets``, each ascending), or behind a mark, the number of all devices, gather and scatter equal
    parts. Group g has the ways ``way_ptr[g]:way_ptr[g + 1]`` to sum; each takes
    ``latency_seconds`` + ``seconds_per_byte`` * bytes and holds ``static[resource:resource + resource_n]``. ``members``: by group, how many
    devices sum, in a folded plan of the whole cluster's. ``static`` begins with the
    devices one by one, the routes of messages and what copies to hosts and back hold. ``port_device``: by resource, the device of its port,
    or -1. ``shortest_chunk_ns``: see ``soap.simulator.chunks``. ``cold_penalty``, ``cold_behind_messages``: the points of
    ``Topology.cold_penalty``, from (0, 0) on.
    """

    sets: Lists
    members: Ints
    way_ptr: Longs
    latency_seconds: Floats
    seconds_per_byte: Floats
    resource: Longs
    resource_n: Ints
    static: Ints
    port_device: Ints
    shortest_chunk_ns: Longs
    cold_penalty: Longs
    cold_behind_messages: Longs


class SyncTemplates(NamedTuple):
    """How regions may be synchronized: ``plan.syncs.seam.Template``, by number. ``known``: lists of a code, what reaches the region (0: no
    gradient, 1: one does, 2: it is frozen), 1 + the number of its compression or 0, and the readers; ``number``: by list, its template.

    By template: its rows ``row_ptr[t]:row_ptr[t + 1]``; ``readers``, a set; ``sharers``: into how many parts a region is cut, 0 if readers
    own all of it; ``parts``: how many of these have an owner in each copy, all but in a folded plan; ``inside`` from ``inside_ptr`` on: by
    reader, which of them it owns; ``first_part``: where these parts begin in ``place_ptr``, by which each has its places among all in
    ``place``: one, in a folded plan those of all for which its owner stands; ``added``; ``offloads``: whether hosts
    update; ``by_rows``: whether only rows with a gradient do; ``partitions`` on servers; ``limits`` from 2 t on: bytes at which the first
    bucket closes, and each later one, 0 if regions travel alone. ``told`` and ``asked``, from their ``_ptr`` on: source and target of each
    pair.

    By row: ``phase``, ``stage``, ``how``, ``amount``, ``apart``, ``large``, ``work`` (its place in WORKS); its items
    ``item_ptr[r]:item_ptr[r + 1]``: sets of devices, or of works the devices, or of an exchange twice the round (and one if its targets add
    up), source, target and amount of each flow; ``first``: the first
    device of what is apart. Amounts: 0 for the whole; 1 + part for what is owned; then those of looked-up rows, from ``amount_ptr[t]`` on:
    ``of``, ``part``, and ``who``: the place of a reader, or the number of readers + that of a leader.
    """

    known: Lists
    number: Ints
    row_ptr: Longs
    readers: Ints
    sharers: Ints
    parts: Ints
    first_part: Longs
    place_ptr: Longs
    place: Ints
    inside_ptr: Longs
    inside: Ints
    added: Ints
    offloads: Ints
    by_rows: Ints
    partitions: Ints
    limits: Longs
    told_ptr: Longs
    told: Ints
    asked_ptr: Longs
    asked: Ints
    amount_ptr: Longs
    of: Ints
    who: Ints
    part: Ints
    phase: Ints
    stage: Ints
    how: Ints
    amount: Ints
    apart: Ints
    large: Ints
    work: Ints
    first: Ints
    item_ptr: Longs
    item: Ints


class ShardTables(NamedTuple):
    """How parameters may be cut: geometry g has the shards ``ptr[g]:ptr[g + 1]``.

    By shard: ``bytes``, ``rows``, ``row_bytes``; its sizes ``size[size_ptr[s]:size_ptr[s + 1]]``; ``lowest``: which of the parameter's
    users gives the last gradient (-1: none does);
    ``update_ns``: [device type, shard]; its uses ``use_ptr[s]:use_ptr[s + 1]``. Of a use: ``use_user``: which user; ``use_place``: tile of
    one replica, or, in a tied geometry, shard of the user's own geometry. ``cut``: by geometry, equal if the shards are the same, whoever
    uses them. ``tied``, ``tied_geometry``: geometries of parameters that several operators use, by [parameter, cuts of its users].

    ``price_ns``: updates by ``price``: [owner, bytes >> LOW_BITS, the low bits of the bytes]. The owner is a host, for its server, or the
    number of hosts + a device type; for tables with gradients of some rows, the number of hosts and of types is added; for a host's
    updates of what its devices offload, twice that number to the host. ``rows_alone``:
    whether an update of a table changes only the rows with a gradient.

    ``effort``: what compression of a shard takes (``syncs.compressed``), by ``compressed``: [code, parameter, shard, number of peers].
    ``clips``: see ``PlannedTraining.clips``.
    """

    ptr: Longs
    bytes: Longs
    rows: Longs
    row_bytes: Longs
    size_ptr: Longs
    size: Longs
    lowest: Ints
    update_ns: LongRows
    use_ptr: Longs
    use_user: Ints
    use_place: Ints
    cut: Ints
    tied: Lists
    tied_geometry: Ints
    price: Lists
    price_ns: Longs
    rows_alone: Ints
    compressed: Lists
    effort: Longs
    clips: Ints


def make_state(operators: int, readers: int, parameters: int, devices: int, slots: int, arena: int) -> State:
    """Room for a graph's state, with this many slots and places in the arena."""
    sizes = {"used": 8, "dev": arena, "back_row": readers, "need_row": readers, "sync": parameters, "arena": arena, "busy": devices}
    sizes |= {"sync_slot": 1, "pull_slot": 1, "prefetch": 1, "head": devices}
    per_operator = {"variant", "replicas", "tiles", "dev_ptr", "tile_slot", "own_slot", "own_count", "row", "block", "block_end"}
    per_operator |= {"sync_row", "gather_row", "loose", "marked", "divided"}
    fields: dict[str, Any] = {"marks": mark_tables()}
    for name, kind in [*State.__annotations__.items()][1:]:
        size = sizes.get(name, operators if name in per_operator else slots)
        fields[name] = np.zeros(size + 1, np.int64 if "Longs" in str(kind) else np.int32)
    for name in ("busy", "doubtful"):
        fields[name] = np.zeros(devices, np.int64)
    return State(**fields)
