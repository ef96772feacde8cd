"""Working memory for operator lowering: holdings, fetches, pieces, carriers, tasks and edges of one operator, in arrays that are reused.

Positions in these arrays count from the operator's own first, as in ``planning.Delivery``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Ints, Longs

HOLDINGS, REDUCTIONS, FETCHES, CONSUMERS, PIECES, CARRIERS, PARTS, TASKS = range(8)
EDGES, RESOURCES, CELL_BOXES, BOUNDS, LINKS, FLOWS, STAMP, GRADIENTS, USES, EXPECTED, PRICES, BUSIEST, NORM, CLAIMS = range(8, 22)
PACKED_SHARDS, TOUCHED, SORTED = 22, 23, 24
"""Places in ``Scratch.count``: the number of each kind. Entries stamped with ``count[STAMP]`` are current. ``BUSIEST``: for the collective
being made, the most messages of any one device in a round; of a collective of equal parts, minus the number of its devices. ``NORM``: a
slot, see ``syncs.clipping``. ``PACKED_SHARDS``: how many are compressed. ``TOUCHED``: see ``syncs.server_traffic``.
``SORTED``, and the next one: see ``syncs.gathering``."""

FULL = "scratch is full"
"""Message of the MemoryError that compiled code raises when an array is too small. Python then makes it larger and starts the work
again."""


class Scratch(NamedTuple):
    """The arrays, by prefix or name.

    - ``h_``: holdings. ``h_box``: a region's number, or -2 - k for the k-th cell. ``h_red``: reduction or -1. ``hold_of``: [output, tile]
      -> holding or -1.
    - ``r_``: reductions. ``r_task``: its task or -1. ``red_of``: [output, replica, group] -> reduction or -1. ``member_ptr``, ``member``:
      tiles of a group.
    - ``f_``: fetches. ``c_``: their consumers, in linked lists. ``p_``: pieces. ``p_id``: equal for equal regions of one holding.
    - ``claim_``: claims of readers, in linked lists by holding (``second_runs``). ``best``: the highest one, by tile. ``slot_base``,
      ``need_base``: by reader, where the rows of its backward tiles and of its needs begin among the sources; the latter -1 if these do not
      count (``marks.needed_together``). ``r_back``: of a reduction, the task that sums its gradients, or -1.
    - ``k_``: carriers; ``part``: their pieces. ``t_``: tasks. ``e_``: edges. ``res``: resources of exchanges. ``cell``: bounds of cells and
      of pieces. ``hash_key``, ``hash_stamp``, ``hash_value``: a hash table.
    - By device: ``update`` in ns; ``floor``: least ns of its update, whatever the changed operator becomes; ``taken``: partitions on the
      cores of a host, for the host's lowest device; ``settled``: see ``syncs.templates``; ``settling``: see
      ``syncs.gathering``; ``offloaded``, ``on_host``, ``lifting``: see ``syncs.offloading``.
    - By parameter: ``geometry``, ``expected`` (a stamp), ``alone`` (a stamp: its regions travel alone).
    - The tiles that use a shard: ``use_slot``, ``use_device``, ``use_lookups``, ``use_block`` (equal for replicas of one tile).
    - By place in ``members``, from 0 on: ``lookups``, ``seen``, ``leader``, ``touched``, ``together``, ``received``; by
      partition: ``p_rows``. See ``syncs.server_traffic``. ``peers``: the number of
      the ``members`` that are leaders, then these devices.
    - By bucket: ``bucket_region``, the number of its first region; ``bucket_part``, its micro-batch, -1 if it is for all of the step;
      ``bucket_template``, ``bucket_shard``, ``owned_ptr``, ``owned``,
      ``first_task``, ``first_count``: see ``syncs.templates``. ``g_``: see ``syncs.gathering``.

    The others are lists for intermediate results.
    """

    count: Longs  # type: ignore[assignment]  # not tuple's method
    h_box: Ints
    h_out: Ints
    h_dev: Ints
    h_tile: Ints
    h_red: Ints
    hold_of: Ints
    r_out: Ints
    r_rep: Ints
    r_group: Ints
    r_box: Ints
    r_dev_ptr: Ints
    r_dev: Ints
    r_hold: Ints
    r_cells: Ints
    r_task: Ints
    r_back: Ints
    red_of: Ints
    member_ptr: Ints
    member: Ints
    f_out: Ints
    f_box: Ints
    f_dev: Ints
    f_piece: Ints
    f_first: Ints
    f_last: Ints
    f_alive: Ints
    c_slot: Ints
    c_tile: Ints
    c_operand: Ints
    c_next: Ints
    p_hold: Ints
    p_fetch: Ints
    p_id: Ints
    p_box: Ints
    p_volume: Longs
    p_carrier: Ints
    k_pattern: Ints
    k_part: Ints
    k_task: Ints
    part: Ints
    t_key: Longs
    t_subkey: Longs
    t_dur: Longs
    t_latency: Longs
    t_overhead: Longs
    t_res: Longs
    t_res_n: Ints
    t_bytes: Longs
    e_src: Ints
    e_dst: Ints
    res: Ints
    cell: Ints
    cell_volume: Longs
    cell_ptr: Ints
    odometer: Ints
    hash_key: Longs
    hash_stamp: Longs
    hash_value: Ints
    work: Longs
    order: Longs
    mark: Longs
    mark_value: Ints
    load: Longs
    load_stamp: Longs
    held: Longs
    flow: Longs
    gradient_head: Ints
    gradient_next: Ints
    gradient_task: Ints
    claim_head: Ints
    claim_next: Ints
    claim_task: Ints
    claim_precedence: Longs
    best: Longs
    slot_base: Ints
    need_base: Ints
    update: Longs
    last_pass: Ints
    floor: Longs
    taken: Longs
    settled: Longs
    settling: Longs
    offloaded: Longs
    on_host: Longs
    lifting: Longs
    members: Ints
    peers: Ints
    geometry: Ints
    expected: Longs
    alone: Longs
    use_slot: Ints
    use_device: Ints
    use_lookups: Longs
    use_block: Longs
    lookups: Longs
    seen: Longs
    leader: Ints
    touched: Longs
    together: Longs
    received: Longs
    p_rows: Longs
    bucket_stamp: Longs
    bucket_of: Ints
    bucket_limit: Longs
    bucket_region: Ints
    bucket_part: Ints
    bucket_template: Ints
    bucket_shard: Ints
    first_task: Ints
    first_count: Ints
    owned_ptr: Longs
    owned: Longs
    g_first: Ints
    g_last: Ints
    g_chunk: Ints
    g_final: Ints
    g_latest: Ints
    g_needed: Ints
    g_needed_in: Ints
    g_order: Ints
    g_turn: Ints
    g_used: Ints
    g_next: Ints
    g_list: Ints
    g_place: Ints
    g_from: Ints
    g_slot: Ints
    fill: Ints


def make_scratch(size: int, devices: int, links: int) -> Scratch:
    """Room for ``size`` of everything, on a cluster with this many devices and links."""
    table = 1
    while table < 4 * size:
        table *= 2
    sizes = {"count": 32, "odometer": 64}
    sizes |= dict.fromkeys(("hash_key", "hash_stamp", "hash_value"), table)
    sizes |= dict.fromkeys(("mark", "mark_value"), max(2 * devices, size))
    sizes |= dict.fromkeys(("load", "load_stamp"), links + 1)
    sizes |= {"held": devices + links + 1, "members": devices + 1, "peers": devices + 1, "cell": 16 * size, "flow": 3 * size}
    sizes |= dict.fromkeys(("update", "floor", "taken", "settled", "settling", "offloaded", "on_host", "lifting"), devices)
    sizes |= dict.fromkeys(("last_pass", "lookups", "leader", "touched", "together", "received", "seen"), devices + 1)
    sizes |= dict.fromkeys(("e_src", "e_dst", "res", "work", "fill", "gradient_next", "gradient_task"), 4 * size)
    sizes |= dict.fromkeys(("claim_next", "claim_task", "claim_precedence"), 4 * size)
    sizes |= dict.fromkeys(("g_list", "g_place", "g_from", "owned"), 4 * size)
    kinds = Scratch.__annotations__.items()
    fields: dict[str, Any] = {
        name: np.zeros(sizes.get(name, size + 1), np.int64 if "Longs" in str(kind) else np.int32) for name, kind in kinds
    }
    return Scratch(**fields)
