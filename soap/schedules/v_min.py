"""V-Min (Qi et al., 2405.15362, section 3.3): two chunks on each stage, laid out like a V, in about a third of 1F1B's activation memory.

A micro-batch goes down and up the V as fast as can be, so that the activations of its 2 S halves live 4 S units and a few: 2 S / 3 + 3 of
them at most are in flight on a stage, where 1F1B has 2 S. With equal times stages idle for at most 4 S units of half a stage, where 1F1B's
idle for 6 (S - 1).
"""

from __future__ import annotations

from functools import partial

from soap.schedules.blocks import repeated
from soap.schedules.contract import Schedule

SCHEDULE = Schedule(
    name="v-min",
    summary="two chunks on each stage, like a V: a shorter bubble than that of 1F1B in a third of its memory",
    actions=partial(repeated, down=1, up=1, waits=3),
    fewest_chunks=2,
    most_chunks=2,
    placements=("v",),
)
