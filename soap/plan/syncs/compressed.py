"""Compressed gradients: each reader selects what of its gradient is sent, all readers exchange that, and each makes the same sum of it.

A shard is compressed by itself, with a state and messages of its own. Shards with equal readers, peers, dtype and settings travel in
buckets (``bucketing``): their messages lie one behind the other in one exchange. What devices do takes them time (``DeviceWork``): to
select, once all gradients of the bucket are complete (if ranks clip: once the device's whole backward pass is); to combine what came, where
a method exchanges twice; to restore the sums, before the update. The last two come after the whole backward pass. Which exchanges there are
and how large a shard's messages are says the method's ``Layout``.

With local aggregation the readers of each host add up their gradients at the first of them, as they are. That one is the host's *peer*: it
alone compresses, exchanges with the other hosts' peers, keeps residuals, and gives the restored sums to its host's other readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from soap.model.regions import lengths
from soap.plan.compression.seam import SUM_COPIES, Exchange, Layout, Work, joined, layout_of
from soap.plan.compression.training import PlannedTraining
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.syncs.amounts import COPIES, Group, reading_groups
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.seam import (
    COMBINE,
    PULL,
    PUSH,
    RESTORE,
    SELECT,
    SPREAD,
    SUM,
    WHOLE,
    Amount,
    DeviceWork,
    Hold,
    How,
    Of,
    Phase,
    Row,
    Setting,
    SyncMethod,
    Template,
)
from soap.strategy.compression import Compression
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import named

EXCHANGES = ((SUM, "sync"), (SPREAD, "spread"))
"""Stage and verb of the first and the second exchange."""
COLLECT, HAND_ON = (PUSH, "collect"), (PULL, "hand on")
"""Stage and verb of what happens inside hosts: gradients to their peers, and sums from these."""
STAGES: dict[Work, int] = {"select": SELECT, "combine": COMBINE, "restore": RESTORE}


class CompressedSum(SyncMethod):
    """All readers own whole regions; the peers keep a residual each. A region with a single peer is not compressed."""

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """A gradient that goes nowhere, or nowhere but inside a host, stays as it is."""
        return len(peers) > 1

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """One or two exchanges, each after the peers' work for it; with local aggregation between what happens inside hosts. Every reader
        restores the sums then, unless peers do, and give them to the others."""
        peers, after = tuple(dict.fromkeys(leaders)), Phase.AFTER_BACKWARD
        given = [(reader, leader, WHOLE) for reader, leader in zip(readers, leaders, strict=True) if reader != leader]
        select, combine, restore = (Row(after, STAGES[work], work, How.WORK, (peers,), work=work) for work in STAGES)
        rows = [Row(after, *COLLECT, How.EXCHANGE, rounds=((given, True),))] if given else []
        for number, ((stage, verb), work, kind) in enumerate(zip(EXCHANGES, (select, combine), how.exchanges, strict=False)):
            amount = Amount(Of.MESSAGE, part=number)
            if kind == "sum":
                rows += [work, Row(after, stage, verb, How.SUM, (peers,), amount=amount)]
            else:
                flows = [(source, target, amount) for source in peers for target in peers if source != target]
                rows += [work, Row(after, stage, verb, How.EXCHANGE, rounds=((flows, False),))]
        back = [(leader, reader, amount) for reader, leader, amount in given]
        handed = [Row(after, *HAND_ON, How.EXCHANGE, rounds=((back, False),))] if given else []
        return Template((*rows, restore, *handed))

    def messages(self, plan: Plan, sync: ShardSync) -> Sequence[Exchange]:
        """Those of all shards together."""
        return joined(layouts_for(plan, sync))

    def works(self, plan: Plan, sync: ShardSync, work: Work) -> Sequence[DeviceWork]:
        """Each peer's, on all shards."""
        how, layouts, late = _settings(sync), layouts_for(plan, sync), work != "select" or plan.training.clips
        return [DeviceWork(STAGES[work], device, work_name(sync, work, device), how, layouts, work, late) for device in sync.peers]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """Of peers: states all the time; messages and sums from the selection on; what work takes, while it goes on. Of all readers, with
        local aggregation: what travels inside hosts, once it does."""
        for device, size in _inside_buffers(plan, sync):
            yield Hold(device, size, since=sync_name(sync, COLLECT[1]))
        for device in sync.peers:
            names = [work_name(sync, work, device) for work in STAGES]
            state, moved, room = _amounts(plan, sync, device)
            yield Hold(device, state, kind=MemoryKind.STATES)
            yield Hold(device, moved, since=names[0])
            for name in names:
                yield Hold(device, room, since=name, until=name, kind=MemoryKind.WORKSPACE)


