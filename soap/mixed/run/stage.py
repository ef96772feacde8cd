"""A stage at work: it computes passes in the order in which all is there that they need, as HetPipe's stages and simulated ones do. The
last stage computes a minibatch's backward pass behind its forward pass.

With backward passes first a stage would never have computed ahead of the next one, which would wait for each message.

Tensors travel by a process group, as between the stages of pipelines inside a step; gradients, which go the other way, by a second one
(``runtime.comm.redistribute.Groups`` says why).

What a stage asks of servers: versions of its parameters, and to count its part of a wave; a head also when it may begin.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soap.elastic.clocks import Push
from soap.elastic.messages import Kind, Message, checked, decode, encode
from soap.elastic.transport import Connection, connect
from soap.mixed.partitioning import READ_AHEAD
from soap.mixed.planned import Piece, WavePlan
from soap.mixed.run.stage_program import Begun, StageProgram, StageValues, Updates
from soap.runtime.comm import signs
from soap.runtime.comm.signs import LOOK_S
from soap.runtime.system import clock

Addresses = Sequence[tuple[str, int]]
"""By server, where it listens."""


class Client:
    """Of one thread of one stage. All servers are asked before any answer is read."""

    def __init__(self, plan: WavePlan, worker: int, stage: int, addresses: Addresses, secret: bytes) -> None:
        self._worker, self._addresses, self._secret = worker, addresses, secret
        self._connections: dict[int, Connection] = {}
        self._numbers = {server: plan.read_by(worker, stage, server) for server in range(len(plan.servers))}
        self._order = _places(plan, plan.workers[worker][stage].parameters, self._numbers)
        self.pulled_bytes = self.pushed_bytes = 0
        """Of values alone."""

    def pull(self, version: int, least: int) -> Tensor | None:
        """The stage's parameters of a version, end to end; None if it has none. ``least``: no worker will ask for an earlier one."""
        answers = self._ask(Kind.PULL, Kind.VALUES, lease=least, version=version)
        if not answers:
            return None
        found = {server: answer.tensors()[0] for server, answer in answers.items()}
        self.pulled_bytes += sum(own.nbytes for own in found.values())
        return torch.cat([found[server][span[0] : span[1]] for server, span, _ in self._order])

    def push(self, wave: int, update: Tensor, least: int) -> None:
        """Count the stage's part of a wave. Returns when all servers have it."""
        parts = {server: torch.cat([update[a:b] for own, _, (a, b) in self._order if own == server]) for server in self._used()}
        self.pushed_bytes += sum(own.nbytes for own in parts.values())
        self._ask(Kind.PUSH, Kind.VERSION, parts, lease=wave, version=least)

    def leave(self) -> None:
        """The worker has no more waves: tell servers, and then the clocks."""
        self._ask(Kind.LEFT, Kind.VERSION)
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

    def _ask(
        self, kind: Kind, expected: Kind, parts: Mapping[int, Tensor] = MappingProxyType({}), *, lease: int = 0, version: int = 0
    ) -> dict[int, Message]:
        """The answers of all servers that have something of the stage's parameters. ``parts``: what each is given with the question."""
        for server in self._used():
            given = [torch.tensor(self._numbers[server], dtype=torch.int64), *([parts[server]] if server in parts else [])]
            self._peer(server).send(encode(Message.of(kind, self._worker, given, lease=lease, version=version)))
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


FORWARD, BACKWARD, STARTS = 1, 2, 3
"""Tags."""
Ways = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""The groups of what goes forward, and of gradients. Their messages have no limit: a stage may wait for other workers' slowest."""


class What(Enum):
    """What is in an inbox."""

    MAY_START = auto()
    ACTIVATIONS = auto()
    GRADIENTS = auto()
    INPUTS = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Item:
    """``number``: of activations: how many minibatches the worker has finished; of a start: its version. ``tensors``: activations,
    gradients, pulled values, or a minibatch's inputs. ``waited_ns``: until the bound allowed a start.
    ``failure``: of a thread."""

    what: What
    number: int = 0
    tensors: tuple[Tensor, ...] = ()
    waited_ns: int = 0
    failure: BaseException | None = None


