"""How a stage hears of others: one thread for each neighbour takes what comes and puts it into the stage's inbox; sends are not waited for.

Tensors travel by a process group, as between the stages of pipelines inside a step; gradients, which go the other way, by a second one
(``runtime.comm.new_groups.Groups`` says why).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soap.runtime.comm import signs
from soap.runtime.comm.signs import LOOK_S
from soap.runtime.system import clock

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
