"""Servers and workers on emulated hosts: throughput by the number of workers, beside other ways to train, and as it is predicted.

    python -m benchmarks.bipartite --results cells.json --write docs/results/bipartite.md

Twitter's layers (``zoo:full_sparse:emulation``) on six hosts whose links are as narrow for them as 150 MB/s were for Twitter's. In a round
all parts of a lease and the links are measured, every plan is predicted from that, and every plan trains for ``--seconds``; so do threads
of one machine without locks, and data parallelism with sparse gradients. Rounds take turns and begin each with another plan. Needs root, as
emulation does, and a box that nobody else uses. Rounds are kept in ``--results`` as soon as they are known; the same command goes on with
those that are missing. What hosts send is ``benchmarks.egress``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks import kept
from benchmarks.elastic_cluster import Hosts, hosts_of, steps_of
from benchmarks.elastic_work import MeasuredWork
from benchmarks.end_to_end import machine
from benchmarks.pages import give
from benchmarks.quiet import Watch
from soap import export
from soap.cli.options import positive
from soap.cluster.topology import Topology
from soap.elastic.cut import Cut
from soap.elastic.layout import ElasticPlan, Lookups, Place, route
from soap.elastic.leases import Steps
from soap.elastic.simulation.design import Asked, Design, Needs, Traffic, bipartite, design_of, fully_connected, shapes_of
from soap.elastic.simulation.steady import Steady, simulate
from soap.elastic.worker import InMemory, Source
from soap.errors import SoapError
from soap.files import check_writable
from soap.model.graph import OperatorGraph
from soap.strategy.consistency import parse
from soap.tracing.execute import TracedModel
from soap.zoo import batches, build

HOSTS = 6
RATE = "200Mbit/s"
MODEL = "zoo:full_sparse:emulation"
BATCH = 512
"""Samples of a lease."""
DRAWN = 8
"""Batches of data, which leases take in turn."""
WITHIN = 0.15
"""Aimed at: the error of a predicted rate."""
HOGWILD, DATA_PARALLEL = f"Hogwild, {HOSTS} threads of one machine", f"data parallel, sparse gradients, {HOSTS} hosts"
PORT = 29517
VERSION = 2
_NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
_CELL = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0},
        **{name: _NUMBERS for name in ("predicted", "measured", "predicted_idle", "measured_idle")},
        "machine": {"type": "string"},
        "others_share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "required": ["number", "predicted", "measured", "predicted_idle", "measured_idle", "machine", "others_share"],
    "additionalProperties": False,
}
INTRO = """# Servers and workers on emulated hosts

`{model}` in leases of {batch} samples, trained by Adagrad on {hosts} hosts that this machine emulates, each with a device of
an equal share of its cores and a link of {rate} in each direction. Samples per second, medians of {rounds} rounds, in each of which
everything ran in turn; predicted from the parts of a lease and the links as measured in the same round, with nothing fitted to the runs.
Workers and owners are those of `soap.elastic`; leases are dealt by a process of the benchmark, by pipes in place of Ray's calls.

    python -m benchmarks.bipartite --results FILE --write docs/results/bipartite.md
