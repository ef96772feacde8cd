"""What ``soap-simulate --fits`` reports: a document for programs, and the same as text for people."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from soap.api.fitting import Fit, Way
from soap.cli.command import OPTIONS, UsageError
from soap.cli.options import reading_options
from soap.cli.plain_text import aligned, attributes, milliseconds
from soap.cli.plan_summary import kinds_text
from soap.cli.recomputing import budgeted, budgeted_text
from soap.cluster.topology import Topology
from soap.errors import InfeasibleError
from soap.model.graph import OperatorGraph
from soap.plan.memory_kinds import MemoryKind
from soap.search.infeasible import shrinking
from soap.units import format_bytes

STRATEGY_FILE = "strategy.json"
SMALLER = "several batches are normalized each by itself, so that training has other numbers than with one batch"
MOST_SAID = 6
"""Ways for which there was no time, by name; of the others it is said how many."""
UNUSED = ("what_if", "sensitivity", "explain", "timeline", "output")
"""Options of ``soap-simulate`` that say something about one strategy alone."""


def check_alone(args: argparse.Namespace) -> None:
    """UsageError if ``--fits`` is asked for together with what needs one strategy."""
    for name in UNUSED:
        if args.fits and getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--fits with {option}, which is about one strategy; expected one of them: first --fits, then {option}")


def document(fit: Fit, args: argparse.Namespace, graph: OperatorGraph, topology: Topology) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    return {
        "model": {"name": graph.name, "hash": graph.hash, "operators": len(graph.operators)},
        "cluster": {"name": topology.name, "hash": topology.hash, "devices": [device.name for device in topology.devices]},
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


def text(found: Mapping[str, Any]) -> str:
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
