"""When what micro-batches send is known to have left its device. Pure data.

A value's gradient proves that the value has arrived. Nothing answers gradients, or values without one. Of these, messages of at most
``PASSES_UNDER_WAY`` passes are on their way to a device at a time: before a later pass sends something there, the sender waits for what the
oldest has sent. So of many micro-batches only the last few are kept. That waits for nobody who is not behind anyway: the receiver is ready
for a message at a place of the order that all share, which does not depend on what its sender does later.
"""

from __future__ import annotations

from soap.plan.plan import Message, Plan

PASSES_UNDER_WAY = 2
"""The pass that sends, and the one before: a receiver may be behind by as much without making its sender wait."""

Route = tuple[int, int, bool]
"""(source, target, whether gradients travel there)."""


def sending_pass(plan: Plan, message: Message, *, gradient: bool) -> tuple[Route, int] | None:
    """The route of a message, and the place in ``Plan.order`` of the pass that sends it. ``gradient``: the message that takes the gradients
    back. None without micro-batches."""
    if plan.order is None:
        return None
    fetch, place = message.parts[0]
    if gradient:
        tiles = [tile for tile, _ in plan.fetches[fetch].consumers]
        return (message.target, message.source, True), max(plan.rank(plan.tiles[tile], "B") for tile in tiles)
    maker = plan.holdings[plan.fetches[fetch].pieces[place].holding].tile
    return (message.source, message.target, False), plan.rank(plan.tiles[maker], "F")