def compressed_names(plan: Plan) -> frozenset[str]:
    """Parameters of which something is compressed."""
    return frozenset(region.parameter for sync in plan.syncs if sync.compression is not None for region in sync.regions)


def compressed_shards(plan: Plan) -> dict[int, ShardSync]:
    """Compressed shard -> the synchronization that it is part of, in the order of the shards."""
    found = {number: sync for sync in plan.syncs if sync.compression is not None for number in sync.shards}
    return dict(sorted(found.items()))


def layouts_for(plan: Plan, sync: ShardSync) -> tuple[Layout, ...]:
    """The messages of a compressed synchronization, for each of its shards."""
    how, size, peers = _settings(sync), plan.graph.tensors[sync.parameter].itemsize, len(sync.peers)
    return tuple([layout_of(how, lengths(region.box), size, peers) for region in sync.regions])


def _inside_buffers(plan: Plan, sync: ShardSync) -> Iterator[tuple[int, int]]:
    """(reader, bytes) of what travels inside hosts: buffers to receive in and copies to send, and the sum of a host's gradients."""
    if not sync.aggregated:
        return
    size, whole = gradient_bytes(plan, sync), sum(layout.whole_bytes for layout in layouts_for(plan, sync))
    for group in reading_groups(sync):
        for device in group:
            yield device, inside_bytes(size, whole, len(group) - 1) if device == group[0] else COPIES * size


def inside_bytes(gradient_bytes: int, whole_bytes: int, others: int) -> int:
    """Those of a peer with so many other readers on its host. ``whole_bytes``: of the gradient in the type in which it is summed."""
    return COPIES * others * gradient_bytes + whole_bytes


def _amounts(plan: Plan, sync: ShardSync, device: int) -> tuple[int, int, int]:
    """``amounts`` of all shards together. Their state, messages and sums are there at once; work goes from one to the next."""
    how, element_bytes, on_host = _settings(sync), plan.graph.tensors[sync.parameter].itemsize, device not in plan.accelerators
    own = [amounts(how, layout, element_bytes, plan.training, on_host=on_host) for layout in layouts_for(plan, sync)]
    states, moved, rooms = zip(*own, strict=True)
    return sum(states), sum(moved), max(rooms)


def amounts(
    how: Compression, layout: Layout, element_bytes: int, training: PlannedTraining, *, on_host: bool
) -> tuple[int, int, int]:
    """Bytes of a peer beside a shard's gradient: what it keeps from step to step; messages and the sum; what its work takes for a while. At
    most, in any step of the training: a warm-up sends more than later steps, momentum keeps more."""
    densest = layout_of(how.at(max(how.share, training.densest)), layout.shape, element_bytes, layout.peers)
    messages = [each.message_bytes for each in (layout, densest)] + [SUM_COPIES * layout.whole_bytes] * training.dense
    rooms = [each.room_bytes(how, on_host=on_host) for each in (layout, densest)]
    state = layout.state_bytes(how) + training.kept * layout.whole_bytes
    return state, max(messages) + layout.whole_bytes, max(rooms) + training.made * layout.whole_bytes


def work_name(sync: ShardSync, work: str, device: int) -> str:
    """Task name of a device's work."""
    return f"{sync_name(sync, work)} @{device}"


def _settings(sync: ShardSync) -> Compression:
    assert sync.compression is not None  # the payload is compressed
    return sync.compression


METHOD = CompressedSum(named("compressed"))
