"""For each method of synchronization the configurations that its conformance is tried with; a method without an entry fails the suites."""

from __future__ import annotations

from dataclasses import replace

from soap.strategy.compression import Bf16, Chunked, Int8, PowerSgd, Rgc, RgcAsq
from soap.strategy.config import SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, SPARSE_ALL_GATHER, compressed, parameter_server

COMPRESSED = (
    Rgc(),
    Rgc(density=0.3, selection="exact"),
    Rgc(density=0.5, selection="sampled"),
    Rgc(density=0.3, selection="search", ragged=True),
    RgcAsq(density=0.1),
    Chunked(),
    PowerSgd(rank=3),
    Bf16(),
    Int8(),
)
"""Compressions of every method."""

STATE_IN_HOSTS = replace(SHARDED_STATE, within="host")

CASES: dict[str, tuple[SyncConfig, ...]] = {
    "all_reduce": (SyncConfig(), SyncConfig(offload=True)),
    "sparse_all_gather": (SPARSE_ALL_GATHER,),
    "parameter_server": tuple(parameter_server(count, within) for count in (1, 2, 7) for within in ("none", "host")),
    "compressed": (*map(compressed, COMPRESSED), *(compressed(how, "host") for how in (COMPRESSED[1], PowerSgd(rank=3), Int8()))),
    "sharded_state": tuple(replace(sync, offload=away) for sync in (SHARDED_STATE, STATE_IN_HOSTS) for away in (False, True)),
    "sharded": tuple(replace(sync, offload=away) for sync in (SHARDED, SHARDED_IN_HOSTS) for away in (False, True)),
    "row_server": tuple(parameter_server(count, within, rows=True) for count in (1, 3, 40) for within in ("none", "host")),
}
