"""Virtual workers beside synchronous plans on emulated hosts of unequal speed: throughput and waiting, predicted and measured.

    python -m benchmarks.wsp --kept wsp.json --page docs/results/wsp.md
    python -m benchmarks.wsp --only 2x1/hetpipe:4 --minibatches 20

One host has twice the processor time of the other; each has one device (two workers of one) or two (two workers of two, ED: a device of
each host). A cell is a shape and a plan: data parallelism, the best synchronous plan that a search finds, and ED's workers with D = 0, 4
and 32, the same stages each time. Cells that the file ``--kept`` has are not measured again. Needs root, as emulation does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import kept
from benchmarks.accuracy import READING, measure
from benchmarks.end_to_end import machine
from benchmarks.pages import give
from benchmarks.quiet import Watch
from benchmarks.uneven import LATENCY_SECONDS, _faster
from soap import api
from soap.cli import emulation
from soap.cli.lease_data import lease_data
from soap.cli.options import positive
from soap.cli.worker_run import samples_per_second
from soap.cluster.topology import Device, Host, Link, Topology
from soap.elastic.worker import Source
from soap.emulation.placement import run_evenly
from soap.errors import SoapError
from soap.mixed.planned import minibatch_dims
from soap.mixed.run.plan import wave_plan
from soap.mixed.run.training import Job, train
from soap.runtime.comm.launch import launch
from soap.search.options import SearchOptions
from soap.strategy.config import Strategy
from soap.units import parse_bandwidth

VERSION, COMMAND = 1, "python -m benchmarks.wsp"
MODEL, RATE = "zoo:vgg16:tiny@32", "1Gbit/s"
SCALES = {"2x1": 0.5, "2x2": 0.25}
"""By shape (hosts x devices of each), of the clusters' three or six cores and their links: the box has two."""
DDP, BEST, BOUNDS = "data_parallel", "best synchronous", (0, 4, 32)
HETPIPE = "hetpipe:"
SYNCHRONOUS = (DDP, BEST)
PLANS = (*SYNCHRONOUS, *(f"{HETPIPE}{bound}" for bound in BOUNDS))
CELL = {
    "type": "object",
    "properties": {
        "cell": {"type": "string"},
        "predicted": {"type": "number"},
        "measured": {"type": "number"},
        "predicted_waiting_ns": {"type": ["array", "null"]},
        "measured_waiting_ns": {"type": ["array", "null"]},
        "others": {"type": ["number", "null"]},
        "machine": {"type": "string"},
    },
    "required": ["cell", "predicted", "measured", "predicted_waiting_ns", "measured_waiting_ns", "others", "machine"],
    "additionalProperties": False,
}
"""Samples per second of the cluster at full scale; waiting of a minibatch, by worker; ``others``: how much of the box others used."""


def topology_of(shape: str, rate: str) -> Topology:
    """Two hosts with so many devices each, those of the first twice as fast as those of the second."""
    own, count = api.load_cluster("local:1").devices[0].type, int(shape.partition("x")[2])
    kinds = ("fast", 2), ("slow", 1)
    devices = tuple(
        Device(host * count + place, f"{name}/cpu{place}", host, _faster(own, times))
        for host, (name, times) in enumerate(kinds)
        for place in range(count)
    )
    hosts = tuple(Host(name, times * count, None) for name, times in kinds)
    speed, links = parse_bandwidth(rate, "rate"), list[Link]()
    for name, _ in kinds:
        inside = [device.name for device in devices if device.name.startswith(name)]
        for a, b in [(name, "network"), ("network", name), *((d, name) for d in inside), *((name, d) for d in inside)]:
            links.append(Link(len(links), f"{a}->{b}", a, b, speed if "network" in (a, b) else 100 * speed, LATENCY_SECONDS))
    return Topology(f"{shape} at {rate}", devices, hosts, tuple(links))


def synchronous(shape: str, plan: str, args: argparse.Namespace) -> dict[str, Any]:
    """A cell of a plan that all ranks run step by step."""
    topology, scale = topology_of(shape, args.rate), SCALES[shape]
    graph = api.load(args.model, plan_only=True, **READING).graph
    simulator = api.simulator_for(graph, topology, optimizer_states=0, costs="estimate")
    strategy: Strategy = api.classical(DDP, graph, topology)
    if plan == BEST:
        strategy = api.find(graph, topology, SearchOptions(budget=args.budget, optimizer_states=0, costs="estimate")).strategy
    (found,) = measure(simulator, topology.name, args.model, args.model, {plan: strategy}, args.minibatches, 1, "sgd", scale=scale)
    samples = int(args.model.rpartition("@")[2])
    rates = [1e9 * samples / own for own in (found.predicted_ns, found.measured_ns)]
    return {"predicted": rates[0], "measured": rates[1], "predicted_waiting_ns": None, "measured_waiting_ns": None}


