"""Plans of servers and workers, and of virtual workers, in words, and how they train in their steady state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soap import api
from soap.cli.plain_text import aligned, attributes, devices, listed, milliseconds
from soap.cli.plan_summary import rate
from soap.cluster.topology import Topology
from soap.strategy.consistency import parse
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.elastic.layout import ElasticPlan
    from soap.elastic.simulation.steady import Steady
    from soap.mixed.steady import MixedSteady


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


def describe_workers(found: api.WorkersOutcome) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    topology, graph = found.simulator.topology, found.simulator.graph
    workers = [
        [
            {
                "device": topology.devices[stage.device].name,
                "first": graph.operators[stage.first].name,
                **attributes(stage, "forward_ns", "backward_ns"),
                "memory_bytes": stage.needed_bytes,
                "limit_bytes": topology.memory_limits[stage.device],
                "parameter_bytes": stage.parameter_bytes,
            }
            for stage in plan.stages
        ]
        for plan in found.plans
    ]
    return {
        "model": graph.name,
        "cluster": topology.name,
        "consistency": str(found.strategy.consistency),
        "allocation": found.allocation,
        "in_flight": found.plans[0].in_flight,
        "most_in_flight": list(found.most_in_flight),
        "workers": workers,
        "steady": _steady_workers(found.steady),
        "allocations": dict(found.rates or {}),
    }


def workers_text(told: Mapping[str, Any]) -> str:
    """The document for people."""
    steady, count = told["steady"], len(told["workers"])
    head = f"{count} virtual workers ({told['allocation']}, {told['consistency']}), {told['in_flight']} minibatches in flight in each"
    if told["most_in_flight"]:
        head += f" of {min(told['most_in_flight'])} that fit at most"
    lines: list[tuple[str, ...]] = [("worker", "stage", "device", "from operator", "forward", "backward", "memory", "of")]
    for number, stages in enumerate(told["workers"]):
        for place, own in enumerate(stages):
            times = milliseconds(own["forward_ns"]), milliseconds(own["backward_ns"])
            memory = format_bytes(own["memory_bytes"]), format_bytes(own["limit_bytes"])
            lines.append((str(number), str(place), own["device"], own["first"], *times, *memory))
    facts = [("simulated", f"{rate(steady['samples_per_second'])} samples/s" + ("" if steady["settled"] else ", not settled"))]
    facts.append(("a minibatch waits for the bound", _each(steady["waiting_ns"])))
    facts.append(("and then for values and its first device", _each(steady["pulling_ns"])))
    staleness = ", ".join(f"{number}: {count}" for number, count in steady["staleness"].items())
    facts.append(("others' earlier minibatches that starts may lack", f"{staleness} (number: starts)"))
    facts.append(("of each worker's wave", f"{steady['pushes']:.3g} pushes, {steady['pulls']:.3g} pulls"))
    moved = format_bytes(round(steady["parameter_bytes"])), format_bytes(round(steady["activation_bytes"]))
    facts.append(("between hosts for a minibatch", f"{moved[0]} of parameters, {moved[1]} of activations"))
    sections = [head, aligned(lines), listed(facts)]
    if len(told["allocations"]) > 1:
        best = sorted(told["allocations"].items(), key=lambda own: -own[1])
        sections.append(listed([("simulated allocations", "samples/s"), *((name, rate(own)) for name, own in best)]))
    return "\n\n".join(sections)


def _steady_workers(found: MixedSteady) -> dict[str, Any]:
    return {
        **attributes(found, "samples_per_second", "settled"),
        "idle": {str(device): share for device, share in found.idle.items()},
        **attributes(found, "waiting_ns", "pulling_ns"),
        "staleness": {str(missing): count for missing, count in sorted(found.staleness.items())},
        **attributes(found, "mean_staleness", "pushes", "pulls", "parameter_bytes", "activation_bytes"),
    }


def _each(times_ns: Sequence[float]) -> str:
    return ", ".join(milliseconds(round(own)) for own in times_ns)
