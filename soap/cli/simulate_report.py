"""What ``soap-simulate`` says besides a plan: what decides an iteration, plans too large to list, layers on servers, which figures of the
cluster would change a choice, and what jobs on one cluster do to each other."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from soap import api
from soap.api import save_strategy
from soap.api.fitting import Fit, Way
from soap.api.large_plans import LargePrediction
from soap.cli.command import OPTIONS, Parser, UsageError, refuse_given
from soap.cli.options import reading_options
from soap.cli.plain_text import aligned, and_more, attributes, listed, milliseconds
from soap.cli.plan_summary import budgeted, budgeted_text, kinds_text, subject
from soap.cluster.fewer import part_of
from soap.cluster.topology import Topology
from soap.errors import InfeasibleError, StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.memory_kinds import MemoryKind
from soap.profiles.lookup import ProfiledCosts
from soap.search.infeasible import shrinking
from soap.search.layer_placement import LayerPlacement
from soap.search.sensitivity import DOUBLE, HALF, MOST, Sensitivity
from soap.search.starts import BASELINE
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.units import format_bytes

MOST_ROWS = 16
"""Rows of devices and of links in the text; the JSON document has all."""


def iteration_document(simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Plain JSON values. ``critical_path_ns``: by kind of task, adding up to the iteration. ``peak_bytes``: over the simulated time."""
    busy, topology = simulation.busy_ns, simulation.topology
    return {
        "iteration_ns": simulation.makespan_ns,
        "critical_path_ns": {kind.value: duration for kind, duration in simulation.critical_path_ns.items()},
        "devices": [
            {"name": device.name, "busy_ns": busy[device.name], "peak_bytes": peak, "available_bytes": limit}
            for device, peak, limit in zip(topology.devices, simulation.peak_bytes, topology.memory_limits, strict=True)
        ],
        "links": [{"name": name, "busy_ns": busy[name], "bytes": size} for name, size in simulation.link_bytes.items()],
    }


def iteration_text(iteration: Mapping[str, Any]) -> str:
    """The document as tables."""
    whole_ns = max(1, iteration["iteration_ns"])
    path = [(kind, *_time(ns, whole_ns)) for kind, ns in sorted(iteration["critical_path_ns"].items(), key=lambda own: -own[1])]
    devices = [(d["name"], *_time(d["busy_ns"], whole_ns), format_bytes(d["peak_bytes"])) for d in iteration["devices"]]
    used = sorted((link for link in iteration["links"] if link["bytes"]), key=lambda link: (-link["bytes"], link["name"]))
    links = [(link["name"], *_time(link["busy_ns"], whole_ns), format_bytes(link["bytes"])) for link in used]
    sections = ["the iteration takes as long as these, one after the other:\n" + aligned(path)]
    sections.append(_table(("device", "busy", "", "peak memory"), devices))
    if links:
        sections.append(_table(("link", "held", "", "carries"), links))
    return "\n\n".join(sections)


def _time(duration_ns: int, whole_ns: int) -> tuple[str, str]:
    """A time, and its share of the iteration."""
    return milliseconds(duration_ns), f"{duration_ns / whole_ns:.0%}"


