"""``soap-run --restarts``: a rank that is lost ends the step, and training goes on from the last checkpoint by itself: all ranks are
started again, or, if one dies again and again before it has done a step, as many as are left, by a plan for fewer devices.

What is lost is a process: killed, crashed, or unheard of. An error that a rank tells in words would come again, and ends the run as ever.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from soap.cli import checkpoints, emulation, spare_plans
from soap.cli.command import Parser, UsageError
from soap.cli.options import positive
from soap.errors import RuntimeFailure, StrategyError
from soap.runtime.checkpoint.manifest import complete
from soap.runtime.comm.launched import under_launcher

if TYPE_CHECKING:
    from soap.cli.training import Job, Outcome
    from soap.cluster.topology import Topology
    from soap.simulator.simulate import Simulation

EVERY = 10
"""Steps between checkpoints unless the user says otherwise: so many are done again at most."""
KEPT = 2
"""Checkpoints in a folder of our own."""
AT_ONCE = 2
"""A rank that is lost so often in succession before any step was done has no device any more."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Prepared(NamedTuple):
    """A job for the ranks, its predictions, and where their numbers come from (``soap.cli.run.prepare``)."""

    job: Job
    predicted: Mapping[str, Simulation]
    costs: dict[str, Any]


@dataclass(frozen=True)
class Restart:
    """``step``: from which training went on; ``devices``: on how many; ``said``: why."""

    step: int
    devices: int
    said: str


Start = Callable[["Job"], "Outcome | None"]
"""Runs a job on its ranks."""
Replan = Callable[["Topology", Path | None, Path], Prepared]
"""Prepares the same training on another cluster, by the plan in a file if there is one that fits; else by a plan that is searched, and
written to the other path."""


def add_restarts(parser: Parser) -> None:
    """The options."""
    help_text = (
        f"start lost ranks again up to N times, from the last checkpoint (--save-every; default then: every {EVERY} steps); a rank that is "
        "lost again and again before a step is done is left out, by a plan for fewer devices"
    )
    parser.add_argument("--restarts", metavar="N", type=positive, help=help_text)
    spare_help = "with --restarts: plans for fewer devices, as soap-search --spare-plans wrote them (default: search when it is needed)"
    parser.add_argument("--spare-plans", metavar="DIR", help=spare_help)


def check_possible(args: argparse.Namespace) -> None:
    """UsageError if the options do not go together."""
    if args.restarts is None:
        if args.spare_plans is not None:
            raise UsageError("--spare-plans without --restarts; add --restarts N")
        return
    if under_launcher(os.environ):
        raise UsageError("--restarts under torchrun, which starts ranks itself; expected --max-restarts of torchrun with --resume")
    if args.compare_data_parallel:
        raise UsageError("--restarts with --compare-data-parallel, which has no checkpoints; expected one of them")
    if args.spare_plans is not None and not Path(args.spare_plans).is_dir():
        raise UsageError(f"--spare-plans {args.spare_plans!r} is no folder; expected what soap-search --spare-plans wrote")


Prepare = Callable[..., "tuple[Job, Mapping[str, Simulation], dict[str, Any]]"]
"""``soap.cli.run.prepare``."""


def train(
    args: argparse.Namespace, prepare: Prepare, start: Callable[..., Outcome | None], say: Callable[[str], None]
) -> tuple[Prepared, Outcome | None, list[Restart]]:
    """Prepare and train what the options say: once, or with ``--restarts`` again where ranks are lost. Returns what was trained in the
    end, what came of it, and the restarts. ``start``: runs a job on its hosts; ``say``: shows a line at once."""

    def begin(job: Job) -> Outcome | None:
        return start(job, emulation.asked_hosts(args, job.topology, job.device_kind))

    prepared = Prepared(*prepare(args))
    if not args.restarts:
        return prepared, begin(prepared.job), []
    run = Restarting(prepared, args.restarts, begin, partial(_replan, args, prepare, say), say, args.spare_plans)
    outcome = run.train()
    return run.prepared, outcome, run.restarts


