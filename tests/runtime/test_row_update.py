"""Updates of some rows: those of the optimizer on whole tables, whatever it keeps for each element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from soap.errors import RuntimeFailure
from soap.runtime.sync.row_update import RowGradient, Updater, add_up, common_rows, parallel, spares_rows
from tests.runtime.sparse_modules import OPTIMIZERS, Optimizer

ROWS = 12
CUTS = ((0, 5), (5, 6), (6, 12))
STEPS: Sequence[Sequence[int]] = ((1, 2, 8), (), (2, 3), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), (11,))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def table(columns: tuple[int, ...] = (4,)) -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * torch.Size(columns).numel(), dtype=torch.float64).reshape(ROWS, *columns)


def gradient_of(step: int, rows: Sequence[int], columns: tuple[int, ...] = (4,)) -> RowGradient:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(len(rows), *columns, generator=generator, dtype=torch.float64)
    return RowGradient(torch.tensor(rows, dtype=torch.int64), values)


def shards_of(whole: torch.Tensor) -> dict[int, torch.Tensor]:
    return {number: whole[a:b].clone().requires_grad_() for number, (a, b) in enumerate(CUTS)}


def updater_of(shards: dict[int, torch.Tensor], optimizer: torch.optim.Optimizer, lazy: bool) -> Updater:
    columns = [(0, size) for size in shards[0].shape[1:]]
    return Updater(optimizer, shards, {number: ("t", ((a, b), *columns)) for number, (a, b) in enumerate(CUTS)}, lazy)


@pytest.mark.parametrize("columns", [(4,), (), (2, 3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_as_on_the_whole_table(optimizer: str, columns: tuple[int, ...], threads: int) -> None:
    make = OPTIMIZERS[optimizer]
    alone = table(columns).requires_grad_()
    shards = shards_of(table(columns))
    whole, parts = make([alone]), make(list(shards.values()))
    updater = updater_of(shards, parts, lazy=False)
    for step, rows in enumerate(STEPS):
        gradient = gradient_of(step, rows, columns)
        alone.grad = gradient.dense(0, ROWS)
        whole.step()
        updater.update({}, {number: within(gradient, number) for number in range(len(CUTS))}, {})
        assert torch.equal(torch.cat(list(shards.values())), alone)
    for key, value in whole.state[alone].items():
        found = [parts.state[shard][key] for shard in shards.values()]
        if isinstance(value, torch.Tensor) and value.shape == alone.shape:
            assert torch.equal(torch.cat(found), value), key
        else:
            assert all(float(other) == float(value) for other in found), key


def within(gradient: RowGradient, number: int) -> RowGradient:
    first, stop = CUTS[number]
    there = (gradient.rows >= first) & (gradient.rows < stop)
    return RowGradient(gradient.rows[there], gradient.values[there])


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad", "decay"])
def test_lazily_only_rows_that_are_looked_up_change(optimizer: str, threads: int) -> None:
    """As if each row had an optimizer of its own, but that all count all steps; by rows or from a dense gradient."""
    for dense in (False, True):
        shards = shards_of(table())
        parts = OPTIMIZERS[optimizer](list(shards.values()))
        updater = updater_of(shards, parts, lazy=True)
        expected = Lazily(OPTIMIZERS[optimizer])
        for step, rows in enumerate(STEPS):
            gradient = gradient_of(step, rows)
            if dense:
                whole = gradient.dense(0, ROWS)
                updater.update({n: whole[a:b].clone() for n, (a, b) in enumerate(CUTS)}, {}, {"t": gradient.rows})
            else:
                updater.update({}, {n: within(gradient, n) for n in range(len(CUTS))}, {})
            torch.testing.assert_close(torch.cat([s.detach() for s in shards.values()]), expected.step(gradient), rtol=1e-12, atol=1e-12)
        assert len({float(state["step"]) for state in parts.state.values() if "step" in state}) <= 1


class Lazily:
    """One tensor whose rows that are not looked up are put back after each step, with their state."""

    def __init__(self, make: Optimizer) -> None:
        self.table = table().requires_grad_()
        self.optimizer = make([self.table])

    def step(self, gradient: RowGradient) -> torch.Tensor:
        self.table.grad = gradient.dense(0, ROWS)
        idle = torch.ones(ROWS, dtype=torch.bool)
        idle[gradient.rows] = False
        before = {key: value.clone() for key, value in self._rows().items()}
        self.optimizer.step()
        with torch.no_grad():
            for key, value in self._rows().items():
                value[idle] = before[key][idle] if key in before else 0.0
        return self.table.detach()

    def _rows(self) -> dict[str, torch.Tensor]:
        state = {k: v for k, v in self.optimizer.state.get(self.table, {}).items() if v.shape == self.table.shape}
        return {"": self.table.detach(), **state}


def test_only_some_of_the_tensors() -> None:
    shards = shards_of(table())
    updater = updater_of(shards, OPTIMIZERS["sgd"](list(shards.values())), lazy=False)
    gradient = gradient_of(0, (1, 5, 8))
    before = [shard.detach().clone() for shard in shards.values()]
    updater.update({2: within(gradient, 2).dense(6, 6)}, {0: within(gradient, 0), 1: within(gradient, 1)}, {}, only=(1,))
    assert [torch.equal(a, b) for a, b in zip(before, shards.values(), strict=True)] == [True, False, True]


class Looked(torch.optim.Adam):
    """``seen``: of each step, the tensors in each group. ``given``: how many of ``every`` tensor had a gradient. Fails if ``broken``."""

    def __init__(self, params: Any, every: Sequence[torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.every, self.broken = every, False
        self.seen: list[list[int]] = []
        self.given: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append([len(group["params"]) for group in self.param_groups])
        self.given.append(sum(tensor.grad is not None for tensor in self.every))
        if self.broken:
            raise ValueError
        super().step()


def in_two_groups(shards: dict[int, torch.Tensor]) -> Looked:
    """The second has weight decay, and comes first by its number."""
    first, *others = shards.values()
    return Looked([{"params": others}, {"params": [first], "weight_decay": 0.1}], list(shards.values()))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("parts", [((0,), (1,), (2,)), ((2, 0), (1,)), ((1,), (2, 0))])
def test_a_step_in_parts_is_the_step(parts: Sequence[Sequence[int]], lazy: bool) -> None:
    """Each part's step looks at its own tensors alone, of which alone there are gradients. One has rows, and one was left a gradient by the
    backward pass."""
    whole, cut = shards_of(table()), shards_of(table())
    once, often = in_two_groups(whole), in_two_groups(cut)
    at_once, in_parts = updater_of(whole, once, lazy), updater_of(cut, often, lazy)
    for step, rows in enumerate(STEPS):
        own = {number: within(gradient_of(step, rows), number) for number in range(len(CUTS))}
        dense = {0: own[0].dense(0, 5), 1: own[1].dense(5, 1)}
        cut[1].grad = torch.ones_like(cut[1], requires_grad=False)
        at_once.update(dense, {2: own[2]}, {})
        for part in parts:
            in_parts.update(dense, {2: own[2]}, {}, part)
        assert all(torch.equal(whole[number], cut[number]) for number in whole)
        for number in whole:
            a, b = once.state[whole[number]], often.state[cut[number]]
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    sizes = [[len({1, 2} & {*part}), len({0} & {*part})] for part in parts]
    assert often.seen == sizes * len(STEPS) and once.seen == [[2, 1]] * len(STEPS)
    assert often.given == [len({0, 1} & {*part}) + (2 in part and not lazy) for part in parts] * len(STEPS)
    assert [len(group["params"]) for group in often.param_groups] == [2, 1]


def test_groups_are_whole_again_after_a_failure() -> None:
    shards = shards_of(table())
    optimizer = in_two_groups(shards)
    updater = updater_of(shards, optimizer, lazy=False)
    optimizer.broken = True
    with pytest.raises(ValueError):
        updater.update({0: torch.zeros_like(shards[0])}, {}, {}, only=(0,))
    assert optimizer.seen == [[0, 1]] and [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


def test_which_optimizers_leave_rows_alone() -> None:
    def spared(make: Optimizer) -> bool:
        optimizer = make([torch.zeros(2, requires_grad=True)])
        return spares_rows(optimizer, optimizer.param_groups[0])

    assert [name for name, make in OPTIMIZERS.items() if spared(make)] == ["sgd", "adagrad"]
    assert not spared(lambda p: torch.optim.Adagrad(p, weight_decay=0.1))
    assert not spared(lambda p: torch.optim.RMSprop(p))


class ByTable(torch.optim.SGD):
    """Keeps something that is no number and has no value for each element."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["ends"] = torch.zeros(2)


