"""Loss against time of virtual workers with D = 0, 4 and 32, beside synchronous training, on the data of ``benchmarks.convergence``.

    OMP_NUM_THREADS=1 python -m benchmarks.wsp_convergence --results wsp_convergence.json --write docs/results/wsp_convergence.md

Two workers of two devices (ED) on the emulated hosts of ``benchmarks.wsp`` train half of each batch, as HetPipe's: SGD, where a worker's
update is divided by the number of workers. When minibatches begin and end, and with which version, is simulated, with random delays; the
values are trained by that in one process (``soap.elastic.clocks`` and the net). Synchronous training takes the simulated step of the best
plan that a search finds for the same devices. One cell is real: it trains on the emulated hosts, and its losses are held against the same
process that follows its starts. That cell needs root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks import kept
from benchmarks.accuracy import READING
from benchmarks.convergence_page import WINDOW, first_step
from benchmarks.end_to_end import machine
from benchmarks.models import export_model, make_model
from benchmarks.pages import give
from benchmarks.quiet import Watch
from benchmarks.wsp import BOUNDS, RATE, Shape, export_minibatch
from benchmarks.wsp_replay import RULES, WORKERS, Minibatch, Replay, TaskBatches
from soap.cli import emulation
from soap.cli.options import not_negative, positive
from soap.elastic.simulation.steady import Delays
from soap.elastic.worker import Source
from soap.emulation.placement import run_evenly
from soap.errors import SoapError
from soap.files import check_writable
from soap.mixed.partitioning import POLICIES
from soap.mixed.planned import strategy_of, wave_plan
from soap.mixed.run.training import Job, Outcome, train
from soap.mixed.steady import Found, Training
from soap.runtime.comm.launch import launch

VERSION, COMMAND = 1, "python -m benchmarks.wsp_convergence"
SHAPE, SPREAD = "2x2", 0.2
IN_FLIGHT = 4
"""HetPipe had up to 7. So small a net would be quicker with 16, the most that are tried, but a start then lacks 22 minibatches at D = 0, a
quarter of an epoch of digits, and 61 at D = 4; it learns nothing so."""
BSP, REAL = "BSP", "real, D = {}"
REAL_BOUND = 4
STEPS = {"digits": 1000, "lstm": 500}
WAYS = (BSP, *(f"D = {bound}" for bound in BOUNDS))
_NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 1}
CELL = {
    "type": "object",
    "properties": {
        "task": {"enum": [*STEPS]},
        "way": {"enum": [*WAYS, REAL.format(REAL_BOUND)]},
        "seed": {"type": "integer"},
        "in_flight": {"type": "integer"},
        "times_ms": _NUMBERS,
        "losses": _NUMBERS,
        "missing": {"type": "number"},
        "apart": {"type": ["number", "null"]},
        "others": {"type": ["number", "null"]},
        "machine": {"type": "string"},
    },
    "required": ["task", "way", "seed", "in_flight", "times_ms", "losses", "missing", "apart", "others", "machine"],
    "additionalProperties": False,
}
"""Of each minibatch, in the order of their ends, when it ended and its loss. ``missing``: minibatches of the other worker that a start
lacked, on average. ``apart``: of a real run, how far a loss is from the replay's at most."""


def found_of(shape: Shape) -> Found:
    """The workers, with ``IN_FLIGHT`` minibatches in flight."""
    return shape.finder.with_in_flight(POLICIES["ED"](shape.topology), IN_FLIGHT)


def simulated(shape: Shape, bound: int, steps: int, seed: int) -> tuple[list[Minibatch], float]:
    """The minibatches of a simulated training, and how many of the other worker's a start lacks on average."""
    graph, plans = shape.model.graph, found_of(shape).plans
    strategy = strategy_of(plans, graph, WORKERS, f"bounded:{bound}", shape.topology.device_count)
    placement = wave_plan(strategy, graph, shape.topology).placement(graph, shape.topology)
    training = Training(shape.topology, plans, placement, bound, steps, Delays(SPREAD, seed))
    trace = training.run()
    ends = training.loop.schedule().end_ns
    found = []
    for worker in range(WORKERS):
        done = [int(ends[task]) for task in trace.done[worker]]
        for start in trace.starts[worker]:
            finished = sum(end <= start.dealt_ns for end in done[: start.minibatch])
            found.append(Minibatch(worker, start.minibatch, start.dealt_ns, done[start.minibatch], start.version, finished))
    return found, sum(number * count for number, count in trace.missing.items()) / trace.missing.total()


def synchronous(shape: Shape, steps: int) -> list[Minibatch]:
    """Both workers' halves of each step, with all steps before it."""
    best = shape.best  # first, as finding it measures what the simulator then knows
    step_ns = shape.simulator.run(best).makespan_ns
    return [Minibatch(w, n, n * step_ns, (n + 1) * step_ns, n, n) for n in range(steps) for w in range(WORKERS)]


