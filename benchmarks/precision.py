"""What a lower precision is worth on a GPU: predicted steps on one device in float32, with products in TF32, and in bfloat16 by autocast.

    python -m benchmarks.precision --write docs/results/precision.md

From the data sheet alone (``--device``, a preset's). A call is bound by memory if reading and writing its operands takes longer than its
operations; the share is of the time of forward and backward passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tqdm import tqdm

from benchmarks.pages import give
from soap import api
from soap.cluster.presets import device_types
from soap.cluster.topology import Device, DeviceType, Host, Topology
from soap.measure.compute_rates import float32_precision
from soap.model.graph import OperatorGraph
from soap.plan.planning import build_plan
from soap.profiles import efficiency
from soap.profiles.roofline import work_seconds
from soap.profiles.work import Kernel, backward_work, forward_work
from soap.strategy.classical import single_device

MODELS = ("zoo:gpt", "zoo:resnet50", "zoo:rnnlm", "zoo:alexnet", "zoo:nmt", "zoo:dlrm")
READINGS: dict[str, dict[str, str]] = {
    "float32": {},
    "tf32": {"matmul_precision": "high"},
    "bfloat16": {"autocast": "bfloat16", "autocast_device": "cuda"},
}


def one_device(kind: DeviceType) -> Topology:
    """A host with nothing but this device."""
    return Topology("one", (Device(0, "host/gpu0", 0, kind),), (Host("host", 8, 2**38),), ())


def predicted(graph: OperatorGraph, topology: Topology) -> tuple[float, float]:
    """Milliseconds of a step, and the share of its passes' time that is bound by memory."""
    strategy = single_device(graph, topology)
    kind, bound, whole = topology.devices[0].type, 0.0, 0.0
    for tile in build_plan(graph, strategy, topology).tiles:
        name = graph.operators[tile.operator].kind
        passes = [(False, forward_work(graph, tile))]
        passes += [(True, backward_work(graph, tile))] if tile.operator in graph.backward_operators else []
        for backward, work in passes:
            for kernel in work:
                seconds = work_seconds([kernel], kind, name, backward=backward)
                whole += seconds
                bound += seconds if _is_bound_by_memory(kernel, kind, name, backward) else 0.0
    return api.simulate(graph, topology, strategy, costs="estimate").makespan_ns / 1e6, bound / whole


def _is_bound_by_memory(kernel: Kernel, device: DeviceType, kind: str, backward: bool) -> bool:
    share = efficiency.shares(device, kind, kernel, backward=backward)
    moving = (kernel.traffic_bytes - kernel.fused_bytes) / (device.memory_bandwidth_bytes_per_second * share.memory)
    return moving > kernel.flops / (device.flops(kernel.dtype) * share.arithmetic)


def page(device: str, models: Sequence[str]) -> str:
    """As Markdown."""
    topology = one_device(device_types()[device])
    lines = []
    for model in tqdm(models, disable=None):
        cells, first = [], 0.0
        for precision, reading in READINGS.items():
            with float32_precision("highest"):
                graph = api.load(model, plan_only=True, **reading).graph  # type: ignore[arg-type]
            step_ms, share = predicted(graph, topology)
            first = first or step_ms
            cells += [f"{step_ms:.1f} ms" + (f" ({step_ms / first:.2f})" if precision != "float32" else ""), f"{share:.0%}"]
        lines.append("| " + " | ".join([model.removeprefix("zoo:"), *cells]) + " |")
    head = ["model", *(cell for precision in READINGS for cell in (precision, "bound by memory"))]
    return "\n".join(
        [
            "# What a lower precision is worth",
            "",
            f"Predicted steps on one {device}, from its data sheet; in brackets: of the step in float32. TF32: products of matrices and",
            "convolutions (in float32, convolutions are in TF32 by torch's default). Share of the passes' time in calls that memory binds.",
            "",
            f"`python -m benchmarks.precision --device {device} --write docs/results/precision.md`, {date.today()}.",
            "",
            f"| {' | '.join(head)} |",
            "|---" + "|---:" * (len(head) - 1) + "|",
            *lines,
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="precision", description="Predicted steps by precision.")
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help="default: " + " ".join(MODELS))
    parser.add_argument("--device", choices=sorted(device_types()), default="h200", help="default %(default)s")
    parser.add_argument("--write", metavar="FILE", type=Path, help="instead of printing")
    args = parser.parse_args(argv)
    text = page(args.device, args.models)
    give(text, args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
