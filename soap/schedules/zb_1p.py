"""ZB-1p (Qi et al., 2401.10241, section 3): weight gradients fill the bubble as far as 1F1B's activation memory allows.

Each of S stages may have S micro-batches in flight, from F to the end of W. So later stages go ahead of 1F1B's, and a message that comes
late does not stop them. With M >= S the step takes 3 M + S - 1 units, as by ZB-H1. The paper's schedules follow from times that were
measured, this one from equal times (``blocks``).
"""

from __future__ import annotations

from functools import partial

from soap.schedules.blocks import repeated
from soap.schedules.contract import Schedule

SCHEDULE = Schedule(
    name="zb-1p",
    summary="weight gradients fill the bubble, within the memory of 1F1B",
    actions=partial(repeated, down=1, up=2, room=1),
)
