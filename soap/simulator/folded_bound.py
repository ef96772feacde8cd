"""Engines of the two copies of a folded strategy, and how many messages these mean for all copies."""

from __future__ import annotations

import numpy as np

from soap.simulator.costs import CostModel
from soap.simulator.drawn_engine import make_engine
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.folding import Folding
from soap.simulator.shared import Shared


def folded_shared(folding: Folding, costs: CostModel) -> Shared:
    """What engines of the two copies share."""
    copies, training = folding.copies.graph, folding.builder.training
    return Shared(copies, folding.topology, costs, training, folding.communication, folding.between_hosts)


def folded_engine(folding: Folding, costs: CostModel, draws: Draws | None = None) -> Engine:
    """An engine, with draws if there are any, for ``folding.copies.strategy``, and for those of foldings that are ``alike``."""
    return make_engine(folded_shared(folding, costs), draws)


def alike(one: Folding, other: Folding) -> bool:
    """Whether both have the same two copies of the graph, on links that stand for the same ones, so that one engine may hold either."""
    mine, theirs = one.communication, other.communication
    same = one.builder is other.builder and one.topology == other.topology
    return same and mine.common == theirs.common and mine.groups == theirs.groups


def messages(folding: Folding, engine: Engine) -> int:
    """Communications in an iteration, of all copies. ``engine``: has played the two copies. What holds nothing but devices and links of
    copy 1 stands for the same in all copies but the first."""
    small, images = folding.topology, folding.copies.images
    mine = np.append(np.searchsorted(folding.copies.devices, images[1]), small.device_count + folding.alike[folding.local[1]])
    slots = engine.taken()
    begins, held = engine.held(slots)
    count, elsewhere = np.diff(begins), np.append(0, np.cumsum(~np.isin(held, mine)))
    inside = (count > 0) & (np.diff(elsewhere[begins]) == 0)
    moves = engine.state.moved[slots] > 0
    return int(np.count_nonzero(moves) + (folding.count - 2) * np.count_nonzero(inside & moves))
