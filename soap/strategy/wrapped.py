"""How another trainer brings parameters together that readers own in parts, where it differs from what plans say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrapped:
    """``modules``: by module that the trainer wraps, its parameters, which are gathered together, and whose gradients are summed together;
    all others as usual. ``stays``: what is gathered before its first use in a step is kept until its last one, and not gathered again for
    the backward pass. ``itemsize``: bytes of an element on its way to readers; 0: as many as the parameter's."""

    modules: tuple[tuple[str, ...], ...] = ()
    stays: bool = False
    itemsize: int = 0


USUAL = Wrapped()
"""As plans say."""
