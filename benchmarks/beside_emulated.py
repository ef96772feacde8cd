"""Two trainings on the hosts of one emulation, each on devices of its own: what they do to each other's steps, predicted and measured.

    python -m benchmarks.beside_emulated
    python -m benchmarks.beside_emulated --rate 200Mbit/s --seconds 20 --profile 0

Both have a device of each of two hosts and one of a server's two, and share the hosts' links. The first synchronizes by plain parameter
servers; its neighbour does, too, or has its last layers on the server (``ralp``). Each pair begins at once, in launchers of their own, for
``--seconds`` of simulated steps; of these count the ones that begin and end while both train. Alone is the same without the other.
Predicted is ``soap.simulate_beside``, with computations that are measured before (``--profile`` seconds for each model). Needs root.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from statistics import median
from typing import TypeAlias

from benchmarks.accuracy import OPTIMIZER, READING, soap_profile
from benchmarks.end_to_end import machine
from benchmarks.models import export_model
from benchmarks.quiet import Watch
from soap import api
from soap.cli import emulation
from soap.cli.options import not_negative, positive
from soap.cli.training import Job, train
from soap.cli.updating import states_of
from soap.cluster.fewer import part_of
from soap.cluster.topology import Topology
from soap.emulation.placement import Placement
from soap.errors import RuntimeFailure, SoapError
from soap.measure.iteration import WARM_UP_STEPS
from soap.measure.this_machine import core_reference_ns
from soap.runtime.comm.launch import launch
from soap.runtime.training_options import OnStep, StepMetrics
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.ralp import RALP

CLUSTER, MODELS, RATE = "emulated:2x2+1", ("emulated-alexnet", "emulated-vgg16"), "200Mbit/s"
PLAIN, ALONE = "parameter_server", "alone"
LEAST_STEPS = 12
PATIENCE_S = 1200.0
"""How long a pair may take."""
LEAST_COUNTED = 4
"""Steps of each training of which the middle one is taken."""
PLACES = "SOAP_BESIDE_PLACES"
"""Environment variable of a training's ranks: its own file, and those of all."""
Told: TypeAlias = "tuple[int, str | None]"
"""A training's number, and why it has failed."""


@dataclass(frozen=True)
class Trained:
    """A model by a plan on its devices of the whole cluster (``ranks``)."""

    file: str
    strategy: Strategy
    simulation: Simulation
    ranks: tuple[int, ...]


def prepared(file: str, whole: Topology, place: int) -> dict[str, Trained]:
    """By plan: plain servers, and the best cut. ``place``: which of a host's devices are its own."""
    names = [device.name for device in whole.devices if device.name.endswith(f"cpu{place}")]
    part, states = part_of(whole, names), states_of(OPTIMIZER)
    graph = api.load(file, plan_only=True, **READING).graph
    simulator = Simulator(graph, part, api.costs_for(whole, states), states)
    placed = api.placed_layers(f"{RALP}:1", simulator, least_gain=-1.0)
    plans = {PLAIN: api.classical(PLAIN, graph, part), RALP: placed.strategy}
    ranks = tuple(device.index for device in whole.devices if device.name in names)
    return {name: Trained(file, strategy, simulator.run(strategy), ranks) for name, strategy in plans.items()}


def measured_ns(jobs: Sequence[Trained], steps: Sequence[int], whole: Topology) -> list[float]:
    """The middle step of each, in the time that all train. RuntimeFailure in one line if one fails."""
    from soap.emulation.emulate import emulated  # imported here: it locks files in a way that only Unix has

    context = multiprocessing.get_context("spawn")
    with emulated(emulation.limits(whole, 1.0), core_reference_ns()) as made, tempfile.TemporaryDirectory() as folder:
        told: Queue[Told] = context.Queue()
        places = [str(Path(folder) / str(number)) for number in range(len(jobs))]
        processes = [
            context.Process(target=_train, args=(number, own, count, _part_of(made.place, own.ranks), made.address, places, told))
            for number, (own, count) in enumerate(zip(jobs, steps, strict=True))
        ]
        for process in processes:
            process.start()
        try:
            _await_all(told, processes)
        finally:
            for process in processes:
                process.terminate()  # has ended, if all is well
                process.join()
        return together_ns([[int(line) for line in Path(place).read_text(encoding="ascii").split()] for place in places])


def together_ns(ends: Sequence[Sequence[int]]) -> list[float]:
    """The middle step of each training, of those that begin and end while all train, warm. ``ends``: by training, when its steps ended.
    RuntimeFailure if there are too few."""
    begin, end = max(own[WARM_UP_STEPS - 1] for own in ends), min(own[-1] for own in ends)
    steps = [[after - before for before, after in pairwise(own) if begin <= before and after <= end] for own in ends]
    if (least := min(map(len, steps))) < LEAST_COUNTED:
        raise RuntimeFailure(f"{least} steps of a training while all train; expected {LEAST_COUNTED}: try more --seconds")
    return [median(own) for own in steps]