def cell(shape: Shape, task: str, way: str, seed: int) -> dict[str, Any]:
    """One training, in one process."""
    missing = 0.0
    if way == BSP:
        minibatches, wave = synchronous(shape, STEPS[task]), 1
    else:
        minibatches, missing = simulated(shape, BOUNDS[WAYS.index(way) - 1], STEPS[task], seed)
        wave = IN_FLIGHT
    torch.manual_seed(seed)
    losses = Replay(make_model(f"task-{task}")[0], RULES[task], TaskBatches(task, seed), wave).losses(minibatches)
    return _cell(task, way, seed, wave, sorted(own.end_ns for own in minibatches), losses, missing, None)


def real(shape: Shape, task: str, seed: int) -> dict[str, Any]:
    """One training on emulated hosts, and how far its losses are from those of one process that follows its starts."""
    graph, rule, steps = shape.model.graph, RULES[task], STEPS[task]
    strategy = strategy_of(found_of(shape).plans, graph, WORKERS, f"bounded:{REAL_BOUND}", shape.topology.device_count)
    plan, batches = wave_plan(strategy, graph, shape.topology), TaskBatches(task, seed)
    job = Job(
        plan=plan,
        source=Source(shape.minibatch, None, 0, READING),
        batches=batches,
        optimizer=partial(torch.optim.SGD, lr=rule.rate, momentum=rule.momentum, nesterov=rule.momentum > 0),
        minibatches=(steps,) * WORKERS,
        ranks=shape.topology.device_count,
        evenly=run_evenly,
    )
    with emulation.cluster(emulation.limits(shape.topology, shape.scale)) as placed:
        outcome = launch(processes=job.ranks, entry=train, args=(job,), place=placed.place, address=placed.address)[0]
    assert outcome is not None  # not under torchrun
    minibatches = _seen(outcome, shape.scale)
    torch.manual_seed(0)  # as the file's
    replayed = Replay(make_model(f"task-{task}")[0], rule, batches, plan.in_flight).losses(minibatches)
    in_order = sorted(minibatches, key=lambda own: (own.end_ns, own.worker))
    told = [outcome.losses(own.worker)[own.number] for own in in_order]
    apart = max(abs(one - other) for one, other in zip(told, replayed, strict=True))
    missing = sum(number * count for number, count in outcome.missing.items()) / outcome.missing.total()
    return _cell(task, REAL.format(REAL_BOUND), seed, plan.in_flight, [own.end_ns for own in in_order], told, missing, apart)


def _seen(outcome: Outcome, scale: float) -> list[Minibatch]:
    """Of the first stages, on the cluster's clock, which begins with the first minibatch."""
    firsts = [outcome.of(worker, 0) for worker in range(WORKERS)]
    begin_s = min(own.begun_s[0] for own in firsts)
    found = []
    for worker, seen in enumerate(firsts):
        times = [[1e9 * scale * (moment - begin_s) for moment in own] for own in (seen.begun_s, seen.ended_s)]
        for number, start in enumerate(seen.starts):
            found.append(Minibatch(worker, number, times[0][number], times[1][number], start.version, start.finished))
    return found


def _cell(
    task: str, way: str, seed: int, in_flight: int, ends_ns: Sequence[float], losses: Sequence[float], missing: float, apart: float | None
) -> dict[str, Any]:
    times = [round(own / 1e6, 3) for own in ends_ns]
    facts = {"task": task, "way": way, "seed": seed, "in_flight": in_flight, "missing": missing, "apart": apart}
    return {**facts, "times_ms": times, "losses": [round(own, 6) for own in losses]}


INTRO = """# Convergence of virtual workers

    OMP_NUM_THREADS=1 {command} --results FILE --write docs/results/wsp_convergence.md

Two workers of two devices on two emulated hosts, devices 2 : 1 in speed, {rate} links; the nets and data of [convergence](convergence.md),
SGD without momentum or clipping (rates 0.1 and 1), each worker half of each batch. *D*: starts and ends are simulated, with delays of 20%,
and trained in one process; *BSP*: by the simulated steps of the best synchronous plan for these devices; *real*: trained on the emulated
hosts, whose losses differ from those of one process that follows its starts by *apart* at most. The nets are so small that messages take
most of a minibatch's time: what workers gain by throughput is in [wsp](wsp.md), what stale values cost in steps is here.
*Final*: mean training loss of the last {window} steps. *Time*: until the mean of as many is the mean final loss of BSP, median of the
seeds; *steps*: how many minibatches a worker has then done. *Missing*: minibatches of the other worker that a start lacks, on average.
"""
HEAD = ("task", "way", "Nm", "final loss", "loss at ¼ of BSP's time", "at ½", "at its end", "time, s", "steps", "missing", "apart")


