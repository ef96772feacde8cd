"""Interleaved 1F1B (Narayanan et al., 2104.04473, section 2.2): each of S stages has v chunks, so that the pipeline fills v times as fast.

With chunks of equal time and M a multiple of S the bubble is (S - 1) / (v M + S - 1) of the step: the paper's (1 / v) (S - 1) / M of the
ideal time. Stage s begins with (v - 1) R + 2 (S - 1 - s) forward passes, where R = S.

Micro-batches go in rounds: a stage takes all of a round through its first chunk, then through its second. If S does not divide M there are
max(1, M // S) rounds whose sizes differ by one at most, the larger first, and R is the largest of them. (Torch has these rounds, too, but
only equal ones.) Then more is in flight, and the bubble is longer.
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.schedules.contract import Schedule, Shape, stage_by_stage
from soap.schedules.table import MOST_CHUNKS, Action


def round_sizes(stages: int, microbatches: int) -> list[int]:
    """How many micro-batches go together, round by round."""
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _actions(shape: Shape, stage: int) -> Iterator[Action]:
    sizes = round_sizes(shape.stages, shape.microbatches)
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    chunks, start = shape.chunks_of(stage), 0
    for size in sizes:
        own = range(start, start + size)
        forward += [(chunk, microbatch) for chunk in chunks for microbatch in own]
        backward += [(chunk, microbatch) for chunk in reversed(chunks) for microbatch in own]
        start += size
    warm_up = min((shape.chunks - 1) * sizes[0] + 2 * (shape.stages - 1 - stage), len(forward))
    for chunk, microbatch in forward[:warm_up]:
        yield Action("F", chunk, microbatch)
    for i, (chunk, microbatch) in enumerate(backward):
        if i + warm_up < len(forward):
            yield Action("F", *forward[i + warm_up])
        yield Action("B", chunk, microbatch)


SCHEDULE = Schedule(
    name="interleaved",
    summary="1F1B with several chunks on each stage; a shorter bubble for more messages and memory",
    actions=stage_by_stage(_actions),
    fewest_chunks=2,
    most_chunks=MOST_CHUNKS,
)
