"""``soap-profile --what-decides``: what to measure before a plan is chosen instead of data parallelism, as commands to run. Where the
machines are elsewhere, they are commands to run there."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from soap import api
from soap.api import informing as deciding
from soap.api.informing import Matter, Thing, WhatDecides
from soap.api.predictions import plays_compiled
from soap.cli.command import UsageError
from soap.cli.plain_text import listed, milliseconds
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.profiles.entries import COMPRESSION, UPDATE
from soap.search.deciding import DEFAULT_CONFIDENCE
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

PLAN = "plan"
"""The name of the plan that is asked about."""
MOST_ROWS = 12
LEAST_SHARE = 0.005
"""Lines of the text have at least this share, or value."""
ONE = f"{LOCAL}:1"
"""Kernels are timed on one GPU by itself."""
FILE = "measured.json"
"""What is measured elsewhere travels in."""
HOST, PORT = "HOST", 29500
"""Where ranks on several hosts meet: a name that the user has to replace, and torchrun's usual port."""
WORDS = {
    deciding.RATE: "how fast {device} is at all its work",
    deciding.TILES: "{kind} on {device}",
    deciding.LAUNCHES: "launching kernels on {device}",
    deciding.UPDATES: "updates of parameters on {device}",
    deciding.COMPRESSING: "compressing gradients on {device}",
    deciding.SERVERS: "what parameter servers do",
    deciding.LINKS: "links, and what messages and sums cost devices",
    deciding.PLANS: "the plan itself, beside the costs of its parts",
}


class Subject(NamedTuple):
    """What the user has named. ``model``: MODEL with the options that say how it is read. ``strategy``: the plan's file. ``lossy``: the
    methods by which the plan compresses gradients."""

    model: tuple[str, ...]
    cluster: str
    strategy: str
    lossy: tuple[str, ...] = ()


def check_alone(args: argparse.Namespace) -> None:
    """UsageError if options are given that ``--what-decides`` has no use for."""
    given = {"--strategy": args.strategy, "--budget": args.budget, "--again": args.again, "--kind": args.kind, "--for": args.planned}
    for option, value in given.items():
        if value:
            raise UsageError(f"--what-decides with {option}; expected one of them: --what-decides measures nothing, and prints commands")


def find(simulator: Simulator, plan: Strategy, usual: Strategy) -> WhatDecides:
    """What decides between a plan and data parallelism (``usual``). StrategyError if they are the same."""
    if plan == usual:
        raise StrategyError(f"this strategy is {BASELINE}, to which --what-decides compares; expected a strategy that differs from it")
    tasks = max(len(simulator.predict(one).tasks.tasks) for one in (plan, usual))
    compiled = plays_compiled(tasks, deciding.INFORMING_DRAWS)
    return api.what_decides(simulator, {PLAN: plan, BASELINE: usual}, compiled=compiled)


def document(found: WhatDecides, topology: Topology, subject: Subject) -> dict[str, Any]:
    """What decides, as plain JSON values. The keys are part of the command's interface."""
    plan, usual = found.rival, found.reference
    return {
        "cluster": topology.name,
        "at_hand": family(topology.name) is not None,
        "plans": {one.name: {"predicted_ns": one.usual_ns, "mean_ns": round(one.mean_ns)} for one in found.plans},
        "wins": round(plan.wins(usual), 4),
        "draws": len(plan.times_ns),
        "confidence": DEFAULT_CONFIDENCE,
        "sure": found.is_sure(DEFAULT_CONFIDENCE),
        "value_of_everything_ns": round(found.responses.value_of_all_ns),
        "value_to_measure_ns": round(found.value_to_measure_ns),
        "unexplained": round(found.unexplained, 4),
        "decides": [_record(one, topology, subject) for one in found.matters],
    }


def _record(one: Matter, topology: Topology, subject: Subject) -> dict[str, Any]:
    words = command(one, topology, subject)
    return {
        "what": WORDS[one.thing.what].format(device=one.thing.device, kind=one.thing.kind),
        "thing": one.thing.what,
        "device": one.thing.device or None,
        "kind": one.thing.kind or None,
        "share": round(one.share, 4),
        "value_ns": round(one.value_ns),
        "measured": one.measured,
        "command": None if words is None else shlex.join(words),
        "errors": [{"name": list(name), "share": round(share, 4)} for name, share in one.errors],
    }


