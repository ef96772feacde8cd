"""The largest elements of a tensor by torch's operations alone: for GPUs, without a word from the device to the host.

Every shape follows from the tensor's size and k. So a selection that may find fewer elements fills up a tensor of the most that there can
be with ``FILL``, and says how many there are on the device. Blocks bound where the largest can be, as in ``selection``; a look at an eighth
of the memory (at a density of a thousandth) is all that follows the first pass.
"""

from __future__ import annotations

import torch

from soap.plan.compression.seam import PROBES

BLOCK = 64
"""Elements that share a maximum."""
FILL = 0
"""Behind the last position. What is added there is zero."""

Found = tuple[torch.Tensor, torch.Tensor]
"""Positions in order, filled up with FILL; and their number, as a tensor without dimensions."""


def keys_of(tensor: torch.Tensor, sign: int = 0) -> torch.Tensor:
    """Magnitudes of a flat tensor, or with a sign: magnitudes of its elements, zero for all others."""
    return tensor.abs() if sign == 0 else (sign * tensor).clamp_min(0)


def exact(tensor: torch.Tensor, count: int, sign: int = 0) -> Found:
    """The ``count`` largest keys' positions; of equal ones the lower. With a sign: fewer if fewer elements have it."""
    keys, positions = _candidates(keys_of(tensor, sign), count)
    return _positions(_largest(keys, count, sign), positions, count)


def search(tensor: torch.Tensor, count: int, sign: int = 0) -> tuple[Found, torch.Tensor]:
    """``count`` to twice as many positions above a threshold by binary search, and the threshold; see ``selection.search``. If none is
    found it is infinite, and the positions are those of ``exact``.

    Blocks with the 2 k + 1 largest maxima are enough to count in: if the others had an element above a threshold, each of these would have.
    """
    every = keys_of(tensor, sign)
    most = min(2 * count, len(every))
    keys, positions = _candidates(every, 2 * count + 1)
    mean, largest = every.mean(dtype=torch.float64), every.amax().double()
    low, high = torch.zeros_like(mean), torch.ones_like(mean)
    found = torch.full_like(every[0], torch.inf)
    for _ in range(PROBES):
        middle = (low + high) / 2
        threshold = (mean + middle * (largest - mean)).to(keys.dtype)
        above = (keys > threshold).sum()
        found = torch.where(found.isinf() & (above >= count) & (above <= 2 * count) & (largest > mean), threshold, found)
        few = above < count
        low, high = torch.where(few, low, middle), torch.where(few, middle, high)
    taken = torch.where(found.isinf(), _largest(keys, count, sign), keys > found)
    return _positions(taken, positions, most), found


def above(tensor: torch.Tensor, threshold: torch.Tensor, most: int, sign: int = 0) -> Found:
    """Positions of keys above the threshold of an earlier step, of which the first ``most``: the device cannot ask for another search."""
    keys = keys_of(tensor, sign)
    positions, found = _positions(keys > threshold, None, most)
    return positions, found.clamp_max(most)


def _candidates(keys: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The keys in so many blocks with the largest maxima, in order, and their positions (None: all). Padding is below all keys."""
    size = len(keys)
    count = -(-size // BLOCK)
    if blocks >= count:
        return keys, None
    padded = torch.nn.functional.pad(keys, (0, count * BLOCK - size), value=-1).view(count, BLOCK)
    chosen = torch.nonzero_static(_largest(padded.amax(1), blocks, 0), size=blocks)[:, 0]
    return padded[chosen].flatten(), (chosen[:, None] * BLOCK + torch.arange(BLOCK, device=keys.device)).flatten()


def _largest(keys: torch.Tensor, count: int, sign: int) -> torch.Tensor:
    """Which keys are the ``count`` largest; of equal ones the first. With a sign, zeros are not."""
    if count >= len(keys):
        taken = torch.ones_like(keys, dtype=torch.bool)
    else:
        last = torch.topk(keys, count, sorted=False).values.amin()
        larger, equal = keys > last, keys == last
        taken = larger | (equal & (equal.cumsum(0) <= count - larger.sum()))
    return taken & (keys > 0) if sign else taken


def _positions(taken: torch.Tensor, positions: torch.Tensor | None, most: int) -> Found:
    places = torch.nonzero_static(taken, size=most, fill_value=-1)[:, 0]
    found = taken.sum()
    if positions is not None:
        places = torch.where(places < 0, places, positions[places])
    return torch.where(places < 0, FILL, places), found
