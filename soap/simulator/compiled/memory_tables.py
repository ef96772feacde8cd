"""Tables of the compiled memory bound: variants, parameters, devices, and its working arrays."""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.graph_arrays import Ints, LongRows, Longs

KEPT, READ, GRADIENTS, PARAMETER_GRADIENTS, REGIONS, COMPACT, LOOKUPS, SURELY_KEPT, MADE, PRODUCTS, PARTIALS = range(11)
COLUMNS = 11
"""Columns of ``MemoryTables.rows``: where values begin in ``data``.

By tile: bytes that it keeps (``KEPT``), of its copies of parts of the batch (``READ``), of its gradients, of its parameters' gradients. By
[parameter operand, tile]: number of the region that it needs, -1 if none (``REGIONS``). If an operand is sparse, also by [parameter
operand, tile]: bytes of the rows that it looks up at most (``COMPACT``), and the number of look-ups (``LOOKUPS``); else these columns are
-1. By tile: bytes that are certainly there when the loss is known (``SURELY_KEPT``; not
if it is recomputed), of its outputs (``MADE``), which are there twice for a while if it is recomputed, and of what its products make
beside them (``PRODUCTS``), which is kept if they are; and of outputs that are parts of sums and that autograd does not keep
(``PARTIALS``)."""

HELD, TRAINABLE, ACTIVATIONS, COLLECTED, SENT, LARGEST_SUM, LARGEST_SHARD, LARGEST_TILE, LARGEST_ADDED, LARGEST_GRADIENT = range(10)
DOUBTFUL, HELD_DOUBTFUL, TRAINABLE_DOUBTFUL, COLLECTED_DOUBTFUL, LARGEST_SURE_GRADIENT, SURE, LEAVING = range(10, 17)
SENT_BETWEEN, LARGEST_SENT, COLLECTED_TWICE, COLLECTED_AT_ONCE, ASSEMBLED = range(17, 22)
PARTS = 22
"""Rows of ``MemoryTables.part``, each by device, in bytes. ``DOUBTFUL``: the part of activations (and of ``SENT``) that the lower bound
leaves out, because it may be counted twice; the other ``_DOUBTFUL`` rows likewise. ``LARGEST_SURE_GRADIENT``: ``LARGEST_GRADIENT`` without
parameters of which tiles may have rows only. ``SURE``: what is certainly there when the loss is known. ``LEAVING``: gradients of parts that
others own; ``HELD`` makes up for the optimizer's states of these, which ``TRAINABLE`` includes.

What ``ordered_memory`` counts otherwise is by itself: ``SENT_BETWEEN``, what is sent between operators, and ``LARGEST_SENT``, what goes or
comes together of that, at most; ``COLLECTED_TWICE``, sums of gradients of regions that several tiles read, and ``COLLECTED_AT_ONCE``, of
these, where two are of one micro-batch; ``ASSEMBLED``, the part of activations that are regions of parameters."""

MOST_GIVEN, LEAST_GIVEN, USUALLY_GIVEN = 0, 5, 6
"""Places in ``MemoryTables.fixed``."""

FITS, UNKNOWN, LACKING, LIKELY, UNLIKELY = range(5)
"""Verdicts of the bounds. FITS: every device has its upper bound. LACKING: some device has less than it certainly needs, whatever the
order. UNKNOWN: neither; then ``memory_estimate`` may say LIKELY or UNLIKELY to fit."""

WHOLE = 1 << 20
"""Shares of a limit are whole numbers; this is all of it."""

FIT_UP_TO, LACKED_FROM, SLACK, ASKED_AT = range(4)
"""Places in ``MemoryTables.guess``, in parts of ``WHOLE``. ``FIT_UP_TO``: the highest estimate of a strategy that fits; ``LACKED_FROM``:
the lowest of one that does not. ``SLACK``: how far above that it is still worth asking about what would be the best. ``ASKED_AT``: the last
estimate."""


class MemoryTables(NamedTuple):
    """Tables, and working arrays, of the memory bound.

    ``rows``: by variant (see its columns). ``region_volume``: elements, by region of a parameter. ``cut[cut_ptr[variant] + operand]``: the
    number of the set of regions into which a parameter operand is cut. ``cut_volume``: elements of these regions together; -1 if they
    overlap. ``user``, ``user_operand``: by parameter, from ``user_ptr`` on: the operators that use it, and as which of their parameter
    operands. ``elements``, ``itemsize``, ``trainable``, ``row_bytes``: by parameter. ``operand[operand_ptr[op]:]``: an operator's parameter
    operands, as numbers of parameters. ``fixed``: (bytes of the batch and of constants that a device holds at most,
    ``MOST_GIVEN``; states of the optimizer per parameter; whether the order that is played decides; whether hosts may lack memory for
    servers, and for what devices keep there; as the first, at least and on average, ``LEAST_GIVEN`` and ``USUALLY_GIVEN``: they differ if
    devices hold only the samples that they read). ``limit``: bytes of memory, by device.

    Working arrays. ``part``: see its rows. ``step``: [device, operator], changes of the bytes of gradients that wait between operators.
    ``seen``: a stamp, then [region, device]. ``seen_by``: the same places, user and micro-batch of the last tile that reads the region.
    ``looked_up``: rows, by device. ``total``, ``least``: upper and lower limit, in bytes by device, of the bound for any order.
    ``certain``: a lower bound of the peak that decides (``peaks.lacking_bytes``).

    Of estimates (``memory_estimate``): ``guess``, see its places; ``level``, ``highest``, ``dropped``, by device: bytes of activations now
    and at most, and of what the next tile still reads; ``leaves``, by operator: whether one reads what it makes that is not recomputed.
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
    least: Longs
    certain: Longs
    guess: Longs
    level: Longs
    highest: Longs
    dropped: Longs
    leaves: Ints
