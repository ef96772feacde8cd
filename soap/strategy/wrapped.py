"""How another trainer brings parameters together that readers own in parts, where it differs from what plans say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrapped:
    """``modules``: by module that the trainer wraps, its parameters, which are gathered together, and whose gradients are summed together;
    all others as usual. ``kept``: parameters that are gathered before their first use in a step, and kept until their last one, not
    gathered again for the backward pass. ``itemsize``: bytes of an element on its way to readers; 0: as many as the parameter's. ``once``:
    with micro-batches values are gathered once for all of them, and gradients summed once."""

    modules: tuple[tuple[str, ...], ...] = ()
    kept: frozenset[str] = frozenset()
    itemsize: int = 0
    once: bool = False


USUAL = Wrapped()
"""As plans say."""
