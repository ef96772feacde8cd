"""Virtual workers beside synchronous plans on emulated hosts of unequal speed: throughput and waiting, predicted and measured.

    python -m benchmarks.wsp --results wsp.json --write docs/results/wsp.md
    python -m benchmarks.wsp --results wsp.json --only 2x1/hetpipe:4 --minibatches 20

One host has twice the processor time of the other (``two_speeds``). With one device each there are two workers of one (HetPipe's NP), with
two each two workers of two: ED, a device of each host. A cell is a shape and a plan: data parallelism, the best synchronous plan that a
search finds, and the workers with D = 0, 4 and 32, the same stages each time. All is predicted from what ``soap-profile`` measures, which a
shape's first cell does; ``--profile 0`` goes on with what is known. Cells that the results have are not measured again. Needs root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import soap
from benchmarks import kept, two_speeds
from benchmarks.accuracy import READING, measure
from benchmarks.end_to_end import machine
from benchmarks.models import export_model, make_model
from benchmarks.pages import give
from benchmarks.quiet import Watch
from benchmarks.wsp_replay import WORKERS
from soap import api
from soap.cli import emulation
from soap.cli.batches import lease_data
from soap.cli.options import not_negative, part_of_the_box, positive
from soap.cli.stale_run import rate_of, samples_per_second
from soap.cluster.topology import Topology
from soap.elastic.simulation.steady import NO_DELAYS
from soap.elastic.worker import Source
from soap.emulation.placement import run_evenly
from soap.errors import SoapError
from soap.files import check_writable
from soap.mixed.partitioning import POLICIES
from soap.mixed.planned import minibatch_dims, strategy_of, wave_plan
from soap.mixed.run.training import Job, train
from soap.mixed.steady import Finder, Found, Training
from soap.runtime.comm.launch import launch
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.tracing.execute import TracedModel

VERSION, COMMAND = 3, "python -m benchmarks.wsp"
MODEL, RATE = "emulated-vgg16", "500Mbit/s"
SHAPES = {"2x1": (1, 0.25, "NP"), "2x2": (2, 0.125, "ED")}
"""By shape (hosts x devices of each): devices of a host, scale of the clusters' three or six cores and their links, and policy."""
DDP, BEST, BOUNDS = "data_parallel", "best synchronous", (0, 4, 32)
HETPIPE = "hetpipe:"
SYNCHRONOUS = (DDP, BEST)
PLANS = (*SYNCHRONOUS, *(f"{HETPIPE}{bound}" for bound in BOUNDS))
_OF_WORKERS = {"type": ["array", "null"], "items": {"type": "number"}}
CELL = {
    "type": "object",
    "properties": {
        "cell": {"type": "string"},
        "in_flight": {"type": ["integer", "null"]},
        "predicted": {"type": "number"},
        "measured": {"type": "number"},
        "predicted_waiting_ns": _OF_WORKERS,
        "measured_waiting_ns": _OF_WORKERS,
        "others": {"type": ["number", "null"]},
        "machine": {"type": "string"},
    },
    "required": ["cell", "in_flight", "predicted", "measured", "predicted_waiting_ns", "measured_waiting_ns", "others", "machine"],
    "additionalProperties": False,
}
"""Samples per second of the cluster at full scale; waiting of a minibatch, by worker; ``others``: how much of the box others used."""
INTRO = """# Virtual workers beside synchronous plans

`{model}` ({samples} samples of all workers) on two emulated hosts, whose devices are 2 : 1 in speed, with links of {rate}: {minibatches}
minibatches of each worker, or steps. *2x1*: a device each, two workers of one; *2x2*: two each, two workers of a device of each host (ED).
*Waiting*: of a minibatch from when there is room in flight for it until the bound lets it begin, by worker; meanwhile those in front of it
are computed. Predicted are as many minibatches as are measured, from what `soap-profile` measured of tiles and links. *Others used*: the
share of this machine's cores that other programs had meanwhile; above a tenth a line says little.

    {command} --results FILE --write docs/results/wsp.md
"""
HEAD = (
    "cell", "Nm", "samples/s", "predicted", "error", "waiting, ms", "predicted, ms", "÷ best synchronous (predicted)", "÷ DDP (predicted)",
    "others used", "on",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What the cells of a shape have in common. ``file``: the model with the samples of all workers, which synchronous plans run;
    ``minibatch``: with those of one worker alone, which workers run, and whose tiles are measured whole."""

    name: str
    file: str
    minibatch: str
    args: argparse.Namespace

    @property
    def devices(self) -> int:
        """Of each host."""
        return SHAPES[self.name][0]

    @property
    def scale(self) -> float:
        """Of the emulation."""
        return SHAPES[self.name][1] * float(self.args.scale)

    @cached_property
    def topology(self) -> Topology:
        """With measured links, if anything is to be measured."""
        made = two_speeds.two_speeds(self.devices, self.args.rate)
        return two_speeds.with_links(made, self.scale) if self.args.profile else api.with_links(made)

    @cached_property
    def model(self) -> TracedModel:
        """Of all workers' samples together."""
        return api.load(self.file, plan_only=True, **READING)

    @property
    def simulator(self) -> Simulator:
        """With the costs that are known now."""
        costs = two_speeds.measured_costs(self.topology, self.devices, self.args.rate, 0)
        return Simulator(self.model.graph, self.topology, costs, 0)

    @cached_property
    def best(self) -> Strategy:
        """The best synchronous plan: searched, measured, and searched again."""
        found = self._searched()
        if self.args.profile:
            usual = api.classical(DDP, self.model.graph, self.topology)
            two_speeds.profile(self.file, self.devices, self.args.rate, [usual, found], self.args.profile)
            found = self._searched()
        return found

    def _searched(self) -> Strategy:
        own, options = self.simulator, SearchOptions(budget=self.args.budget, optimizer_states=0)
        return search(own.graph, own.topology, IncrementalSimulator(own), options).strategy

    @cached_property
    def finder(self) -> Finder:
        """For D = 0, whose stages all cells have."""
        graph = api.load(self.minibatch, plan_only=True, **READING).graph
        if self.args.profile:
            alone = api.classical("single_device", graph, self.topology)
            two_speeds.profile(self.minibatch, self.devices, self.args.rate, [alone], self.args.profile)
        return Finder(graph, self.topology, self.simulator.costs, 0)

    @cached_property
    def found(self) -> Found:
        """The policy's workers."""
        return self.finder.best_in_flight(POLICIES[SHAPES[self.name][2]](self.topology))


def synchronous(shape: Shape, plan: str) -> dict[str, Any]:
    """A cell of a plan that all ranks run step by step."""
    strategy, args = shape.best, shape.args
    if plan == DDP:
        strategy = api.classical(DDP, shape.model.graph, shape.topology)
    (found,) = measure(
        shape.simulator, shape.name, args.model, shape.file, {plan: strategy}, args.minibatches, 1, "sgd", scale=shape.scale
    )
    rates = [1e9 * samples_of(shape) / own for own in (found.predicted_ns, found.measured_ns)]
    return {"in_flight": None, "predicted": rates[0], "measured": rates[1], "predicted_waiting_ns": None, "measured_waiting_ns": None}


def samples_of(shape: Shape) -> int:
    """Of all workers' minibatches together."""
    return int(shape.model.example_inputs[0].shape[0])


def workers(shape: Shape, bound: int) -> dict[str, Any]:
    """A cell of virtual workers."""
    args, found, graph = shape.args, shape.found, shape.model.graph
    strategy = strategy_of(found.plans, graph, WORKERS, f"bounded:{bound}", shape.topology.device_count)
    plan, hosts = wave_plan(strategy, graph, shape.topology), emulation.limits(shape.topology, shape.scale)
    dims = minibatch_dims(graph)
    data, _ = lease_data(shape.file, READING, shape.model, None, workers=WORKERS, batch=plan.samples, seed=0, dtype=None, dims=dims)
    job = Job(
        plan=plan,
        source=Source(shape.minibatch, None, 0, READING),
        batches=data,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        minibatches=(args.minibatches,) * WORKERS,
        ranks=shape.topology.device_count,
        evenly=run_evenly,
    )
    with emulation.cluster(hosts) as placed:
        outcome = launch(processes=job.ranks, entry=train, args=(job,), place=placed.place, address=placed.address)[0]
    assert outcome is not None  # not under torchrun
    rate = samples_per_second(outcome, plan)
    assert rate is not None  # several minibatches
    training = Training(shape.topology, found.plans, plan.placement(graph, shape.topology), bound, args.minibatches, NO_DELAYS)
    trace = training.run()
    ends = training.loop.schedule().end_ns
    expected, waited, waiting = 0.0, [], []
    for worker in range(WORKERS):
        done = sorted(int(ends[task]) for task in trace.done[worker])
        expected += rate_of([own / 1e9 for own in done], plan.samples, plan.in_flight) or 0.0
        waited.append(_mean([start.dealt_ns - start.able_ns for start in trace.starts[worker]]))
        waiting.append(shape.scale * _mean([start.waited_ns for start in outcome.of(worker, 0).starts]))
    return {
        "in_flight": found.in_flight,
        "predicted": expected,
        "measured": rate / shape.scale,
        "predicted_waiting_ns": waited,
        "measured_waiting_ns": waiting,
    }


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))