class Inbox:
    """What has come, in the order of its coming."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Item] = SimpleQueue()

    def put(self, item: Item) -> None:
        """From any thread."""
        self._queue.put(item)

    def waiting(self) -> list[Item]:
        """All that is there. Raises what a thread has failed with."""
        found = []
        while not self._queue.empty():
            found.append(_sound(self._queue.get()))
        return found

    def next(self) -> Item:
        """Wait for one. Raises what a thread has failed with; RankLost in one line if another rank is gone."""
        clock.catch_up()
        try:
            while True:
                with suppress(Empty):
                    return _sound(self._queue.get(timeout=LOOK_S))
                signs.require_life()
        finally:
            clock.resume()

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a thread whose failure is told here."""

        def run() -> None:
            try:
                work()
            except BaseException as failure:
                self.put(Item(What.FAILED, failure=failure))

        own = threading.Thread(target=run, name=name, daemon=True)
        own.start()
        return own


class Outbox:
    """Sends without waiting; what is under way stays alive until ``wait_all``, in a thread of its own, has seen it go. (gloo says that a
    send is complete only to who waits for it.) ``sent_bytes``: of tensors that others compute with."""

    def __init__(self, ways: Ways = (None, None)) -> None:
        self._ways = ways
        self._under_way: SimpleQueue[tuple[Any, Tensor] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.sent_bytes = 0

    def send(self, rank: int, tag: int, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> None:
        """Numbers, if there are any, and then the tensors. From any thread; that of the device catches up first."""
        head = [torch.tensor(numbers, dtype=torch.int64)] if numbers else []
        with self._lock:
            for tensor in (*head, *(own.detach().contiguous() for own in tensors)):
                sending = dist.isend(tensor, rank, tag=tag, group=self._ways[tag == BACKWARD])
                self._under_way.put((sending, tensor))
            self.sent_bytes += sum(own.nbytes for own in tensors)

    def wait_all(self) -> None:
        """Until ``finish``: wait for one after the other, and let go of it."""
        while (own := self._under_way.get()) is not None:
            own[0].wait()
            del own

    def finish(self) -> None:
        """Nothing more is sent: ``wait_all`` ends when all is."""
        self._under_way.put(None)


def receive(
    rank: int,
    tag: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Wait for tensors that another rank sends by this group; None: that of all."""
    found = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for tensor in found:
        dist.recv(tensor, rank, tag=tag, group=group)
    return found


def receive_numbers(rank: int, tag: int, count: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Wait for whole numbers, as for tensors."""
    numbers = torch.empty(count, dtype=torch.int64)
    dist.recv(numbers, rank, tag=tag, group=group)
    return [int(number) for number in numbers]


def _sound(item: Item) -> Item:
    if item.failure is not None:
        raise item.failure
    return item


@dataclass(frozen=True)
class Start:
    """Of a minibatch: its values have so many waves of all workers (``version``) and, of its own worker's, the first ``finished``
    minibatches that are not in these waves. ``waited_ns``: from when there was room in flight for it until the bound allowed it."""

    minibatch: int
    version: int
    finished: int
    waited_ns: int


@dataclass
class Seen:
    """What a stage has seen. ``starts``: of the first stage. ``losses``: of the last stage, by minibatch. ``pushes``: whole waves and the
    last, incomplete one. ``begun_s``, ``ended_s``: when minibatches were begun and ended here, on the machine's clock."""

    worker: int
    stage: int
    starts: list[Start] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    pushes: int = 0
    pulls: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    activation_bytes: int = 0
    begun_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)


Batch = Callable[[int], Sequence[Tensor]]
"""The inputs of a worker's minibatch, from 0 on."""


class StageWork:
    """``finished``: minibatches before, ``last``: the number of the last one. ``delay_s``: sleeps so long beside each pass, to try how
    workers of unequal speed train. ``clients``: for starts, for pulls and for pushes: each in a thread of its own. ``ways``: by which
    stages send.

    Inputs are read while minibatches before are computed (``READ_AHEAD``). The first stage asks for a minibatch as soon as there is room
    for it in flight, which may be long before it is computed. So what it needs is pulled while minibatches in front of it are computed."""

    def __init__(
        self,
        plan: WavePlan,
        worker: int,
        stage: int,
        program: StageProgram,
        values: StageValues,
        updates: Updates,
        batch: Batch,
        clients: tuple[Client, Client, Client],
        finished: int,
        last: int,
        delay_s: float = 0.0,
        ways: Ways = (None, None),
    ) -> None:
        self._plan, self._worker, self._number = plan, worker, stage
        self._stages = plan.workers[worker]
        self._own, self._room = self._stages[stage], plan.room(worker)[stage]
        self._program, self.values, self.updates, self._batch = program, values, updates, batch
        self._asker, self._puller, self._pusher = clients
        self._last, self._delay_s = last, delay_s
        self._is_first, self._is_last = stage == 0, stage == len(self._stages) - 1
        self.seen = Seen(worker, stage)
        self._inbox, self._outbox, self._ways = Inbox(), Outbox(ways), ways
        self._requests: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._dealt: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        self._pushes: SimpleQueue[Push[Tensor] | None] = SimpleQueue()
        self._turn = 0
        """Counts what has happened; of what can be done, what could be first is done first."""
        self._granted: deque[tuple[int, Item]] = deque()
        self._came: deque[tuple[int, Item]] = deque()
        self._gradients: deque[tuple[int, Item]] = deque()
        self._inputs: deque[tuple[int, Item]] = deque()
        self._slots = deque([0] * self._room)
        """Since when there is room for one more minibatch."""
        self._readable = Semaphore(READ_AHEAD)
        self._begun: deque[Begun] = deque()
        self._next, self._done, self._first = finished + 1, finished, finished + 1
        self._asked, self._version, self._least = finished, values.version, values.version

    def run(self, evenly: Callable[[], None] | None = None) -> None:
        """All minibatches, until servers have this stage's whole waves. ``evenly``: called when its threads are there."""
        threads, sending = self._threads(), self._inbox.thread("sent", self._outbox.wait_all)
        if evenly is not None:
            evenly()
        self._ask()
        while self._done < self._last:
            for item in self._inbox.waiting():
                self._sort(item)
            if not self._step():
                self._sort(self._inbox.next())
        self._pushes.put(None)
        for thread in threads:
            thread.join()
        self._outbox.finish()
        sending.join()
        self._inbox.waiting()  # raises what they have failed with
        self.seen.activation_bytes = self._outbox.sent_bytes

    def leave(self) -> None:
        """Push the last, incomplete wave; nobody waits for this stage any more."""
        left = self.values.last()
        if left is not None:
            self._push(left)
        self._pusher.leave()
        self.seen.pushed_bytes, self.seen.pulled_bytes = self._pusher.pushed_bytes, self._puller.pulled_bytes

    def _step(self) -> bool:
        """Do what can be done. Returns whether there was anything."""
        backward, forward = self._backward_since(), self._forward_since()
        if backward is not None and (forward is None or backward <= forward):
            self._end()
        elif forward is not None:
            self._begin()
        return backward is not None or forward is not None

    def _backward_since(self) -> int | None:
        """Since when the next backward pass could be; None if it cannot yet."""
        if not self._begun:
            return None
        if self._is_last:
            return 0
        return self._gradients[0][0] if self._gradients else None

    def _forward_since(self) -> int | None:
        """The same of the next forward pass. Inputs are the stage's own matter: when they were read does not count."""
        there = self._granted and self._slots and self._inputs and (self._is_first or self._came)
        if self._next > self._last or not there:
            return None
        return max(self._granted[0][0], self._slots[0], 0 if self._is_first else self._came[0][0])

    def _ask(self) -> None:
        """Ask for all minibatches for which there is room in flight: none of them waits for what this worker has not finished."""
        while self._is_first and self._asked < min(self._last, self._done + self._plan.in_flight):
            self._asked += 1
            self._requests.put((self._done, time.perf_counter_ns()))

    def _begin(self) -> None:
        _, granted = self._granted.popleft()
        came = None if self._is_first else self._came.popleft()[1]
        self._slots.popleft()
        finished = self._done if came is None else came.number
        values = self.values.values(finished, granted.tensors[0] if granted.tensors else None, granted.number)
        if self._is_first:
            self.seen.starts.append(Start(self._next, granted.number, finished, granted.waited_ns))
        self.seen.begun_s.append(time.monotonic())
        received, batch = () if came is None else came.tensors, self._inputs.popleft()[1].tensors
        self._readable.release()
        step = (self._next - 1) * len(self._plan.workers) + self._worker
        begun = self._program.forward(step, batch, received, values)
        self._sleep()
        clock.catch_up()
        if begun.loss is not None:
            self.seen.losses.append(float(begun.loss.detach()))
        if not self._is_last:
            self._outbox.send(self._stages[self._number + 1].device, FORWARD, begun.sent, [finished])
        self._begun.append(begun)
        self._next += 1

    def _end(self) -> None:
        begun = self._begun.popleft()
        gradients = () if self._is_last else self._gradients.popleft()[1].tensors
        vector, back = self._program.backward(begun, gradients)
        self._sleep()
        clock.catch_up()
        if not self._is_first:
            self._outbox.send(self._stages[self._number - 1].device, BACKWARD, back)
        push = self.values.ended(self.updates.of(vector, begun.values))
        self._done += 1
        self._slots.append(self._turn)
        self.seen.ended_s.append(time.monotonic())
        self._ask()
        if push is not None:
            self._pushes.put(push)

    def _sleep(self) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)

    def _sort(self, item: Item) -> None:
        places = {
            What.MAY_START: self._granted,
            What.ACTIVATIONS: self._came,
            What.GRADIENTS: self._gradients,
            What.INPUTS: self._inputs,
        }
        self._turn += 1
        places[item.what].append((self._turn, item))

    def _threads(self) -> list[Thread]:
        made = [self._inbox.thread("pushes", self._push_all)]
        made.append(self._inbox.thread("starts", self._hear_starts))
        made.append(self._inbox.thread("inputs", self._read_inputs))
        if self._is_first:
            made.append(self._inbox.thread("questions", self._ask_all))
        else:
            made.append(self._inbox.thread("activations", self._hear_activations))
        if not self._is_last:
            made.append(self._inbox.thread("gradients", self._hear_gradients))
        return made

    def _ask_all(self) -> None:
        """Wait for each minibatch until it may begin, and tell all stages."""
        for _ in range(self._first, self._last + 1):
            finished, able_ns = self._requests.get()
            version, least = self._asker.start(finished)
            for stage in self._stages[1:]:
                self._outbox.send(stage.device, STARTS, (), [version, least])
            self._dealt.put((version, least, time.perf_counter_ns() - able_ns))

    def _read_inputs(self) -> None:
        """Of one minibatch after the other."""
        for minibatch in range(self._first, self._last + 1):
            self._readable.acquire()
            self._inbox.put(Item(What.INPUTS, tensors=tuple(self._batch(minibatch - 1))))

    def _hear_starts(self) -> None:
        """Pull what each minibatch needs, one after the other."""
        for _ in range(self._first, self._last + 1):
            waited_ns = 0
            if self._is_first:
                version, least, waited_ns = self._dealt.get()
            else:
                version, least = receive_numbers(self._stages[0].device, STARTS, 2, self._ways[0])
            self._least = least
            pulled = self._puller.pull(version, least) if version > self._version else None
            if pulled is not None:
                self.seen.pulls += 1
                self._version = version
            self._inbox.put(Item(What.MAY_START, version, () if pulled is None else (pulled,), waited_ns=waited_ns))

    def _hear_activations(self) -> None:
        names, rank = self._own.receives, self._stages[self._number - 1].device
        for _ in range(self._first, self._last + 1):
            (finished,) = receive_numbers(rank, FORWARD, 1, self._ways[0])
            came = receive(rank, FORWARD, self._program.shapes(names), self._program.dtypes(names), self._ways[0])
            self._inbox.put(Item(What.ACTIVATIONS, finished, tuple(came)))

    def _hear_gradients(self) -> None:
        names = [name for name, has in zip(self._own.sends, self._program.has_gradient(self._own.sends), strict=True) if has]
        rank = self._stages[self._number + 1].device
        for _ in range(self._first, self._last + 1):
            came = receive(rank, BACKWARD, self._program.shapes(names), self._program.dtypes(names), self._ways[1])
            self._inbox.put(Item(What.GRADIENTS, 0, tuple(came)))

    def _push_all(self) -> None:
        while (push := self._pushes.get()) is not None:
            self._push(push)
            self._least = self._pusher.pushed(push.wave)

    def _push(self, push: Push[Tensor]) -> None:
        self._pusher.push(push.wave, push.update, self._least)
        self.seen.pushes += 1
