"""Ids of tasks as two whole numbers (compiled): see ``soap.simulator.tasks``."""

from __future__ import annotations

from soap.simulator.compiled.jit import compiled
from soap.simulator.tasks import CHUNKS, MICRO_BATCHES, OPERANDS, PHASES, PIECES, POSITIONS, STAGES, TILES, UNNUMBERED

STATE_FULL = "the state is full"
"""Message of the MemoryError that compiled code raises when the state's arrays are too small."""

FORWARD, BACKWARD, SYNC, UPDATE = range(4)
"""Phases, as in ``lowering``."""


@compiled
def task_key(phase: int, position: int, stage: int, a: int, b: int, c: int, chunk: int = 0) -> tuple[int, int]:
    """A task's id as two numbers that order like the id's parts: see ``soap.simulator.tasks``. ValueError if a part is too large."""
    above = phase // PHASES | position // POSITIONS | stage // STAGES | a // TILES | b // OPERANDS | c // PIECES | chunk // CHUNKS
    if above:  # not 0 if some part is too large, or negative
        raise ValueError(UNNUMBERED)
    return packed(phase, position, stage, a, b, c, chunk)


@compiled
def packed(phase: int, position: int, stage: int, a: int, b: int, c: int, chunk: int) -> tuple[int, int]:
    """``task_key`` of parts that are known to be small enough."""
    return ((phase * MICRO_BATCHES * POSITIONS + position) * STAGES + stage) * TILES + a, (b * PIECES + c) * CHUNKS + chunk


@compiled
def phase_of(key: int) -> int:
    """The first part of an id, of the first number that ``task_key`` makes of it."""
    return key // (MICRO_BATCHES * POSITIONS * STAGES * TILES)


@compiled
def stage_of(key: int) -> int:
    """The third part of an id."""
    return key // TILES % STAGES


@compiled
def set_key(C, slot, key):  # type: ignore[no-untyped-def]
    """Set a slot's key to what ``task_key`` has returned."""
    C.key[slot], C.subkey[slot] = key
