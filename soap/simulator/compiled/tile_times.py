"""How long the tiles of a variant take, and how long each draw says that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import numpy as np

from soap.cluster.topology import DeviceType
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.costs import CostModel, half_ns, launch_ns, light_ns
from soap.simulator.draws import Draws
from soap.strategy.division import Half
from soap.strategy.recomputation import has_product

WAYS = (False, True)
"""Forward, backward."""
AGAIN, WEIGHTS, PASSES = 2, 3, 4
"""Behind these two: a second run that keeps its product; weight gradients, if the backward pass is in two; the number of all."""
OF_PASSES = (*WAYS, False, True)
"""Of all of them: forward or backward."""


def _nothing(*_: object) -> int:
    return 0


class TileTimes:
    """Nanoseconds, [device type, forward, backward, ``AGAIN`` or ``WEIGHTS``, tile]. ``durations``: of the tiles. ``launches``: of
    launching them."""

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
        self._graph, self._types, self._tiles, self._place = graph, types, tiles, place
        ask: list[Callable[[OperatorGraph, Tile, DeviceType], int]] = [costs.forward_ns, costs.backward_ns, costs.forward_ns, _nothing]
        if tiles and has_product(graph.operators[tiles[0].operator]):
            ask[AGAIN] = partial(light_ns, costs)
        if divided:
            ask[True], ask[WEIGHTS] = (partial(half_ns, costs, half=half) for half in get_args(Half))
        self._kinds = np.array([[[f(graph, tile, kind) for tile in tiles] for f in ask] for kind in types], np.int64)
        launches = [[[launch_ns(costs, graph, tile, kind, backward=way) for tile in tiles] for way in OF_PASSES] for kind in types]
        self.durations: Longs = self._kinds[:, :, place]
        self.launches: Longs = np.array(launches, np.int64)[:, :, place]

    def drawn(self, draws: Draws) -> Longs:
        """``durations`` under each draw (``draws.drawn_ns``), [device type, pass, tile, draw]. A second run errs as the first one does."""
        errors = draws.spreads.of_tile
        factors = np.array(
            [
                [[draws.factors(errors(self._graph, tile, kind, backward=way)) for tile in self._tiles] for way in OF_PASSES]
                for kind in self._types
            ]
        )
        usual = self._kinds[..., None]
        drawn: Longs = np.where(usual > 0, np.maximum(1, (usual * factors).astype(np.int64)), 0)
        return drawn[:, :, self._place]
