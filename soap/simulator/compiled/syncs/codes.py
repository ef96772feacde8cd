"""A parameter's synchronization as one whole number, its code: what ``State`` holds and the search proposes.

A code has what compiled code needs of a method's contract, so that no code asks which method it is. From the lowest bit on: whether rows
travel; whether servers own the parameter; whether local aggregation is used; whether gradients are compressed; whether readers own parts;
whether they have values only for their uses; whether owners update in their host's memory; the method's number; partitions less one, or,
of a compression, its number (``SyncCodes``). The default, an all-reduce, is 0.
"""

from __future__ import annotations

from threading import Lock

import numpy as np

from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.simulator.compiled.graph_arrays import Ints
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.state import State
from soap.strategy.compression import Compression
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync_contracts import METHODS

BY_ROWS, SERVED, LOCAL, COMPRESSED, PARTED, GATHERED, OFFLOADED = (1 << bit for bit in range(7))
_METHOD, _PARTITIONS = 7, 11
"""The flags, and the lowest bit of each other part of a code."""

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
        code = number << _PARTITIONS | METHODS.index(contract) << _METHOD
        code |= BY_ROWS * contract.by_rows | SERVED * contract.has_servers | LOCAL * (sync.within == "host") | OFFLOADED * sync.offload
        code |= COMPRESSED * contract.compresses | PARTED * (contract.owner == "parts") | GATHERED * contract.gathers_values
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
def first_with(C: State, flag: int) -> int:
    """The first parameter whose code has a flag; -1 if none has it."""
    for parameter in range(len(C.sync) - 1):
        if C.sync[parameter] & flag:
            return parameter
    return -1
