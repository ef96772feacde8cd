"""Memory over simulated time: how much each device holds when.

Held all the time: parameter shards, optimizer states, the buffers of gradients that are summed over devices, the batch (or, with
``Plan.own_samples``, the samples of it that the device reads) and constants.
Held for a part of the step:

- a tile's outputs, what it saves, and copies of its inputs: from its forward task to its backward task and the last task (or transfer)
  that reads them; of an offloading one, to the copy to its host, and again from the copy back on;
- of a recomputed tile, for its readers in the forward pass alone, and again from its second run on; if it keeps its outputs, these and
  what its products have made stay;
- a fetched region: from its first arrival to the last backward task of its consumers;
- a gradient between operators: from the first task that makes a part of it to the backward task that takes it; if that is in two, to the
  end of the weight gradients, and so all that the tile keeps;
- what is sent: until it has certainly left;
- what a tile's calls pass to each other: while its task runs.

Not counted are copies that a library may make of what it sums. All of this is worked out at once, from arrays of the plan and of the times
at which ranks run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from soap.cluster.topology import Topology
from soap.plan.memory_kinds import ALLOWANCE as BEYOND
from soap.plan.plan import Plan
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.memory.derived import derived
from soap.simulator.memory.gradients import CountedSums, hold_gradients
from soap.simulator.memory.held_parameters import HeldParameters
from soap.simulator.memory.plan_arrays import PlanArrays, plan_arrays
from soap.simulator.memory.played import Played, played_of
from soap.simulator.memory.rank_times import as_ranks_run
from soap.simulator.memory.sent import left_by, send_values
from soap.simulator.memory.spans import spans_of
from soap.simulator.memory.values import hold_values
from soap.simulator.tasks import Schedule, TaskGraph

ALLOWANCE = 0.045
"""A device may hold this share more than simulated, because real tasks run at other times where no task depends on that: a library frees
what it has summed when its thread gets to it. Measured: ``docs/benchmarks.md``."""


def memory_over_time(tasks: TaskGraph, schedule: Schedule, optimizer_states: int = 2) -> tuple[MemoryCurve, ...]:
    """The curve of each device. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it."""
    arrays, played = plan_arrays(tasks.plan), played_of(tasks, schedule)
    return swept(tasks.plan, arrays, played, tasks.topology, optimizer_states).curves()


def with_allowance(peak_bytes: int) -> int:
    """A peak that was simulated, with what may come on top of it."""
    return round((1 + ALLOWANCE) * peak_bytes)


def without_allowance(limit_bytes: int) -> int:
    """The highest peak that, with the allowance, is within a limit."""
    return int(limit_bytes / (1 + ALLOWANCE))


def expected_peaks(peaks_bytes: Iterable[int]) -> tuple[int, ...]:
    """Each device's peak bytes plus ``ALLOWANCE``."""
    return tuple(map(with_allowance, peaks_bytes))


def peaks_by_kind(curves: Iterable[MemoryCurve], peaks: Sequence[int]) -> tuple[dict[str, int], ...]:
    """The parts of each device's peak: bytes by kind (``MemoryKind``) when the simulated order reaches it, and the allowance on top of
    that (``memory_kinds.ALLOWANCE``). They add up to ``peaks``, which are ``expected_peaks`` of the curves."""
    pairs = zip(curves, peaks, strict=True)
    return tuple({**{kind.value: size for kind, size in curve.at_peak.items()}, BEYOND: peak - curve.peak_bytes} for curve, peak in pairs)


def swept(plan: Plan, arrays: PlanArrays, played: Played, topology: Topology, optimizer_states: int) -> ArrayLedger:
    """A ledger with all that devices hold. ``arrays``: the plan's. ``played``: its tasks, as they were simulated on this topology."""
    run, order = as_ranks_run(played, plan, arrays, topology)
    spans = spans_of(run, order, plan, arrays)
    times, ledger = derived(arrays, spans), ArrayLedger(plan.device_count, plan.accelerators, spans.end)
    parameters = HeldParameters(plan, spans, times, ledger)
    parameters.always(optimizer_states)
    counted, left = parameters.synchronized(), left_by(plan, arrays, spans)
    gone = hold_values(plan, arrays, spans, times, ledger, played._replace(start=run.start, end=run.end))
    send_values(plan, arrays, spans, times, ledger, gone, left)
    parameters.updated(optimizer_states)
    hold_gradients(plan, arrays, spans, times, ledger, CountedSums(*counted), left)
    return ledger
