"""``soap-search --consistency``: the best plan of servers and workers, and what is said of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from soap import api
from soap.cli import inputs, plan_summary, spare_plans, stale_plan
from soap.cli.command import Parser, UsageError, note
from soap.cli.options import cluster_of, reading
from soap.cli.plain_text import listed
from soap.cli.plan_summary import rate
from soap.cli.search_options import search_options
from soap.cli.stopping import Stopping
from soap.cli.updating import Updating
from soap.search.options import DEFAULT_BUDGET
from soap.strategy.consistency import parse

ALONE = (
    "objective", "explain", "profile", "verify", "confidence", "patience", "risk", "seed", "beta", "start", "pin", "forbid", "sync",
    "lossy", "correct_momentum", "warm_up", "clip_norm", "recompute", "pipelines", "spare_plans", "plot", "timeline",
)  # fmt: skip
"""Options of searches for strategies that ranks run, which plans of servers and workers do not have."""

SEARCHING_SHARE = 0.8
"""Part of a time limit that is for the search; the rest is for comparing what it finds with other designs."""


def check_alone(args: argparse.Namespace, parser: Parser) -> None:
    """UsageError in one line for what a search for servers and workers does not know."""
    for name in ALONE:
        if getattr(args, name) != parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')} is for strategies that ranks run; leave it out with --consistency")
    if len(args.cluster) > 1:
        raise UsageError("several clusters with --consistency; expected one: its machines are divided into servers and workers")


def search(prog: str, args: argparse.Namespace, stopping: Stopping) -> int:
    """Search, save and report. Returns the exit code."""
    spare_plans.drop_beside(args.output)
    if args.workers is not None:
        return _search_workers(args)
    topology = cluster_of(args, args.cluster[0])
    graph = inputs.load_graph(args, topology)
    options = search_options(args, Updating(tuple(args.optimizer or ("adam",))), graph)
    found = api.find_servers(
        graph,
        topology,
        args.consistency,
        budget=api.MOST_SIMULATED if args.budget == DEFAULT_BUDGET else args.budget,
        seconds=args.limit.seconds(SEARCHING_SHARE),
        optimizer_states=options.optimizer_states,
        costs=args.costs,
        progress=True,
        stopped=lambda: stopping.ended,
    )
    with stopping.saving():
        found.save(args.output)
    told = document(found)
    if args.json:
        print(plan_summary.dump({**told, "strategy": args.output}))
    else:
        print(f"{text(found, told)}\n\nwrote {args.output}")
    if stopping.number is None:
        return 0
    note(prog, f"interrupted after {found.simulated} plans: the best one so far is in {args.output}")
    return stopping.exit_code


def _search_workers(args: argparse.Namespace) -> int:
    """The same of virtual workers."""
    topology = cluster_of(args, args.cluster[0])
    model = api.load(args.model, plan_only=True, **reading(args, topology))
    found = api.find_workers(model, topology, args.consistency, args.workers, costs=args.costs)
    found.save(args.output)
    told = stale_plan.describe_workers(found)
    print(plan_summary.dump({**told, "strategy": args.output}) if args.json else f"{stale_plan.workers_text(told)}\n\nwrote {args.output}")
    return 0


def document(found: api.ServersOutcome) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    topology, graph = found.simulator.topology, found.simulator.graph
    return {
        "model": graph.name,
        "cluster": topology.name,
        **stale_plan.describe(found.plan, topology),
        "steady": stale_plan.steady(found.report, topology),
        "designs": {name: stale_plan.steady(own, topology) for name, own in found.designs.items()},
        "search": found.record["search"],
    }


def text(found: api.ServersOutcome, told: Mapping[str, Any]) -> str:
    """The document for people."""
    sections = [stale_plan.text(told, found.simulator.topology)]
    if told["designs"]:
        lines = [("on the same machines", "samples/s", "hold state", "idle")]
        beside = {"found": told["steady"], **told["designs"]}
        lines += [
            (name, rate(own["samples_per_second"]), f"{own['stateful']}", stale_plan.idle_text(own["idle"])) for name, own in beside.items()
        ]
        sections.append(listed(lines))
    counts = told["search"]
    looked = f"simulated {counts['evaluations']} of at most {counts['possible']} plans"
    if counts["complete"]:
        sections.append(f"{looked}; {'no other can be quicker' if counts['proven'] else 'no single change makes this one quicker'}")
    else:
        sections.append(f"{looked}; the search was ended before it was done")
    if not parse(told["consistency"]).stale:
        sections[-1] += "\nsoap-run runs it by ranks, exactly, and with --ray by servers and workers"
    return "\n\n".join(sections)
