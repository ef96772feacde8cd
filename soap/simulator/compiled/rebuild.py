"""Lowering a whole strategy (compiled)."""

from __future__ import annotations

from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.fragment import CROWDED, lower_operator, place_tiles
from soap.simulator.compiled.jit import entry
from soap.simulator.compiled.scratch import Scratch
from soap.simulator.compiled.serving import count_pulls, make_pulls
from soap.simulator.compiled.state import ARENA, DEVICES, Groups, ShardTables, State
from soap.simulator.compiled.synchronization import begin_updates, count_backward, synchronize
from soap.simulator.compiled.tables import ClusterTables, GraphTables, Ints
from soap.simulator.compiled.variants import CELLS, VariantTables


@entry
def lower_all(
    G: GraphTables,
    V: VariantTables,
    K: ClusterTables,
    R: Groups,
    D: ShardTables,
    C: State,
    S: Scratch,
    variants: Ints,
    replicas: Ints,
    devices: Ints,
    dtypes: int,
) -> None:
    """Begin with a strategy: variant and replicas by operator, devices one operator after the other."""
    operators = len(G.backward)
    if len(devices) > len(C.dev):
        raise MemoryError(CROWDED)
    copy(C.dev, 0, devices, 0, len(devices))
    C.used[ARENA], C.used[DEVICES] = 0, len(devices)
    begin_updates(C)
    fill(C.busy, 0, len(C.busy), 0)
    fill(C.doubtful, 0, len(C.doubtful), 0)
    at = 0
    for op in range(operators):
        C.loose[op] = 1
        C.variant[op], C.replicas[op], C.dev_ptr[op] = variants[op], replicas[op], at
        C.tiles[op] = V.rows[variants[op], CELLS] * replicas[op]
        at += C.tiles[op]
        place_tiles(G, V, K, C, op)
    for op in range(operators - 1, -1, -1):
        lower_operator(G, V, K, R, C, S, op)
        count_backward(G, C, op, 1)
    make_pulls(G, V, K, D, C, S)
    count_pulls(C, 1)
    synchronize(G, V, K, R, D, C, S, dtypes)
    for slot in range(len(C.alias)):
        C.alias[slot] = slot
