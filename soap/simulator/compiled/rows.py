"""How many rows of sparse parameters devices touch (compiled). The counterpart of ``sparse_access.RowAccess`` and ``row_counts``."""

from __future__ import annotations

from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, STAMP, USES, Scratch
from soap.simulator.compiled.state import State
from soap.simulator.compiled.syncs.codes import BY_ROWS

INDEX_BYTES = 8


@compiled
def is_sparse(G: GraphTables, parameter: int) -> bool:
    """Whether a parameter is sparse: a step touches only some of its rows."""
    return G.touched_ptr[parameter + 1] > G.touched_ptr[parameter]


@compiled
def is_sparse_lookup(G: GraphTables, C: State, op: int) -> bool:
    """Whether an operator's tiles are sparse lookups: it is one of ``row_counts.sparse_lookup_operators``."""
    by_rows, as_a_whole = 0, 0
    for k in range(G.parameter_ptr[op], G.parameter_ptr[op + 1]):
        if is_sparse(G, G.parameter[k]):
            if C.sync[G.parameter[k]] & BY_ROWS:
                by_rows += 1
            else:
                as_a_whole += 1
    return by_rows > 0 and as_a_whole == 0


@compiled
def touched_by(G: GraphTables, parameter: int, lookups: int) -> int:
    """The counterpart of ``RowAccess.touched_by``."""
    at = G.touched_ptr[parameter]
    total, first, levels = G.touched[at], at + 2, G.touched_ptr[parameter + 1] - at - 2
    if lookups >= total:
        return G.touched[first]
    level = 0
    while level + 1 < levels and lookups << (level + 1) <= total:
        level += 1
    upper = G.touched[first + level]
    if level + 1 == levels:
        return min(lookups, (upper * (lookups << level) + total - 1) // total)
    lower = G.touched[first + level + 1]
    return min(lookups, lower + ((upper - lower) * ((lookups << (level + 1)) - total) + total - 1) // total)


@compiled
def part_of_rows(G: GraphTables, parameter: int, touched: int, rows: int) -> int:
    """How many of ``touched`` rows of a parameter are in a region of ``rows`` rows, rounded up."""
    total = G.touched[G.touched_ptr[parameter] + 1]
    return (touched * rows + total - 1) // total


@compiled
def count_lookups(S: Scratch) -> int:
    """Fill ``lookups``: by reader (place in ``members``, from 0 on), how many rows its tiles look up. Returns how many all readers look up
    together. Equal tiles of replicas count once. Call it after ``find_members``."""
    if S.members[0] > len(S.lookups):
        raise MemoryError(FULL)
    S.count[STAMP] += 1
    for i in range(S.members[0]):
        S.lookups[i], S.seen[i] = 0, -1
        S.mark[S.members[1 + i]], S.mark_value[S.members[1 + i]] = S.count[STAMP], i
    total = 0
    for i in range(S.count[USES]):
        place = S.mark_value[S.use_device[i]]
        if S.seen[place] != S.use_block[i]:
            S.seen[place] = S.use_block[i]
            S.lookups[place] += S.use_lookups[i]
        total += S.use_lookups[i] if S.use_block[i] == i else 0
    return total


@compiled
def count_together(S: Scratch) -> None:
    """Fill ``together``: by place of a group's ``leader``, how many rows the group looks up. Call it after ``count_lookups``."""
    for i in range(S.members[0]):
        S.together[i], S.seen[i] = 0, -1
        S.mark_value[S.members[1 + i]] = S.leader[i]
    for i in range(S.count[USES]):
        place = S.mark_value[S.use_device[i]]
        if S.seen[place] != S.use_block[i]:
            S.seen[place] = S.use_block[i]
            S.together[place] += S.use_lookups[i]
