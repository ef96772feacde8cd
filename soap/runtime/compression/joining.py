"""Several compressed shards in common messages: their courses go through their exchanges in step, as one course.

Messages lie one behind the other, in the order of the shards, without padding; what came is cut up again, and each shard goes on as if it
were alone. Sums are made number by number, so they too have the bits that they would have apart.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from soap.plan.compression.seam import ExchangeKind
from soap.runtime.compression.peer import Course
from soap.runtime.compression.seam import sizes_of

Joint = Generator[tuple[ExchangeKind, torch.Tensor, Sequence[int]], torch.Tensor, list[torch.Tensor]]
"""What to exchange, and for a ragged exchange the bytes of all ranks' messages; takes what came, and returns the sum of each shard."""


def joined(courses: Sequence[Course]) -> Joint:
    """The courses as one. Those that exchange in unlike ways at a time, as in a warm-up that only some of them have behind them, take
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
    """Ragged messages as they would have come for each shard alone. ``sizes``: by shard and rank; ``received``: rank by rank, and of each
    rank shard by shard."""
    if len(sizes) == 1:
        return [received]
    parts = torch.split(received, [size for rank in zip(*sizes, strict=True) for size in rank])
    return [torch.cat(parts[shard :: len(sizes)]) for shard in range(len(sizes))]