"""

def needs_of_batch(graph: OperatorGraph, design: Design, lookups: Mapping[str, Lookups], input_bytes: int = 0) -> Needs:
    """What one batch asks for exactly, from its look-ups (``Cut.look_ups``)."""
    found = {}
    for name, whole in lookups.items():
        own = whole.without_ones()
        places = design.layout.tables[name]
        shares = tuple(part.entries for part in route([place.partition for place in places], whole))
        value_bytes = 0 if own.values is None else own.values.element_size()
        found[name] = Asked(own.samples, own.entries, value_bytes, graph.tensors[name].itemsize, shares)
    _, dense = shapes_of(graph, [*lookups])
    return Needs(found, max((graph.tensors[name].itemsize for name in dense), default=4), input_bytes)


@dataclass(frozen=True)
class Round:
    """Everything run once. By plan or peer: samples per second, and the share of time in which devices compute nothing."""

    number: int
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    predicted_idle: Mapping[str, float]
    measured_idle: Mapping[str, float]
    machine: str
    others_share: float | None


def plans(graph: OperatorGraph) -> dict[str, ElasticPlan]:
    """By name. Servers are the first hosts."""

    def apart(servers: int, workers: int, word: str = "async", axis: int = 0) -> ElasticPlan:
        return bipartite(graph, range(servers, servers + workers), range(servers), BATCH, parse(word), axis=axis)

    found = {f"1 server, {workers} workers": apart(1, workers) for workers in (1, 2, 3, 4)}
    found |= {
        "2 servers, 2 workers": apart(2, 2),
        "2 servers, 4 workers": apart(2, 4),
        "2 servers, 4 workers, columns": apart(2, 4, axis=1),
        "2 servers, 4 workers, bounded:1": apart(2, 4, "bounded:1"),
        "2 servers, 4 workers, sync": apart(2, 4, "sync"),
        "3 hosts fully connected": fully_connected(graph, range(3), BATCH, parse("async")),
        f"{HOSTS} hosts fully connected": fully_connected(graph, range(HOSTS), BATCH, parse("async")),
    }
    return found


Measured = tuple[tuple[Place, ...], Steps | None]
"""What the durations of a lease's parts depend on: which server has what, and which leases are one update."""


def measured_by(design: Design) -> Measured:
    """What its parts depend on."""
    return design.layout.places, steps_of(design)


@dataclass(frozen=True)
class Bench:
    """What all rounds share. ``data``: the samples."""

    model: TracedModel
    data: InMemory
    hosts: Hosts

    def needs(self, design: Design) -> list[Needs]:
        """Of each batch of the data."""
        cut, graph = Cut(self.model), self.model.graph
        parts = [range(number * BATCH, (number + 1) * BATCH) for number in range(DRAWN)]
        return [needs_of_batch(graph, design, cut.look_ups(self.data.batch(part))) for part in parts]

    def simulated(self, design: Design, topology: Topology, work: MeasuredWork) -> Steady:
        """With leases that ask for what the data's do on average."""
        return simulate(topology, Traffic(design, average(self.needs(design))), work)

    def round(self, number: int, seconds: float) -> Round:
        """One round."""
        watch = Watch()
        designs = {name: design_of(plan, self.model.graph) for name, plan in plans(self.model.graph).items()}
        topology, works = self.hosts.measured_links(), self._works([*designs.values()])
        steady = {name: self.simulated(own, topology, works[measured_by(own)]) for name, own in designs.items()}
        order = [*designs, HOGWILD, DATA_PARALLEL]
        order = order[number % len(order) :] + order[: number % len(order)]
        rates, idle = dict[str, float](), dict[str, float]()
        for name in order:
            if name in designs:
                with self.hosts.prepared(designs[name]):
                    trained = self.hosts.train(designs[name], seconds)
                rates[name], idle[name] = trained.samples_per_second, _mean(trained.idle)
            else:
                rates[name] = self._peer(name, seconds)
            print(f"{name}: {rates[name]:.0f}", file=sys.stderr, flush=True)
        predicted = {name: own.samples_per_second for name, own in steady.items()}
        predicted_idle = {name: _mean(own.idle) for name, own in steady.items()}
        return Round(number, predicted, rates, predicted_idle, idle, machine(), watch.others_share())

    def _works(self, designs: Sequence[Design]) -> dict[Measured, MeasuredWork]:
        """By what they depend on, as all hosts measure it at once."""
        control_ns, found = self.hosts.control_ns(), dict[Measured, MeasuredWork]()
        for design in designs:
            if (key := measured_by(design)) not in found:
                own = self.hosts.ask_all(range(HOSTS), "measure", design.layout, BATCH, steps_of(design))
                times = {part: int(median(one[part] for one in own)) for part in own[0]}
                found[key] = MeasuredWork(times, design.layout.places, control_ns)
        return found

    def _peer(self, name: str, seconds: float) -> float:
        if name == HOGWILD:
            return float(self.hosts.ask(0, "hogwild", MODEL, HOSTS, BATCH, seconds))
        for host in range(HOSTS):
            self.hosts.tell(host, "data_parallel", MODEL, host, HOSTS, PORT, BATCH, seconds)
        return float(median(self.hosts.answer(host) for host in range(HOSTS)))


