"""Whether the tensors of what is to be measured fit into this machine's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.measure.this_machine import free_memory_bytes
from soap.model.graph import OperatorGraph
from soap.search.starts import BASELINE
from soap.simulator.memory.peaks import MemoryUse
from soap.simulator.simulate import Simulation
from soap.units import format_bytes


def require_for_tiles(graph: OperatorGraph, topology: Topology) -> None:
    """RuntimeFailure unless every process can hold all tensors of the model, since each runs any of its tiles."""
    if not topology.has_gpus_alone:
        _require(topology.device_count * sum(tensor.bytes for tensor in graph.tensors.values()), free_memory_bytes(), "this machine")


def together(graph: OperatorGraph, topology: Topology, simulations: Mapping[str, Simulation]) -> list[str]:
    """The names of the strategies that can be trained in turns: as many of the first as fit, since all keep their parameters.
    RuntimeFailure if there is not enough memory for the first two, or for the only one."""
    names = list(simulations)
    least = min(len(names), 2 if names[0] == BASELINE else 1)
    while len(names) > least and not _fits(graph, topology, [simulations[name] for name in names]):
        names.pop()
    chosen = [simulations[name] for name in names]
    if not _fits(graph, topology, chosen):
        needed, there, where = _needed(graph, topology, chosen)
        _require(needed, there, where)
    return names


def _fits(graph: OperatorGraph, topology: Topology, simulations: Sequence[Simulation]) -> bool:
    needed, there, _ = _needed(graph, topology, simulations)
    return needed <= there


def _needed(graph: OperatorGraph, topology: Topology, simulations: Sequence[Simulation]) -> tuple[int, int, str]:
    """Bytes that are needed, bytes that are there, and where: on CPUs those of all ranks, which begin with all parameters; on GPUs
    those of the fullest GPU. On CPUs the bounds leave room for what kernels take for themselves, which is not predicted."""
    if not topology.has_gpus_alone:
        loaded = topology.device_count * sum(tensor.bytes for tensor in graph.parameters)
        bounds = [_held([(s.memory[device.index], s.memory[device.index].total) for s in simulations]) for device in topology.devices]
        return loaded + sum(bounds), free_memory_bytes(), "this machine"
    devices = [_held([(s.memory[device.index], s.peak_bytes[device.index]) for s in simulations]) for device in topology.devices]
    fullest = max(topology.devices, key=lambda device: devices[device.index] / device.type.memory_bytes)
    return devices[fullest.index], fullest.type.memory_bytes, fullest.name


def _held(uses: Sequence[tuple[MemoryUse, int]]) -> int:
    """Bytes of one device: what stays of each strategy, and the largest that one of them needs for a while. ``uses``: each with the most
    that it needs at once."""
    stay = [use.parameters + use.gradients + use.optimizer for use, _ in uses]
    return sum(stay) + max(max(0, most - own) for own, (_, most) in zip(stay, uses, strict=True))


def _require(needed: int, there: int, where: str) -> None:
    if needed > there:
        raise RuntimeFailure(f"{format_bytes(needed)} of memory are needed, and {where} has {format_bytes(there)}")
