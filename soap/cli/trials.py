"""What every rank of ``soap-search --verify`` does: train by several strategies in turns, first to see which one is the fastest, then
that one and data parallelism alone, to see whether it is really faster.

The fastest of several has been lucky, more likely than not (the winner's curse). So further turns judge it, which had no part in
choosing it. All trainers stay, so that a turn can be a few steps long, and whatever the machine does meanwhile hits all alike. Each
turn begins with a step that does not count: it finds the caches full of another strategy's tensors.

What every rank of ``soap-tune`` does, and the samples that it leaves for the command if it fails.
"""

from __future__ import annotations

import gc
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from tqdm import tqdm

from soap import api
from soap.cli.plain_text import milliseconds
from soap.cli.training import Job, batches_of, in_world, make_trainer, show
from soap.errors import SoapWarning
from soap.measure.iteration import measure_steps
from soap.runner.tuning import Observer, Range, first_batches, sample_runs
from soap.runtime.trainer import Trainer
from soap.search.partition_tuning import MOST_SAMPLES, Sample, Tuning
from soap.strategy.config import Strategy

BATCHES = 4
"""Number of batches, used again and again."""
MOST_STEPS = 3
"""Timed steps of a turn, of which the median counts. Fewer if they take more than ``TURN_S``."""
TURN_S = 0.5
ROUNDS = 4
"""Rounds in which all strategies take part; there is at least one."""
DUELS = 20
"""At most so many rounds of the fastest and data parallelism alone."""
LEAST_DUELS = 5
"""At least so many, even if the time is over meanwhile: fewer prove nothing (``soap.measure.paired``)."""
TRIED_SHARE = 0.5
"""Share of the time in which trainers are made and all strategies take turns. The rest is for the fastest and data parallelism."""
TOO_LATE = 1.5
"""No duel begins once so many times the time is over."""
WARM_UP_STEPS = 3
"""A new trainer's first steps still ask the system for memory."""


@dataclass(frozen=True)
class Trial:
    """``job``: its strategies by name, the one to beat first; its number of steps does not count. ``to_beat``: whether the first one is
    data parallelism. ``seconds``: for all turns, including the making of trainers. Every strategy that was begun takes at least one
    turn."""

    job: Job
    to_beat: bool
    seconds: float


@dataclass(frozen=True)
class Times:
    """Nanoseconds of a step of the slowest rank, turn by turn. ``rounds``: of each strategy that was tried. ``duels``: of data
    parallelism and of the strategy that was the fastest in the rounds; empty if that is data parallelism, if there is none, or if no
    time was left."""

    rounds: Mapping[str, tuple[int, ...]]
    duels: Mapping[str, tuple[int, ...]]


class Runner(Protocol):
    """Takes the turns. ``begin``: get a strategy ready. ``turn``: nanoseconds of a step, in one turn. ``end``: it has no more turns."""

    def begin(self, name: str) -> None: ...  # noqa: D102
    def turn(self, name: str) -> int: ...  # noqa: D102
    def end(self, name: str) -> None: ...  # noqa: D102


def run_trial(trial: Trial) -> Times:
    """Run the whole trial on the ranks; an entry for ``launch``."""
    began = time.monotonic()
    job = trial.job
    with warnings.catch_warnings(action="ignore", category=SoapWarning):  # the command has shown the warnings, once for all ranks
        model = api.load(job.model, dtype=job.dtype, **job.reading)
    batches = first_batches(batches_of(job, model), BATCHES)
    trainers: dict[str, Trainer] = {}
    steps: dict[str, int] = {}

    class OnRanks:
        def begin(self, name: str) -> None:
            trainers[name] = make_trainer(job, model, name)
            step_ns = measure_steps(trainers[name], batches, 1, WARM_UP_STEPS - 1).median_ns  # of the slowest rank: all decide alike
            steps[name] = max(1, min(MOST_STEPS, int(1e9 * TURN_S / max(1, step_ns))))

        def turn(self, name: str) -> int:
            return measure_steps(trainers[name], batches, steps[name], 1).median_ns

        def end(self, name: str) -> None:
            trainers.pop(name).comm.close()
            gc.collect()

    with in_world(job) as world, _bar(world.rank) as bar:
        asked = next(iter(job.strategies))

        def late(share: float) -> bool:
            """Whether this share of the time is over, as rank 0 sees it."""
            over = time.monotonic() - began > share * trial.seconds
            return bool(trainers[asked].comm.gather(over)[0])

        return take_turns(list(job.strategies), OnRanks(), late, trial.to_beat, lambda text: show(bar, text))


