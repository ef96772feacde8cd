"""Until when what is sent and received is there, one move after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from soap.plan.departures import PASSES_UNDER_WAY, Route
from soap.plan.plan import Fetch, Plan
from soap.simulator.memory.transit import SENT_BYTES, SENT_TENSORS, lies_in_one_piece


class Stay(NamedTuple):
    """Memory in which something that is sent lies. It stays for that once its readers here have let it go, at ``since_ns``. ``of``: its
    number; it is there once, however many parts of it are sent. ``copy_bytes``: of what may be a copy until then."""

    of: int
    since_ns: int
    size: int
    copy_bytes: int = 0


class Send(NamedTuple):
    """A send of ``size`` bytes that starts at ``start_ns``. ``held``: bytes that the device holds only for this send. ``answer_ns``: when
    the device knows that they have arrived. ``sum_bytes``: of what is received, and added up before it is free: of the sum, which stays.
    ``copied``: it is packed first, beside what it is made of. ``made``: it is packed of something that has been made for that
    (``Ledger.hold``). ``stays``: what is not packed, as it leaves from where it lies."""

    start_ns: int
    answer_ns: int
    size: int
    held: int
    sum_bytes: int = 0
    copied: bool = False
    made: bool = False
    stays: tuple[Stay, ...] = ()


def until_free(sends: Iterable[Send], most: int | None = None) -> Iterator[tuple[Send, int]]:
    """What one device sends, and until when it holds that: until its answer, or until later sends push it out. ``most``: tensors at a time.

    The rule is that of ``Communicator.keep``, except that a send that has been answered leaves at once.
    """
    queue: deque[Send] = deque()
    size, most = 0, SENT_TENSORS if most is None else most
    for send in sorted(sends, key=lambda own: (*own[:7], min((stay.of for stay in own.stays), default=0))):
        for other in [other for other in queue if other.answer_ns <= send.start_ns]:
            queue.remove(other)
            size -= other.size
            yield other, other.answer_ns
        queue.append(send)
        size += send.size
        while len(queue) > most or (len(queue) > 1 and size > SENT_BYTES):
            pushed_out = queue.popleft()
            size -= pushed_out.size
            yield pushed_out, send.start_ns
    for left in queue:
        yield left, left.answer_ns


def lands_in_place(plan: Plan, fetch: Fetch) -> bool:
    """Whether every piece of a region is contiguous in the region's memory."""
    return all(lies_in_one_piece(piece.box, fetch.box) for piece in fetch.pieces)


def packs_together(plan: Plan, device: int) -> bool:
    """Whether a device packs what it sends to several others at once: NCCL's all-to-all takes one tensor, gloo's messages one each."""
    return device in plan.accelerators


def waited_for(sends: Iterable[tuple[Route, int, int]]) -> Mapping[tuple[Route, int], int]:
    """(route, pass) -> when its sender waits for what that pass has sent; those for which it never waits are missing. ``sends``: (route,
    pass, when it starts)."""
    begun: dict[Route, dict[int, int]] = {}
    for route, own, start in sends:
        starts = begun.setdefault(route, {})
        starts[own] = min(start, starts.get(own, start))
    found = {}
    for route, starts in begun.items():
        order = sorted(starts)
        found.update({(route, own): starts[later] for own, later in zip(order, order[PASSES_UNDER_WAY:], strict=False)})
    return found
