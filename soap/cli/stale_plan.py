"""A plan of servers and workers in words, for commands that run it and those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soap.cli.figures import rate
from soap.cli.plain_text import devices, listed
from soap.cluster.topology import Topology
from soap.strategy.consistency import parse

if TYPE_CHECKING:
    from soap.elastic.layout import ElasticPlan
    from soap.elastic.simulation.steady import Steady

SHOWN_TABLES = 4


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
    consistency = parse(plan["consistency"])
    word = f"stale ({consistency})" if consistency.stale else "averaged synchronous updates"
    workers, servers = len(plan["workers"]), len(plan["servers"])
    both = sum(name in plan["servers"] for name in plan["workers"])
    shared = f", {both} of them on the same devices" if both else ""
    return f"{word}: {workers} workers with {plan['batch']} samples each, {servers} servers{shared}"


def text(plan: Mapping[str, Any], topology: Topology) -> str:
    """A plan in a few lines, and how it trains if the document says so (``steady``)."""
    numbers = {device.name: device.index for device in topology.devices}
    rows = [(what, devices([numbers[name] for name in plan[what]])) for what in ("workers", "servers")]
    cut: dict[tuple[str, int], list[str]] = {}
    for name, own in plan["tables"].items():
        cut.setdefault((("rows", "columns")[own["axis"]], len(own["servers"])), []).append(name)
    rows += [(f"tables by {what} in {parts} parts" if parts > 1 else "tables whole", _some(own)) for (what, parts), own in cut.items()]
    if "steady" in plan:
        rows += _steady_rows(plan["steady"])
    return f"{head(plan)}\n\n{listed(rows)}"


def steady(report: Steady, topology: Topology) -> dict[str, Any]:
    """How a plan trains, as plain JSON values."""
    busiest = max(range(len(report.link_busy)), key=report.link_busy.__getitem__, default=None)
    return {
        "samples_per_second": report.samples_per_second,
        "settled": report.settled,
        "idle": dict(report.idle_by_role),
        "stateful": report.stateful,
        "waiting_ns": sum(report.waiting_ns) / len(report.waiting_ns),
        "staleness": {str(missing): count for missing, count in sorted(report.staleness.items())},
        "busiest_link": None if busiest is None else {"name": topology.links[busiest].name, "share": report.link_busy[busiest]},
    }


def idle_text(idle: Mapping[str, float]) -> str:
    """``server 71%, worker 97%``."""
    return ", ".join(f"{role} {share:.0%}" for role, share in idle.items())


def _steady_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("simulated", f"{rate(found['samples_per_second'])} samples/s" + ("" if found["settled"] else ", not settled"))]
    rows.append(("idle", idle_text(found["idle"])))
    if found["busiest_link"] is not None:
        rows.append(("busiest link", f"{found['busiest_link']['name']}, {found['busiest_link']['share']:.0%} of the time"))
    most = max(map(int, found["staleness"]), default=0)
    rows.append(("earlier minibatches that leases may lack", f"{most} at most"))
    return rows


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_TABLES]) + (f" and {len(names) - SHOWN_TABLES} more" if len(names) > SHOWN_TABLES else "")
