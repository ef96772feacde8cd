"""Synchronization of gradients on one rank, with another in its place that has the same gradients."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.model.regions import lengths
from soap.plan.plan import Plan
from soap.runtime.comm.redistribute import Communicator, Pending, Traffic
from soap.runtime.program.actions import ActionKind, MicroBatch, part_of
from soap.runtime.program.program import Program, compile_program
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.step import sync_schedule
from soap.runtime.sync.shards import ShardStore
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, split, summed

Values = dict[int, torch.Tensor]


class _Twin:
    """A communicator of rank 0 whose sums are those of two equal ranks. ``summed``: each sum's tensor as it was given."""

    def __init__(self) -> None:
        self.rank, self.traffic, self.device = 0, Traffic(), torch.device("cpu")
        self.summed: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        assert devices == (0, 1)
        self.summed.append(tensor.clone())
        return Pending((), tensor.mul_(2))


def _program(draw: random.Random) -> Program:
    """A program with parameters on one device and on two, their shards in random buckets."""
    plan = plan_of(mlp(), split((0, 1), b=2), fc1=split((0,)))
    pairs = [i for sync in plan.syncs if len(sync.readers) == 2 for i in sync.shards]
    draw.shuffle(pairs)
    buckets = [sync for sync in plan.syncs if len(sync.readers) == 1]
    while pairs:
        size = draw.randint(1, len(pairs))
        buckets.append(summed(plan, pairs[:size]))
        del pairs[:size]
    return compile_program(replace(plan, syncs=tuple(buckets)), single_tiles=draw.random() < 0.5)


def _shards(plan: Plan) -> Values:
    own = {i: shard for i, shard in enumerate(plan.shards) if 0 in shard.devices}
    return {i: torch.randn(lengths(shard.box), dtype=torch.float64, requires_grad=True) for i, shard in own.items()}


def _sync(program: Program, shards: Values) -> tuple[Gradients, _Twin]:
    twin, store = _Twin(), ShardStore(program.plan, 0)
    store.tensors, store.leaves = shards, dict(shards)
    return Gradients(program, store, cast(Communicator, twin), lambda name: torch.float64), twin


def _used(program: Program, segment: int) -> list[int]:
    tiles = set(program.segments[segment].tiles) & program.activity.tiles
    return [i for i, shard in enumerate(program.plan.shards) if any(tile in tiles for tile, _ in shard.uses)]


def _backward(program: Program, sync: Gradients, shards: Values, totals: Values, last: bool, draw: random.Random, flow: float) -> None:
    """A backward pass whose gradients come in any order; ``flow``: how likely each comes at all. Adds them to ``totals``."""
    for action in part_of(program.backward, 0):
        if action.kind is ActionKind.SEGMENT:
            with sync.early.segment(action.subject):
                for shard in draw.sample(used := _used(program, action.subject), len(used)):
                    if draw.random() < flow:
                        gradient = torch.randn_like(totals[shard])
                        totals[shard] += gradient
                        shards[shard].backward(gradient)
        elif action.kind is ActionKind.SYNC and last:
            sync.start(action.kind, action.subject)


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.sampled_from([0.5, 1.0]), st.booleans())
def test_gradients_are_the_sums_of_what_autograd_gives(draw: random.Random, parts: int, flow: float, early: bool) -> None:
    torch.manual_seed(draw.randrange(1000))
    program = _program(draw)
    shards = _shards(program.plan)
    sync, twin = _sync(program, shards)
    schedule = sync_schedule(program, 0, early)
    in_order = [action.subject for action in part_of(program.backward, 0) if action.kind is ActionKind.SYNC]
    for _ in range(2):
        totals = {i: torch.zeros_like(shard, requires_grad=False) for i, shard in shards.items()}
        twin.summed.clear()
        for number in range(parts):
            with sync.step(schedule, MicroBatch(number, parts)):
                _backward(program, sync, shards, totals, number == parts - 1, draw, flow)
        buffers = [torch.cat([totals[i].flatten() for i in program.plan.syncs[bucket].shards]) for bucket in in_order]
        assert len(twin.summed) == len(buffers)
        for total, buffer in zip(twin.summed, buffers, strict=True):  # each complete when it was given, all in the program's order
            torch.testing.assert_close(total, buffer)
        sync.add_up()
        for own in program.plan.syncs:
            for number in own.shards if 0 in own.readers else ():
                torch.testing.assert_close(sync.dense[number], len(own.readers) * totals[number])
        for i, shard in shards.items():  # as the optimizer's update leaves it
            shard.grad = sync.dense[i]


def test_a_sum_starts_with_its_last_gradient() -> None:
    program = compile_program(plan_of(mlp(), split((0, 1), b=2)))
    first, *others = (i for sync in program.plan.syncs for i in sync.shards)
    program = compile_program(replace(program.plan, syncs=(summed(program.plan, others), summed(program.plan, [first]))))
    shards = _shards(program.plan)
    sync, twin = _sync(program, shards)
    started = []
    with sync.step(sync_schedule(program, 0)), sync.early.segment(0):
        for shard in (*others, first):
            shards[shard].backward(torch.ones_like(shards[shard]))
            started.append(len(twin.summed))
    assert started == [0] * len(others) + [2]  # the first bucket is complete sooner, and waits for its turn


def test_other_backward_passes_are_left_alone() -> None:
    program = compile_program(plan_of(mlp(), split((0, 1), b=2)))
    shards = _shards(program.plan)
    sync, _ = _sync(program, shards)
    (own,) = program.plan.syncs
    shards[own.shards[0]].sum().backward()
    assert torch.equal(cast(torch.Tensor, shards[own.shards[0]].grad), torch.ones_like(shards[own.shards[0]]))
    sync.add_up()
    assert not sync.dense[own.shards[0]].any()


@pytest.mark.slow
def test_hooks_keep_nothing_alive() -> None:
    program = compile_program(plan_of(mlp(), split((0, 1), b=2)))
    shards = _shards(program.plan)
    sync, _ = _sync(program, shards)
    alive: list[weakref.ref[Any]] = [weakref.ref(sync), *(weakref.ref(shard) for shard in shards.values())]
    del sync, shards
    gc.collect()
    assert [reference for reference in alive if reference() is not None] == []
