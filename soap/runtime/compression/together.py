"""Compressed synchronizations together: all ranks of one in one process, with which checks compare distributed runs to the bit, and
several shards in common messages."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from soap.plan.compression.seam import ExchangeKind
from soap.runtime.compression.peer import Course, Peer
from soap.runtime.compression.seam import sizes_of


def synchronized(peers: Sequence[Peer], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum on each rank; all of them go through their exchanges in step."""
    courses = [peer.course(gradient) for peer, gradient in zip(peers, gradients, strict=True)]
    given = [next(course) for course in courses]
    while True:
        received = exchanged(given[0][0], [message for _, message in given])
        given, totals = [], []
        for course, got in zip(courses, received, strict=True):
            try:
                given.append(course.send(got))
            except StopIteration as end:
                totals.append(end.value)
        if totals:
            return totals


def exchanged(kind: ExchangeKind, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets from a collective."""
    if kind == "all_to_all":
        return [torch.stack([message[rank] for message in messages]) for rank in range(len(messages))]
    if kind == "ragged":
        return [torch.cat(list(messages))] * len(messages)
    if kind == "all_gather":
        return [torch.stack(list(messages))] * len(messages)
    return [in_order(messages)] * len(messages)


def in_order(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, made in the order of the ranks."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


Joint = Generator[tuple[ExchangeKind, torch.Tensor, Sequence[int]], torch.Tensor, list[torch.Tensor]]
"""What to exchange, and for a ragged exchange the bytes of all ranks' messages; takes what came, and returns the sum of each shard."""


def joined(courses: Sequence[Course]) -> Joint:
    """The courses as one, with messages one behind the other, cut up again where they come: each shard has the sums and states that it
    would have alone. Those that exchange in unlike ways at a time, as in a warm-up that only some of them have behind them, take
    turns, the same on all ranks."""
    totals: list[torch.Tensor] = [torch.empty(0)] * len(courses)
    waiting = {place: next(course) for place, course in enumerate(courses)}
    told: dict[int, list[int]] = {}
    while waiting:
        kind = next(iter(waiting.values()))[0]
        places = [place for place, (other, _) in waiting.items() if other == kind]
        messages = [waiting.pop(place)[1].detach() for place in places]
        widths = [message.shape[-1] for message in messages]
        message = messages[0] if len(messages) == 1 else torch.cat(messages, -1)
        del messages  # the joined ones are a copy
        if kind == "ragged":
            sizes = [told.pop(place) for place in places]
            received = yield kind, message, [sum(own) for own in zip(*sizes, strict=True)]
            parts = _apart(received, sizes)
        else:
            received = yield kind, message, ()
            parts = list(torch.split(received, widths, -1))
        del message, received
        for place in places:
            try:
                part = parts.pop(0)
                waiting[place] = courses[place].send(part)
                if waiting[place][0] == "ragged":
                    told[place] = sizes_of(part)
            except StopIteration as end:
                totals[place] = end.value
    return totals


def _apart(received: torch.Tensor, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Ragged messages as for each shard alone. ``sizes``: by shard and rank; ``received``: rank by rank, and of each shard by shard."""
    if len(sizes) == 1:
        return [received]
    parts = torch.split(received, [size for rank in zip(*sizes, strict=True) for size in rank])
    return [torch.cat(parts[shard :: len(sizes)]) for shard in range(len(sizes))]
