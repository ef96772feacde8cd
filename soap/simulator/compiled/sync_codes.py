"""How a parameter is synchronized, as one whole number: what ``State`` keeps and the search proposes.

All-reduce 0, allgather 1, a server's P partitions 2 P, or with local aggregation 2 P + 1. No other place knows this.
"""

from __future__ import annotations

import numpy as np

from soap.model.graph import OperatorGraph
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.tables import Ints
from soap.strategy.config import Strategy, SyncConfig

ALL_REDUCED, GATHERED = 0, 1


def sync_codes(graph: OperatorGraph, strategy: Strategy) -> Ints:
    """[parameter]: the number of its synchronization."""
    return np.array([sync_code(strategy.sync(tensor.name)) for tensor in graph.parameters], np.int32)


def sync_code(sync: SyncConfig) -> int:
    """The number of a synchronization."""
    if sync.method == "parameter_server":
        return 2 * sync.partitions + sync.local_aggregation
    return GATHERED if sync.method == "allgather" else ALL_REDUCED


def sync_of(code: int) -> SyncConfig:
    """The synchronization of which that is the number."""
    if code <= GATHERED:
        return SyncConfig("allgather" if code == GATHERED else "allreduce")
    return SyncConfig("parameter_server", code // 2, code % 2 == 1)


@compiled
def goes_by_rows(code: int) -> bool:
    """Whether of a sparse parameter just the rows that are looked up travel."""
    return code != ALL_REDUCED


@compiled
def has_server(code: int) -> bool:
    """Whether parameter servers keep it, where they keep anything of it."""
    return code > GATHERED


@compiled
def partitions_of(code: int) -> int:
    """Into how many partitions a server's regions are cut at most."""
    return code >> 1


@compiled
def is_local(code: int) -> bool:
    """Whether a host's devices deal with servers together; ``code``: one with servers."""
    return code & 1 == 1
