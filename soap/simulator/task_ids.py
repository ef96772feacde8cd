"""Ids of tasks: which of several tasks that are ready at the same time is taken first, and the limits of an id's parts.

An id is (phase, position, stage, tile, operand, piece). ``position`` is that of an operator, parameter or device. A chunk of a
communication has its number as a seventh part. The reference compares these tuples as they are. Compiled code packs them into two whole
numbers; a part that is too large for its bits would make the id of another task, so both refuse it. There is room for a micro-batch
between phase and position.
"""

from __future__ import annotations

from collections.abc import Sequence

from soap.errors import ModelError

PHASES, MICRO_BATCHES, POSITIONS, STAGES, TILES = 1 << 4, 1 << 14, 1 << 20, 1 << 3, 1 << 22
"""Limits of the parts in the first number, highest part first: 63 bits together. All limits are powers of two."""
OPERANDS, PIECES, CHUNKS = 1 << 20, 1 << 24, 1 << 8
"""Limits of the parts in the second number: 52 bits together."""

LIMITS = {"phase": PHASES, "position": POSITIONS, "stage": STAGES, "tile": TILES, "operand": OPERANDS, "piece": PIECES, "chunk": CHUNKS}
"""Each part of an id must be below its limit; in the order of the parts."""

UNNUMBERED = "a task's id does not fit into its numbers"
"""Message of the ValueError that compiled code raises for such an id."""


def check_id(parts: Sequence[int]) -> None:
    """ModelError if a part of a task's id is negative or not below its limit. An id may have fewer parts; the others are 0."""
    for (name, limit), value in zip(LIMITS.items(), parts, strict=False):
        if not 0 <= value < limit:
            raise ModelError(f"task with {name} {value}; {_EXPECTED}")


def unnumbered() -> ModelError:
    """The error for a task that compiled code cannot number."""
    return ModelError(f"a task has a number that is too large; {_EXPECTED}")


_EXPECTED = (
    f"expected fewer than {POSITIONS} operators and parameters, {TILES} tiles of each, {OPERANDS} operands or results, and {PIECES} pieces "
    "of each that are on devices of their own: make the model or the number of tiles smaller"
)
