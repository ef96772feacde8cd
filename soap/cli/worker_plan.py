"""A plan of virtual workers in words, and how they train in their steady state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soap import api
from soap.cli.figures import rate
from soap.cli.plain_text import aligned, listed, milliseconds
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.mixed.steady import MixedSteady


def describe(found: api.WorkersOutcome) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    topology, graph = found.simulator.topology, found.simulator.graph
    workers = [
        [
            {
                "device": topology.devices[stage.device].name,
                "first": graph.operators[stage.first].name,
                "forward_ns": stage.forward_ns,
                "backward_ns": stage.backward_ns,
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
        "steady": _steady(found.steady),
        "allocations": dict(found.rates or {}),
    }


def text(told: Mapping[str, Any]) -> str:
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


def _steady(found: MixedSteady) -> dict[str, Any]:
    return {
        "samples_per_second": found.samples_per_second,
        "settled": found.settled,
        "idle": {str(device): share for device, share in found.idle.items()},
        "waiting_ns": list(found.waiting_ns),
        "pulling_ns": list(found.pulling_ns),
        "staleness": {str(missing): count for missing, count in sorted(found.staleness.items())},
        "mean_staleness": found.mean_staleness,
        "pushes": found.pushes,
        "pulls": found.pulls,
        "parameter_bytes": found.parameter_bytes,
        "activation_bytes": found.activation_bytes,
    }


def _each(times_ns: Sequence[float]) -> str:
    return ", ".join(milliseconds(round(own)) for own in times_ns)