def command(one: Matter, topology: Topology, subject: Subject) -> list[str] | None:
    """The command that makes a thing known; None if there is none. What is measured already only runs tell more about."""
    at_hand = family(topology.name)
    emulate = ["--emulate"] if at_hand == EMULATED else []
    if one.measured or one.thing.what == deciding.SERVERS:
        run = ["soap-run", subject.strategy, "--model", *subject.model, "--cluster", subject.cluster, "--compare-data-parallel", *emulate]
        return run if at_hand else [*_on_hosts(topology), *run]
    if one.thing.what == deciding.LINKS:
        links = ["soap-profile", "links", "--cluster", subject.cluster, *emulate]
        return links if at_hand else [*_on_hosts(topology), *links]
    if at_hand is None and not _is_gpu(one.thing, topology):
        return None  # what is measured of processors holds for this machine alone
    where = ["--cluster", subject.cluster] if at_hand else ["--cluster", ONE, "--for", subject.cluster]
    return ["soap-profile", *subject.model, *where, "--strategy", subject.strategy, *_kind(one.thing, subject)]


def _on_hosts(topology: Topology) -> list[str]:
    """What starts a command's ranks on all hosts of a cluster; nothing for one host, on which commands start them."""
    hosts = {device.host for device in topology.devices}
    each = str(topology.device_count // len(hosts))
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:{PORT}"]
    return ["torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", each, *meet, "--no-python"] if len(hosts) > 1 else []


def _kind(thing: Thing, subject: Subject) -> list[str]:
    if thing.what == deciding.COMPRESSING:
        return [word for method in subject.lossy for word in ("--lossy", method)] + ["--kind", COMPRESSION]
    kind = {deciding.TILES: thing.kind, deciding.UPDATES: UPDATE}.get(thing.what)
    return ["--kind", kind] if kind else []


def _is_gpu(thing: Thing, topology: Topology) -> bool:
    return any(device.type.name == thing.device and device.type.kind == "cuda" for device in topology.devices)


def text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    plan, usual = found["plans"][PLAN], found["plans"][BASELINE]
    won = f"beats {BASELINE} in {found['wins'] * found['draws']:.0f} of {found['draws']} draws of the costs"
    head = (
        f"{PLAN}: {milliseconds(round(plan['mean_ns']))} on average over the draws, {BASELINE}: {milliseconds(round(usual['mean_ns']))}; "
        f"it {won}\n"
        f"to know all costs exactly is worth {milliseconds(found['value_of_everything_ns'])} of an iteration at most"
    )
    rows = [("what to know", "decides", "is worth", "command")]
    told = [one for one in found["decides"] if one["share"] >= LEAST_SHARE or one["value_ns"] >= LEAST_SHARE * plan["mean_ns"]]
    for one in told[:MOST_ROWS]:
        command = one["command"] or "(nothing measures it for such devices)"
        shown = f"{one['what']}{' (measured)' if one['measured'] and one['thing'] != deciding.PLANS else ''}"
        rows.append((shown, f"{one['share']:.0%}", milliseconds(one["value_ns"]), command))
    rows.append(("many small errors, each by itself too little to tell", f"{found['unexplained']:.0%}", "", ""))
    notes = ["decides: share of the variance of time / time of data_parallel; is worth: by how much the expected time of the plan that"]
    notes.append("is chosen drops if this alone is known exactly, so at most")
    if not found["at_hand"]:
        notes.append(f"run these commands on {found['cluster']}, or one such machine; then soap-profile export {FILE} there, and")
        notes.append(f"soap-profile import {FILE} here")
    if any(f"{HOST}:{PORT}" in (one["command"] or "") for one in told[:MOST_ROWS]):
        notes.append(f"start commands with torchrun on each of its hosts; {HOST} is the name or address of one of them, the same on all")
    if found["sure"]:
        notes.append(f"the choice is sure already: {won}")
    return "\n\n".join([head, listed(rows), "\n".join(notes)])
