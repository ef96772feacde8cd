"""How long the tiles of a variant take, and how long each draw says that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args
from weakref import WeakKeyDictionary

import numpy as np

from soap.cluster.topology import DeviceType
from soap.model.graph import OperatorGraph
from soap.plan.marks.seam import Takes
from soap.plan.tiling import Tile
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.costs import ROW_NS, CostModel
from soap.simulator.draws import Draws
from soap.strategy.division import Half

WAYS = (False, True)
"""Forward, backward."""
WEIGHTS = 2
"""Behind these two: weight gradients, if the backward pass is in two."""
OF_ROWS = {Takes.PASS: 0, **{takes: WEIGHTS + takes - Takes.PASS for takes in Takes if takes > Takes.PASS}}
"""Where what rows of marks take is: as long as forward, or behind these."""
PASSES = WEIGHTS + len(OF_ROWS)
OF_PASSES = [0, 1, 1, *(0 for _ in range(WEIGHTS + 1, PASSES))]
"""Of all of them: which of ``WAYS``."""


def _nothing(*_: object) -> int:
    return 0


class TileTimes:
    """Nanoseconds, [device type, forward, backward, ``WEIGHTS`` or one of ``OF_ROWS``, tile], of tiles that are of few kinds."""

    def __init__(
        self,
        graph: OperatorGraph,
        costs: CostModel,
        types: Sequence[DeviceType],
        tiles: Sequence[Tile],
        place: Ints | Longs,
        *,
        divided: bool = False,
    ) -> None:
        """``tiles``: one tile of each kind; tiles of one kind take equal times. ``place``: by tile, which kind it is. ``divided``: whether
        their backward passes are in two."""
        graph = graph.copies_of or graph  # costs are those of the whole graph's tiles
        self._graph, self._types, self._tiles, self._place = graph, types, tiles, place
        ask: list[Callable[[OperatorGraph, Tile, DeviceType], int]] = [costs.forward_ns, costs.backward_ns, _nothing]
        ask += (partial(ROW_NS[takes], costs) for takes in OF_ROWS if takes > Takes.PASS)
        if divided:
            ask[True], ask[WEIGHTS] = (partial(costs.half_ns, half=half) for half in get_args(Half))
        self._kinds = np.array([[[f(graph, tile, kind) for tile in tiles] for f in ask] for kind in types], np.int64)
        launches = [[[costs.launch_ns(graph, tile, kind, backward=way) for tile in tiles] for way in WAYS] for kind in types]
        self._launches: Longs = np.array(launches, np.int64)[:, OF_PASSES]
        self._drawn: WeakKeyDictionary[Draws, Longs] = WeakKeyDictionary()

    @property
    def durations(self) -> Longs:
        """Of the tiles."""
        return self._kinds[:, :, self._place]

    @property
    def launches(self) -> Longs:
        """Of launching them."""
        return self._launches[:, :, self._place]

    def drawn(self, draws: Draws) -> Longs:
        """``durations`` under each draw (``draws.drawn_ns``), [device type, pass, tile, draw]. A second run errs as the first one does."""
        found = self._drawn.get(draws)
        if found is None:
            found = self._drawn[draws] = self._draw(draws)
        return found[:, :, self._place]

    def _draw(self, draws: Draws) -> Longs:
        """The same of each kind of tile."""
        errors = draws.spreads.of_tile
        factors = np.array(
            [
                [[draws.factors(errors(self._graph, tile, kind, backward=way)) for tile in self._tiles] for way in WAYS]
                for kind in self._types
            ]
        )[:, OF_PASSES]
        usual = self._kinds[..., None]
        return np.where(usual > 0, np.maximum(1, (usual * factors).astype(np.int64)), 0)
