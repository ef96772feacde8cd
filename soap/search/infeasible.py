"""The error message if nothing fits into memory."""

from __future__ import annotations

from soap.cluster.topology import Topology
from soap.errors import InfeasibleError
from soap.model.graph import OperatorGraph
from soap.search.metropolis import Evaluator
from soap.search.starts import Start
from soap.units import format_bytes


def infeasible(graph: OperatorGraph, topology: Topology, evaluator: Evaluator, best: Start, proposals: int) -> InfeasibleError:
    """The error of a search that found nothing that fits."""
    return InfeasibleError(
        f"model {graph.name!r} does not fit into the memory of cluster {topology.name!r}: {_need(topology, evaluator, best)}, in the "
        f"closest of {proposals} proposals and all starts; ways out: (1) more devices or devices with more memory, "
        "(2) a smaller batch, (3) an optimizer that keeps fewer states, (4) --sync zero or fsdp: devices share states or values, "
        "(5) a larger --budget"
    )


def _need(topology: Topology, evaluator: Evaluator, best: Start) -> str:
    """Memory that is needed and available: on the device that lacks most if the evaluator can simulate in full, otherwise over all
    devices."""
    run = getattr(evaluator, "run", None)
    if run is not None:
        peaks = zip(run(best.strategy).peak_bytes, topology.devices, strict=True)
        lacks = [(peak - device.type.memory_bytes, peak, device) for peak, device in peaks]
        _, needed_bytes, device = max(lacks, key=lambda lack: lack[0])
        return f"{device.name} needs {format_bytes(needed_bytes)}, available {format_bytes(device.type.memory_bytes)}"
    available_bytes = sum(device.type.memory_bytes for device in topology.devices)
    lacking = format_bytes(best.overflow_bytes)
    return f"{lacking} more needed than the {format_bytes(available_bytes)} available on {topology.device_count} devices"
