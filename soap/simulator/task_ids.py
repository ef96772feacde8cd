"""Ids of tasks: which of several that are ready at the same time is taken first. How many of a kind can be told apart.

An id is (phase, position, stage, tile, operand, piece), ``position`` that of an operator, parameter or device, and behind that the chunk
of a communication that has several. The reference compares these
tuples as they are. Compiled code packs them into two whole numbers, each of which would tell a number that is too large for its bits as
another one; so both refuse it. There is room for a micro-batch, between phase and position.
"""

from __future__ import annotations

from collections.abc import Sequence

from soap.errors import ModelError

PHASES, MICRO_BATCHES, POSITIONS, STAGES, TILES = 1 << 4, 1 << 14, 1 << 20, 1 << 3, 1 << 22
"""In the first number, highest first: 63 bits. All limits are powers of two."""
OPERANDS, PIECES, CHUNKS = 1 << 20, 1 << 24, 1 << 8
"""In the second: 52 bits."""

LIMITS = {"phase": PHASES, "position": POSITIONS, "stage": STAGES, "tile": TILES, "operand": OPERANDS, "piece": PIECES, "chunk": CHUNKS}
"""How many there may be of each part of an id, in the order of the parts."""

UNNUMBERED = "a task's id does not fit into its numbers"
"""What compiled code raises instead (ValueError)."""


def check_id(parts: Sequence[int]) -> None:
    """ModelError if some part of a task's id is none of those that can be told apart. Ids of fewer parts are as if the others were 0."""
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
