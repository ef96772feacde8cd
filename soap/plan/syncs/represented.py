"""What readers own in parts, in a plan of two of many equal copies (``soap.plan.copies``): the parts that the whole cluster's readers have.

In such a plan each reader stands for others: copy 1's for the corresponding devices of all copies but the first. A region is cut for all of
them, and the readers that are there own what they own in the whole plan; the other parts have no owner. Where rows do not divide evenly,
copy 1's reader owns the largest part of those for which it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from soap.model.regions import Box

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
        """The parts of a region, in row order, of which everyone owns one; those without an owner that lie side by side are one.
        ``first``: the place among all readers, modulo their number, of who owns the first part (``placement``)."""
        places = self.places(readers)
        count = sum(map(len, places))
        rows = box[0][1] - box[0][0] if box else 1
        least, longer = divmod(rows, count)
        owners: list[tuple[int, int]] = []
        for reader, mine in zip(readers, places, strict=True):
            parts = (mine - first) % count
            long = parts[parts < longer]
            owners.append((int(long[0] if long.size else parts[0]), reader))
        if not box:
            return [(box, next(((reader,) for part, reader in owners if part < longer), ()))]
        found: list[Owned] = []
        (start, stop), *rest = box
        at = start
        for part, reader in sorted(owners):
            begin = start + part * least + min(part, longer)
            end = begin + least + (part < longer)
            if end > begin:
                found += [(((at, begin), *rest), ())] if begin > at else []
                found.append((((begin, end), *rest), (reader,)))
                at = end
        return found + ([(((at, stop), *rest), ())] if stop > at else [])