def workers(shape: str, bound: int, args: argparse.Namespace) -> dict[str, Any]:
    """A cell of virtual workers: ED's for D = 0, with another bound."""
    topology, scale = topology_of(shape, args.rate), SCALES[shape]
    model = api.load(args.model, plan_only=True, **READING)
    first = api.find_workers(model, topology, "bounded:0", "ED", costs="estimate")
    strategy = replace(first.strategy, consistency=f"bounded:{bound}")
    steady = api.simulate_workers(model, topology, strategy, costs="estimate").steady
    plan, hosts = wave_plan(strategy, model.graph, topology), emulation.limits(topology, scale)
    count = len(plan.workers)
    dims = minibatch_dims(model.graph)
    data, _ = lease_data(args.model, READING, model, None, workers=count, batch=plan.samples, seed=0, dtype=None, dims=dims)
    job = Job(
        plan=plan,
        source=Source(args.model, None, 0, READING),
        batches=data,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        minibatches=(args.minibatches,) * count,
        ranks=topology.device_count,
        evenly=run_evenly,
    )
    with emulation.cluster(hosts) as placed:
        outcome = launch(processes=job.ranks, entry=train, args=(job,), place=placed.place, address=placed.address)[0]
    assert outcome is not None  # not under torchrun
    rate = samples_per_second(outcome, plan)
    assert rate is not None  # several minibatches
    waiting = []
    for worker in range(count):
        waited = [start.waited_ns for start in outcome.of(worker, 0).starts]
        waiting.append(scale * sum(waited) / len(waited))
    return {
        "predicted": steady.samples_per_second,
        "measured": rate / scale,
        "predicted_waiting_ns": list(steady.waiting_ns),
        "measured_waiting_ns": waiting,
    }


def page(cells: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> str:
    """Markdown: all cells, and how many times as fast ED's workers are as the synchronous plans."""
    known = {cell["cell"]: cell for cell in cells}
    told = f"By `{COMMAND}`; {args.model}, hosts 2 : 1 at {args.rate}; waiting is of a minibatch."
    lines = ["# Virtual workers beside synchronous plans", "", told, ""]
    heads = "cell | samples/s | predicted | waiting, ms | predicted | ÷ best synchronous | ÷ DDP | others used | on"
    lines += [f"| {heads} |", f"|{'---|' * 9}"]
    for cell in cells:
        shape = cell["cell"].partition("/")[0]
        ratios = []
        for plan in (BEST, DDP):
            other = known.get(f"{shape}/{plan}")
            of = [cell[what] / other[what] for what in ("measured", "predicted")] if other is not None else []
            ratios.append(f"{of[0]:.2f} (predicted {of[1]:.2f})" if of else "")
        waiting = [_milliseconds(cell[f"{what}_waiting_ns"]) for what in ("measured", "predicted")]
        others = "?" if cell["others"] is None else f"{cell['others']:.0%}"
        figures = f"{cell['measured']:.1f} | {cell['predicted']:.1f} | {' | '.join(waiting)} | {' | '.join(ratios)}"
        lines.append(f"| {cell['cell']} | {figures} | {others} | {cell['machine']} |")
    return "\n".join(lines) + "\n"


def _milliseconds(times_ns: Sequence[float] | None) -> str:
    return "" if times_ns is None else ", ".join(f"{own / 1e6:.1f}" for own in times_ns)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="wsp", description="Virtual workers beside synchronous plans on emulated hosts.")
    parser.add_argument("--kept", type=Path, default=Path("wsp.json"), help="cells that are measured (default %(default)s)")
    parser.add_argument("--page", help="where the page goes (default: standard output)")
    parser.add_argument("--only", nargs="*", help="these cells alone, such as 2x1/hetpipe:4")
    parser.add_argument("--model", default=MODEL, help="default %(default)s; its batch is that of all workers")
    parser.add_argument("--rate", default=RATE, help="of the hosts' links (default %(default)s)")
    parser.add_argument("--minibatches", type=positive, default=100, help="of each worker, or steps (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=2000, help="of the search for the best synchronous plan (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        cells = kept.read(args.kept, CELL, VERSION, COMMAND)
        for shape in SCALES:
            for plan in PLANS:
                name = f"{shape}/{plan}"
                if any(cell["cell"] == name for cell in cells) or (args.only and name not in args.only):
                    continue
                watch = Watch()
                own = synchronous(shape, plan, args) if plan in SYNCHRONOUS else workers(shape, int(plan.removeprefix(HETPIPE)), args)
                cells.append({"cell": name, **own, "others": watch.others_share(), "machine": machine()})
                kept.write(args.kept, cells, VERSION)
    except SoapError as error:
        parser.error(str(error))
    give(page(cells, args), args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
