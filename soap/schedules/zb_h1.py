"""ZB-H1 (Qi et al., 2401.10241, section 2.1): 1F1B whose weight gradients are put off until stages would wait.

Stage s of S does s backward passes before its first weight gradients, and keeps that distance. With stages of equal time, T_W at most T_F
and T_B (of the inputs' gradients), and M >= S, all stages are idle for (S - 1)(T_F + T_B - T_W) of the step (table 2 there), where 1F1B
has (S - 1)(T_F + T_B + T_W). In flight are min(M, S - s) micro-batches between F and I, as under 1F1B, and s more between I and W (s + 1
while one begins its W), which keep what weight gradients need.
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.schedules.contract import Schedule, Shape, stage_by_stage
from soap.schedules.one_f_one_b import alternating
from soap.schedules.table import Action


def _actions(shape: Shape, stage: int) -> Iterator[Action]:
    for action in alternating(shape, stage):
        if action.kind == "F":
            yield action
            continue
        yield Action("I", stage, action.microbatch)
        if action.microbatch >= stage:
            yield Action("W", stage, action.microbatch - stage)
    for microbatch in range(max(0, shape.microbatches - stage), shape.microbatches):
        yield Action("W", stage, microbatch)


SCHEDULE = Schedule(
    name="zb-h1",
    summary="1F1B with weight gradients apart, which fill a part of the bubble",
    actions=stage_by_stage(_actions),
)
