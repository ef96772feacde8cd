"""Runs communications: when they start and end, and what they hold (compiled). The counterpart of ``reference`` for all tasks but tiles and
devices' updates."""

from __future__ import annotations

from soap.simulator.compiled.jit import inlined
from soap.simulator.compiled.state import Groups, State
from soap.simulator.compiled.trial import TAKEN, Trial


@inlined
def communicate(C: State, R: Groups, T: Trial, slot: int) -> int:
    """Run the last task that was taken, a communication or a server's work; returns its end."""
    resource = C.resource[slot]
    if resource >= 0:
        return _serve(C, R, T, slot, R.static, resource)
    return _serve(C, R, T, slot, C.arena, -1 - resource)


@inlined
def _serve(C, R, T, slot, held, first):  # type: ignore[no-untyped-def]
    """Run a task that holds ``held[first:first + resource_n]``."""
    last, start = first + C.resource_n[slot], T.ready[slot]
    for i in range(first, last):
        start = max(start, T.free[held[i]])
    end = start + C.duration[slot]
    left = end - C.latency[slot]
    for i in range(first, last):
        T.free[held[i]] = left
        _charge(C, R, T, slot, held[i], start)
    T.start[slot], T.end[slot] = start, end
    return end


@inlined
def _charge(C, R, T, slot, resource, start):  # type: ignore[no-untyped-def]
    """Charge the last task's CPU overhead to the device that has a port at this link, from the task's start on. A device is charged once,
    however many of its links the task holds."""
    device = R.port_device[resource]
    if device >= 0 and T.charged[device] != T.size[TAKEN]:
        T.charged[device] = T.size[TAKEN]
        T.message[device] = 1 if C.latency[slot] > 0 else 0
        T.free[device] = max(T.free[device], start) + C.overhead[slot]
