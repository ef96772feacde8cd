"""What every rank of ``soap-tune`` does, and the samples that it leaves for the command if it fails."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from soap import api
from soap.cli.training import Job, batches_of, in_world, make_trainer
from soap.errors import SoapWarning
from soap.runner.tuning import Observer, Range, first_batches, sample_runs
from soap.runtime.trainer import Trainer
from soap.search.partition_tuning import MOST_SAMPLES, Sample, Tuning
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class Trial:
    """What a rank must know. ``job``: its first strategy is tuned, by runs of its steps; all runs take its order of tiles. ``batches``:
    how many batches a run repeats. ``known``: earlier samples. ``notes``: the file in which rank 0 notes what it does; None: no file."""

    job: Job
    wanted: Range
    batches: int
    known: tuple[Sample, ...] = ()
    notes: str | None = None


def measure(trial: Trial) -> Tuning:
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
