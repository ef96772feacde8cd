"""Tables of the compiled memory bound: variants, parameters, devices, and its working arrays."""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.graph_arrays import Ints, LongRows, Longs

KEPT, READ, GRADIENTS, PARAMETER_GRADIENTS, REGIONS, COMPACT, LOOKUPS, MADE, PRODUCTS, PARTIALS = range(10)
COLUMNS = 10
"""Columns of ``MemoryTables.rows``: where values begin in ``data``.

By tile: bytes that it keeps (``KEPT``), of its copies of parts of the batch (``READ``), of its gradients, of its parameters' gradients. By
[parameter operand, tile]: number of the region that it needs, -1 if none (``REGIONS``). If an operand is sparse, also by [parameter
operand, tile]: bytes of the rows that it looks up at most (``COMPACT``), and the number of look-ups (``LOOKUPS``); else these columns are
-1. By tile: bytes of its outputs (``MADE``), which are there twice for a while if it is recomputed, and of what its products make beside
them (``PRODUCTS``), which is kept if they are; and of outputs that are parts of sums and that autograd does not keep (``PARTIALS``)."""

HELD, TRAINABLE, ACTIVATIONS, COLLECTED, SENT, LARGEST_SUM, LARGEST_SHARD, LARGEST_TILE, LARGEST_ADDED, LARGEST_GRADIENT = range(10)
SENT_BETWEEN, LARGEST_SENT, COLLECTED_TWICE, COLLECTED_AT_ONCE, ASSEMBLED = range(10, 15)
PARTS = 15
"""Rows of ``MemoryTables.part``, each by device, in bytes. ``HELD`` makes up for the optimizer's states of parts that others own, which
``TRAINABLE`` includes.

What ``ordered_memory`` counts otherwise is by itself: ``SENT_BETWEEN``, what is sent between operators, and ``LARGEST_SENT``, what goes or
comes together of that, at most; ``COLLECTED_TWICE``, sums of gradients of regions that several tiles read, and ``COLLECTED_AT_ONCE``, of
these, where two are of one micro-batch; ``ASSEMBLED``, the part of activations that are regions of parameters."""

FITS, UNKNOWN = range(2)
"""Verdicts of the bound. FITS: every device has as much as it needs at most. UNKNOWN: some device has less, and may fit."""


class MemoryTables(NamedTuple):
    """Tables, and working arrays, of the memory bound.

    ``rows``: by variant (see its columns). ``region_volume``: elements, by region of a parameter. ``cut[cut_ptr[variant] + operand]``: the
    number of the set of regions into which a parameter operand is cut. ``cut_volume``: elements of these regions together; -1 if they
    overlap. ``user``, ``user_operand``: by parameter, from ``user_ptr`` on: the operators that use it, and as which of their parameter
    operands. ``elements``, ``itemsize``, ``trainable``, ``row_bytes``: by parameter. ``operand[operand_ptr[op]:]``: an operator's parameter
    operands, as numbers of parameters. ``fixed``: bytes of the batch and of constants that a device holds at most; states of the optimizer
    per parameter; whether hosts may lack memory for servers, and for what devices keep there. ``limit``: bytes of memory, by device.

    Working arrays. ``part``: see its rows. ``step``: [device, operator], changes of the bytes of gradients that wait between operators.
    ``seen``: a stamp, then [region, device]. ``seen_by``: the same places, user and micro-batch of the last tile that reads the region.
    ``looked_up``: rows, by device. ``total``: the bound, in bytes by device.
    """

    rows: LongRows
    data: Longs
    cut: Ints
    cut_ptr: Longs
    cut_volume: Longs
    region_volume: Longs
    user_ptr: Ints
    user: Ints
    user_operand: Ints
    elements: Longs
    itemsize: Longs
    trainable: Ints
    row_bytes: Longs
    operand_ptr: Ints
    operand: Ints
    fixed: Longs
    limit: Longs
    part: LongRows
    step: Longs
    seen: Longs
    seen_by: Longs
    looked_up: Longs
    total: Longs
