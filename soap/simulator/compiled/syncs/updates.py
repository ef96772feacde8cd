"""Updates of shards by the readers that own them (compiled): their durations, on devices or on hosts, and the values that are brought
behind them. The counterpart of ``SyncMethod.updates``."""

from __future__ import annotations

from soap.plan.syncs.seam import Phase
from soap.simulator.communication.offloading import OFFLOADING_NS
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import TASKS
from soap.simulator.compiled.syncs.exchange import new_row
from soap.simulator.compiled.syncs.offloading import add_offload, offload
from soap.simulator.compiled.syncs.pricing import adding_ns, price_ns, table_price_ns
from soap.simulator.compiled.syncs.server_traffic import gathered_bytes, gathered_rows
from soap.simulator.compiled.syncs.templates import add_rows, own_bytes, owns, phase_row
from soap.simulator.compiled.world import World

_AFTER_UPDATE = int(Phase.AFTER_UPDATE)


@compiled
def add_update(W: World, template: int, parameter: int, shard: int, expected: bool) -> None:
    """Add the updates of a shard on its owners, if these are readers; if they are only ``expected``, subtract the same from ``floor``, but
    for what offloading takes more of several shards than of one. Call it after ``find_members``."""
    S, away = W.scratch, W.templates.offloads[template] == 1
    whole, rows = _gathered(W, template, parameter, shard)
    for i in range(S.members[0]):
        size, device = own_bytes(W, template, parameter, shard, i), S.members[1 + i]
        if size > 0:
            own_ns = _update_ns(W, template, shard, i, size, whole, rows)
            if expected:
                S.floor[device] -= own_ns + (OFFLOADING_NS if away else 0)
                continue
            S.update[device] += own_ns
            if away:
                offload(W, device, size)


@compiled
def _gathered(W, template, parameter, shard):  # type: ignore[no-untyped-def]
    """(bytes that each reader updates, rows that it adds up for that) of a shard of which only rows have a gradient; else (-1, 0)."""
    if not W.templates.by_rows[template]:
        return -1, 0
    return gathered_bytes(W, parameter, shard), gathered_rows(W, parameter, shard)


@compiled
def _update_ns(W, template, shard, i, size, gathered, rows):  # type: ignore[no-untyped-def]
    """What reader ``i`` takes to add up others' gradients and to update ``size`` bytes that it owns, unless its host does."""
    K, D, S, Y = W.cluster, W.shards, W.scratch, W.templates
    device = S.members[1 + i]
    kind = K.device_type[device]
    if gathered >= 0:
        update = table_price_ns(W, K.hosts[0] + kind, gathered, D.bytes[shard])
        row_seconds = K.row_seconds[device] if K.serves_itself[device] else 0.0
        return adding_ns(rows * D.row_bytes[shard], rows, K.memory_bandwidth[device], row_seconds) + update
    added = adding_ns(Y.added[template] * size, 0, K.memory_bandwidth[device], 0.0)
    if Y.offloads[template]:
        return added
    return added + (price_ns(D, S, K.hosts[0] + kind, size) if Y.parts[template] else D.update_ns[kind, shard])


@compiled
def brings_values(W: World, bucket: int) -> bool:
    """Whether something behind the owners' updates belongs to a bucket."""
    return phase_row(W.templates, W.scratch.bucket_template[bucket], _AFTER_UPDATE) >= 0


@compiled
def bring_values(W: World, buckets: int, slot0: int) -> None:
    """Add the tasks that bring values of the first ``buckets`` buckets behind the owners' updates (``update_row``), and the updates that
    hosts make for devices. ``lifting``: as ``settling``, of what waits for these."""
    C, S = W.state, W.scratch
    fill(C.update_row, 0, len(C.update_row), -1)
    fill(S.settling, 0, len(S.settling), 0)
    fill(S.lifting, 0, len(S.lifting), 0)
    for bucket in range(buckets):
        if brings_values(W, bucket):
            _follow_owners(W, bucket, -1)
    for device in range(len(S.settling)):
        away = S.offloaded[device] > 0
        if S.settling[device] > 0 or away:
            C.update_row[device] = new_row(C, S.settling[device] + (1 if away else 0))
            S.settling[device] = C.update_row[device] + 2
        if away:
            C.arena[S.settling[device]] = slot0 + S.count[TASKS]
            S.settling[device] += 1
            S.lifting[device] = add_offload(W, device, slot0, S.lifting[device]) + 2
    for bucket in range(buckets):
        if brings_values(W, bucket):
            slot = slot0 + S.count[TASKS]
            S.count[TASKS] += 1
            add_rows(W, bucket, _AFTER_UPDATE, slot, slot0)
            _follow_owners(W, bucket, slot)


@compiled
def _follow_owners(W, bucket, slot):  # type: ignore[no-untyped-def]
    """Let the task in ``slot`` wait for the updates of a bucket's owners; if it is -1, count it among what does."""
    R, C, S, Y = W.groups, W.state, W.scratch, W.templates
    group, template = S.t_res_n[bucket], S.bucket_template[bucket]
    waiting = S.lifting if Y.offloads[template] else S.settling
    for i in range(R.sets.ptr[group + 1] - R.sets.ptr[group]):
        if owns(W, bucket, i):
            device = R.sets.item[R.sets.ptr[group] + i]
            if slot >= 0:
                C.arena[waiting[device]] = slot
                C.waits[slot] += 1
            waiting[device] += 1
