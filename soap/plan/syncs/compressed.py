"""Compressed gradients: each reader selects what of its gradient is sent, all readers exchange that, and each makes the same sum of it.

A shard is compressed by itself: it shares no bucket. What devices do takes them time (``DeviceWork``): to select, once the shard's gradient
is complete (if ranks clip: once the device's whole backward pass is); to combine what came, where a method exchanges twice; to restore the
sum, before the update. The last two come after the whole backward pass. Which exchanges there are and how large their messages are says the
method's ``Layout``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from soap.model.regions import lengths
from soap.plan.compression.seam import SUM_COPIES, Exchange, Layout, Work, layout_of
from soap.plan.flows import Round
from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.syncs.amounts import moving_rounds
from soap.plan.syncs.seam import COMBINE, RESTORE, SELECT, SPREAD, SUM, DeviceWork, Hold, Phase, SyncMethod, SyncStep
from soap.strategy.compression import Compression
from soap.strategy.sync_contracts import named

EXCHANGES = ((SUM, "sync"), (SPREAD, "spread"))
"""Stage and verb of the first and the second exchange."""
STAGES: dict[Work, int] = {"select": SELECT, "combine": COMBINE, "restore": RESTORE}


class CompressedSum(SyncMethod):
    """All readers own the whole region, and keep a residual of their own. A region with a single reader is not compressed."""

    def serves_region(self, readers: Sequence[int]) -> bool:
        """A gradient that goes nowhere stays as it is."""
        return len(readers) > 1

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """One or two exchanges, each after the devices' work for it."""
        layout, found = layout_for(plan, sync), []
        works: tuple[Work, ...] = ("select", "combine")
        for (stage, verb), work, exchange in zip(EXCHANGES, works, layout.exchanges, strict=False):
            name, own = sync_name(sync, verb), self._works(plan, sync, layout, work)
            if exchange.kind == "sum":
                found.append(SyncStep(Phase.AFTER_BACKWARD, stage, name, summed_bytes=exchange.message_bytes, works=own))
            else:
                found.append(SyncStep(Phase.AFTER_BACKWARD, stage, name, exchange_rounds(sync, exchange), works=own))
        return found

    def ending(self, plan: Plan, sync: ShardSync) -> Sequence[DeviceWork]:
        """Every reader restores the sum."""
        return self._works(plan, sync, layout_for(plan, sync), "restore")

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """What each reader keeps from step to step, messages, the sum, and what its work takes for a while."""
        return [(device, sum(_amounts(plan, sync, device))) for device in sync.readers]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """State all the time; messages and the sum from the selection on; what work takes, while it goes on."""
        for device in sync.readers:
            names = [work_name(sync, work, device) for work in STAGES]
            state, moved, room = _amounts(plan, sync, device)
            yield Hold(device, state)
            yield Hold(device, moved, since=names[0])
            for name in names:
                yield Hold(device, room, since=name, until=name)

    @staticmethod
    def _works(plan: Plan, sync: ShardSync, layout: Layout, work: Work) -> tuple[DeviceWork, ...]:
        how, late = _settings(sync), work != "select" or plan.training.late
        return tuple(
            DeviceWork(STAGES[work], device, work_name(sync, work, device), how, layout, work, late) for device in sync.readers
        )


def layout_for(plan: Plan, sync: ShardSync) -> Layout:
    """The messages of a compressed synchronization."""
    return layout_of(_settings(sync), lengths(sync.box), plan.graph.tensors[sync.parameter].itemsize, len(sync.readers))


def exchange_rounds(sync: ShardSync, exchange: Exchange) -> tuple[Round, ...]:
    """The round in which each reader sends every other a message, the same to all or not."""
    flows = [(source, target, exchange.message_bytes) for source in sync.readers for target in sync.readers]
    return moving_rounds((flows, 0))


def held_bytes(compression: Compression, layout: Layout, *, on_host: bool) -> int:
    """All that a reader holds for a compressed shard beside its gradient, at most, if training adds nothing."""
    passing = layout.message_bytes + layout.whole_bytes + layout.room_bytes(compression, on_host=on_host)
    return layout.state_bytes(compression) + passing


def _amounts(plan: Plan, sync: ShardSync, device: int) -> tuple[int, int, int]:
    """Bytes of a reader: what it keeps from step to step; messages and the sum; what its work takes for a while. At most, in any step of
    the training: a warm-up sends more than later steps, momentum keeps more."""
    how, layout, training, on_host = _settings(sync), layout_for(plan, sync), plan.training, device not in plan.accelerators
    densest = layout_of(how.at(max(how.share, training.densest)), layout.shape, plan.graph.tensors[sync.parameter].itemsize, layout.peers)
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
