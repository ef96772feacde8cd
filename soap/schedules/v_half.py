"""V-Half (Qi et al., 2405.15362, section 3.3): two chunks on each stage, laid out like a V, in about half of 1F1B's activation memory.

A micro-batch goes down the V in 2 units for each stage and up in 1, so that the activations of its 2 S halves live 6 S units and a few:
S + 3 of them at most are in flight on a stage, where 1F1B has 2 S. With equal times stages idle for at most 3 S units of half a stage,
where 1F1B's idle for 6 (S - 1).
"""

from __future__ import annotations

from functools import partial

from soap.schedules.blocks import repeated
from soap.schedules.contract import Schedule

SCHEDULE = Schedule(
    name="v-half",
    summary="two chunks on each stage, like a V: half the bubble of 1F1B in half of its memory",
    actions=partial(repeated, down=2, up=1, waits=2),
    fewest_chunks=2,
    most_chunks=2,
    placements=("v",),
)
