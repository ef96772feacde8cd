"""A stage by itself: when it asks for minibatches and pulls, and how long servers keep what stages may still pull."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from soap.mixed.run.stage import Client, Inbox, Item, Outbox, StageWork, What
from soap.mixed.run.stage_program import Begun, StageProgram, StageValues, Updates
from soap.mixed.run.training import Desk
from tests.mixed.test_run import FOUR, PAIR, plan_for

PATIENCE_S = 20.0


class Servers:
    """What a stage asks, answered in the same process by a real desk; the other worker has left. ``asked``: of each minibatch, how many
    were finished; ``pulled``: versions, in the order in which they come."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._changed = desk, threading.Condition()
        self.asked: list[int] = []
        self.pulled: list[int] = []
        desk.left(1)

    def start(self, finished: int) -> tuple[int, int]:
        """See ``Client``."""
        self.asked.append(finished)
        return self._desk.start(0, finished)

    def pull(self, version: int, least: int) -> Tensor:
        """See ``Client``."""
        assert least <= version
        with self._changed:
            self.pulled.append(version)
            self._changed.notify_all()
        return torch.zeros(1)

    def push(self, wave: int, update: Tensor, least: int) -> None:
        """See ``Client``."""

    def pushed(self, wave: int) -> int:
        """See ``Client``."""
        return self._desk.pushed(0, wave)

    def wait_for(self, version: int) -> bool:
        """Until it is pulled. Returns whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: version in self.pulled, PATIENCE_S)


class Program:
    """Computes nothing. ``before``: minibatch -> the version that must have been pulled when it is computed."""

    def __init__(self, servers: Servers, before: dict[int, int]) -> None:
        self._servers, self._before, self.came_late = servers, before, list[int]()

    def forward(self, step: int, batch: object, received: object, values: Tensor) -> Begun:
        """See ``StageProgram``. Worker 0 of two has every other step."""
        minibatch = step // 2 + 1
        if minibatch in self._before and not self._servers.wait_for(self._before[minibatch]):
            self.came_late.append(minibatch)
        return Begun(values, (), (), (), torch.zeros(()))

    def backward(self, begun: Begun, gradients: object) -> tuple[Tensor, list[Tensor]]:
        """See ``StageProgram``."""
        return torch.ones(1), []


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_stage_asks_as_soon_as_there_is_room_in_flight(in_flight: int) -> None:
    """A single stage computes one minibatch after the other; nevertheless so many are in flight, and what a minibatch needs comes while
    those in front of it are computed: with D = 0 minibatch 2 Nm needs the first wave, and may begin when Nm are finished."""
    plan, count = plan_for("alexnet:tiny", PAIR, in_flight, "bounded:0"), 4 * in_flight
    servers = Servers(Desk(plan))
    needing = {(2 + wave) * in_flight: wave + 1 for wave in range(3)}
    before = {minibatch - in_flight + 1: version for minibatch, version in needing.items()}
    program, values = Program(servers, before), StageValues(in_flight, torch.zeros(1))
    client = cast(Client, servers)
    work = StageWork(
        plan, 0, 0, cast(StageProgram, program), values, Updates(_sgd, None, 2), lambda number: (), (client, client, client), 0, count
    )
    work.run()
    assert program.came_late == []
    assert servers.asked == [max(0, minibatch - in_flight) for minibatch in range(1, count + 1)]
    assert [start.minibatch for start in work.seen.starts] == [*range(1, count + 1)]
    assert [start.finished for start in work.seen.starts] == [*range(count)], "its own are in its values as soon as they are there"
    assert (work.seen.pushes, work.seen.pulls) == (4, 3)
    assert servers.pulled == [1, 2, 3]


def test_inputs_are_read_while_minibatches_before_are_computed() -> None:
    """Those of the next one have been read when one is computed, and no more."""
    plan, count = plan_for("alexnet:tiny", PAIR, 1, "async"), 6
    servers, changed, read = Servers(Desk(plan)), threading.Condition(), list[int]()

    class Waiting(Program):
        """Waits for the inputs of the next minibatch, and writes down how many have been read; their own are what it gets."""

        def forward(self, step: int, batch: object, received: object, values: Tensor) -> Begun:
            """See ``StageProgram``."""
            minibatch = step // 2 + 1
            assert batch == (minibatch - 1,)
            with changed:
                there = changed.wait_for(lambda: len(read) > min(minibatch, count - 1), PATIENCE_S)
                seen.append((there, len(read)))
            return super().forward(step, batch, received, values)

    def reading(minibatch: int) -> Any:
        with changed:
            read.append(minibatch)
            changed.notify_all()
        return (minibatch,)

    seen: list[tuple[bool, int]] = []
    client, values = cast(Client, servers), StageValues(1, torch.zeros(1))
    program = cast(StageProgram, Waiting(servers, {}))
    work = StageWork(plan, 0, 0, program, values, Updates(_sgd, None, 2), reading, (client, client, client), 0, count)
    work.run()
    assert read == [*range(count)]
    assert seen == [(True, min(minibatch + 1, count)) for minibatch in range(1, count + 1)]


def test_a_stage_fails_with_what_reading_fails_with() -> None:
    plan = plan_for("alexnet:tiny", PAIR, 1, "async")
    servers = Servers(Desk(plan))

    def reading(minibatch: int) -> Any:
        raise ValueError(f"minibatch {minibatch} cannot be read")

    client, values = cast(Client, servers), StageValues(1, torch.zeros(1))
    program = cast(StageProgram, Program(servers, {}))
    work = StageWork(plan, 0, 0, program, values, Updates(_sgd, None, 2), reading, (client, client, client), 0, 4)
    with pytest.raises(ValueError, match="minibatch 0 cannot be read"):
        work.run()


def test_passes_are_in_the_order_in_which_all_is_there_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two stages, three in flight: what may begin before gradients come is computed before their backward pass, and what they
    make room for behind it."""
    plan, count, in_flight = plan_for("alexnet:tiny", FOUR, 3, "async"), 6, 3
    servers, changed, heard, order = Servers(Desk(plan)), threading.Condition(), list[What](), list[str]()
    put = Inbox.put

    def note(inbox: Inbox, item: Item) -> None:
        with changed:
            put(inbox, item)
            heard.append(item.what)
            changed.notify_all()

    def wait(what: What, times: int) -> None:
        with changed:
            assert changed.wait_for(lambda: heard.count(what) >= times, PATIENCE_S)

    def gradients(rank: int, tag: int, shapes: object, dtypes: object, back: None) -> list[Tensor]:
        """Those of minibatch n come when all have been granted that were asked for before; the next ones when it has ended."""
        number = heard.count(What.GRADIENTS)
        with changed:
            assert changed.wait_for(lambda: f"B{number}" in order or number == 0, PATIENCE_S)
        wait(What.MAY_START, min(count, in_flight + number))
        return []

    class Noting(Program):
        """Writes down what is computed. The first forward pass lasts until the first gradients have come, each until inputs are read."""

        def shapes(self, names: object) -> list[tuple[int, ...]]:
            """See ``StageProgram``."""
            return []

        def dtypes(self, names: object) -> list[torch.dtype]:
            """See ``StageProgram``."""
            return []

        def has_gradient(self, names: Sequence[str]) -> list[bool]:
            """See ``StageProgram``."""
            return [True for _ in names]

        def forward(self, step: int, batch: object, received: object, values: Tensor) -> Begun:
            """See ``StageProgram``."""
            minibatch = step // 2 + 1
            order.append(f"F{minibatch}")
            wait(What.INPUTS, min(count, minibatch + 1))
            if minibatch == 1:
                wait(What.GRADIENTS, 1)
            return Begun(values, (), (), (), None)

        def backward(self, begun: Begun, gradients: object) -> tuple[Tensor, list[Tensor]]:
            """See ``StageProgram``."""
            with changed:
                order.append(f"B{sum(own[0] == 'B' for own in order) + 1}")
                changed.notify_all()
            return super().backward(begun, gradients)

    monkeypatch.setattr(Inbox, "put", note)
    monkeypatch.setattr("soap.mixed.run.stage.receive", gradients)
    monkeypatch.setattr(Outbox, "send", lambda *given: None)
    client, program = cast(Client, servers), cast(StageProgram, Noting(servers, {}))
    values, updates = StageValues(in_flight, torch.zeros(1)), Updates(_sgd, None, 2)
    StageWork(plan, 0, 0, program, values, updates, lambda number: (), (client, client, client), 0, count).run()
    assert order[:4] == ["F1", "F2", "F3", "B1"], "the first gradients came during F1, behind the grants of all three"
    assert [own for own in order if own[0] == "F"] == [f"F{number}" for number in range(1, count + 1)]
    assert [own for own in order if own[0] == "B"] == [f"B{number}" for number in range(1, count + 1)]
    assert all(order.index(f"F{number + in_flight}") > order.index(f"B{number}") for number in range(1, count - in_flight + 1))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_servers_keep_versions_of_minibatches_that_are_not_finished() -> None:
    """Without a bound each minibatch has what servers have: stages may still pull version 1 for the seventh when the eighth has 2."""
    desk = Desk(plan_for("alexnet:tiny", PAIR, 2, "async"))

    def starts(worker: int, finished: int) -> tuple[int, int]:
        return desk.start(worker, finished)

    assert [starts(0, 0), starts(0, 0), starts(1, 0), starts(1, 0)] == [(0, 0)] * 4
    for wave in range(3):
        assert desk.pushed(0, wave) == 0
        if wave < 2:
            assert [starts(0, 2 * wave + 2), starts(0, 2 * wave + 2)] == [(0, 0)] * 2
    assert desk.pushed(1, 0) == 0
    assert starts(0, 6) == (1, 0), "the sixth has 0 and may be the last that is finished; the seventh has 1"
    assert [starts(1, 2), starts(1, 2), desk.pushed(1, 1)] == [(1, 0), (1, 0), 0]
    assert starts(1, 4) == (2, 0) and starts(0, 6) == (2, 0)
    assert starts(0, 7)[1] == 1, "the seventh is finished: nobody asks for 0"
