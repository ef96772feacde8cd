"""How soon compressed training has the dense run's loss: steps to that loss times a step's time, on four emulated hosts, at three rates.

    OMP_NUM_THREADS=1 python -m benchmarks.time_to_loss --results cells.json --write docs/results/time_to_loss.md
    OMP_NUM_THREADS=1 python -m benchmarks.time_to_loss --results cells.json --tasks lstm --rates 50Mbit/s

Steps come from the single-process emulation of ``benchmarks.convergence`` (its tasks, batches and starting values), the time of a step from
data parallelism that compresses alike, in turns with PyTorch's DistributedDataParallel on the emulated hosts (``benchmarks.lossy_race``).
One cell is run from beginning to end: trained there until it has the loss, with the wall clock read off, and its losses held against the
emulation's. Needs root, as emulation does. Cells are kept in ``--results`` as soon as they are known: the same command goes on with those
that are missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks import convergence, kept, time_to_loss_page
from benchmarks.accuracy import READING
from benchmarks.convergence_cells import Key
from benchmarks.convergence_page import DENSE, USUAL, WINDOW, first_step
from benchmarks.convergence_tasks import RANKS, TASKS, Task
from benchmarks.end_to_end import machine
from benchmarks.lossy_emulated import RATES
from benchmarks.lossy_race import LossyRace, race, step_ns
from benchmarks.models import TASK_MODELS, export_model
from benchmarks.oracles.compression import Emulation, by_policy
from benchmarks.pages import give
from benchmarks.quiet import Watch
from benchmarks.time_to_loss_race import NET, WholeTraining, run_to_loss
from soap import api
from soap.cli.options import positive
from soap.cli.run import on_ranks
from soap.cli.training import Job
from soap.cli.updating import Updating
from soap.emulation.hosts import HostLimits, host_limits
from soap.errors import SoapError
from soap.files import check_writable
from soap.measure.this_machine import cpu_cores
from soap.plan.compression.training import PlannedTraining
from soap.search.starts import BASELINE
from soap.simulator.reference import execution_order
from soap.strategy.compression import Compression, parse
from soap.strategy.sync import compressed

METHODS = (DENSE, "bf16", "int8", "powersgd", "rgc", "rgc:0.01", "rgc+asq:0.01")
WHOLE = ("lstm", "rgc+asq:0.01", "50Mbit/s")
"""Task, method and rate of the cell that is run from beginning to end, beside dense sums. Of a task without momentum."""
SPARSE = {"encoder.weight"}
"""Tables of which a batch reads some rows: plans compress none, so the emulation does not either."""
VERSION = 1

_COUNT = {"type": "integer", "minimum": 1}
_STEPS = {"type": "object", "additionalProperties": {"type": "array", "items": {"anyOf": [_COUNT, {"type": "null"}]}, "minItems": 1}}
_RUN = {
    "type": "object",
    "properties": {"method": {"type": "string"}, "steps": _COUNT, "seconds": {"type": "number", "minimum": 0}, "apart": {"type": "number"}},
    "required": ["method", "steps", "seconds", "apart"],
    "additionalProperties": False,
}
_CELL = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("task", "rate", "machine")},
        "limit": _COUNT,
        "aim": {"type": "number"},
        "steps": {**_STEPS, "required": [DENSE]},
        "times_ns": {"type": "object", "additionalProperties": {"type": "array", "items": _COUNT, "minItems": 1}, "required": [DENSE]},
        "whole": {"type": "array", "items": _RUN},
        "others_share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "additionalProperties": False,
}
_CELL["required"] = list(_CELL["properties"])  # type: ignore[call-overload]


@dataclass(frozen=True)
class Cell:
    """One task at one rate. ``aim``: the dense runs' final training loss, averaged as on the page of convergence. ``steps``: by method, of
    each seed, after how many steps it is reached; None: not in ``limit``. ``times_ns``: timed steps of each contender. ``whole``: trainings
    from beginning to end: after how many steps and seconds the loss was reached, and how far losses were from the emulation's at most.
    ``others_share``: of all cores' time, what other programs used meanwhile; None: unknown."""

    task: str
    rate: str
    limit: int
    aim: float
    steps: Mapping[str, Sequence[int | None]]
    times_ns: Mapping[str, Sequence[int]]
    whole: Sequence[Mapping[str, Any]]
    machine: str
    others_share: float | None


@dataclass(frozen=True)
class Known:
    """What the emulation says of a task. ``losses``: by method, of each seed, of all steps."""

    losses: Mapping[str, Sequence[Sequence[float]]]

    @property
    def aim(self) -> float:
        """The dense runs' final training loss."""
        return mean(mean(own[-WINDOW:]) for own in self.losses[DENSE])

    @property
    def steps(self) -> dict[str, list[int | None]]:
        """By method, of each seed, the first step with that loss."""
        return {method: [first_step(own, self.aim) for own in runs] for method, runs in self.losses.items()}


def chosen_for(task: Task, method: str) -> dict[str, Compression]:
    """Parameter of the net -> how it is compressed, in emulation and plan alike."""
    if method == DENSE:
        return {}
    found = by_policy(task.make(), parse(method), convergence.LEAST_BYTES)
    return {name: how for name, how in found.items() if how is not None and name not in SPARSE}


def losses_of(name: str, method: str, seed: int, steps: int) -> list[float]:
    """Training losses of the emulation."""
    task = TASKS[name]
    chosen = chosen_for(task, method)
    torch.manual_seed(seed)
    emulation = Emulation(task.make(), task.loss, chosen, RANKS, task.training)
    key = Key(name, method, USUAL, task.batch, steps, seed)
    parts = (list(zip(*(own.chunk(RANKS) for own in samples), strict=True)) for samples in convergence.batches(key, task.data().train))
    return [emulation.step(own) for own in parts]