def page(cells: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    busy = [own["others"] for own in cells if own["apart"] is not None and own["others"] is not None]
    told = f"\nDuring the real run other programs used {max(busy):.0%} of the cores.\n" if busy else ""
    where = "\n\n".join(f"{own}." for own in dict.fromkeys(cell["machine"].partition(", load average")[0] for cell in cells))
    lines = [INTRO.format(command=COMMAND, rate=RATE, window=WINDOW) + told, where, "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for task in STEPS:
        usual = [own for own in cells if (own["task"], own["way"]) == (task, BSP)]
        if not usual:
            continue
        aim, ends = mean(final(own) for own in usual), median(own["times_ms"][-1] for own in usual)
        for way in (*WAYS, REAL.format(REAL_BOUND)):
            runs = [own for own in cells if (own["task"], own["way"]) == (task, way)]
            if runs:
                lines.append(_line(task, way, runs, aim, ends))
    return "\n".join(lines) + "\n"


def _line(task: str, way: str, runs: Sequence[Mapping[str, Any]], aim: float, ends_ms: float) -> str:
    reached = [first_step_of(own, aim) for own in runs]
    known = [own for own in reached if own is not None]
    times = "not reached"
    steps = ""
    if len(known) == len(runs):
        times = f"{median(own['times_ms'][place - 1] for own, place in zip(runs, known, strict=True)) / 1e3:.2f}"
        steps = f"{median(known) / WORKERS:.0f}"
    at = [f"{mean(loss_at(own, share * ends_ms) for own in runs):.3f}" for share in (0.25, 0.5, 1.0)]
    apart = [own["apart"] for own in runs if own["apart"] is not None]
    cells = [
        task, way, runs[0]["in_flight"], f"{mean(map(final, runs)):.3f}", *at, times, steps, f"{mean(own['missing'] for own in runs):.1f}",
        f"{max(apart):.1e}" if apart else "",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def final(cell: Mapping[str, Any]) -> float:
    """Mean of the last losses."""
    return mean(cell["losses"][-WINDOW * WORKERS :])


def first_step_of(cell: Mapping[str, Any], aim: float) -> int | None:
    """After how many minibatches of all workers the mean of the last ``WINDOW`` steps is no more than ``aim``; None if it never is."""
    losses = cell["losses"]
    steps = [mean(losses[n : n + WORKERS]) for n in range(0, len(losses), WORKERS)]
    found = first_step(steps, aim)
    return None if found is None else min(len(losses), WORKERS * found)


def loss_at(cell: Mapping[str, Any], time_ms: float) -> float:
    """Mean of the last ``WINDOW`` steps that have ended by then."""
    count = sum(own <= time_ms for own in cell["times_ms"])
    return mean(cell["losses"][max(0, count - WINDOW * WORKERS) : max(1, count)])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="wsp_convergence", description="Loss against time of virtual workers.")
    parser.add_argument("--results", type=Path, metavar="FILE", required=True, help="JSON; goes on with what is missing there")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown (default: print it)")
    parser.add_argument("--tasks", nargs="*", choices=[*STEPS], default=[*STEPS], help="default %(default)s")
    parser.add_argument("--seeds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--real", nargs="*", choices=[*STEPS], default=["digits"], help="tasks of real runs (default %(default)s)")
    parser.add_argument("--profile", type=not_negative, default=30, help="seconds, twice for each task (default %(default)s)")
    args = parser.parse_args(argv)
    args.rate, args.budget, args.scale = RATE, 1000, 1.0
    torch.set_num_threads(1)
    try:
        for path in filter(None, (args.results, args.write)):
            check_writable(path)
        cells = kept.read(args.results, CELL, VERSION, COMMAND)
        with tempfile.TemporaryDirectory() as temporary:
            for task in args.tasks:
                whole, minibatch = (str(make(f"task-{task}", Path(temporary))) for make in (export_model, export_minibatch))
                _complete(cells, Shape(SHAPE, whole, minibatch, args), task, args)
    except SoapError as error:
        parser.error(str(error))
    give(page(cells), args.write)
    return 0


def _complete(cells: list[dict[str, Any]], shape: Shape, task: str, args: argparse.Namespace) -> None:
    """Add a task's trainings that are missing, each kept at once."""
    known = {(own["task"], own["way"], own["seed"]) for own in cells}
    todo = [(way, seed) for seed in range(args.seeds) for way in WAYS] + [(REAL.format(REAL_BOUND), 0)] * (task in args.real)
    for way, seed in todo:
        if (task, way, seed) in known:
            continue
        watch = Watch()
        own = cell(shape, task, way, seed) if way in WAYS else real(shape, task, seed)
        assert all(a <= b for a, b in pairwise(own["times_ms"]))
        cells.append({**own, "others": watch.others_share(), "machine": machine()})
        kept.write(args.results, cells, VERSION)
        print(f"{task} {way} {seed}: {final(own):.4f} at {own['times_ms'][-1] / 1e3:.2f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
