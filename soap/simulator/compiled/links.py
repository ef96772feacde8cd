"""When communication can start, how long it takes, and what it holds (compiled). The counterpart of what ``reference`` does for what is no
tile."""

from __future__ import annotations

from soap.simulator.compiled.jit import compiled, inlined
from soap.simulator.compiled.state import SYNC_BUCKET, Groups, State
from soap.simulator.compiled.trial import TAKEN, Trial


@compiled
def has_ports(R: Groups) -> bool:
    """Whether sums of gradients yield."""
    found = False
    for device in R.port_device:
        found |= device >= 0
    return found


@inlined
def communicate(C: State, R: Groups, T: Trial, slot: int, ports: bool) -> int:
    """Serve something that is no tile, the last task that was taken; its end. ``ports``: ``has_ports``."""
    resource = C.resource[slot]
    if resource >= 0:
        return _serve(C, R, T, slot, R.static, resource, ports)
    return _serve(C, R, T, slot, C.arena, -1 - resource, ports)


@inlined
def _serve(C, R, T, slot, held, first, ports):  # type: ignore[no-untyped-def]
    """It holds ``held[first:first + resource_n]``."""
    last, devices, duration = first + C.resource_n[slot], len(T.rest), C.duration[slot]
    yields, sent = ports and C.kind[slot] == SYNC_BUCKET, duration - C.latency[slot]
    start = T.ready[slot]
    for i in range(first, last):
        start = max(start, T.free[held[i]] if yields or held[i] < devices else T.passable[held[i]])
    end = start + duration
    if not yields:
        shared = 0
        for i in range(first, last):
            if held[i] >= devices:
                shared = max(shared, T.free[held[i]] - start)
        end += min(sent, shared)
    left = end - C.latency[slot]
    for i in range(first, last):
        resource = held[i]
        if yields or resource < devices:
            T.free[resource] = left
        else:
            T.passable[resource] = left
            T.free[resource] = max(left, T.free[resource] + sent if T.free[resource] > start else 0)
        if ports:
            _charge(C, R, T, slot, resource, start)
    T.start[slot], T.end[slot] = start, end
    return end


@inlined
def _charge(C, R, T, slot, resource, start):  # type: ignore[no-untyped-def]
    """The device that has a port at this link is busy with the last task that was taken, from its start on: once, whatever links that
    holds."""
    device = R.port_device[resource]
    if device >= 0 and T.charged[device] != T.size[TAKEN]:
        T.charged[device] = T.size[TAKEN]
        T.free[device] = max(T.free[device], start) + C.handling[slot]
