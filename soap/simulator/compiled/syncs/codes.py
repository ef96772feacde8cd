"""How a parameter is synchronized, as one whole number: what ``State`` keeps and the search proposes.

It holds what compiled code asks of a method's contract, so that nothing asks which method it is: from the lowest bit on whether rows
travel, whether servers keep it, whether hosts deal with others together, bits of an element on its way (0: as wide as it is), the method's
number, and partitions less one. The default, an all-reduce, is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from soap.model.graph import OperatorGraph
from soap.simulator.compiled.graph_arrays import Ints
from soap.simulator.compiled.jit import compiled
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.methods import METHODS

FIELDS = ("owner", "payload", "residence", "within", "partitions")
"""What of a ``SyncConfig`` a number says. Two synchronizations that differ in something else would be one to compiled code."""

_ROWS, _SERVERS, _HOSTS, _WIRE, _METHOD, _PARTITIONS = 0, 1, 2, 3, 11, 17
"""First bits of what a code holds."""


def sync_codes(graph: OperatorGraph, strategy: Strategy) -> Ints:
    """[parameter]: the number of its synchronization."""
    return np.array([sync_code(strategy.sync(tensor.name)) for tensor in graph.parameters], np.int32)


def sync_code(sync: SyncConfig) -> int:
    """The number of a synchronization."""
    contract = sync.contract
    code = (sync.partitions - 1) << _PARTITIONS | METHODS.index(contract) << _METHOD | (contract.wire_bits or 0) << _WIRE
    return code | (sync.within == "host") << _HOSTS | contract.has_servers << _SERVERS | contract.by_rows << _ROWS


def sync_of(code: int) -> SyncConfig:
    """The synchronization of which that is the number."""
    contract = METHODS[code >> _METHOD & 63]
    within = contract.within[code >> _HOSTS & 1]
    return SyncConfig(contract.owner, contract.payload, contract.residence, within, 1 + (code >> _PARTITIONS))


def known_sync(code: int, held: SyncConfig, choices: Iterable[SyncConfig]) -> SyncConfig:
    """The same, but as it is known: what is held, if that has the number, else the choice that has it. These may say more than a number."""
    return next((sync for sync in (held, *choices) if sync_code(sync) == code), sync_of(code))


@compiled
def travels_by_rows(code: int) -> bool:
    """Whether of a parameter just the rows that are looked up travel."""
    return code & 1 == 1


@compiled
def has_server(code: int) -> bool:
    """Whether parameter servers keep it, where they keep anything of it."""
    return code >> _SERVERS & 1 == 1


@compiled
def gathers_rows(code: int) -> bool:
    """Whether readers give each other rows."""
    return code & 3 == 1


@compiled
def sums_in_place(code: int) -> bool:
    """Whether readers sum dense gradients in buffers."""
    return code & 3 == 0


@compiled
def partitions_of(code: int) -> int:
    """Into how many partitions a server's regions are cut at most."""
    return 1 + (code >> _PARTITIONS)


@compiled
def is_local(code: int) -> bool:
    """Whether a host's devices deal with servers together."""
    return code >> _HOSTS & 1 == 1


@compiled
def method_of(code: int) -> int:
    """The method's place in the registry: what is summed in one buffer has one."""
    return code >> _METHOD & 63


@compiled
def is_as_it_travels(code: int) -> bool:
    """Whether what is summed in place travels as it is kept."""
    return code >> _WIRE & 255 == 0


@compiled
def wire_bytes(code: int, gradient_bytes: int, itemsize: int) -> int:
    """What so many bytes of gradients take on their way: ``plan.syncs.buckets.wire_bytes``."""
    bits = code >> _WIRE & 255
    return gradient_bytes if bits == 0 else (gradient_bytes // itemsize * bits + 7) // 8
