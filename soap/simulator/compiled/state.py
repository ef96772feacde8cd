"""A strategy and its task graph in compiled form: what a simulation plays, and what a change of the strategy patches.

A *slot* is a task's place in the arrays. Each operator has a block of slots for the forward passes of its tiles, followed by as many for
their backward passes (``alive`` says whether one takes place), and a block for the tasks that move its outputs and sum its partial
results. Who follows whom is kept per operator in ``arena``: for each source of edges a row of slots. Blocks are never changed, only
replaced: what was there before is still there when a change is undone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Floats, Ints, Longs

SLOTS, ARENA, DEVICES, SYNCS, PULLS = range(5)
"""Places in ``State.used``: slots, arena and devices that are taken, number of sums of gradients and of parameter servers'
tasks behind the backward pass, number of pulls before the forward pass."""

NONE, FORWARD_TILE, BACKWARD_TILE, OTHER, SYNC_BUCKET, UPDATE_DEVICE = range(6)
"""What a slot is (``State.kind``). Slot d is the update of device d."""

NEVER = 1 << 29
"""Added to ``waits`` of a device's update if there is nothing to update."""

LOW_BITS = 30
"""A number of bytes is two items of a list of small numbers: so many bits of it are the second."""


class State(NamedTuple):
    """Per operator: ``variant``, ``replicas``, number of ``tiles``, where its ``dev`` begin (``dev_ptr``), its slots (``tile_slot``;
    ``own_slot``, ``own_count``), where in ``arena`` the rows of its forward tiles and of its other tasks begin (``row``), how much of the
    arena is its block (``block``, ``block_end``). ``back_row``: the same for the backward tiles of each reader (as ``GraphTables.reader``),
    ``sync_row``: for an operator's backward tiles, what waits for their gradients. ``loose``: operators that may have tiles without
    predecessors. ``sync``: by parameter, as ``sync_codes``. ``sync_slot``: first slot of the sums and of what parameter servers do behind
    the backward pass; ``pull_slot``: first slot of the pulls before the forward pass.

    Per slot: ``key``, ``subkey`` (stable identity, breaks ties: ``task_ids``), ``duration`` in ns, ``launch`` (of a tile, in ns),
    ``latency`` (of a message, in ns, for which it holds nothing), ``overhead`` (of communication, in ns, for which it keeps devices busy
    that have ports at its links), ``resource`` (>= 0: in ``static``, else -1 - place in ``arena``) and ``resource_n``, ``waits`` (number of
    edges into it), ``kind``, ``owner`` (operator; -1 behind the backward pass), ``index`` (tile, row of another task, or group of a sum),
    ``moved`` bytes, ``alias`` (the slot that stands for this one in a trial, -1 if none does).
    ``busy``: per device, ns of all its tiles, forward and backward; ``doubtful``: of these, backward passes that may not take place any
    more when another operator changes.
    """

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
    back_row: Ints
    sync: Ints
    sync_slot: Ints
    pull_slot: Ints
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
    alias: Ints
    arena: Ints
    busy: Longs
    doubtful: Longs
    loose: Ints


class Lists(NamedTuple):
    """Lists of whole numbers that are known by a number of their own: ``item[ptr[k]:ptr[k + 1]]``. ``table``: open addressing, -1 where
    empty. ``missing``: the length of one that was looked for in vain (or of several together, by ``serving.ask_prices``), then the list."""

    ptr: Longs
    item: Ints
    table: Ints
    missing: Ints


class Groups(NamedTuple):
    """Sets of devices that sum together (``Lists``, ascending). Group g may do so in the ways ``way_ptr[g]:way_ptr[g + 1]``, each of
    which takes ``latency_seconds`` + ``seconds_per_byte`` * bytes and holds ``static[resource:resource + resource_n]``. ``static`` begins
    with the devices one by one and the routes of messages. By resource: ``port_device`` (-1: none). ``cold_penalty``: the points of
    ``Topology.cold_penalty``, from (0, 0) on.
    """

    sets: Lists
    way_ptr: Longs
    latency_seconds: Floats
    seconds_per_byte: Floats
    resource: Longs
    resource_n: Ints
    static: Ints
    port_device: Ints
    cold_penalty: Longs


class ShardTables(NamedTuple):
    """How parameters may be cut: geometry g has the shards ``ptr[g]:ptr[g + 1]``. ``lowest``: which of the parameter's users gives the last
    gradient (-1: nobody gives any). ``update_ns``: [device type, shard]. Uses ``use_ptr[s]:use_ptr[s + 1]``: (``use_user``: which user,
    ``use_place``: tile of one replica, or of a tied geometry: shard of the user's own). ``cut``: equal for geometries whose shards are
    the same, whoever uses them. ``tied``: geometries of parameters that several operators use, by [parameter, cuts of its users].
    ``rows``, ``row_bytes``: of the shard. ``price_ns``: updates by ``price``: [owner, bytes >> LOW_BITS, rest of the bytes]; owner: a host
    for its server, or number of hosts + a type of device, and both together more for tables with gradients of some rows. ``rows_alone``:
    whether these rows are all that is updated of a table.
    """

    ptr: Longs
    bytes: Longs
    rows: Longs
    row_bytes: Longs
    lowest: Ints
    update_ns: Longs
    use_ptr: Longs
    use_user: Ints
    use_place: Ints
    cut: Ints
    tied: Lists
    tied_geometry: Ints
    price: Lists
    price_ns: Longs
    rows_alone: Ints


def make_state(operators: int, readers: int, parameters: int, devices: int, slots: int, arena: int) -> State:
    """Room for a graph's state, with so many slots and places in the arena."""
    sizes = {"used": 8, "dev": arena, "back_row": readers, "sync": parameters, "arena": arena, "busy": devices}
    sizes |= {"sync_slot": 1, "pull_slot": 1}
    per_operator = {"variant", "replicas", "tiles", "dev_ptr", "tile_slot", "own_slot", "own_count", "row", "block", "block_end"}
    per_operator |= {"sync_row", "loose"}
    fields: dict[str, Any] = {}
    for name, kind in State.__annotations__.items():
        size = sizes.get(name, operators if name in per_operator else slots)
        fields[name] = np.zeros(size + 1, np.int64 if "Longs" in str(kind) else np.int32)
    for name in ("busy", "doubtful"):
        fields[name] = np.zeros(devices, np.int64)
    return State(**fields)
