"""What marks of operators (``State.marked``, ``strategy.kept``) mean for their tiles (compiled)."""

from __future__ import annotations

from soap.simulator.compiled.jit import inlined
from soap.strategy.kept import OFFLOADED
from soap.strategy.recomputation import LIGHT, RECOMPUTED


@inlined
def runs_again(mark: int) -> bool:
    """Whether tiles run a second time."""
    return mark in (RECOMPUTED, LIGHT)


@inlined
def needed_together(mark: int, reader_mark: int) -> bool:
    """Whether an operator's tiles are needed as soon as those that read what they make: both run again and it is made again for them, or
    both come back from their hosts."""
    return (mark == RECOMPUTED and runs_again(reader_mark)) or (mark == OFFLOADED and reader_mark == OFFLOADED)
