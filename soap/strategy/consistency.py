"""How far a plan's workers may be apart: in step, boundedly, or not bounded at all."""

from __future__ import annotations

from dataclasses import dataclass

from soap.errors import StrategyError

SYNC = "sync"
ASYNC = "async"
BOUNDED = "bounded:"
MAX_BOUND = 10**6
EXPECTED = f"{SYNC}, {BOUNDED}D with D from 0 to {MAX_BOUND}, or {ASYNC}"


@dataclass(frozen=True)
class Consistency:
    """``sync``: one update of all workers' gradients for each step, exact. ``bounded:D``: a worker begins only if no other is more than D
    minibatches behind it (stale synchronous parallel training: Ho et al., NIPS 2013). ``async``: nobody waits.

    ``bound``: D; None without one. ``stale``: whether values may be read that lack others' updates."""

    word: str
    bound: int | None
    stale: bool

    def __str__(self) -> str:
        return self.word


def parse(word: str) -> Consistency:
    """The consistency of this name. StrategyError for any other."""
    if word == SYNC:
        return Consistency(SYNC, 0, stale=False)
    if word == ASYNC:
        return Consistency(ASYNC, None, stale=True)
    digits = word.removeprefix(BOUNDED)
    if digits != word and digits.isascii() and digits.isdigit() and int(digits[:8]) <= MAX_BOUND:
        return Consistency(f"{BOUNDED}{int(digits)}", int(digits), stale=True)
    raise StrategyError(f"consistency {word!r}: expected {EXPECTED}")