def take_turns(
    names: Sequence[str], runner: Runner, late: Callable[[float], bool], to_beat: bool, show: Callable[[str], None] = lambda text: None
) -> Times:
    """The rounds, then the duels. ``names``: the one to beat first, if there is one (``to_beat``). ``late``: whether this share of the
    time is over; it is asked between turns. The first two strategies are tried whatever time it takes."""
    rounds: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        if number > 1 and late(TRIED_SHARE / 2):
            break  # the ones predicted to be faster come first
        runner.begin(name)
        rounds[name] = []
    for number in range(ROUNDS):
        for name in turned(list(rounds), number):
            rounds[name].append(runner.turn(name))
        show(_standing(rounds, names[0] if to_beat else None))
        if late(TRIED_SHARE):
            break
    fastest = min(rounds, key=lambda name: median(rounds[name]))
    duels: dict[str, list[int]] = {}
    if to_beat and fastest != names[0] and not late(TOO_LATE):
        for name in [name for name in rounds if name not in (names[0], fastest)]:
            runner.end(name)
        alone = len(rounds) == 2  # nothing was chosen: the rounds were duels already
        duels = {name: list(rounds[name]) if alone else [] for name in (names[0], fastest)}
        for number in range(DUELS):
            if len(duels[fastest]) >= LEAST_DUELS and late(1.0):
                break
            for name in turned(list(duels), number):
                duels[name].append(runner.turn(name))
            show(_standing(duels, names[0]))
    return Times(*({name: tuple(own) for name, own in times.items()} for times in (rounds, duels)))


def turned(names: Sequence[str], number: int) -> list[str]:
    """The names in another order each time, so that none always follows the same other one."""
    place = number // 2 % len(names)
    turned = [*names[place:], *names[:place]]
    return turned[::-1] if number % 2 else turned


def _standing(times: Mapping[str, Sequence[int]], usual: str | None) -> str:
    fastest = min(times, key=lambda name: median(times[name]))
    own_ns = median(times[fastest])
    over = f", {median(times[usual]) / max(1, own_ns):.2f}x {usual}" if usual is not None and usual != fastest else ""
    return f"{fastest} {milliseconds(round(own_ns))}{over}"


def _bar(rank: int) -> tqdm[Any]:
    """A progress bar on rank 0, shown if standard error is a terminal."""
    return tqdm(total=ROUNDS + DUELS, desc="verifying", unit="round", disable=True if rank else None, leave=False)


@dataclass(frozen=True)
class PartitionTrial:
    """What a rank must know. ``job``: its first strategy is tuned, by runs of its steps; all runs take its order of tiles. ``batches``:
    how many batches a run repeats. ``known``: earlier samples. ``notes``: the file in which rank 0 notes what it does; None: no file."""

    job: Job
    wanted: Range
    batches: int
    known: tuple[Sample, ...] = ()
    notes: str | None = None


def measure(trial: PartitionTrial) -> Tuning:
    """The short runs, one after the other, each from the model's own parameters and with the same batches."""
    job = trial.job
    with warnings.catch_warnings(action="ignore", category=SoapWarning):  # the command has shown the warnings, once for all ranks
        model = api.load(job.model, **job.reading)
    batches = first_batches(batches_of(job, model), trial.batches)
    strategy, order = job.strategies[job.main]

    def trainer_for(chosen: Strategy) -> Trainer:
        return make_trainer(replace(job, strategies={job.main: (chosen, order)}), model, job.main)

    whole, done = MOST_SAMPLES * job.steps, len(trial.known) * job.steps
    with in_world(job) as world, tqdm(total=whole, initial=done, unit="step", disable=True if world.rank else None, leave=False) as bar:
        observer = _Told(bar, trial.known, trial.notes if world.rank == 0 else None).observer
        return sample_runs(strategy, trial.wanted, trainer_for, batches, job.steps, trial.known, observer)


class _Told:
    """Shows runs on a bar, with the best so far, and notes them."""

    def __init__(self, bar: tqdm[Any], known: tuple[Sample, ...], notes: str | None) -> None:
        self._bar, self._notes, self._samples = bar, notes, list(known)
        self.observer = Observer(self._begun, self._step, self._ended)

    def _begun(self, partitions: int) -> None:
        ran = [(sample.time_ns, sample.partitions) for sample in self._samples if sample.time_ns is not None]
        self._bar.set_description_str(f"{partitions} partitions", refresh=False)
        if ran:
            time_ns, best = min(ran)
            self._bar.set_postfix_str(f"best so far {best}: {time_ns / 1e6:.4g} ms", refresh=False)
        self._note({"begun": partitions})

    def _step(self) -> None:
        self._bar.update()

    def _ended(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._note({"partitions": sample.partitions, "time_ns": sample.time_ns})

    def _note(self, line: dict[str, Any]) -> None:
        if self._notes is not None:
            with Path(self._notes).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + os.linesep)


def read_notes(path: Path) -> tuple[tuple[Sample, ...], int | None]:
    """The samples that were taken, and the number of partitions of the run that did not end; None if all ended."""
    samples: list[Sample] = []
    begun: int | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        begun = entry.get("begun")
        if begun is None:
            samples.append(Sample(entry["partitions"], entry["time_ns"]))
    return tuple(samples), begun
