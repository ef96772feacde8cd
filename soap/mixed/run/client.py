"""What a stage asks of servers: versions of its parameters, and to count its part of a wave; a head also when it may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from soap.elastic.messages import Kind, Message, checked, decode, encode
from soap.elastic.transport import Connection, connect
from soap.mixed.run.plan import Piece, WavePlan

Addresses = Sequence[tuple[str, int]]
"""By server, where it listens."""


class Client:
    """Of one thread of one stage. All servers are asked before any answer is read. ``sent_bytes``, ``received_bytes``: of all frames."""

    def __init__(self, plan: WavePlan, worker: int, stage: int, addresses: Addresses, secret: bytes) -> None:
        self._worker, self._addresses, self._secret = worker, addresses, secret
        self._connections: dict[int, Connection] = {}
        self._numbers = {server: plan.read_by(worker, stage, server) for server in range(len(plan.servers))}
        self._order = _places(plan, plan.workers[worker][stage].parameters, self._numbers)
        self.pulled_bytes = self.pushed_bytes = 0
        """Of values alone."""

    @property
    def sent_bytes(self) -> int:
        """Of all frames."""
        return sum(peer.sent_bytes for peer in self._connections.values())

    @property
    def received_bytes(self) -> int:
        """Of all frames."""
        return sum(peer.received_bytes for peer in self._connections.values())

    def pull(self, version: int, least: int) -> Tensor | None:
        """The stage's parameters of a version, end to end; None if it has none. ``least``: no worker will ask for an earlier one."""
        answers = self._ask(
            lambda numbers: Message.of(Kind.PULL, self._worker, [_whole(numbers)], lease=least, version=version), Kind.VALUES
        )
        if not answers:
            return None
        found = {server: answer.tensors()[0] for server, answer in answers.items()}
        self.pulled_bytes += sum(own.nbytes for own in found.values())
        return torch.cat([found[server][span[0] : span[1]] for server, span, _ in self._order])

    def push(self, wave: int, update: Tensor, least: int) -> None:
        """Count the stage's part of a wave. Returns when all servers have it."""
        parts = {server: torch.cat([update[a:b] for own, _, (a, b) in self._order if own == server]) for server in self._used()}

        def asked(server: int, numbers: Sequence[int]) -> Message:
            return Message.of(Kind.PUSH, self._worker, [_whole(numbers), parts[server]], lease=wave, version=least)

        self.pushed_bytes += sum(own.nbytes for own in parts.values())
        self._ask_each(asked, Kind.VERSION)

    def leave(self) -> None:
        """The worker has no more waves: tell servers, and then the clocks."""
        self._ask(lambda numbers: Message.of(Kind.LEFT, self._worker, [_whole(numbers)]), Kind.VERSION)
        self._ask_desk(Message(Kind.LEFT, self._worker))

    def pushed(self, wave: int) -> int:
        """Servers have the stage's part of a wave. Returns the least version that any worker will ask for."""
        return self._ask_desk(Message(Kind.PUSHED, self._worker, wave)).lease

    def start(self, finished: int) -> tuple[int, int]:
        """Wait until the worker may begin its next minibatch. Returns its version, and the least that any worker will ask for."""
        answer = self._ask_desk(Message(Kind.START, self._worker, version=finished))
        return answer.version, answer.lease

    def close(self) -> None:
        """End all connections."""
        for peer in self._connections.values():
            peer.close()

    def _used(self) -> list[int]:
        return [server for server, numbers in self._numbers.items() if numbers]

    def _ask(self, make: Callable[[Sequence[int]], Message], expected: Kind) -> dict[int, Message]:
        return self._ask_each(lambda server, numbers: make(numbers), expected)

    def _ask_each(self, make: Callable[[int, Sequence[int]], Message], expected: Kind) -> dict[int, Message]:
        """The answers of all servers that have something of the stage's parameters."""
        for server in self._used():
            self._peer(server).send(encode(make(server, self._numbers[server])))
        return {server: checked(decode(self._peer(server).receive()), expected) for server in self._used()}

    def _ask_desk(self, question: Message) -> Message:
        return checked(decode(self._peer(0).ask(encode(question))), Kind.STARTED)

    def _peer(self, server: int) -> Connection:
        if server not in self._connections:
            host, port = self._addresses[server]
            self._connections[server] = connect(host, port, self._secret)
        return self._connections[server]


def _places(
    plan: WavePlan, names: Sequence[str], numbers: dict[int, tuple[int, ...]]
) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """For each piece of these parameters, end to end: its server, its span in what that one sends, and its span in the whole."""
    at: dict[Piece, tuple[int, int]] = {}
    for server, own in numbers.items():
        held, first = plan.held_by(server), 0
        for number in own:
            size = held[number].span[1] - held[number].span[0]
            at[held[number]] = first, first + size
            first += size
    found, first = [], 0
    for piece in (piece for name in names for piece in plan.pieces[name]):
        size = piece.span[1] - piece.span[0]
        found.append((piece.server, at[piece], (first, first + size)))
        first += size
    return found


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
