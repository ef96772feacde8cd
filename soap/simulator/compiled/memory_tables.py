"""What the compiled bound of memory knows of variants, parameters and devices, and what it works on."""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.graph_arrays import Ints, Longs

KEPT, READ, GRADIENTS, PARAMETER_GRADIENTS, REGIONS, COMPACT, LOOKUPS = range(7)
COLUMNS = 7
"""Columns of ``MemoryTables.rows``: where in ``data`` stand, by tile, the bytes that it keeps, those of its copies of parts of the batch,
those of its gradients, those of its parameters' gradients; and by [parameter operand, tile] the number of the region that it needs (-1:
nothing), and if some are sparse the bytes of the rows of it that it looks up at most, and how many look-ups there are (else -1)."""

HELD, TRAINABLE, ACTIVATIONS, COLLECTED, SENT, LARGEST_SUM, LARGEST_SHARD, LARGEST_TILE, LARGEST_ADDED, LARGEST_GRADIENT = range(10)
DOUBTFUL, HELD_DOUBTFUL, TRAINABLE_DOUBTFUL, COLLECTED_DOUBTFUL, LARGEST_SURE_GRADIENT = range(10, 15)
PARTS = 15
"""Rows of ``MemoryTables.part``, each by device. ``DOUBTFUL``: what of the activations may be there only once; the others likewise;
``LARGEST_SURE_GRADIENT``: without parameters of which tiles may have rows only."""

FITS, UNKNOWN, LACKING = range(3)
"""What the bounds say of a strategy: every device has as much as it needs at most; neither; some device has not what it needs at least."""


class MemoryTables(NamedTuple):
    """``rows``: by variant. ``region_volume``: elements, by region of a parameter. ``cut[cut_ptr[variant] + operand]``: into which regions
    a parameter operand is cut, as a number. ``cut_volume``: elements of these regions in all; -1 if they overlap. ``user``,
    ``user_operand``: by parameter, from ``user_ptr`` on: operators that use it, and as which of their parameter operands.
    ``elements``, ``itemsize``, ``trainable``, ``row_bytes``: by parameter. ``operand[operand_ptr[op]:]``: an operator's parameter operands,
    as numbers of parameters. ``fixed``: bytes of the batch and of constants, which all devices have;
    states of the optimizer per parameter. ``limit``: bytes, by device.

    Work: ``part`` (see its rows), ``step``: [device, operator], changes of the gradients that wait between operators; ``seen``: a stamp,
    then [region, device]; ``looked_up``: by device; ``total``, ``least``: bytes that each device needs at most, and at least.
    """

    rows: Longs
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
    part: Longs
    step: Longs
    seen: Longs
    looked_up: Longs
    total: Longs
    least: Longs
