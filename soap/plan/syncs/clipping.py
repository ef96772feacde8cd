"""Clipping gradients by their norm, as far as a plan shows it: who waits for whom, and by which plans ranks can clip.

Where nothing is compressed, gradients are clipped once they are complete. Every device needs the norm of all of them: one all-reduce of one
number, behind all sums and backward passes, which all updates wait for. Where something is compressed, each device clips what it has itself
before it sends anything (DGC); that takes no further sum between hosts, but few plans allow it (``refusal``).
"""

from __future__ import annotations

from soap.plan.plan import Plan
from soap.plan.syncs.compressed import compressed_shards

NORM_NAME = "sum of squares"
"""Task name of the all-reduce by which all devices learn the norm."""
NORM_BYTES = 8
"""What of a device is summed: the squares of its gradients, in float64."""


def compresses(plan: Plan) -> bool:
    """Whether some gradient travels compressed."""
    return any(sync.compression is not None for sync in plan.syncs)


def sums_norm(plan: Plan) -> bool:
    """Whether all devices learn the norm of all gradients before they update."""
    return plan.training.clips and plan.device_count > 1 and not compresses(plan)


def refusal(plan: Plan) -> str:
    """Why ranks cannot clip their own gradients, which they do where some are compressed; empty if they can. Each must have a share of all
    gradients, so that N^(-1/2) of the norm means something, and none may be on its way to an owner. Those of a host are clipped together
    if it compresses as one peer; then all that is compressed must be compressed so."""
    if not compresses(plan):
        return ""
    everyone = tuple(range(plan.device_count))
    for sync in plan.syncs:
        if plan.is_frozen(sync):
            continue
        if tuple(sorted(sync.readers)) != everyone or sync.contract.by_rows or sync.contract.owned_in_parts:
            return (
                f"with compressed gradients, where {sync.parameter!r} is not summed over all devices "
                f"({sync.contract.name}, {len(sync.readers)} of {plan.device_count}); expected data parallelism by all-reduces and "
                "compressed sums: ranks clip their own gradients before they are compressed"
            )
    ways = {sync.leaders: plan.shards[number].parameter for number, sync in compressed_shards(plan).items()}
    if len(ways) > 1:
        return (
            f"where {' and '.join(map(repr, list(ways.values())[:2]))} are compressed by other devices; expected "
            "each device to compress, or one device of each host, the same for all parameters: peers clip what they compress"
        )
    return ""
