"""What stages of virtual workers really hold at once, storage by storage, is never more than is predicted of processors.

Counted is what torch's calls make in the stage's threads, from the stage's own values on, as in ``tests/runtime/test_memory``; what servers
hold beside a stage is not the stage's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soap.elastic.worker import Batches
from soap.mixed.partitioning import Partitioner, WorkerPlan, copies_on_processors
from soap.mixed.planned import WavePlan, strategy_of, wave_plan
from soap.mixed.run.stage import Inbox, StageWork
from soap.mixed.run.training import Job, _Rank, train
from soap.profiles.roofline import RooflineCosts
from soap.runtime.comm.launch import launch
from soap.tracing.load import load_model
from tests.elastic.stars import star
from tests.mixed.test_run import FOUR, PAIR, SAMPLES, job_for

MODEL = "alexnet:tiny"
MINIBATCHES = 41
"""Of each worker: so many that whatever is kept for good shows."""


class Held:
    """Storages that calls of several threads have made and that are still there. ``most_bytes``: the most at once, after any call."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()

    def made(self, result: object) -> None:
        """By a call, in any thread."""
        storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        with self._lock:
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._live.update({own._cdata: (StorageWeakRef(own), own.nbytes()) for own in storages})
            self.most_bytes = max(self.most_bytes, sum(size for _, size in self._live.values()))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells what this thread's calls make."""

    def __init__(self, held: Held) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._held.made(result)
        return result


@contextmanager
def counted(held: Held) -> Iterator[None]:
    """What a stage's threads make counts, but for what it needs to begin."""
    stage, run, thread = _Rank._stage, StageWork.run, Inbox.thread

    def counting(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with Counting(held):
                return work(*args, **options)

        return call

    def run_from_here(own: StageWork, *args: Any) -> None:
        held.most_bytes = 0
        counting(run)(own, *args)

    def counting_thread(inbox: Inbox, name: str, work: Callable[[], None]) -> threading.Thread:
        return thread(inbox, name, counting(work))

    own = patch.object(_Rank, "_stage", counting(stage)), patch.object(StageWork, "run", run_from_here)
    with own[0], own[1], patch.object(Inbox, "thread", counting_thread):
        yield


def held_by_ranks(job: Job) -> int:
    """Run on each rank: the most bytes that its stage holds."""
    held = Held()
    with counted(held):
        train(job)
    return held.most_bytes


@dataclass
class Paced:
    """Batches of two workers. The second one's come once the first one has begun all that it may begin until the second goes on. ``folder``
    is where they tell each other; ``told``: whether this rank has asked before (the first time is for shapes alone)."""

    batches: Batches
    folder: str
    in_flight: int
    bound: int
    told: bool = False

    def batch(self, samples: Sequence[int]) -> Sequence[Tensor]:
        minibatch, worker = samples[0] // 2 + 1, samples[0] % 2
        if self.told and worker == 0:
            Path(self.folder, str(minibatch)).touch()
        if self.told and worker == 1:
            waves = max(0, minibatch - self.in_flight) // self.in_flight  # those that it has pushed, or is about to
            last = min(MINIBATCHES, self.in_flight * (waves + self.bound + 2) - 1)
            until = time.monotonic() + 120
            while not Path(self.folder, str(last)).exists():
                assert time.monotonic() < until, f"minibatch {last} of the first worker never began"
                time.sleep(0.001)
        self.told = True
        return self.batches.batch(samples)


def planned(groups: tuple[tuple[int, ...], ...], in_flight: int, bound: int) -> tuple[WavePlan, list[WorkerPlan]]:
    """Stages on processors of one kind, each on a host of its own."""
    count = sum(map(len, groups))
    topology = star(count, 1e9, 1e-5)
    minibatch = load_model(f"zoo:{MODEL}@{SAMPLES}", plan_only=True, dtype="float64").graph
    partitioner = Partitioner(minibatch, topology, RooflineCosts(topology, 0), bound)
    plans = [plan for own in groups if (plan := partitioner.plan(own, in_flight)) is not None]
    graph = load_model(f"zoo:{MODEL}@{SAMPLES * len(groups)}", plan_only=True, dtype="float64").graph
    return wave_plan(strategy_of(plans, graph, count, f"bounded:{bound}", count), graph, topology), plans


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "in_flight", "bound"),
    [
        pytest.param(FOUR, 3, 1, marks=pytest.mark.long),
        pytest.param(FOUR, 4, 0, marks=pytest.mark.long),
        pytest.param(FOUR, 2, 4, marks=pytest.mark.long),
        pytest.param(PAIR, 1, 0, marks=pytest.mark.long),
        (PAIR, 4, 2),
    ],
)
def test_stages_hold_no_more_than_is_predicted(
    tmp_path: Path, groups: tuple[tuple[int, ...], ...], in_flight: int, bound: int
) -> None:
    """The second worker waits, so that the first one has as many waves ahead as it may."""
    plan, plans = planned(groups, in_flight, bound)
    job = job_for(MODEL, plan, [MINIBATCHES] * 2)
    job = replace(job, batches=Paced(job.batches, str(tmp_path), in_flight, bound))
    found = launch(job.ranks, held_by_ranks, (job,), limit_s=240)
    predicted = {stage.device: stage.needed_bytes for own in plans for stage in own.stages}
    for rank, size in found.items():
        assert size <= predicted[rank], (found, predicted)
    quick = [stage.device for stage in plans[0].stages]
    assert max(found[rank] / predicted[rank] for rank in quick) > 0.4, (found, predicted)


def test_copies_of_parameters_on_processors() -> None:
    """Values, what is pulled (three), a gradient and its update, waves that are not pulled, and what is pushed; with more than one
    minibatch in flight the sums of a part of a wave."""
    assert [copies_on_processors(1, bound) for bound in (0, 1, 4, None)] == [8, 9, 12, 12]
    assert [copies_on_processors(wave, 0) for wave in (2, 4)] == [11, 13]
