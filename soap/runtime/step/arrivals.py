"""What comes from other ranks for a step: messages and exchanges under way, and the regions that they fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soap.plan.plan import Exchange, Pattern, exchange_name, message_name
from soap.plan.plan import Part as MessagePart
from soap.runtime.comm.packing import are_adjacent
from soap.runtime.comm.redistribute import Pending
from soap.runtime.step.routed import RegionKey
from soap.runtime.step.state import StepState

Held = Callable[[int], torch.Tensor]
"""Holding of this rank -> its value."""


class Arrivals:
    """This rank's fetches under way. ``take`` waits for a region and returns it. Parts are received straight into the region where they are
    adjacent in it, else into a buffer, which is copied and dropped."""

    def __init__(self, state: StepState) -> None:
        self._state, self._plan = state, state.plan
        self._rooms: dict[int, torch.Tensor] = {}
        self._parts: dict[MessagePart, torch.Tensor] = {}
        self._pending: dict[int, list[Pending]] = {}
        self._filled: set[int] = set()

    def put_into(self, fetch: int, region: torch.Tensor) -> None:
        """Let a region be received into this memory."""
        self._rooms[fetch] = region

    def expect_message(self, number: int, again: str = "") -> None:
        """Start receiving a message. ``again``: behind the name of its task."""
        message = self._plan.messages[number]
        places = [self._place(part) for part in message.parts]
        pending = self._state.receive(places, message.source, self._state.program.tags[number], message_name(self._plan, message) + again)
        self._note(message.parts, pending)

    def exchange(self, number: int, held: Held, again: str = "") -> None:
        """Take part in an exchange."""
        exchange = self._plan.exchanges[number]
        name = exchange_name(self._plan, exchange) + again
        if exchange.pattern is Pattern.BROADCAST:
            self._broadcast(exchange, held, name)
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
        pending = self._state.exchange(exchange.tensor, list(given.values()), list(expected.values()), devices, name)
        self._note(mine, pending)

    def take(self, fetch: int, held: Held) -> torch.Tensor:
        """The region of a fetch, once it is complete."""
        for pending in self._pending.pop(fetch):
            pending.wait()
        key: RegionKey = ("fetch", fetch)
        if self._state.regions.is_routed(key):
            self._rooms[fetch] = self._state.regions.empty(key)
        if fetch in self._filled:
            self._filled.remove(fetch)
        else:
            for place, piece in enumerate(self._plan.fetches[fetch].pieces):
                part = (fetch, place)
                came = self._value(part, held) if self._source(part) == self._state.rank else self._parts.pop(part, None)
                if came is not None:
                    self._state.regions.put(key, self._rooms[fetch], piece.box, came)
        return self._rooms.pop(fetch)

    def _broadcast(self, exchange: Exchange, held: Held, name: str) -> None:
        source = self._source(exchange.parts[0])
        if self._state.rank == source:
            self._state.tell(self._value(exchange.parts[0], held), len(exchange.parts), exchange.devices, name)
            return
        part = next(part for part in exchange.parts if self._plan.fetches[part[0]].device == self._state.rank)
        self._note([part], self._state.hear(self._place(part), source, exchange.devices, name))

    def _include_own(
        self, parts: Sequence[MessagePart], there: set[int], given: list[torch.Tensor], expected: dict[int, list[torch.Tensor]], held: Held
    ) -> None:
        """Send this rank's own pieces to itself, too, if they are ``there`` and make the received parts adjacent: no buffer then."""
        fetches = {fetch for fetch, _ in parts}
        if len(fetches) != 1:
            return
        (fetch,) = fetches
        if self._state.regions.is_routed(("fetch", fetch)):
            return
        own = [(fetch, k) for k in range(len(self._plan.fetches[fetch].pieces)) if self._source((fetch, k)) == self._state.rank]
        places = {**expected, self._state.rank: [self._place(part) for part in own]}
        if {self._holding(part) for part in own} <= there and are_adjacent([place for some in places.values() for place in some]):
            expected[self._state.rank] = places[self._state.rank]
            given.extend(self._value(part, held) for part in own)
            self._filled.add(fetch)

    def _note(self, parts: Sequence[MessagePart], pending: Pending) -> None:
        for fetch in dict.fromkeys(fetch for fetch, _ in parts):
            self._pending.setdefault(fetch, []).append(pending)

    def _holding(self, part: MessagePart) -> int:
        return self._plan.fetches[part[0]].pieces[part[1]].holding

    def _source(self, part: MessagePart) -> int:
        return self._plan.holdings[self._holding(part)].device

    def _value(self, part: MessagePart, held: Held) -> torch.Tensor:
        piece = self._plan.fetches[part[0]].pieces[part[1]]
        return self._state.regions.cut(("holding", piece.holding), held(piece.holding), piece.box)

    def _place(self, part: MessagePart) -> torch.Tensor:
        key: RegionKey = ("fetch", part[0])
        box, regions = self._plan.fetches[part[0]].pieces[part[1]].box, self._state.regions
        if regions.is_routed(key):
            self._parts[part] = regions.empty(key, box)
            return self._parts[part]
        if part[0] not in self._rooms:
            self._rooms[part[0]] = regions.empty(key)
        return regions.cut(key, self._rooms[part[0]], box)
