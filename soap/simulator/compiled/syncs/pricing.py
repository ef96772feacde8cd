"""Durations of adding up gradients and of updating shards (compiled). The counterpart of ``communication.servers`` and ``costs``."""

from __future__ import annotations

from soap.simulator.compiled.communication import MISSING, REDUCE_TRAFFIC, nanoseconds, seek_list
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import PRICES, Scratch
from soap.simulator.compiled.state import LOW_BITS, ShardTables
from soap.simulator.compiled.world import World


@compiled
def adding_ns(added: int, rows: int, bandwidth: float, row_seconds: float) -> int:
    """The counterpart of ``servers.adding_ns``."""
    return nanoseconds(added * REDUCE_TRAFFIC / bandwidth + rows * row_seconds) if added > 0 else 0


@compiled
def table_price_ns(W: World, owner: int, rows_bytes: int, table_bytes: int) -> int:
    """The counterpart of ``costs.table_update_ns``. ``owner``: as in ``ShardTables.price``, without the addition for rows."""
    K, D, S = W.cluster, W.shards, W.scratch
    of_rows = owner + K.hosts[0] + D.update_ns.shape[0]
    return price_ns(D, S, of_rows, rows_bytes if D.rows_alone[0] else table_bytes)


@compiled
def price_ns(D: ShardTables, S: Scratch, owner: int, size: int) -> int:
    """Nanoseconds to update ``size`` bytes. ``owner``: as in ``ShardTables.price``. If the price is not known yet, returns 0 and
    ``count[PRICES]`` grows; ``ask_prices`` must be called later."""
    missing = S.count[PRICES]
    if missing + 4 > len(D.price.missing):
        return 0
    entry = D.price.missing[1 + missing : 4 + missing]  # built in place: it stays there if it is missing
    entry[0], entry[1], entry[2] = owner, size >> LOW_BITS, size & ((1 << LOW_BITS) - 1)
    found = seek_list(D.price, entry)
    if found >= 0:
        return D.price_ns[found]
    S.count[PRICES] = missing + 3
    return 0


@compiled
def ask_prices(D: ShardTables, S: Scratch) -> None:
    """LookupError if some prices were not known; all of these are then in ``price.missing``."""
    if S.count[PRICES] > 0:
        D.price.missing[0] = S.count[PRICES]
        S.count[PRICES] = 0
        raise LookupError(MISSING)