def emulated_trainings(name: str, args: argparse.Namespace) -> Known:
    """All trainings of a task."""
    losses: dict[str, list[list[float]]] = {}
    for method in args.methods:
        for seed in range(args.seeds):
            losses.setdefault(method, []).append(losses_of(name, method, seed, args.steps or TASKS[name].steps))
        print(f"{name} {method}: trained", file=sys.stderr, flush=True)
    return Known(losses)


def job_of(name: str, path: Path, rate: str, args: argparse.Namespace) -> Job:
    """Data parallelism with each method, under the task's own training."""
    task, training = TASKS[name], TASKS[name].training
    momentum = None if training.momentum is None else training.momentum.factor
    simulator = api.simulator_for(
        str(path),
        f"emulated:{RANKS}x1@{rate}",
        optimizer_states=int(momentum is not None),
        training=PlannedTraining(clips=training.clip_norm is not None),
    )
    usual, strategies, own = api.classical(BASELINE, simulator.graph, simulator.topology), {}, {}
    for method in args.methods:
        syncs = {NET + parameter: compressed(how) for parameter, how in chosen_for(task, method).items()}
        strategy = usual.with_changes(parameters=syncs)
        simulation = simulator.run(strategy)
        strategies[method] = strategy, execution_order(simulation.tasks, simulation.schedule)
        own[method] = tuple(sorted(syncs))
    updating = Updating(("sgd",), training.learning_rate, momentum=momentum)
    return Job(
        str(path), READING, simulator.topology, strategies, args.timed, 0, updating,
        clip_norm=training.clip_norm, correct_momentum=momentum, compressed=own, emulated=True,
    )  # fmt: skip


def finished(name: str, rate: str, path: Path, known: Known, args: argparse.Namespace) -> Cell:
    """Time steps; and train as a whole if this is the cell for that."""
    job = job_of(name, path, rate, args)
    limits = host_limits(job.topology, 1.0, cpu_cores())
    watch = Watch()
    times = on_ranks(job, limits, race, LossyRace(job, f"task-{name}", args.rounds))
    assert times is not None  # not under torchrun
    whole = []
    if (name, rate) == (WHOLE[0], WHOLE[2]):
        whole = [trained_whole(job, method, name, known, limits) for method in (DENSE, WHOLE[1]) if method in args.methods]
    steps = len(known.losses[DENSE][0])
    return Cell(name, rate, steps, known.aim, known.steps, times, whole, machine(), watch.others_share())


def trained_whole(job: Job, method: str, name: str, known: Known, limits: Sequence[HostLimits]) -> dict[str, Any]:
    """Train on the emulated hosts until the loss is there."""
    expected = known.losses[method][0]
    found = on_ranks(job, limits, run_to_loss, WholeTraining(job, method, name, known.aim, len(expected)))
    assert found is not None  # not under torchrun
    seconds, losses = found
    apart = max(abs(one - other) for one, other in zip(losses, expected, strict=False))
    return {"method": method, "steps": len(losses), "seconds": round(seconds, 2), "apart": apart}


def run_all(args: argparse.Namespace, cells: list[Cell]) -> None:
    """Run what is missing, and keep each cell at once."""
    known = {(cell.task, cell.rate) for cell in cells}
    for name in args.tasks:
        rates = [rate for rate in args.rates if (name, rate) not in known]
        if not rates:
            continue
        trainings = emulated_trainings(name, args)
        with tempfile.TemporaryDirectory() as folder:
            path = export_model(f"task-{name}", Path(folder))
            for rate in rates:
                cells.append(finished(name, rate, path, trainings, args))
                middle = step_ns({method: tuple(own) for method, own in cells[-1].times_ns.items()})
                print(name, rate, {method: f"{own / 1e6:.1f} ms" for method, own in middle.items()}, file=sys.stderr, flush=True)
                if args.results is not None:
                    kept.write(args.results, map(asdict, cells), VERSION)


def read(path: Path | None) -> list[Cell]:
    """The cells of a file; none if there is no file. SoapError in one line if it is no such file."""
    return [] if path is None else [Cell(**own) for own in kept.read(path, _CELL, VERSION, "benchmarks.time_to_loss")]


def middle_steps(runs: Sequence[int | None]) -> float | None:
    """The median of the seeds; None if one has not come so far."""
    reached = [own for own in runs if own is not None]
    return median(reached) if len(reached) == len(runs) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="time_to_loss", description="Time to the dense run's loss, on emulated hosts.")
    tasks = [name.removeprefix("task-") for name in TASK_MODELS]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, help="default: all")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of the hosts' links (default %(default)s)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="dense, and what compresses (default %(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, help="of the emulation (default %(default)s)")
    parser.add_argument("--steps", type=positive, help="of a training (default: each task's)")
    parser.add_argument("--rounds", type=positive, default=2, help="turns of each contender (default %(default)s)")
    parser.add_argument("--timed", type=positive, default=10, help="steps of a turn (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    args = parser.parse_args(argv)
    try:
        if DENSE not in args.methods:
            parser.error(f"--methods {' '.join(args.methods)}: expected {DENSE!r} too, whose loss is what the others are to reach")
        for method in args.methods:
            if method != DENSE:
                parse(method)
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        cells = read(args.results)
        run_all(args, cells)
        give(time_to_loss_page.page(cells), args.write)
    except SoapError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