def _await_all(told: Queue[Told], processes: Sequence[BaseProcess]) -> None:
    """Until all have ended well. RuntimeFailure if one has failed, or ended without a word."""
    found, end_s = set[int](), time.monotonic() + PATIENCE_S
    while len(found) < len(processes):
        ended = {number for number, process in enumerate(processes) if process.exitcode is not None}
        try:
            number, failure = told.get(timeout=1.0)
        except Empty:
            if ended - found:
                raise RuntimeFailure(f"training {min(ended - found)} has ended without a result") from None
            if time.monotonic() > end_s:
                raise RuntimeFailure(f"trainings have not ended after {PATIENCE_S:g} s; expected less: try fewer --seconds") from None
            continue
        if failure is not None:
            raise RuntimeFailure(f"training {number}: {failure}")
        found.add(number)


def _part_of(place: Placement, ranks: Sequence[int]) -> Placement:
    """Where these ranks of the whole cluster go, numbered anew."""
    hosts, shares = tuple(place.hosts[rank] for rank in ranks), tuple(place.shares[rank] for rank in ranks)
    return replace(place, hosts=hosts, shares=shares, cores=tuple(place.cores[rank] for rank in ranks) if place.cores else ())


def _train(
    number: int, own: Trained, steps: int, place: Placement, address: str, places: Sequence[str], told: Queue[Told]
) -> None:
    """In a process of its own: a launcher, and its ranks. ``places``: by training, the file for the ends of its steps."""
    order = execution_order(own.simulation.tasks, own.simulation.schedule)
    plans, topology = {PLAIN: (own.strategy, order)}, own.simulation.topology
    os.environ[PLACES] = os.pathsep.join([places[number], *places])
    job = Job(own.file, READING, topology, plans, steps, 0, OPTIMIZER, emulated=True, log=f"{ends.__module__}:{ends.__name__}")
    try:
        launch(topology.device_count, train, (job,), place=place, address=address)
    except SoapError as error:
        told.put((number, str(error)))
    else:
        told.put((number, None))


def ends() -> OnStep:
    """Called on rank 0 of each training before its first step: waits until all trainings are there. What it returns writes down when a step
    has ended."""
    own, *places = (Path(place) for place in os.environ[PLACES].split(os.pathsep))
    own.touch()
    end_s = time.monotonic() + PATIENCE_S
    while not all(place.exists() for place in places):
        if time.monotonic() > end_s:
            raise RuntimeFailure(f"the other training is not there after {PATIENCE_S:g} s")
        time.sleep(0.01)

    def ended(metrics: StepMetrics) -> None:
        with own.open("a", encoding="ascii") as stream:
            stream.write(f"{time.monotonic_ns()}\n")

    return ended


def rows(own: Trained, others: Mapping[str, Trained], whole: Topology, seconds: int) -> list[list[str]]:
    """The first job beside the second one by each of its plans, and each alone."""
    found = []
    for plan, other in others.items():
        both = [own, other]
        predicted = api.beside_of([job.simulation for job in both], whole)
        beside = measured_ns(both, [max(LEAST_STEPS, round(1e9 * seconds / job.step_ns)) for job in predicted], whole)
        for job, simulated, together, name in zip(both, predicted, beside, (PLAIN, plan), strict=True):
            count = max(LEAST_STEPS, round(1e9 * seconds / 2 / simulated.alone_ns))
            (alone,) = measured_ns([job], [count], whole)
            times = [f"{value / 1e6:.1f}" for value in (simulated.alone_ns, alone, simulated.step_ns, together)]
            slower = f"{together / alone:.2f} ({simulated.slowdown:.2f})"
            found.append([f"{Path(job.file).stem} by {name}", f"beside {Path(both[job is own].file).stem} by {(plan, PLAIN)[job is other]}",
                          *times, slower])  # fmt: skip
            print(" | ".join(found[-1]), file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="beside_emulated", description="Two trainings on the hosts of one emulation.")
    parser.add_argument("--models", nargs=2, default=list(MODELS), help="of benchmarks.models: the first, and its neighbour")
    parser.add_argument("--rate", default=RATE, help="of the hosts' links (default %(default)s)")
    parser.add_argument("--seconds", type=positive, default=20, help="of each pair (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=40, help="seconds for each model (default %(default)s)")
    args = parser.parse_args(argv)
    cluster = f"{CLUSTER}@{args.rate}"
    try:
        whole, watch = api.load_cluster(cluster), Watch()
        with tempfile.TemporaryDirectory() as temporary:
            files = [str(export_model(name, Path(temporary))) for name in args.models]
            for file in files if args.profile else ():
                soap_profile([file, "--cluster", cluster, "--budget", str(args.profile)])
            first, second = (prepared(file, whole, place) for place, file in enumerate(files))
            found = rows(first[PLAIN], second, whole, args.seconds)
    except SoapError as error:
        parser.error(str(error))
    others = watch.others_share()
    head = ("job", "", "alone predicted, ms", "measured", "beside predicted, ms", "measured", "slower (predicted)")
    table = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *found)]
    print(f"{machine()}; {cluster}; others used {'?' if others is None else f'{others:.0%}'}\n\n" + "\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
