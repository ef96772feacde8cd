"""What readers own in parts, in a plan of two of many equal copies (``soap.plan.copies``): the parts that the whole cluster's readers have.

In such a plan each reader stands for others: copy 1's for the corresponding devices of all copies but the first. A region is cut for all of
them, and the readers that are there own what they own in the whole plan; the other parts have no owner. If it does not divide evenly,
copy 1's reader owns the largest part of those for which it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from soap.model.regions import Box, volume
from soap.plan.placement import reader_parts

Ints = NDArray[np.int64]
Owned = tuple[Box, tuple[int, ...]]
"""A part and its owners; nobody owns those of devices that are not there."""


class Represented:
    """``images``, ``devices``: as in ``copies.Copies``."""

    def __init__(self, images: Ints, devices: Sequence[int]) -> None:
        self._images, self._devices = images, devices
        self._column = {device: i for i, device in enumerate(images[1].tolist())}

    def everyone(self, readers: Sequence[int]) -> tuple[int, ...]:
        """The devices of the cluster, ascending, for which these devices of two copies stand."""
        members = [self._devices[reader] for reader in readers]
        columns = [self._column[device] for device in members if device in self._column]
        alone = [device for device in members if device not in self._column]
        return tuple(sorted((*alone, *self._images[1:, columns].ravel().tolist())))

    def copies(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """The devices for which these stand, in each copy if these are of one copy; else everyone of them together."""
        members = [self._devices[device] for device in devices]
        columns = [self._column[device] for device in members if device in self._column]
        if 0 < len(columns) < len(members):
            return [self.everyone(devices)]
        return [tuple(own) for own in self._images[1:, columns].tolist()] if columns else [tuple(members)]

    def places(self, readers: Sequence[int]) -> list[Ints]:
        """For each of these readers the places, among everyone, of the devices for which it stands."""
        everyone, found = np.array(self.everyone(readers)), []
        for reader in readers:
            column = self._column.get(self._devices[reader])
            mine = self._images[1:, column] if column is not None else np.array([self._devices[reader]])
            found.append(np.searchsorted(everyone, mine))
        return found

    def parts(self, box: Box, first: int, readers: Sequence[int]) -> list[Owned]:
        """The parts of a region, in the order of memory, of which everyone owns one; those without an owner that lie side by side are one.
        ``first``: the place among all readers, modulo their number, of who owns the first part (``placement``)."""
        places = self.places(readers)
        count = sum(map(len, places))
        boxes = reader_parts(box, count)
        owner: dict[int, int] = {}
        for reader, mine in zip(readers, places, strict=True):
            parts = [part for part in ((mine - first) % count).tolist() if part < len(boxes)]
            if parts:
                owner[max(parts, key=lambda part: volume(boxes[part]))] = reader
        found: list[Owned] = []
        for part, own in enumerate(boxes):
            before, devices = found[-1] if found else ((), (-1,))
            if part not in owner and not devices and _lie_in_line(before, own):
                found[-1] = (tuple([(a, b) for (a, _), (_, b) in zip(before, own, strict=True)]), ())
            else:
                found.append((own, (owner[part],) if part in owner else ()))
        return found


def _lie_in_line(one: Box, other: Box) -> bool:
    """Whether the second box begins where the first one ends, along the only dimension in which they differ."""
    differing = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    return len(differing) == 1 and differing[0][0][1] == differing[0][1][0]
