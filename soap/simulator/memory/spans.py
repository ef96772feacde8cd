"""When everything in a played iteration takes place, as arrays beside those of the plan (``plan_arrays``). Times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = -1
"""In place of a start and an end: it does not take place."""

Span = tuple[int, int]
"""(start, end) of a task."""


class Spans(NamedTuple):
    """Starts and ends, NEVER where there is none.

    By tile: ``forward``, ``backward`` (not of tiles that make only what nobody reads, ``unread``), ``weights``: of its weight gradients, if
    its backward pass is in two; ``again``: its second run, from when ranks begin it, and ``again_work_end``: when that has computed;
    ``away``, ``back``: the copies of what it keeps to its host, and back (from its need on). ``segment``: the first tile of its segment, in
    the order in which ranks run it. ``begun``: when that segment's backward pass begins. ``light``: whether it keeps its outputs though it
    runs again. By carrier: ``brought``, ``returned``. By reduction: ``summed``: when devices sum, and of a single device when its last tile
    runs; ``summed_back``: the sum of gradients. ``named``: by name of a task of a synchronization or an update; ``ready``: when all that it
    waits for is over. ``end``: of the step.
    """

    end: int
    forward_start: Longs
    forward_end: Longs
    backward_start: Longs
    backward_end: Longs
    weights_start: Longs
    weights_end: Longs
    again_start: Longs
    again_end: Longs
    again_work_end: Longs
    away_start: Longs
    away_end: Longs
    back_start: Longs
    back_end: Longs
    segment: Longs
    begun: Longs
    light: Bools
    unread: Bools
    brought_start: Longs
    brought_end: Longs
    returned_start: Longs
    returned_end: Longs
    summed_start: Longs
    summed_end: Longs
    summed_back_start: Longs
    summed_back_end: Longs
    named: Mapping[str, Span]
    ready: Mapping[str, int]
