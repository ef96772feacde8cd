"""Regions that a rank fetches from others: memory for each, and the communication that fills it.

Parts are received straight into the region if they are adjacent there (parts along dimension 0, in the order of the ranks). Otherwise they
are received into a buffer, which is copied to the region and then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soap.plan.plan import Exchange, Part, Pattern, exchange_name, message_name
from soap.runtime.comm.packing import are_adjacent, cut
from soap.runtime.comm.redistribute import Pending
from soap.runtime.step.state import StepState

Held = Callable[[int], torch.Tensor]
"""Holding of this rank -> its value."""


class Arrivals:
    """This rank's fetches under way. ``take`` waits for a region and returns it."""

    def __init__(self, state: StepState) -> None:
        self._state, self._plan = state, state.plan
        self._rooms: dict[int, torch.Tensor] = {}
        self._pending: dict[int, list[Pending]] = {}
        self._filled: set[int] = set()

    def expect_message(self, number: int) -> None:
        """Start receiving a message."""
        message = self._plan.messages[number]
        places = [self._place(part) for part in message.parts]
        pending = self._state.receive(places, message.source, self._state.program.tags[number], message_name(self._plan, message))
        self._note(message.parts, pending)

    def exchange(self, number: int, held: Held) -> None:
        """Take part in an exchange."""
        exchange = self._plan.exchanges[number]
        if exchange.pattern is Pattern.BROADCAST:
            self._broadcast(exchange, held)
            return
        rank, devices = self._state.rank, exchange.devices
        given: dict[int, list[torch.Tensor]] = {device: [] for device in devices}
        expected: dict[int, list[torch.Tensor]] = {device: [] for device in devices}
        mine = [part for part in exchange.parts if self._plan.fetches[part[0]].device == rank]
        for part in mine:
            expected[self._source(part)].append(self._place(part))
        sent = [part for part in exchange.parts if self._source(part) == rank]
        for part in sent:
            given[self._plan.fetches[part[0]].device].append(self._value(part, held))
        self._include_own(mine, {self._holding(part) for part in sent}, given[rank], expected, held)
        name = exchange_name(self._plan, exchange)
        pending = self._state.exchange(exchange.tensor, list(given.values()), list(expected.values()), devices, name)
        self._note(mine, pending)

    def take(self, fetch: int, held: Held) -> torch.Tensor:
        """The region of a fetch, once it is complete."""
        for pending in self._pending.pop(fetch):
            pending.wait()
        if fetch not in self._filled:
            for place in range(len(self._plan.fetches[fetch].pieces)):
                if self._source((fetch, place)) == self._state.rank:
                    self._place((fetch, place)).copy_(self._value((fetch, place), held))
        return self._rooms.pop(fetch)

    def _broadcast(self, exchange: Exchange, held: Held) -> None:
        source, name = self._source(exchange.parts[0]), exchange_name(self._plan, exchange)
        if self._state.rank == source:
            self._state.tell(self._value(exchange.parts[0], held), len(exchange.parts), exchange.devices, name)
            return
        part = next(part for part in exchange.parts if self._plan.fetches[part[0]].device == self._state.rank)
        self._note([part], self._state.hear(self._place(part), source, exchange.devices, name))

    def _include_own(
        self, parts: Sequence[Part], there: set[int], given: list[torch.Tensor], expected: dict[int, list[torch.Tensor]], held: Held
    ) -> None:
        """Send this rank's own pieces to itself, too, if they are ``there`` and make the received parts adjacent: no buffer then."""
        fetches = {fetch for fetch, _ in parts}
        if len(fetches) != 1:
            return
        (fetch,) = fetches
        own = [(fetch, k) for k in range(len(self._plan.fetches[fetch].pieces)) if self._source((fetch, k)) == self._state.rank]
        places = {**expected, self._state.rank: [self._place(part) for part in own]}
        if {self._holding(part) for part in own} <= there and are_adjacent([place for some in places.values() for place in some]):
            expected[self._state.rank] = places[self._state.rank]
            given.extend(self._value(part, held) for part in own)
            self._filled.add(fetch)

    def _note(self, parts: Sequence[Part], pending: Pending) -> None:
        for fetch in dict.fromkeys(fetch for fetch, _ in parts):
            self._pending.setdefault(fetch, []).append(pending)

    def _holding(self, part: Part) -> int:
        return self._plan.fetches[part[0]].pieces[part[1]].holding

    def _source(self, part: Part) -> int:
        return self._plan.holdings[self._holding(part)].device

    def _value(self, part: Part, held: Held) -> torch.Tensor:
        piece = self._plan.fetches[part[0]].pieces[part[1]]
        return cut(held(piece.holding), self._plan.holdings[piece.holding].box, piece.box)

    def _place(self, part: Part) -> torch.Tensor:
        fetch = self._plan.fetches[part[0]]
        if part[0] not in self._rooms:
            self._rooms[part[0]] = self._state.empty(fetch.box, fetch.tensor)
        return cut(self._rooms[part[0]], fetch.box, fetch.pieces[part[1]].box)
