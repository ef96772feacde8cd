"""When recomputed segments run forward a second time. Pure data, no torch.

*Invariant*: a segment's second run comes right before the backward pass for which it is made (``RunOrder.second_turns``).
"""

from __future__ import annotations

from collections.abc import Iterator

from soap.plan.running.run_order import RunOrder
from soap.runtime.program.action_order import BEFORE, Entry
from soap.runtime.program.actions import Action, ActionKind


def second_runs(run: RunOrder) -> Iterator[Entry]:
    """The second run of each recomputed segment."""
    for turn, number in run.second_turns:
        yield (turn, BEFORE, run.segments[number].start), Action(ActionKind.RECOMPUTE, number, (run.segments[number].device,))
