"""Sequential accumulation: a micro-batch goes through all chunks and back before the next one begins.

One micro-batch is in flight, and one stage works at a time; with one stage this is the usual accumulation of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.schedules.contract import PLACEMENTS, Schedule, Shape, stage_by_stage
from soap.schedules.table import MOST_CHUNKS, Action


def _actions(shape: Shape, stage: int) -> Iterator[Action]:
    chunks = shape.chunks_of(stage)
    for microbatch in range(shape.microbatches):
        for chunk in chunks:
            yield Action("F", chunk, microbatch)
        for chunk in reversed(chunks):
            yield Action("B", chunk, microbatch)


SCHEDULE = Schedule(
    name="accumulation",
    summary="one micro-batch after the other; least memory, no overlap",
    actions=stage_by_stage(_actions),
    most_chunks=MOST_CHUNKS,
    placements=PLACEMENTS,
)
