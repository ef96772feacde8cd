"""A parameter's synchronization as one whole number, its code: what ``State`` holds and the search proposes.

A code has what compiled code needs of a method's contract, so that no code asks which method it is. From the lowest bit on: whether rows
travel; whether servers own the parameter; whether local aggregation is used; whether gradients are compressed; whether readers own parts;
whether they have values only for their uses; whether owners update in their host's memory; bits of an element on its way (0: as many as
its type has); the method's number; partitions less one, or, of a compression, its number (``SyncCodes``). The default, an all-reduce, is 0.
"""

from __future__ import annotations

from threading import Lock

import numpy as np

from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.simulator.compiled.graph_arrays import Ints
from soap.simulator.compiled.jit import compiled
from soap.strategy.compression import Compression
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync_contracts import METHODS

FIELDS = ("owner", "payload", "residence", "within", "partitions", "compression", "offload")
"""The fields of a ``SyncConfig``, all of which are in its code."""

_ROWS, _SERVERS, _HOSTS, _COMPRESSED, _PARTS, _GATHERED, _OFFLOAD, _WIRE, _METHOD, _PARTITIONS = 0, 1, 2, 3, 4, 5, 6, 7, 15, 19
"""The lowest bit of each part of a code."""

MOST_SETTINGS = 1 << 12


class SyncCodes:
    """Codes for the engines of one ``Shared``, in which compressions are numbered as they come. Threads may ask at the same time."""

    def __init__(self) -> None:
        self._settings: dict[Compression, int] = {}
        self._known: dict[SyncConfig, int] = {}
        self._syncs = {0: SyncConfig()}
        self._lock = Lock()

    def of_parameters(self, graph: OperatorGraph, strategy: Strategy) -> Ints:
        """[parameter]: the code of its synchronization."""
        return np.array([self.code(strategy.sync(tensor.name)) for tensor in graph.parameters], np.int32)

    def code(self, sync: SyncConfig) -> int:
        """The code of a synchronization. StrategyError if there are too many compressions."""
        known = self._known.get(sync)
        if known is not None:
            return known
        contract, number = sync.contract, sync.partitions - 1
        if sync.compression is not None:
            number = self.settings_number(sync.compression)
        code = number << _PARTITIONS | METHODS.index(contract) << _METHOD | (contract.wire_bits or 0) << _WIRE
        code |= sync.offload << _OFFLOAD | contract.compresses << _COMPRESSED
        code |= (contract.owner == "parts") << _PARTS | contract.gathers_values << _GATHERED
        code |= (sync.within == "host") << _HOSTS | contract.has_servers << _SERVERS | contract.by_rows << _ROWS
        self._known[sync], self._syncs[code] = code, sync
        return code

    def settings_number(self, compression: Compression) -> int:
        """The number of a compression. StrategyError if there are too many."""
        with self._lock:
            number = self._settings.get(compression, len(self._settings))
            if number >= MOST_SETTINGS:
                raise StrategyError(
                    f"more than {MOST_SETTINGS} settings of compression for one model on one cluster; expected fewer densities and ranks"
                )
            self._settings[compression] = number
        return number

    def compression(self, number: int) -> Compression:
        """The compression that was given this number."""
        return list(self._settings)[number]

    def sync(self, code: int) -> SyncConfig:
        """The synchronization that was given this code."""
        return self._syncs[code]


@compiled
def travels_by_rows(code: int) -> bool:
    """Whether only the rows that are looked up travel."""
    return code & 1 == 1


@compiled
def has_server(code: int) -> bool:
    """Whether parameter servers own the parameter."""
    return code >> _SERVERS & 1 == 1


@compiled
def sums_in_place(code: int) -> bool:
    """Whether readers sum dense gradients in buffers."""
    return code & 27 == 0


@compiled
def is_dealt_out(code: int) -> bool:
    """Whether each of several readers owns a part."""
    return code >> _PARTS & 1 == 1


@compiled
def is_gathered(code: int) -> bool:
    """Whether readers have dense values only for their uses."""
    return code >> _GATHERED & 1 == 1


@compiled
def offloads(code: int) -> bool:
    """Whether owners keep the optimizer's state in their host's memory, and it is updated there."""
    return code >> _OFFLOAD & 1 == 1


@compiled
def is_alone(code: int) -> bool:
    """Whether each region travels by itself: by rows, or to servers and back."""
    return code & 3 != 0


@compiled
def is_compressed(code: int) -> bool:
    """Whether gradients travel compressed, where there are several peers."""
    return code & 8 == 8


@compiled
def is_local(code: int) -> bool:
    """Whether a host's devices communicate together, through one of them (local aggregation)."""
    return code >> _HOSTS & 1 == 1


@compiled
def is_as_it_travels(code: int) -> bool:
    """Whether gradients travel in the type in which they are kept."""
    return code >> _WIRE & 255 == 0


@compiled
def wire_bytes(code: int, gradient_bytes: int, itemsize: int) -> int:
    """Bytes that ``gradient_bytes`` of gradients take on their way: the counterpart of ``plan.syncs.bucketing.wire_bytes``."""
    bits = code >> _WIRE & 255
    return gradient_bytes if bits == 0 else (gradient_bytes // itemsize * bits + 7) // 8
