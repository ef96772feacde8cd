"""Shards whose messages travel together: the sums and the states that they have apart, bit for bit, in just the planned bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from soap.plan.compression.seam import joined as joined_exchanges
from soap.plan.compression.seam import layout_of
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.peer import AS_IT_IS, STEPS, CompressedTraining, Peer, exchanged, joined, synchronized
from soap.runtime.compression.seam import State
from soap.strategy.compression import Compression
from tests.extent import often, rows_often
from tests.runtime.compression.cases import METHODS, SETTINGS, gradient

SHAPES: tuple[tuple[int, ...], ...] = ((40, 70), (1,), (3, 2, 5), (0, 3), (4500,))
STEP_COUNT = 6

Peers = list[list[Peer]]
"""By rank and shard."""


def peers_of(how: Compression, ranks: int, dtype: torch.dtype, training: CompressedTraining = AS_IT_IS) -> Peers:
    return [[Peer(how, shape, dtype, rank, ranks, training) for shape in SHAPES] for rank in range(ranks)]


def together(ranks: Peers, gradients: Sequence[Sequence[torch.Tensor]]) -> tuple[list[list[torch.Tensor]], list[tuple[str, int]]]:
    """(each rank's sums, kind and bytes of each exchange): the joined courses of all ranks, in step. ``gradients``: by rank and shard."""
    courses = [
        joined([peer.course(own) for peer, own in zip(mine, given, strict=True)])
        for mine, given in zip(ranks, gradients, strict=True)
    ]
    received: list[torch.Tensor | None] = [None] * len(courses)
    moved: list[tuple[str, int]] = []
    while True:
        given, totals = [], []
        for course, got in zip(courses, received, strict=True):
            try:
                given.append(next(course) if got is None else course.send(got))
            except StopIteration as end:
                totals.append(end.value)
        if totals:
            assert not given
            return totals, moved
        kind = given[0][0]
        if kind == "ragged":
            assert all(list(sizes) == [message.nbytes for _, message, _ in given] for *_, sizes in given)
        moved.append((kind, given[0][1].nbytes // (len(ranks) if kind == "all_to_all" else 1)))
        received = list(exchanged(kind, [message for _, message, _ in given]))


def apart(ranks: Peers, gradients: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The same, shard by shard."""
    by_shard = [synchronized([mine[i] for mine in ranks], [given[i] for given in gradients]) for i in range(len(SHAPES))]
    return [[totals[rank] for totals in by_shard] for rank in range(len(ranks))]


def drawn(ranks: int, dtype: torch.dtype, step: int) -> list[list[torch.Tensor]]:
    return [[gradient(shape, dtype, 1000 * step + 10 * rank + i) for i, shape in enumerate(SHAPES)] for rank in range(ranks)]


def same(one: State, other: State) -> bool:
    parts = [(one.summed, other.summed), (one.common, other.common), (one.own, other.own)]
    return one.numbers == other.numbers and all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine) for mine, theirs in parts
    )


FIRST = {own[0] for own in METHODS.values()}
"""Of each method."""
TYPED = [(how, dtype) for how in SETTINGS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("ranks", often([2, 4], [4]))
@pytest.mark.parametrize(("how", "dtype"), rows_often(TYPED, [own for own in TYPED if own[1] == torch.float32 or own[0] in FIRST]), ids=str)
def test_joined_messages_change_no_bit(how: Compression, ranks: int, dtype: torch.dtype) -> None:
    alone, common = peers_of(how, ranks, dtype), peers_of(how, ranks, dtype)
    layouts = [layout_of(how, shape, dtype.itemsize, ranks) for shape in SHAPES]
    planned = joined_exchanges(layouts)
    assert sum(each.message_bytes for each in planned) == sum(each.message_bytes for own in layouts for each in own.exchanges)
    for step in range(STEP_COUNT):
        given = drawn(ranks, dtype, step)
        expected = apart(alone, given)
        found, moved = together(common, given)
        assert all(torch.equal(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))
        assert all(same(a.state, b.state) for mine, theirs in zip(common, alone, strict=True) for a, b in zip(mine, theirs, strict=True))
        assert [kind for kind, _ in moved] == [each.kind for each in planned]  # one exchange for all shards
        fixed = [(kind, size) for kind, size in moved if kind != "ragged"]
        assert fixed == [(each.kind, each.message_bytes) for each in planned if each.kind != "ragged"]


@pytest.mark.parametrize("how", [SETTINGS[0], SETTINGS[4], SETTINGS[-3], SETTINGS[-1]], ids=repr)
def test_warm_ups_and_momentum_too(how: Compression) -> None:
    """Also where some shards have more steps behind them than others, as behind a checkpoint without these: they then take turns."""
    training = CompressedTraining(Momentum(0.9, nesterov=True), WarmUp(2, 1))
    alone, common = peers_of(how, 3, torch.float32, training), peers_of(how, 3, torch.float32, training)
    for ranks in (alone, common):
        for mine in ranks:
            mine[2].state.numbers[STEPS] = 1
    kinds = []
    for step in range(STEP_COUNT):
        given = drawn(3, torch.float32, step)
        expected = apart(alone, given)
        found, moved = together(common, given)
        assert all(torch.equal(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))
        assert all(same(a.state, b.state) for mine, theirs in zip(common, alone, strict=True) for a, b in zip(mine, theirs, strict=True))
        kinds.append([kind for kind, _ in moved])
    usual = [each.kind for each in layout_of(how, SHAPES[0], 4, 3).exchanges]
    assert kinds[0] == ["sum"] and kinds[3:] == [usual] * 3
    assert sorted(kinds[1]) == sorted([*usual, "sum"]) or how.name == "powersgd"  # whose own sums join that of dense steps