def average(needs: Sequence[Needs]) -> Needs:
    """Of equal batches, but for how many entries each partition gets."""
    tables = {}
    for name, first in needs[0].tables.items():
        sums = np.cumsum([0, *np.sum([own.tables[name].shares for own in needs], 0)]) // len(needs)
        tables[name] = replace(first, shares=tuple(np.diff(sums).tolist()))
    return replace(needs[0], tables=tables)


def _mean(idle: Mapping[int, float]) -> float:
    return sum(idle.values()) / len(idle)


def page(rounds: Sequence[Round]) -> str:
    """Markdown."""
    parts = [INTRO.format(model=MODEL, batch=BATCH, hosts=HOSTS, rate=RATE, rounds=len(rounds)), ""]
    parts += [f"{own}." for own in dict.fromkeys(one.machine for one in rounds)]
    shares = [own.others_share for own in rounds if own.others_share is not None]
    parts += ["", f"{len(rounds)} rounds; others used {max(shares, default=0.0):.0%} at most.", ""]
    parts += ["| plan | predicted | measured | error | idle, predicted | idle, measured |", "|---|---:|---:|---:|---:|---:|"]
    errors = []
    for name in rounds[0].predicted:
        predicted, measured = (median(getattr(own, kind)[name] for own in rounds) for kind in ("predicted", "measured"))
        idle = (median(getattr(own, kind)[name] for own in rounds) for kind in ("predicted_idle", "measured_idle"))
        errors.append(predicted / measured - 1)
        parts.append(f"| {name} | {predicted:.0f} | {measured:.0f} | {errors[-1]:+.1%} | {' | '.join(f'{own:.0%}' for own in idle)} |")
    for name in (HOGWILD, DATA_PARALLEL):
        parts.append(f"| {name} | | {median(own.measured[name] for own in rounds):.0f} | | | |")
    most = max(map(abs, errors))
    parts += ["", f"{len(errors)} plans: median error {median(map(abs, errors)):.1%}, most {most:.1%} (aim {WITHIN:.0%})."]
    return "\n".join([*parts, ""])


def read(path: Path) -> list[Round]:
    """The rounds of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [Round(**own) for own in kept.read(path, _CELL, VERSION, "benchmarks.bipartite")]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bipartite", description="Servers and workers on emulated hosts.")
    parser.add_argument("--rounds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--seconds", type=positive, default=8, help="of each plan in a round, behind its warm-up (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", required=True, help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        rounds = read(args.results)
        missing = sorted({*range(args.rounds)} - {own.number for own in rounds})
        if missing:
            with bench_of(HOSTS, RATE) as bench:
                for number in missing:
                    rounds.append(bench.round(number, args.seconds))
                    kept.write(args.results, map(asdict, rounds), VERSION)
        give(page(rounds), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


@contextmanager
def bench_of(hosts: int, rate: str) -> Iterator[Bench]:
    """So many hosts with the model, which is exported once, since it takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        made = build(f"{MODEL}@{BATCH}")
        file = Path(folder) / "model.pt2"
        export(made.module, made.args, path=file, verify=False)
        source, data = Source(str(file)), drawn()
        with hosts_of(hosts, rate, source, data) as own:
            yield Bench(source.load(plan_only=True), data, own)


def drawn() -> InMemory:
    """The data."""
    several = [own for own, _ in zip(batches(f"{MODEL}@{BATCH}"), range(DRAWN), strict=False)]
    return InMemory(tuple(torch.cat(own) for own in zip(*several, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