def _table(head: Sequence[str], everything: Sequence[Sequence[str]]) -> str:
    """Rows that differ in their first cell alone are one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in everything:
        alike.setdefault(tuple(cells), []).append(name)
    rows = [(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), *cells) for cells, names in alike.items()]
    return "\n".join([aligned([head, *rows[:MOST_ROWS]]), *and_more(len(rows), MOST_ROWS, what="further rows")])


OF_TASKS = ("timeline", "explain", "sensitivity", "beside")
"""Options for which all tasks of a plan are listed."""


def large_report(args: argparse.Namespace, simulator: Simulator, strategy: Strategy, found: LargePrediction, name: str) -> dict[str, Any]:
    """What is told, as plain JSON values. Writes the strategy if that is asked for. UsageError in one line for options about tasks."""
    said = f"of a plan of {found.tiles} tiles; expected one of fewer micro-batches or devices: leave it out"
    refuse_given(args, OF_TASKS, said)
    if args.output:
        record = {"predicted_ns": found.makespan_ns, "peak_bytes": found.peak_bytes}
        save_strategy(args.output, strategy, simulator.graph, simulator.topology, record)
    return {
        "model": simulator.graph.name,
        "cluster": {"name": simulator.topology.name, "devices": simulator.topology.device_count},
        "strategy": name,
        "folded": {"copies": found.copies, "tiles": found.tiles, "microbatches": found.microbatches},
        "predicted_ns": found.makespan_ns,
        "most_memory_bytes": found.peak_bytes,
        "available_memory_bytes": found.available_bytes,
        "fits": found.fits,
    }


def large_text(report: dict[str, Any]) -> str:
    """The document as a short table."""
    cluster, folded = report["cluster"], report["folded"]
    lacks = "" if report["fits"] else ": does not fit"
    held = f"up to {format_bytes(report['most_memory_bytes'])} of {format_bytes(report['available_memory_bytes'])}{lacks}"
    head = f"{report['model']} on {cluster['name']} ({cluster['devices']} devices)\n"
    alike, tiles = folded["copies"], f"{folded['tiles']:,} tiles"
    few = f", and {folded['microbatches']} micro-batches at most: the rest follows on a line" if folded["microbatches"] else ""
    copied = f"{alike} copies of the model do the same: two were simulated, {tiles}{few}"
    head += f"note: {copied if alike > 1 else f'{tiles}: time and memory alone; with --explain or --timeline all of it, in minutes{few}'}"
    return f"{head}\n\n{listed([(report['strategy'], milliseconds(report['predicted_ns'])), ('memory per device', held)])}"


def layers_document(placed: LayerPlacement, graph: OperatorGraph, topology: Topology) -> dict[str, Any]:
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
    return {**attributes(placed, "friendly", "gain", "least_gain"), "plain_servers_ns": placed.plain_ns, "best": best}


def layers_text(found: Mapping[str, Any]) -> str:
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


def find_sensitivity(simulator: Simulator, plan: Strategy, usual: Strategy) -> list[Sensitivity]:
    """How the choice depends on each figure. StrategyError if there is no choice."""
    if plan == usual:
        raise StrategyError(f"--sensitivity compares with {BASELINE}, and this strategy is {BASELINE}; expected another one")
    return api.sensitivity(simulator, plan, usual)


def sensitivity_document(found: list[Sensitivity], simulator: Simulator) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    return {
        "gain": round(found[0].usual, 4),
        "within": MOST,
        "scaled_measurements": isinstance(simulator.costs, ProfiledCosts),
        "figures": [
            {
                "figure": one.figure.value,
                "known": one.is_known,
                "turns_below": None if one.below is None else round(one.below, 4),
                "turns_above": None if one.above is None else round(one.above, 4),
                "gain_at_half": round(one.at_half, 4),
                "gain_at_double": round(one.at_double, 4),
            }
            for one in found
        ],
    }


def sensitivity_text(told: Mapping[str, Any]) -> str:
    """The document as a table."""
    rows = [("figure", f"gain at {HALF:g}x", f"at {DOUBLE:g}x", "turns over at")]
    for one in told["figures"]:
        if not one["known"]:
            rows.append((one["figure"], "-", "-", "this cluster has no such figure"))
            continue
        places = [one[side] for side in ("turns_below", "turns_above") if one[side] is not None]
        turns = " and ".join(f"{place:.2g}x" for place in places) or f"not within a factor of {told['within']:g}"
        rows.append((one["figure"], f"{one['gain_at_half']:.2f}x", f"{one['gain_at_double']:.2f}x", turns))
    better = "this plan" if told["gain"] > 1 else BASELINE
    head = f"predicted gain over {BASELINE}: {told['gain']:.2f}x, so {better} is the choice; with other figures of the cluster:"
    lines = [head, aligned(rows)]
    if told["scaled_measurements"]:
        lines.append("measured times do not follow from figures: each is scaled as the estimate of the same computation")
    return "\n".join(lines)


def add_beside(parser: Parser) -> None:
    """Add ``--devices`` and ``--beside``."""
    parser.add_argument(
        "--devices",
        metavar="NAMES",
        help="the devices of the cluster to use, or hosts for all of theirs, by name, with commas (default: all)",
    )
    parser.add_repeatable(
        "--beside",
        metavar="JOB",
        help="simulate another job beside this one, on other devices of the same cluster, and say what both do to each other: a file with "
        "a JSON object of model, builtin (a name) or strategy (a file), and devices (a list of names); repeatable",
    )


def check_beside(args: argparse.Namespace) -> None:
    """UsageError if ``--beside`` does not go with the other options."""
    if args.beside and args.fits:
        raise UsageError("--beside with --fits; expected one of them: what fits into memory does not depend on other jobs' devices")


def asked_part(args: argparse.Namespace, whole: Topology) -> Topology:
    """The devices that ``--devices`` names."""
    return part_of(api.with_links(whole, args.costs), [name.strip() for name in args.devices.split(",")]) if args.devices else whole


def beside_document(args: argparse.Namespace, whole: Topology, name: str, simulation: Simulation) -> list[dict[str, Any]]:
    """Each job as plain JSON values, this one first."""
    topology = api.with_links(whole, args.costs)
    jobs = [api.load_job(path) for path in args.beside]
    simulations = [simulation, *(api.job_simulation(job, topology, costs=args.costs) for job in jobs)]
    names, found = [name, *(job.name for job in jobs)], api.beside_of(simulations, topology)
    return [
        {
            "job": name,
            "model": simulated.plan.graph.name,
            "devices": [device.name for device in simulated.topology.devices],
            "alone_ns": round(own.alone_ns),
            "step_ns": round(own.step_ns),
            "least_ns": round(own.least_ns),
            "most_ns": round(own.most_ns),
            "slowdown": own.slowdown,
            "steps": own.steps,
        }
        for name, simulated, own in zip(names, simulations, found, strict=True)
    ]


def beside_text(jobs: Sequence[Mapping[str, Any]]) -> str:
    """The document as a table."""
    rows = [("beside each other", "model", "devices", "alone", "beside", "slower", "least", "most")]
    rows += [
        (
            job["job"], job["model"], str(len(job["devices"])), milliseconds(job["alone_ns"]), milliseconds(job["step_ns"]),
            f"{job['slowdown']:.2f}x", milliseconds(job["least_ns"]), milliseconds(job["most_ns"]),
        )
        for job in jobs
    ]  # fmt: skip
    return f"{aligned(rows, indent='')}\n  a step's mean over {len(jobs)} jobs that go on and on; least, most: by how far apart they begin"


STRATEGY_FILE = "strategy.json"
SMALLER = "several batches are normalized each by itself, so that training has other numbers than with one batch"
MOST_SAID = 6
"""Ways for which there was no time, by name; of the others it is said how many."""
UNUSED = ("what_if", "sensitivity", "explain", "timeline", "output")
"""Options of ``soap-simulate`` that say something about one strategy alone."""


def check_fits(args: argparse.Namespace) -> None:
    """UsageError if ``--fits`` is asked for together with what needs one strategy."""
    for name in UNUSED:
        if args.fits and getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--fits with {option}, which is about one strategy; expected one of them: first --fits, then {option}")


def fit_document(fit: Fit, args: argparse.Namespace, graph: OperatorGraph, topology: Topology) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    return {
        **subject(graph, topology),
        "fits": fit.fits,
        "asked": _way(fit.asked),
        "ways": [{**_way(way), "commands": commands(way, args)} for way in fit.ways],
        "tried": list(fit.tried),
        "untried": list(fit.untried),
        "closest": None if fit.closest is None else _way(fit.closest),
    }


def commands(way: Way, args: argparse.Namespace) -> list[str]:
    """The command that makes a strategy file of a way; of one with several batches also the one that trains by it."""
    model = args.model if way.micro_batches == 1 else way.model
    options = [*reading_options(args), *((OPTIONS["memory_budget"], args.memory_budget) if args.memory_budget else ())]
    options += ["--batches", args.batches] if args.batches != "whole" else []
    if way.budgeted is not None:  # a search begins with it
        start = ["--start", way.base, "--recompute", "yes", "--budget", "1"]
        return [shlex.join(["soap-search", model, "--cluster", args.cluster, *options, *start, "-o", STRATEGY_FILE])]
    made = shlex.join(["soap-simulate", model, "--cluster", args.cluster, *options, "--builtin", way.name, "-o", STRATEGY_FILE])
    accumulate = ["--accumulate", str(way.micro_batches)]
    trained = shlex.join(["soap-run", STRATEGY_FILE, "--model", model, "--cluster", args.cluster, *reading_options(args), *accumulate])
    return [made, trained] if way.micro_batches > 1 else [made]


def _way(way: Way) -> dict[str, Any]:
    return {
        **attributes(way, "name", "model", "micro_batches"),
        "predicted_ns": way.time_ns,
        **attributes(way, "fits", "lacking_bytes", "device", "peak_bytes", "available_bytes"),
        "peak_memory_bytes": dict(way.by_kind),
        "budgeted": None if way.budgeted is None else budgeted(way.base, way.budgeted),
    }


def fit_text(found: Mapping[str, Any]) -> str:
    """The document for people."""
    asked, cluster = found["asked"], found["cluster"]
    head = f"{found['model']['name']} ({found['model']['operators']} operators) on {cluster['name']} ({len(cluster['devices'])} devices)"
    verdict = "fits" if found["fits"] else f"does not fit, {format_bytes(asked['lacking_bytes'])} missing in all"
    lines = [head, f"{asked['name']} {verdict}: {_memory(asked)}, {milliseconds(asked['predicted_ns'])}"]
    lines.append(f"  at its peak: {kinds_text(asked['peak_memory_bytes'])}")
    if found["fits"]:
        return "\n".join(lines)
    sections = ["\n".join(lines)]
    if found["ways"]:
        rows = [(_name(way), milliseconds(way["predicted_ns"]), _memory(way)) for way in found["ways"]]
        sections.append("these fit, the fastest first:\n" + aligned(rows))
        if any(way["micro_batches"] > 1 for way in found["ways"]):
            sections.append(SMALLER)
        sections += [budgeted_text(way["budgeted"]) for way in found["ways"] if way["budgeted"] is not None]
        sections.append("\n".join(["a strategy file of each:", *(f"  {one}" for way in found["ways"] for one in way["commands"])]))
    else:
        closest = found["closest"]
        most = max(MemoryKind, key=lambda kind: closest["peak_memory_bytes"][kind.value])
        sections.append(
            f"nothing that was tried fits ({', '.join(found['tried']) or 'nothing else to try'})\n"
            f"closest: {_name(closest)}, {_memory(closest)}, {format_bytes(closest['lacking_bytes'])} missing in all\n"
            f"  at its peak: {kinds_text(closest['peak_memory_bytes'])}\n"
            f"what would help: {shrinking(most) or 'more devices'}; devices with more memory, or more of them"
        )
    if found["untried"]:
        first, others = found["untried"][:MOST_SAID], len(found["untried"][MOST_SAID:])
        sections.append(f"no time was left for {', '.join(first)}{f' and {others} others' * (others > 0)}")
    sections.append("soap-search looks for mixtures of these that are faster")
    return "\n\n".join(sections)


def require_way(found: Mapping[str, Any]) -> None:
    """InfeasibleError in one line if neither what was asked about fits, nor any way that was tried."""
    closest = found["closest"]
    if closest is not None:
        names = f"model {found['model']['name']!r} fits into the memory of cluster {found['cluster']['name']!r} in none of the ways tried"
        raise InfeasibleError(f"{names}: the closest is {_name(closest)}, with which {_memory(closest)}; expected devices with more memory")


def _name(way: Mapping[str, Any]) -> str:
    return f"{way['name']} in {way['micro_batches']} batches" if way["micro_batches"] > 1 else str(way["name"])


def _memory(way: Mapping[str, Any]) -> str:
    return f"{way['device']} needs {format_bytes(way['peak_bytes'])} of {format_bytes(way['available_bytes'])}"