def test_one_line_for_state_that_cannot_be_cut() -> None:
    shards = shards_of(table())
    updater = updater_of(shards, ByTable(list(shards.values()), lr=0.1), lazy=True)
    with pytest.raises(RuntimeFailure, match=r"^optimizer state 'ends' has shape \(2,\) for rows of shape \(1, 4\); expected a number or"):
        updater.update({}, {0: gradient_of(0, (1,))}, {})


def test_sums_of_rows() -> None:
    one, two = RowGradient(torch.tensor([1, 4]), torch.tensor([1.0, 2.0])), RowGradient(torch.tensor([0, 4]), torch.tensor([8.0, 16.0]))
    none = RowGradient(torch.tensor([], dtype=torch.int64), torch.tensor([]))
    total = add_up([one, none, two])
    assert total.rows.tolist() == [0, 1, 4] and total.values.tolist() == [8.0, 1.0, 18.0]
    assert total.dense(0, 6).tolist() == [8.0, 1.0, 0.0, 0.0, 18.0, 0.0]
    assert add_up([none, none]).rows.tolist() == []
    assert common_rows([one.rows, two.rows]).tolist() == [0, 1, 4]
    found = RowGradient.of(torch.arange(4.0), torch.tensor([0, 2, 3, 9]), 2)
    assert found.rows.tolist() == [2, 3] and found.values.tolist() == [0.0, 1.0]


def test_work_in_several_threads_keeps_its_order(threads: int) -> None:
    assert parallel(lambda number: number * number, range(20)) == [number * number for number in range(20)]
    assert parallel(lambda number: number, []) == []
