"""Saving that fails, or is killed, leaves what was there."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from soap.errors import CheckpointError
from soap.plan.plan import Plan
from soap.runtime.checkpoint.checkpoint import read_state_dict
from soap.runtime.checkpoint.manifest import complete
from tests.extent import so_many
from tests.graph_builder import mlp
from tests.runtime.checkpointing import (
    alone,
    alone_plan,
    kill_at_every_file_event,
    save_again_and_again,
    trainer_of,
)
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split
from tests.runtime.pool import Pool, RankError


def save_with_little_room(plan: Plan, folder: str) -> str:
    """Rank 1 can write only small files."""
    with trainer_of(plan) as trainer:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            trainer.save(folder)
        except CheckpointError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return "saved"


def test_a_rank_that_cannot_write_is_told_of_by_all(pool: Pool, tmp_path: Path) -> None:
    messages = pool.run(save_with_little_room, plan_of(mlp(), split((0, 1), n=2), device_count=2), str(tmp_path))
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"cannot write a checkpoint to {str(tmp_path)!r}: file too large; earlier checkpoints are as they were")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    plan, model = alone_plan(), HandModel(mlp())
    with trainer_of(plan) as trainer:
        first = trainer.save(tmp_path)
        trainer.step(*model.inputs(0))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        try:
            with pytest.raises(CheckpointError) as caught:
                trainer.save(tmp_path, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(caught.value) == (
            f"cannot write a checkpoint to {str(tmp_path)!r}: file too large; earlier checkpoints are as they were: "
            "free space, or choose another folder"
        )
        assert list(tmp_path.iterdir()) == [first]
        assert trainer.save(tmp_path, keep=1).name == "step-00000001"  # and training goes on


def test_keep_must_keep_something(tmp_path: Path) -> None:
    with trainer_of(alone_plan()) as trainer, pytest.raises(CheckpointError, match=r"^keep 0: expected at least 1, or None for all$"):
        trainer.save(tmp_path, keep=0)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_any_change_of_the_folder_a_complete_checkpoint_is_left(tmp_path: Path) -> None:
    """In a process of its own, which forks while it has no threads."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        steps = pool.apply(kill_at_every_file_event, (alone_plan(), str(tmp_path)))
    assert len(steps) > 20  # so many changes does a save make
    before = steps.count([2, 3])
    assert steps == [[2, 3]] * before + [[3, 4]] * (len(steps) - before - 1) + [[3]]  # the old one until the new one is there


@pytest.mark.slow
def test_ranks_killed_at_random_moments_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    plan = plan_of(mlp(), split((0, 1), b=2), device_count=2)
    rng = random.Random(0)
    for victims in ((1, 0), (0,), (1,), (0, 1))[: so_many(1, 4)]:
        pool = Pool(2)
        before = complete(tmp_path)[-1:]
        thread = threading.Thread(target=_run_until_killed, args=(pool, plan, str(tmp_path)))
        thread.start()
        while complete(tmp_path)[-1:] == before and thread.is_alive():
            time.sleep(0.01)
        time.sleep(rng.random())
        for victim in victims:
            pool._processes[victim].kill()
        thread.join()
        step = complete(tmp_path)[-1].step
        assert not before or step > before[0].step
        expected, found = alone(alone_plan(), step), read_state_dict(tmp_path)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def _run_until_killed(pool: Pool, plan: Plan, folder: str) -> None:
    with pytest.raises(RankError):
        pool.run(save_again_and_again, plan, folder, 2)
