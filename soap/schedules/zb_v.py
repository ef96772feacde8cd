"""ZB-V (Qi et al., 2401.10241, section 6; V-ZB in 2405.15362): two chunks on each stage, laid out like a V, and no bubble in 1F1B's memory.

The last chunk is on the first stage, so that backward passes begin there, too. In flight, from F to the end of W, are 2 S - 1 - s
micro-batches in the first chunk of stage s and s + 1 in the second: 2 S halves, as much as 1F1B's S. With equal times and M >= 2 S - 1 a
stage that has begun has no idle time until its end, 6 M units of half a stage later; with M >= S a step takes 6 M + S - 1.
"""

from __future__ import annotations

from functools import partial

from soap.schedules.blocks import repeated
from soap.schedules.contract import Schedule

SCHEDULE = Schedule(
    name="zb-v",
    summary="two chunks on each stage, like a V: weight gradients fill all of the bubble, in the memory of 1F1B",
    actions=partial(repeated, down=4, up=2, waits=2),
    fewest_chunks=2,
    most_chunks=2,
    placements=("v",),
)
