"""The largest elements of a tensor by torch's operations alone: for GPUs, without a word from the device to the host.

Every shape follows from the tensor's size and k. So a selection that may find fewer elements fills up a tensor of the most that there can
be with ``FILL``, and says how many there are on the device. Blocks bound where the largest can be, as in ``selection``; a look at an eighth
of the memory (at a density of a thousandth) is all that follows the first pass.
"""

from __future__ import annotations

import torch

from soap.plan.compression.rgc import DEVICE_BLOCK, LEAST_IN_BLOCKS
from soap.plan.compression.seam import PROBES

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

    Blocks with the 2 k + 1 largest maxima are enough to look at: if the others had an element above a threshold, each of these would have.
    """
    every = keys_of(tensor, sign)
    most = min(2 * count, len(every))
    keys, positions = _candidates(every, 2 * count + 1)
    if count >= len(every):
        found, last = torch.full_like(every[0], torch.inf), every.amin()
    else:
        top = torch.topk(keys, min(2 * count + 1, len(keys)), sorted=False).values
        last = torch.kthvalue(top, len(top) - count + 1).values
        below = top.amin() if len(top) > 2 * count else torch.full_like(last, -1)
        found = _first_threshold(every.mean(dtype=torch.float64), every.amax().double(), last, below)
    taken = torch.where(found.isinf(), _down_to(last, keys, count, sign), keys > found)
    return _positions(taken, positions, most), found


def _first_threshold(mean: torch.Tensor, largest: torch.Tensor, last: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """The threshold at which a binary search ends, infinite if it ends without: what it counts above a threshold is between k and 2 k where
    that is below the k-th largest key (``last``) and not below the (2 k + 1)-th (``below``).

    Of such thresholds a search meets the one with the fewest halvings first, and at that halving there is one alone. So the last place
    before ``last`` at each halving is tried, at once: a loop would launch ten kernels for each. Neighbours are tried as well, as thresholds
    are rounded.
    """
    width = largest - mean
    parts = 2.0 ** torch.arange(1, PROBES + 1, device=mean.device, dtype=torch.float64)
    near = torch.arange(-2, 2, device=mean.device, dtype=torch.float64)
    places = ((last.double() - mean) / width * parts).ceil()[:, None] + near
    thresholds = (mean + places / parts[:, None] * width).to(last.dtype).flatten()
    inside = ((places > 0) & (places < parts[:, None])).flatten()
    hit = inside & (thresholds >= below) & (thresholds < last) & (width > 0)
    first = hit.to(torch.int8).argmax()
    return torch.where(hit.any(), thresholds[first], torch.inf)


def above(tensor: torch.Tensor, threshold: torch.Tensor, most: int, sign: int = 0) -> Found:
    """Positions of keys above the threshold of an earlier step, of which the first ``most``: the device cannot ask for another search."""
    keys = keys_of(tensor, sign)
    positions, found = _positions(keys > threshold, None, most)
    return positions, found.clamp_max(most)


def _candidates(keys: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The keys in so many blocks with the largest maxima, in order, and their positions (None: all). Padding is below all keys."""
    size = len(keys)
    count = -(-size // DEVICE_BLOCK)
    if blocks >= count or size < LEAST_IN_BLOCKS:
        return keys, None
    rest = count * DEVICE_BLOCK - size
    padded = (torch.nn.functional.pad(keys, (0, rest), value=-1) if rest else keys).view(count, DEVICE_BLOCK)
    chosen = torch.nonzero_static(_largest(padded.amax(1), blocks, 0), size=blocks)[:, 0]
    return padded[chosen].flatten(), (chosen[:, None] * DEVICE_BLOCK + torch.arange(DEVICE_BLOCK, device=keys.device)).flatten()


def _largest(keys: torch.Tensor, count: int, sign: int) -> torch.Tensor:
    """Which keys are the ``count`` largest; of equal ones the first. With a sign, zeros are not."""
    last = keys.amin() if count >= len(keys) else torch.topk(keys, count, sorted=False).values.amin()
    return _down_to(last, keys, count, sign)


def _down_to(last: torch.Tensor, keys: torch.Tensor, count: int, sign: int) -> torch.Tensor:
    """``_largest``, where the smallest of them is known."""
    larger, equal = keys > last, keys == last
    taken = larger | (equal & (equal.cumsum(0) <= count - larger.sum()))
    return taken & (keys > 0) if sign else taken


def _positions(taken: torch.Tensor, positions: torch.Tensor | None, most: int) -> Found:
    places = torch.nonzero_static(taken, size=most, fill_value=-1)[:, 0]
    found = taken.sum()
    if positions is not None:
        places = torch.where(places < 0, places, positions[places])
    return torch.where(places < 0, FILL, places), found
