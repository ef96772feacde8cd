"""Updates of shards by the readers that own them (compiled): their durations, on devices or on hosts. The counterpart of
``SyncMethod.updates``."""

from __future__ import annotations

from soap.simulator.communication.offloading import OFFLOADING_NS
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.syncs.offloading import offload
from soap.simulator.compiled.syncs.pricing import adding_ns, price_ns
from soap.simulator.compiled.syncs.server_traffic import owner_ns, prepare
from soap.simulator.compiled.syncs.templates import own_bytes, part_count
from soap.simulator.compiled.world import World


@compiled
def add_update(W: World, template: int, parameter: int, shard: int, expected: bool) -> None:
    """Add the updates of a shard on its owners, if these are readers; if they are only ``expected``, subtract the same from ``floor``, but
    for what offloading takes more of several shards than of one. Call it after ``find_members``."""
    S, away = W.scratch, W.templates.offloads[template] == 1
    if W.templates.by_rows[template]:
        prepare(W, template, parameter, shard)
    for i in range(S.members[0]):
        size, device = own_bytes(W, template, parameter, shard, i), S.members[1 + i]
        if size > 0:
            own_ns = _update_ns(W, template, parameter, shard, device, size)
            if expected:
                S.floor[device] -= own_ns + (OFFLOADING_NS if away else 0)
                continue
            S.update[device] += own_ns
            if away:
                offload(W, device, size)


@compiled
def _update_ns(W, template, parameter, shard, device, size):  # type: ignore[no-untyped-def]
    """What a reader takes to add up others' gradients and to update ``size`` bytes that it owns, unless its host does."""
    K, D, S, Y = W.cluster, W.shards, W.scratch, W.templates
    kind = K.device_type[device]
    if Y.by_rows[template]:
        row_seconds = K.row_seconds[device] if K.serves_itself[device] else 0.0
        return owner_ns(W, parameter, shard, D.rows[shard], K.hosts[0] + kind, K.memory_bandwidth[device], row_seconds)
    parts = part_count(W, template, parameter)
    added = adding_ns((parts * (Y.added[template] + 1) - 1) * size, 0, K.memory_bandwidth[device], 0.0)
    if Y.offloads[template]:
        return added
    return added + (price_ns(D, S, K.hosts[0] + kind, size) if Y.parts[template] else D.update_ns[kind, shard])
