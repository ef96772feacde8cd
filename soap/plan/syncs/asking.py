"""The request at the beginning of a step: readers tell owners which rows of sparse parameters they look up, all parameters at once."""

from __future__ import annotations

from soap.plan.delivery import Round, joined
from soap.plan.plan import Plan
from soap.plan.syncs.amounts import INDEX_BYTES
from soap.plan.syncs.seam import method_for, server_of


def asking_rounds(plan: Plan, *, pull_together: bool = True) -> tuple[Round, ...]:
    """The rounds of the request: members tell their leaders, then leaders tell the owners; first how many rows of each part, then which.

    The second kind of round has flows of 0 bytes here, because the bytes of the indices are counted with the rows.
    """
    told: list[tuple[int, int]] = []
    asked: list[tuple[int, int]] = []
    for sync in plan.syncs:
        if sync.contract.by_rows:
            found = method_for(sync).template_of(plan, sync, pull_together=pull_together)
            owners = [plan.shards[number].devices[0] for number in sync.shards]
            told += found.told
            asked += [(source, owners[server_of(target)] if target < 0 else target) for source, target in found.asked]
    lists = [[(a, b, INDEX_BYTES) for a, b in own if a != b] for own in (told, asked)]
    return tuple((joined((a, b, size if counted else 0) for a, b, size in own), 0) for own in lists if own for counted in (True, False))
