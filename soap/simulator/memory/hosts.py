"""Memory of hosts: what parameter servers of accelerators keep there, and what these offload. On CPUs it is in a device's own memory
(``sweep``).

All of it counts as held at once: values, sums of gradients and optimizer states of all partitions and of all offloaded shards, and
what is received for partitions. Offloaded shards have pinned copies of their values and gradients there, offloading operators one of all
that their tiles keep.
Not counted: what each rank's process takes for itself, the batches that it reads, and what a library makes while it updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from soap.cluster.topology import Topology
from soap.model.graph import Operator, OperatorGraph
from soap.plan.delivery import box_bytes
from soap.plan.plan import Plan
from soap.plan.syncs.amounts import COPIES, COUNT_BYTES, INDEX_BYTES
from soap.plan.syncs.seam import method_for
from soap.simulator.memory.footprint import Use
from soap.simulator.memory.sizes import amount_bytes


def host_use(plan: Plan, topology: Topology, optimizer_states: int = 2) -> tuple[int, ...]:
    """Bytes that each host holds at most. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it."""
    result = [0] * len(topology.hosts)
    for number in plan.on_servers | plan.offloaded:
        shard = plan.shards[number]
        for device in plan.accelerators.intersection(shard.devices):
            kept = (2 + optimizer_states) * box_bytes(plan, shard.parameter, shard.box)
            result[topology.devices[device].host] += kept + (COUNT_BYTES if optimizer_states > 1 else 0)
    on_host = {operator: [hold for hold in marked.holds if hold.on_host] for operator, marked in plan.marked.items()}
    for tile in plan.tiles if any(on_host.values()) else ():
        for hold in on_host.get(tile.operator, ()):
            if tile.device in plan.accelerators:
                result[topology.devices[tile.device].host] += amount_bytes(plan.graph, tile, hold.amount)
    for sync in plan.syncs:
        for device, size in method_for(sync).host_buffers(plan, sync):
            result[topology.devices[device].host] += size
    return tuple(result)


def lacking_on_hosts(uses: Sequence[int], topology: Topology) -> int:
    """Bytes by which these uses (one per host) exceed the hosts' memory, added up. A host whose memory is not known lacks nothing."""
    pairs = zip(uses, topology.hosts, strict=True)
    return sum(max(0, use - host.memory_bytes) for use, host in pairs if host.memory_bytes is not None)


def hosts_may_lack(graph: OperatorGraph, topology: Topology, optimizer_states: int = 2, *, offloading: bool = False) -> bool:
    """False if no strategy can need more memory on a host than it has: not even if all parameters were on one host's servers, and all
    devices read all of each. Found without a plan, so that searches need not make plans to know it. ``offloading``: also if each device
    offloads all parameters, and what one tile of each operator keeps."""
    known = [host.memory_bytes for host in topology.hosts if host.memory_bytes is not None]
    devices = topology.device_count
    if not known or all(device.type.kind == "cpu" for device in topology.devices):
        return False
    trained = [tensor for tensor in graph.parameters if tensor.requires_grad]
    rows = sum(tensor.shape[0] for tensor in trained if tensor.name in graph.sparse)
    away = devices * (2 + optimizer_states) if offloading else 0
    most = (2 + optimizer_states + away + (1 + COPIES) * devices) * sum(tensor.bytes for tensor in trained)
    kept = devices * sum(_kept_bytes(graph, op) for op in graph.operators) if offloading else 0
    return most + kept + 2 * INDEX_BYTES * devices * devices * rows > min(known)


def _kept_bytes(graph: OperatorGraph, op: Operator) -> int:
    """Bytes of what a whole operator reads of others, makes, and keeps besides: at least what it offloads."""
    beside = graph.footprints[op.name][0].sizes_bytes[Use.KEPT] if op.name in graph.footprints else op.saved_bytes
    made = (graph.tensors[o.tensor] for o in op.outputs)
    read = sum(graph.tensors[o.tensor].bytes for o in op.inputs)
    return read + sum(tensor.bytes // tensor.itemsize * tensor.partial_itemsize for tensor in made) + beside
