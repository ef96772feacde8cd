"""What ends a program with state."""

from __future__ import annotations

from soap.tracing.calls import BufferRef
from soap.tracing.rules.norm import keep_state, next_state
from tests.tracing.drawing import Draw, Drawn, draws


@draws("soap.next_state")
def taken(d: Draw, name: str) -> Drawn:
    return Drawn(next_state, (d.floats(*d.shape(0, 3)), d.ids(9, *d.shape(0, 2)), d.floats(d.size())))


@draws("soap.keep_state")
def kept(d: Draw, name: str) -> Drawn:
    return Drawn(keep_state, (d.floats(*d.shape(0, 3)), d.ids(9)), {"buffers": (BufferRef("a"), BufferRef("b"))})
