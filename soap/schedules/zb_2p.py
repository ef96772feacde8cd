"""ZB-2p (Qi et al., 2401.10241, section 3): no stage ever waits, for twice the activation memory of 1F1B.

Each of S stages may have 2 S micro-batches in flight, from F to the end of W. With equal times and M >= 2 S - 1 a stage that has begun has
no idle time until its end, 3 M units later: the paper's ZB-H2. Stages begin and end one after the other, so that a step takes
3 M + S - 1 units, but the next one may begin after 3 M if stages update their parameters without waiting for each other.
"""

from __future__ import annotations

from functools import partial

from soap.schedules.blocks import repeated
from soap.schedules.contract import Schedule

SCHEDULE = Schedule(
    name="zb-2p",
    summary="weight gradients fill all of the bubble, for twice the memory of 1F1B",
    actions=partial(repeated, down=1, up=2, room=2),
)
