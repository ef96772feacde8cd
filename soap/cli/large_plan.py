"""``soap-simulate`` of plans whose tasks are too many to be told one by one: their time and their memory, from two of many equal copies."""

from __future__ import annotations

import argparse
from typing import Any

from soap.api import save_strategy
from soap.api.large import LargePrediction
from soap.cli.command import UsageError
from soap.cli.plain_text import listed, milliseconds
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.units import format_bytes


def report(args: argparse.Namespace, simulator: Simulator, strategy: Strategy, found: LargePrediction, name: str) -> dict[str, Any]:
    """What is told, as plain JSON values. Writes the strategy if that is asked for. UsageError in one line for options about tasks."""
    for option in ("timeline", "explain", "sensitivity", "beside"):
        if getattr(args, option):
            raise UsageError(f"--{option} of a plan of {found.tiles} tiles; expected one of fewer micro-batches or devices: leave it out")
    if args.output:
        record = {"predicted_ns": found.makespan_ns, "peak_bytes": found.peak_bytes}
        save_strategy(args.output, strategy, simulator.graph, simulator.topology, record)
    return {
        "model": simulator.graph.name,
        "cluster": {"name": simulator.topology.name, "devices": simulator.topology.device_count},
        "strategy": name,
        "folded": {"copies": found.copies, "tiles": found.tiles},
        "predicted_ns": found.makespan_ns,
        "peak_memory_bytes": found.peak_bytes,
        "available_memory_bytes": found.available_bytes,
        "fits": found.peak_bytes <= found.available_bytes,
    }


def text(report: dict[str, Any]) -> str:
    """The document as a short table."""
    cluster, folded = report["cluster"], report["folded"]
    lacks = "" if report["fits"] else ": does not fit"
    held = f"{format_bytes(report['peak_memory_bytes'])} of {format_bytes(report['available_memory_bytes'])}{lacks}"
    head = f"{report['model']} on {cluster['name']} ({cluster['devices']} devices)\n"
    head += f"note: {folded['copies']} copies of the model do the same: two were simulated, {folded['tiles']:,} tiles"
    return f"{head}\n\n{listed([(report['strategy'], milliseconds(report['predicted_ns'])), ('memory per device', held)])}"
