"""The error message if nothing fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from soap.cluster.topology import Topology
from soap.errors import InfeasibleError, asked
from soap.model.graph import OperatorGraph
from soap.plan.memory_kinds import MemoryKind
from soap.search.record import Recorder
from soap.search.starts import Start
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, tile_count
from soap.strategy.config import Strategy
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator

Outcome = Simulation | FoldedSimulation
MOST_TILES = 2**14
"""So many tiles are played in a few seconds."""
SHRINKING = {
    MemoryKind.VALUES: "devices may share them ({syncs} fsdp)",
    MemoryKind.GRADIENTS: "devices may share them ({syncs} fsdp)",
    MemoryKind.STATES: "devices may share them ({syncs} zero)",
    MemoryKind.KEPT: "a smaller batch keeps less",
    MemoryKind.WORKSPACE: "a smaller batch takes less",
    MemoryKind.BATCH: "a smaller batch takes less",
}
"""What makes a kind of memory smaller, where it is most of a peak."""


def infeasible(
    graph: OperatorGraph, topology: Topology, evaluator: IncrementalSimulator, recorder: Recorder, *, saving: bool
) -> InfeasibleError:
    """The error of a search that found nothing that fits: what is lacking at least, and the ways out. ``saving``: whether it has tried to
    share optimizer states."""
    best, closest = recorder.best, min(recorder.starts, key=lambda start: start.score)
    assert best is not None
    simulation, of_start = evaluator.outcome(best.strategy), evaluator.outcome(closest.strategy)
    if simulation is None or of_start is None:
        available_bytes, lacking = sum(topology.memory_limits), format_bytes(best.overflow_bytes)
        need = f"{lacking} more needed than the {format_bytes(available_bytes)} available on {topology.device_count} devices"
        rest = f": {_each(topology, best)}"
    else:
        need, rest = _lacking(topology, simulation), _made_of(topology, simulation)
        if closest.strategy != best.strategy:
            _, start_bytes = _fullest(topology, of_start)
            rest = f" (of the starts {closest.name}, with {format_bytes(start_bytes)}){rest}"
        else:
            rest = f": {closest.name}{rest}"
        rest += _least(topology, recorder, evaluator.outcome, _fullest(topology, simulation)[1])
    rest += _in_stages(topology, recorder, closest)
    ways = ["more devices or devices with more memory", "a smaller batch", "an optimizer that keeps fewer states"]
    ways += [] if saving else [f"{asked('syncs')} zero or fsdp, by which devices share states or values"]
    ways += [f"a larger {asked('budget')}", *([f"a larger {asked('memory_budget')}"] if topology.limits else [])]
    return InfeasibleError(
        f"model {graph.name!r} does not fit into the memory of cluster {topology.name!r}: {need}, in the closest of {len(recorder.rows)} "
        f"proposals and all starts{rest}; ways out: {', '.join(f'({number}) {way}' for number, way in enumerate(ways, 1))}"
    )


def nothing_fits_yet(graph: OperatorGraph, topology: Topology, recorder: Recorder) -> InfeasibleError:
    """The error of a search that was ended before anything fitted; found without simulating anything."""
    best = recorder.best
    assert best is not None
    tried = f"{len(recorder.starts)} starts and {len(recorder.rows)} proposals"
    return InfeasibleError(
        f"the search was ended after {tried}, before a plan was found by which model {graph.name!r} fits into the memory of cluster "
        f"{topology.name!r}: the closest, {_each(topology, best)}{_in_stages(topology, recorder, best)}; expected more time, or more memory"
    )


def _each(topology: Topology, start: Start) -> str:
    """What a start lacks, in words."""
    each_bytes = -(-start.overflow_bytes // topology.device_count)
    return f"{start.name}, lacks {format_bytes(start.overflow_bytes)} in all, {format_bytes(each_bytes)} a device"


def _in_stages(topology: Topology, recorder: Recorder, said: Start) -> str:
    """The start in stages that lacks least, and how much, unless it is said already; nothing if there is none."""
    found = min((start for start in recorder.starts if start.strategy.stages), key=lambda start: start.score, default=said)
    return "" if found.strategy == said.strategy else f"; in stages, {_each(topology, found)}"


def _least(topology: Topology, recorder: Recorder, played: Callable[[Strategy], Outcome | None], closest_bytes: int) -> str:
    """With a memory budget, which may be changed: the start whose fullest device needs least, if that is less than in the closest plan,
    which lacks least in all: that may all be on one device."""
    if not topology.limits:
        return ""
    left, needed = MOST_TILES, list[tuple[int, str]]()
    for start in recorder.starts:
        left -= tile_count(start.strategy)
        if left < 0:
            break
        if (outcome := played(start.strategy)) is not None:
            needed.append((max(outcome.peak_bytes), start.name))
    least_bytes, name = min(needed, default=(closest_bytes, ""))
    return f"; with {name} no device needs more than {format_bytes(least_bytes)}" if least_bytes < closest_bytes else ""


def _lacking(topology: Topology, simulation: Outcome) -> str:
    """Memory that is needed and available, on the device or the host that lacks most."""
    number, needed_bytes = _fullest(topology, simulation)
    available_bytes, limited = topology.memory_limits[number], f" by {asked('memory_budget')}" if topology.limits else ""
    if needed_bytes > available_bytes:
        name = topology.devices[number].name
        return f"{name} needs {format_bytes(needed_bytes)}, available {format_bytes(available_bytes)}{limited}"
    known = ((use, host.name, host.memory_bytes) for use, host in zip(simulation.host_memory, topology.hosts, strict=True))
    needed_bytes, name, available_bytes = max(((use, name, have) for use, name, have in known if have), key=lambda own: own[0] - own[2])
    need = f"{format_bytes(needed_bytes)} of main memory, available {format_bytes(available_bytes)}"
    return f"what servers keep and devices offload on {name} needs {need}"


def _made_of(topology: Topology, simulation: Outcome) -> str:
    """What most of the fullest device's peak is held for."""
    number, _ = _fullest(topology, simulation)
    size, kind = max((size, kind) for kind, size in simulation.peak_by_kind[number].items() if kind in {*MemoryKind})
    smaller = shrinking(MemoryKind(kind))
    return f"; most of that, {format_bytes(size)}, is for {kind}{': ' * bool(smaller)}{smaller}"


def shrinking(kind: MemoryKind) -> str:
    """What makes a kind of memory smaller, in words; empty if nothing does by itself."""
    return SHRINKING.get(kind, "").format(syncs=asked("syncs"))


def _fullest(topology: Topology, simulation: Outcome) -> tuple[int, int]:
    """The device that lacks most, and the bytes that it needs."""
    pairs = zip(simulation.peak_bytes, topology.memory_limits, strict=True)
    number, (needed_bytes, _) = max(enumerate(pairs), key=lambda own: own[1][0] - own[1][1])
    return number, needed_bytes
