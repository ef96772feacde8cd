"""What ``soap-simulate --builtin ralp`` says of the model's cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.cli.plain_text import milliseconds
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.search.layer_placement import LayerPlacement


def document(placed: LayerPlacement, graph: OperatorGraph, topology: Topology) -> dict[str, Any]:
    """Plain JSON values. ``best``: the best cut, taken or not; None if no tail keeps up and fits. ``first``: its first operator."""
    best = None
    if (cut := placed.best) is not None:
        best = {
            "first": graph.operators[cut.position].name,
            "operators": len(graph.operators) - cut.position,
            "devices": [topology.devices[device].name for device in cut.tail],
            "predicted_ns": cut.cost_ns,
            "front_ns": cut.front_ns,
            "tail_ns": cut.tail_ns,
        }
    return {
        "friendly": placed.friendly,
        "gain": placed.gain,
        "least_gain": placed.least_gain,
        "plain_servers_ns": placed.plain_ns,
        "best": best,
    }


def text(found: Mapping[str, Any]) -> str:
    """The document as a few lines."""
    plain, best = milliseconds(found["plain_servers_ns"]), found["best"]
    if best is None:
        return f"layers on servers: none, as no tail keeps up with the workers and fits; plain servers take {plain}"
    kept = "" if found["friendly"] else f", less than {found['least_gain']:.0%}: unfriendly, so parameters stay on plain servers"
    return (
        f"layers on servers: {best['operators']} operators from {best['first']} on, on {', '.join(best['devices'])}: "
        f"{milliseconds(best['predicted_ns'])} instead of {plain} with plain servers, a gain of {found['gain']:.0%}{kept}\n"
        f"a step computes {milliseconds(best['front_ns'])} on the busiest worker, {milliseconds(best['tail_ns'])} on the busiest of these"
    )
