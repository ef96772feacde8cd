"""Recomputation (``OpConfig.recompute``): a tile runs again when the backward pass needs it, instead of keeping what it has made
(``plan.recomputation``)."""

from __future__ import annotations

from dataclasses import replace

from soap.plan.marks.seam import FORWARD, Amount, Hold, Marked, On, Row, Takes
from soap.strategy.marks import marks_of

NEED = Row("need", "need", "recompute", backward=True, stage=3, on=On.NOTHING, takes=Takes.MOMENT, needed=True)


def _again(takes: Takes) -> Row:
    return Row("again", "recompute", "recompute", True, 4, On.DEVICE, takes, after=(FORWARD, 0), again=True, before_backward=True)


_WHOLE, _LIGHT, _GATHER, _WHOLE_GATHER, _LIGHT_GATHER = marks_of("recompute")
_AGAIN = frozenset((_WHOLE, _LIGHT, _WHOLE_GATHER, _LIGHT_GATHER))
MARKED = {
    _WHOLE: Marked((NEED, _again(Takes.PASS)), together=_AGAIN),
    _LIGHT: Marked((NEED, _again(Takes.LIGHT)), (Hold(Amount.PRODUCT),), keeps_outputs=True),
    _GATHER: Marked((NEED,), gathers=True),
}
MARKED[_WHOLE_GATHER], MARKED[_LIGHT_GATHER] = (replace(MARKED[own], gathers=True) for own in (_WHOLE, _LIGHT))