def page(cells: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> str:
    """Markdown: all cells, and how many times as fast the workers are as the synchronous plans."""
    known = {cell["cell"]: cell for cell in cells}
    samples = make_model(args.model)[1][0].shape[0]
    told = INTRO.format(model=args.model, samples=samples, rate=args.rate, minibatches=args.minibatches, command=COMMAND)
    lines = [told, f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for cell in sorted(cells, key=lambda own: _order(own["cell"])):
        shape = cell["cell"].partition("/")[0]
        ratios = []
        for plan in (BEST, DDP):
            other = known.get(f"{shape}/{plan}")
            of = [cell[what] / other[what] for what in ("measured", "predicted")] if other is not None else []
            ratios.append(f"{of[0]:.2f} ({of[1]:.2f})" if of else "")
        waiting = [_milliseconds(cell[f"{what}_waiting_ns"]) for what in ("measured", "predicted")]
        others = "?" if cell["others"] is None else f"{cell['others']:.0%}"
        rates = f"{cell['measured']:.1f} | {cell['predicted']:.1f} | {cell['predicted'] / cell['measured'] - 1:+.1%}"
        in_flight = "" if cell["in_flight"] is None else cell["in_flight"]
        lines.append(
            f"| {cell['cell']} | {in_flight} | {rates} | {' | '.join(waiting)} | {' | '.join(ratios)} | {others} | {cell['machine']} |"
        )
    return "\n".join(lines) + "\n"


def _order(name: str) -> tuple[int, int]:
    shape, _, plan = name.partition("/")
    return [*SHAPES].index(shape), [*PLANS].index(plan)


def _milliseconds(times_ns: Sequence[float] | None) -> str:
    return "" if times_ns is None else ", ".join(f"{own / 1e6:.1f}" for own in times_ns)


def export_minibatch(name: str, folder: Path) -> Path:
    """The model with the first samples of its example batch alone, those of one worker."""
    torch.manual_seed(0)
    module, inputs = make_model(name)
    path = folder / f"{name}-minibatch.pt2"
    soap.export(module, tuple(own[: len(own) // WORKERS].clone() for own in inputs), path=path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="wsp", description="Virtual workers beside synchronous plans on emulated hosts.")
    parser.add_argument("--results", type=Path, metavar="FILE", required=True, help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    parser.add_argument("--only", nargs="*", help="these cells alone, such as 2x1/hetpipe:4")
    parser.add_argument("--model", default=MODEL, help="of benchmarks.models (default %(default)s); its batch is that of all workers")
    parser.add_argument("--rate", default=RATE, help="of the hosts' links (default %(default)s)")
    parser.add_argument("--minibatches", type=positive, default=60, help="of each worker, or steps (default %(default)s)")
    parser.add_argument("--budget", type=positive, default=2000, help="of the search for the best synchronous plan (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=60, help="seconds, twice for each shape (default %(default)s)")
    parser.add_argument("--scale", type=part_of_the_box, default=1.0, help="less than 1 beside other programs")
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        cells = kept.read(args.results, CELL, VERSION, COMMAND)
        with tempfile.TemporaryDirectory() as temporary:
            whole, minibatch = (str(make(args.model, Path(temporary))) for make in (export_model, export_minibatch))
            for name in SHAPES:
                _complete(cells, Shape(name, whole, minibatch, args))
    except SoapError as error:
        parser.error(str(error))
    give(page(cells, args), args.write)
    return 0


def _complete(cells: list[dict[str, Any]], shape: Shape) -> None:
    """Add a shape's cells that are missing and asked for, each kept at once."""
    for plan in PLANS:
        name = f"{shape.name}/{plan}"
        if any(cell["cell"] == name for cell in cells) or (shape.args.only and name not in shape.args.only):
            continue
        prepared: Any = shape.best if plan in SYNCHRONOUS else shape.found  # before the watch begins: that is not what is measured
        assert prepared is not None
        watch = Watch()
        own = synchronous(shape, plan) if plan in SYNCHRONOUS else workers(shape, int(plan.removeprefix(HETPIPE)))
        cells.append({"cell": name, **own, "others": watch.others_share(), "machine": machine()})
        kept.write(shape.args.results, cells, VERSION)
        print(f"{name}: {own['measured']:.1f} samples/s, predicted {own['predicted']:.1f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
