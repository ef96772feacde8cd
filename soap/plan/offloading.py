"""What a plan keeps in hosts' memory: optimizer states, and what operators keep between their passes; and the tasks of that.

*Parameters* (``SyncConfig.offload``). When all gradients are there, a device copies those of the shards that it owns to its host, whose
cores update, and copies the values back. What follows the update (``Phase.AFTER_UPDATE``) waits for that copy.

*Operators* (``OpConfig.offload``). What autograd keeps for a tile is copied to the host behind the tile's forward pass, and is then gone
from the device, unless others keep it, too. It comes back before the tile's backward pass. Tiles on one device that read what each other
makes form *runs*: when the backward pass has come to a run, the copies of all of it start, those first that are needed first, and each tile
waits for its own. So all but the first copy of a run are made while others compute. Parameters stay, and so do parts of the batch.

A device that is a CPU does all of it in its own memory.
"""

from __future__ import annotations

from collections.abc import Collection

from soap.model.graph import Operator
from soap.plan.plan import Plan
from soap.plan.recomputation import remade
from soap.plan.syncs.bucketing import idle_shards, shard_bytes
from soap.plan.tiling import Tile


def offloaded_bytes(plan: Plan) -> dict[int, int]:
    """Device -> bytes of the gradients that it copies to its host, as many as of the values that come back."""
    found: dict[int, int] = {}
    for number in sorted(plan.offloaded & plan.synchronized.union(idle_shards(plan))):
        for device in plan.shards[number].devices:
            found[device] = found.get(device, 0) + shard_bytes(plan.graph, plan.shards[number])
    return dict(sorted(found.items()))


def come_back_with(plan: Plan, active: Collection[int]) -> dict[int, int]:
    """Tile of an offloading operator -> the tile of its run with which it comes back, which the backward pass meets first: itself, or one
    that reads what it makes. ``active``: the tiles that have a backward pass.

    Among the readers the one counts that the backward pass comes to first: it has the highest position, or comes back with one that has.
    """
    own = {tile for tile in active if plan.tiles[tile].operator in plan.offloading_operators}
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


def kept_to_host_name(op: Operator, tile: Tile) -> str:
    """Task name of the copy of what a tile keeps to its host."""
    return f"kept to host {op.name}[{tile.index}]"


def kept_from_host_name(op: Operator, tile: Tile) -> str:
    """Task name of the copy of what a tile keeps back to its device."""
    return f"kept from host {op.name}[{tile.index}]"


def to_host_name(device: int) -> str:
    """Task name of the copy of a device's gradients to its host."""
    return f"gradients to host @{device}"


def host_update_name(device: int) -> str:
    """Task name of the update by the host."""
    return f"update on host @{device}"


def from_host_name(device: int) -> str:
    """Task name of the copy of updated values back to the device."""
    return f"values from host @{device}"
