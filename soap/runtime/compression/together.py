"""All ranks of a compressed synchronization in one process: what a check compares distributed runs with, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from soap.plan.compression.seam import ExchangeKind
from soap.runtime.compression.peer import Peer


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