def _replan(
    args: argparse.Namespace, prepare: Prepare, say: Callable[[str], None], topology: Topology, plan: Path | None, new: Path
) -> Prepared:
    """See ``Replan``. Which checkpoint is gone on from is not decided here."""
    others = {"save": None, "save_every": None, "keep": None, "resume": None}
    if plan is not None:
        try:
            return Prepared(*prepare(argparse.Namespace(**vars(args) | others | {"strategy": str(plan)}), topology))
        except StrategyError as error:  # it was made for another model, say, which is no reason to end
            say(str(error))
    say(f"searching a plan for {topology.device_count} devices, for {spare_plans.SEARCH_S:g} s at most")
    spare_plans.search(args, topology, new)
    return Prepared(*prepare(argparse.Namespace(**vars(args) | others | {"strategy": str(new)}), topology))


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the report says of restarts, for people."""
    found = report.get("restarts")
    if not found:
        return []
    return [("restarts", f"{len(found)}, the last behind step {found[-1]['step']} on {found[-1]['devices']} devices")]


class Restarting:
    """Trains a prepared job to its end. ``restarts``: those needed. ``say``: shows a line. ``spare``: folder of plans for fewer devices."""

    def __init__(self, prepared: Prepared, most: int, start: Start, replan: Replan, say: Callable[[str], None], spare: str | None) -> None:
        self.prepared, self.restarts = prepared, list[Restart]()
        self._most, self._start, self._replan, self._say = most, start, replan, say
        self._spare = Path(spare) if spare else None
        self._gone: list[int] = []
        self._begin, self._steps = prepared.job.checkpoints, prepared.job.steps
        self._topology = prepared.job.topology

    def train(self) -> Outcome | None:
        """Returns what all attempts together have brought: losses of all steps, times of the last attempt's."""
        from soap.runtime.comm.failures import RankLost

        with _folder(self._begin.save) as (saves, notes):
            log, suspect, times = notes / "losses", None, 0
            while True:
                job = self._job(saves, log)
                done = checkpoints.noted_bytes(log)
                try:
                    with _visible(self._left):
                        outcome = self._start(job)
                    return None if outcome is None else self._whole(outcome, log)
                except RankLost as lost:
                    if len(self.restarts) == self._most:
                        raise self._over(lost, saves) from None
                    at_once = checkpoints.noted_bytes(log) == done
                    times = times + 1 if at_once and lost.rank is not None and lost.rank == suspect else int(at_once)
                    suspect = lost.rank
                    if times == AT_ONCE and suspect is not None and len(self._left) > 1:
                        self._leave_out(suspect, notes)
                        times = 0
                    self._note(lost, saves)

    @property
    def _left(self) -> list[int]:
        """Numbers of the devices that are left, as they were in the beginning."""
        return [number for number in range(self._topology.device_count) if number not in self._gone]

    def _job(self, saves: Path, log: Path) -> Job:
        """The job from the last checkpoint on."""
        job, (step, resume) = self.prepared.job, self._reached(saves)
        last = self._begin.resumed_at + self._steps
        every, keep = self._begin.save_every or EVERY, self._begin.keep if self._begin.save else KEPT
        own = replace(self._begin, resume=resume, resumed_at=step, save=str(saves), save_every=every, keep=keep)
        return replace(job, checkpoints=own, steps=last - step, journal=str(log))

    def _reached(self, saves: Path) -> tuple[int, str | None]:
        """The step and the path of the latest checkpoint of this run; those that it began with if there are none."""
        last = self._begin.resumed_at + self._steps
        for found in reversed(complete(saves) if self.restarts else ()):
            if found.step == last:  # ranks were lost behind the last step: it is done again, for what they would have said
                shutil.rmtree(found.path)
            elif self._begin.resumed_at < found.step:
                return found.step, str(found.path)
        return self._begin.resumed_at, self._begin.resume

    def _leave_out(self, rank: int, notes: Path) -> None:
        """Go on without the device of this rank."""
        self._gone.append(self._left[rank])
        topology = spare_plans.left(self._topology, self._gone)
        new = notes / f"plan-{topology.device_count}.json"
        found, seed = self._replan(topology, self._prepared_plan(topology), new), self.prepared.job.seed
        self.prepared = found._replace(job=replace(found.job, checkpoints=self._begin, seed=seed))

    def _prepared_plan(self, topology: Topology) -> Path | None:
        from soap import api

        for path in sorted(self._spare.glob("*.json")) if self._spare else ():
            try:
                if api.load_strategy_header(path).cluster_hash == topology.hash:
                    return path
            except StrategyError:  # another file
                continue
        return None

    def _note(self, lost: Exception, saves: Path) -> None:
        devices = self.prepared.job.topology.device_count
        self.restarts.append(Restart(0, devices, str(lost)))
        step, _ = self._reached(saves)
        self.restarts[-1] = replace(self.restarts[-1], step=step)
        fewer = f", without {', '.join(self._topology.devices[i].name for i in self._gone)}" if self._gone else ""
        number = f"restart {len(self.restarts)} of {self._most}"
        self._say(f"{lost}; {number}: training goes on after step {step} on {devices} devices{fewer}")

    def _over(self, lost: Exception, saves: Path) -> RuntimeFailure:
        kept = f"--resume {self._begin.save} goes on from there" if self._begin.save else "with --save DIR, --resume DIR would go on"
        return RuntimeFailure(f"{lost}; that was after {self._most} restarts, and is the end: {kept}")

    def _whole(self, outcome: Outcome, log: Path) -> Outcome:
        """With the losses of all steps, and without checkpoints that are gone with their folder."""
        own, found = dict(outcome.measured), checkpoints.noted_losses(log)
        first = self._begin.resumed_at
        name = self.prepared.job.main
        own[name] = replace(own[name], losses=tuple(found[step] for step in range(first, first + self._steps)))
        return replace(outcome, measured=own, saved=outcome.saved if self._begin.save else None)


@contextmanager
def _folder(save: str | None) -> Iterator[tuple[Path, Path]]:
    """Where checkpoints go, and where notes do. Those that the user has not asked for are removed."""
    with tempfile.TemporaryDirectory(prefix="soap-restarts-") as own:
        yield Path(save) if save else Path(own) / "checkpoints", Path(own)


@contextmanager
def _visible(left: Sequence[int]) -> Iterator[None]:
    """Within the context started ranks see the GPUs that are left alone, in their order: rank n takes the n-th."""
    before = os.environ.get(VISIBLE)
    named = before.split(",") if before is not None else None
    if list(left) == list(range(len(left))) and named is None:  # none is lost, or the last ones are
        yield
        return
    os.environ[VISIBLE] = ",".join(named[number] if named else str(number) for number in left if named is None or number < len(named))
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before
