"""``soap-simulate --beside``: what jobs on one cluster do to each other's steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from soap import api
from soap.cli.command import Parser, UsageError
from soap.cli.plain_text import aligned, milliseconds
from soap.cluster.fewer import part_of
from soap.cluster.topology import Topology
from soap.simulator.simulate import Simulation


def add_beside(parser: Parser) -> None:
    """Add ``--devices`` and ``--beside``."""
    parser.add_argument(
        "--devices",
        metavar="NAMES",
        help="the devices of the cluster to use, or hosts for all of theirs, by name, with commas (default: all)",
    )
    parser.add_argument(
        "--beside",
        metavar="JOB",
        action="append",
        default=[],
        help="simulate another job beside this one, on other devices of the same cluster, and say what both do to each other: a file with "
        "a JSON object of model, builtin (a name) or strategy (a file), and devices (a list of names); repeatable",
    )


def check(args: argparse.Namespace) -> None:
    """UsageError if ``--beside`` does not go with the other options."""
    if args.beside and args.fits:
        raise UsageError("--beside with --fits; expected one of them: what fits into memory does not depend on other jobs' devices")


def asked_part(args: argparse.Namespace, whole: Topology) -> Topology:
    """The devices that ``--devices`` names."""
    return part_of(api.with_links(whole, args.costs), [name.strip() for name in args.devices.split(",")]) if args.devices else whole


def document(args: argparse.Namespace, whole: Topology, name: str, simulation: Simulation) -> list[dict[str, Any]]:
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


def text(jobs: Sequence[Mapping[str, Any]]) -> str:
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
