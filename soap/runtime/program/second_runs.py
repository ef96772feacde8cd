"""When recomputed segments run forward a second time. Pure data, no torch.

*Invariant*: a segment's second run comes right before the first backward pass that needs it, its own or that of a segment that reads what
it makes again; and after the second runs that it reads from. So as little as possible is there at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from soap.plan.recomputation import Recomputation
from soap.runtime.program.action_order import BEFORE, Entry
from soap.runtime.program.actions import Action, ActionKind
from soap.runtime.program.segments import Segment


def second_runs(
    again: Recomputation, segments: Sequence[Segment], segment_of: Mapping[int, int], turns: Sequence[int]
) -> Iterator[Entry]:
    """The second run of each recomputed segment. ``turns``: segment -> its turn in the backward pass."""
    own = sorted({segment_of[tile] for tile in again.tiles}, key=lambda segment: turns[segment])
    makers: dict[int, set[int]] = {segment: set() for segment in own}
    for tile, linked in again.links.items():
        makers[segment_of[tile]].update(segment_of[maker] for maker in linked)
    done: set[int] = set()
    for segment in own:
        needed, todo = set[int](), [segment]
        while todo:
            number = todo.pop()
            if number not in needed | done:
                needed.add(number)
                todo.extend(makers[number])
        for number in needed:
            yield (turns[segment], BEFORE, segments[number].start), Action(ActionKind.RECOMPUTE, number, (segments[number].device,))
        done |= needed
