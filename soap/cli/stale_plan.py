"""A plan of servers and workers in words, for commands that run it and those that do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from soap.cli.plain_text import devices, listed
from soap.cluster.topology import Topology
from soap.strategy.consistency import SYNC

if TYPE_CHECKING:
    from soap.elastic.plan import ElasticPlan


def describe(plan: ElasticPlan, topology: Topology) -> dict[str, Any]:
    """A plan as plain JSON values."""
    named = [device.name for device in topology.devices]
    return {
        "consistency": str(plan.consistency),
        "workers": [named[device] for device in plan.workers],
        "servers": [named[device] for device in plan.servers],
        "batch": plan.batch,
        "tables": {name: {"axis": cut.axis, "servers": list(cut.servers)} for name, cut in plan.tables.items()},
        "dense_servers": list(plan.dense),
    }


def head(plan: Mapping[str, Any]) -> str:
    """The first words about a plan: whether it is stale, and how many take part."""
    word = "averaged synchronous updates" if plan["consistency"] == SYNC else f"stale ({plan['consistency']})"
    workers, servers = len(plan["workers"]), len(plan["servers"])
    both = sum(name in plan["servers"] for name in plan["workers"])
    shared = f", {both} of them on the same devices" if both else ""
    return f"{word}: {workers} workers with {plan['batch']} samples each, {servers} servers{shared}"


def text(plan: Mapping[str, Any], topology: Topology) -> str:
    """A plan in a few lines, for commands that do not run it."""
    numbers = {device.name: device.index for device in topology.devices}
    rows = [(what, devices([numbers[name] for name in plan[what]])) for what in ("workers", "servers")]
    cut = {axis: [name for name, own in plan["tables"].items() if own["axis"] == axis] for axis in (0, 1)}
    rows += [(f"tables by {what}", ", ".join(cut[axis])) for axis, what in ((0, "rows"), (1, "columns")) if cut[axis]]
    return f"{head(plan)}\n\n{listed(rows)}"
