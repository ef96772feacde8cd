"""What stages keep of micro-batches between their passes. It follows from the order alone, as a stage does one action after the other."""

from __future__ import annotations

from collections.abc import Sequence

from soap.schedules.table import WEIGHTS, WORK, Table


def in_flight(table: Table) -> tuple[int, ...]:
    """Of each stage, the most micro-batches, over all of its chunks, that have begun F and not yet ended B or I."""
    ones, zeros = [1] * table.chunk_count, [0] * table.chunk_count
    return peaks(table, ones, zeros)


def awaiting_weights(table: Table) -> tuple[int, ...]:
    """Of each stage, the most micro-batches, over all of its chunks, that have ended I and not yet W."""
    ones, zeros = [1] * table.chunk_count, [0] * table.chunk_count
    return peaks(table, zeros, ones)


def peaks(table: Table, activation_bytes: Sequence[int], weight_bytes: Sequence[int]) -> tuple[int, ...]:
    """Of each stage, the most that it keeps at once for micro-batches.

    ``activation_bytes``: by chunk, what a micro-batch keeps from F to the end of B or I. ``weight_bytes``: by chunk, what it keeps between
    I and the end of W.
    """
    found = []
    for actions in table.stages:
        kept = most = 0
        last = {action[1:]: place for place, action in enumerate(actions) if not {*WEIGHTS}.isdisjoint(WORK[action.kind].shares)}
        for place, (kind, chunk, microbatch) in enumerate(actions):
            shares = WORK[kind].shares
            kept += (("forward" in shares) - ("inputs" in shares)) * activation_bytes[chunk]
            kept += (("inputs" in shares) - (last.get((chunk, microbatch)) == place)) * weight_bytes[chunk]
            most = max(most, kept)
        found.append(most)
    return tuple(found)
