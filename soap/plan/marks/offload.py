"""Offloading (``OpConfig.offload``): what autograd keeps for a tile is copied to the host after the tile's forward pass, and is then gone
from the device, unless others keep it, too. It comes back before the tile's backward pass.

Tiles on one device that read what each other makes form *runs*: when the backward pass has come to a run, the copies of all of it start,
those first that are needed first, and each tile waits for its own. So all but the first copy of a run are made while others compute.
Parameters stay, and so do parts of the batch. A device that is a CPU does all of it in its own memory.
"""

from __future__ import annotations

from collections.abc import Collection

from soap.plan.marks.recompute import NEED
from soap.plan.marks.seam import FORWARD, Amount, Hold, Marked, On, Row, Takes
from soap.plan.plan import Plan
from soap.plan.recomputation import remade
from soap.strategy.marks import marks_of

AWAY = Row("away", "kept to host", "copy", backward=False, stage=3, on=On.TO_HOST, takes=Takes.COPY, after=(FORWARD,))
BACK = Row("back", "kept from host", "copy", True, 4, On.FROM_HOST, Takes.COPY, after=(0, 1), before_backward=True)

(_OFFLOADED,) = marks_of("offload")
_HOLDS = Hold(Amount.AWAY, since="need"), Hold(Amount.AWAY, since="away", until="back", on_host=True)
MARKED = {_OFFLOADED: Marked((NEED, AWAY, BACK), _HOLDS, kept_until="away", together=frozenset((_OFFLOADED,)))}


def come_back_with(plan: Plan, active: Collection[int]) -> dict[int, int]:
    """Tile of an offloading operator -> the tile of its run with which it comes back, which the backward pass meets first: itself, or one
    that reads what it makes. ``active``: the tiles that have a backward pass.

    Among the readers the one counts that the backward pass comes to first: it has the highest position, or comes back with one that has.
    """
    own = {tile for tile in active if plan.marked.get(plan.tiles[tile].operator) is MARKED[_OFFLOADED]}
    read: dict[int, set[int]] = {tile: set() for tile in own}
    for number, fetch in enumerate(plan.fetches if own else ()):
        for piece in fetch.pieces:
            held = plan.holdings[piece.holding]
            if held.reduction is None and held.tile in own:
                read[held.tile].add(number)
    found: dict[int, tuple[int, int]] = {}
    for tile in sorted(own, reverse=True):  # readers come first
        claims = [(-1, tile)]
        for number in read[tile]:
            linked = tile in remade(plan, number, own)
            for reader, _ in plan.fetches[number].consumers:
                if linked and reader in own:
                    claims.append(found[reader])
                elif reader in active:
                    claims.append((plan.tiles[reader].operator, tile))
        found[tile] = max(claims)
    return {tile: first for tile, (_, first) in sorted(found.items())}
