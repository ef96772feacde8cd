"""How much of the devices' memory plans may use: what a GPU's process leaves of it, and as people write it: ``80%`` of each device's, or
``20GB`` of it."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from soap.cluster.topology import Topology
from soap.errors import TopologyError, asked
from soap.units import format_bytes, parse_bytes

FIELD = "memory_budget"
EXPECTED = "a share of each device's memory, such as 80%, or a size such as 20GB"
CONTEXT_BYTES = 1_290_000_000
"""A process's CUDA context, its kernels, and the handles of cuBLAS and cuDNN. Measured on an H200 with torch 2.11 and CUDA 13: 137.02 GiB
in use, of which the allocator had 135.81 (``benchmarks/gpu/results/failures.json``)."""

CHANNEL_BYTES = 2**22 + 512 * 8 * 8 * 16 + 640 * 120 * 8 * 8
"""NCCL's buffer of a connection on a channel: of the protocols Simple, LL and LL128 (``DEFAULT_BUFFSIZE`` and its neighbours in
https://github.com/NVIDIA/nccl/blob/master/src/init.cc)."""
CHANNELS, CONNECTIONS, COMMUNICATORS = 16, 2, 3
"""Of a communicator, with what a ring and a tree receive each; and communicators of a GPU: by data, by matrices, by stages. Assumed: NCCL
takes 2 to 32 channels, and as many connections as a tree has neighbours."""

_PERCENT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*%\s*", re.ASCII)


def left_by_process(total_bytes: int) -> int:
    """Bytes that tensors may take of a GPU's memory, of which its driver reports so many: without the context, and without buffers of NCCL;
    at least half of it. What the allocator holds beyond tensors is part of ``sweep.ALLOWANCE``."""
    taken_bytes = CONTEXT_BYTES + COMMUNICATORS * CONNECTIONS * CHANNELS * CHANNEL_BYTES
    return max(total_bytes - taken_bytes, total_bytes // 2)


def read_budget(text: str) -> Fraction | int:
    """The share of a device's memory, or the bytes of it, that a text states. TopologyError in one line if it is neither."""
    percent = _PERCENT.fullmatch(text)
    if percent is None and "%" not in text:
        size_bytes = parse_bytes(text, asked(FIELD))
        if size_bytes < 1:
            raise TopologyError(f"{asked(FIELD)} {text!r}: nothing fits into that; expected {EXPECTED}")
        return size_bytes
    share = Fraction(percent[1]) / 100 if percent is not None else Fraction(0)
    if not 0 < share <= 1:
        raise TopologyError(f"{asked(FIELD)} {text[:80]!r}: expected {EXPECTED}: a share is above 0% and at most 100%")
    return share


def with_memory_budget(topology: Topology, text: str | None) -> Topology:
    """The same cluster, on each device of which plans may use so much memory at most; as it is if ``text`` is None.

    A size holds for each device; one with less memory has all of it. TopologyError in one line if no device has so much, or the text is no
    budget.
    """
    if text is None:
        return topology
    budget, have = read_budget(text), topology.memory_limits
    if isinstance(budget, Fraction):
        return replace(topology, limits=tuple([max(1, int(budget * own)) for own in have]))
    if budget > max(have):
        most = format_bytes(max(have))
        raise TopologyError(f"{asked(FIELD)} {text!r}: no device of cluster {topology.name!r} has more than {most}; expected at most that")
    return replace(topology, limits=tuple([min(budget, own) for own in have]))
