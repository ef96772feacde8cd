"""1F1B: one forward pass, one backward pass. PipeDream's steady state (Narayanan et al., 1806.03377) with a flush at the end of the step
(PipeDream-Flush, 2006.09503).

Stage s of S begins with min(M, S - 1 - s) forward passes, then takes turns. With stages of equal time the bubble is GPipe's,
(S - 1) / (M + S - 1), but only min(M, S - s) micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.schedules.contract import Schedule, Shape, stage_by_stage
from soap.schedules.table import Action


def alternating(shape: Shape, stage: int) -> Iterator[Action]:
    """The actions of a stage; backward passes whole."""
    warm_up = min(shape.microbatches, shape.stages - 1 - stage)
    for microbatch in range(warm_up):
        yield Action("F", stage, microbatch)
    for microbatch in range(shape.microbatches):
        if microbatch + warm_up < shape.microbatches:
            yield Action("F", stage, microbatch + warm_up)
        yield Action("B", stage, microbatch)


SCHEDULE = Schedule(
    name="1f1b", summary="one forward pass, one backward pass; GPipe's bubble with less memory", actions=stage_by_stage(alternating)
)
