"""GPipe (Huang et al., 1811.06965, section 2.3): all forward passes, then all backward passes.

With S stages of equal time and M micro-batches the bubble is (S - 1) / (M + S - 1) of the step. All M micro-batches are in flight. With v
chunks on each stage this is the breadth-first schedule (Lamy-Poirier, 2211.05953), whose bubble is (S - 1) / (v M + S - 1) if M >= S.

As all micro-batches pass a chunk before any goes on to the next, operators that couple samples are possible anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.schedules.contract import PLACEMENTS, Schedule, Shape, stage_by_stage
from soap.schedules.table import MOST_CHUNKS, Action


def _actions(shape: Shape, stage: int) -> Iterator[Action]:
    chunks = shape.chunks_of(stage)
    for chunk in chunks:
        for microbatch in range(shape.microbatches):
            yield Action("F", chunk, microbatch)
    for chunk in reversed(chunks):
        for microbatch in range(shape.microbatches):
            yield Action("B", chunk, microbatch)


SCHEDULE = Schedule(
    name="gpipe",
    summary="all forward passes, then all backward passes; operators may couple samples",
    actions=stage_by_stage(_actions),
    most_chunks=MOST_CHUNKS,
    placements=PLACEMENTS,
    meets_barriers=True,
)
