"""A training from its first step to a loss, on emulated hosts. Runs on every rank."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from time import perf_counter_ns

from benchmarks import convergence
from benchmarks.convergence_cells import Key
from benchmarks.convergence_page import USUAL, first_step
from benchmarks.convergence_tasks import TASKS
from soap import api
from soap.cli.training import Job, make_trainer
from soap.errors import SoapWarning
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.system import clock

NET = "net."
"""What names of the net's parameters begin with in the exported model."""


@dataclass(frozen=True)
class WholeTraining:
    """``method``: which of the job's strategies. ``task``: in ``convergence_tasks``, whose first seed's batches are trained with. ``aim``:
    the loss, averaged as on the page of convergence; ``steps``: the most that are taken."""

    job: Job
    method: str
    task: str
    aim: float
    steps: int


def run_to_loss(own: WholeTraining) -> tuple[float, tuple[float, ...]]:
    """(seconds by the wall clock from the first step's beginning to the end of the step that reaches the loss, losses up to there); of all
    steps if it is not reached. The loss is the same on all ranks, so all stop together."""
    job, task = own.job, TASKS[own.task]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SoapWarning)
        model = api.load(job.model, **job.reading)
    batches = convergence.batches(Key(own.task, own.method, USUAL, task.batch, own.steps, 0), task.data().train)
    world = open_world(job.topology.device_count, job.topology.devices[0].type.kind, job.backend)
    try:
        trainer = make_trainer(job, model, own.method)
        losses: list[float] = []
        trainer.comm.barrier()
        start = perf_counter_ns()
        for batch in batches:
            losses.append(trainer.step(*batch))
            if first_step(losses, own.aim) is not None:
                break
        trainer.comm.finish_sends()
        clock.catch_up()
        trainer.comm.barrier()
        return (perf_counter_ns() - start) / 1e9, tuple(losses)
    finally:
        close_world(world)
