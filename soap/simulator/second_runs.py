"""The tasks of recomputation: when the backward pass needs what a tile must compute again, and the second run itself. And those of what
operators offload: the copies to the host and back.

A second run waits for its *need*, a task without work, so that nothing is made again before the backward pass comes there. That is the
first of the tile's readers, in the order of the backward pass, that has a gradient for it: of those whose action comes first
(``Plan.rank``; without micro-batches there is but one), the reader with the highest position. A reader that is itself recomputed from the
tile's second output needs it as soon as it is needed itself. So the need has a *precedence*, which is above the tile's own, and it waits
for nothing below this precedence: tasks cannot wait for each other in a circle.

What a tile has offloaded comes back at its need, too. There a reader's own need counts if it offloads as well (``plan.offloading``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from soap.cluster.host_links import host_link
from soap.plan.offloading import kept_from_host_name, kept_to_host_name
from soap.plan.plan import Plan, need_name
from soap.plan.recomputation import find_recomputation, keeps_outputs
from soap.plan.tiling import Tile
from soap.simulator.communication.offloading import DOWN, UP, copy_ns, offload_resource
from soap.simulator.memory.peaks import away_bytes
from soap.simulator.task_list import BACKWARD, FORWARD, TaskList
from soap.simulator.tasks import TaskKind

NEED, AGAIN = 3, 4
"""Stages of a need and of a second run, or a copy back, the third part of a task's id."""
AWAY = 3
"""Stage, among forward tasks, of a copy to the host."""
NEED_NS = 1
"""What a need takes: nothing that counts, but a task takes time."""


class Need(NamedTuple):
    """A reader's claim: the ``precedence`` of the pass that the backward pass has come to, and the task after which that is so. Passes come
    in falling precedence, (- rank of the action, position of the operator)."""

    precedence: tuple[int, int]
    task: int


class SecondRuns:
    """Adds needs and second runs while the backward pass is lowered, last operator first. ``backward``: tile -> its backward task, for the
    tiles that have one so far. ``compute``: adds the task of a second run, after these tasks. ``needs``, ``away``, ``back``: by tile, its
    need, and its copies to the host and back."""

    def __init__(
        self, plan: Plan, tasks: TaskList, backward: Mapping[int, int], compute: Callable[[Tile, Iterable[int]], int]
    ) -> None:
        self._plan, self._list, self._backward, self._compute = plan, tasks, backward, compute
        self._marked, self._away = plan.recomputed_operators, plan.offloading_operators
        self._claims: dict[int, list[Need]] = {}
        self.needs: dict[int, Need] = {}
        self.away: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self._again: dict[int, int] = {}

    def note_fetch(self, number: int) -> None:
        """Note what the readers of a region claim of the holdings on their own device. All its readers have been lowered."""
        if not self._marked and not self._away:
            return
        fetch = self._plan.fetches[number]
        local = [piece.holding for piece in fetch.pieces if self._plan.holdings[piece.holding].device == fetch.device]
        links = len(local) == len(fetch.pieces)
        carries = self._plan.graph.tensors[fetch.tensor].requires_grad
        for holding in local:
            held = self._plan.holdings[holding]
            together = self._needed_together(held.tile)
            for tile, _ in fetch.consumers:
                if links and held.reduction is None and tile in self.needs and self._plan.tiles[tile].operator in together:
                    self._claim(holding, self.needs[tile])
                elif carries and tile in self._backward:
                    self._claim(holding, Need(self._precedence(tile), self._backward[tile]))

    def _needed_together(self, maker: int) -> frozenset[int]:
        """The operators whose needs are also those of a tile that they read: it is made again for them, or comes back from its host."""
        operator = self._plan.tiles[maker].operator
        if operator in self._away:
            return self._away
        return self._marked if operator in self._marked and not keeps_outputs(self._plan, maker) else frozenset()

    def note_return(self, fetches: Iterable[int], holdings: Iterable[int], task: int) -> None:
        """Note a task that brings gradients of these fetches back to these holdings."""
        if not self._marked and not self._away:
            return
        readers = (tile for number in fetches for tile, _ in self._plan.fetches[number].consumers if tile in self._backward)
        claim = Need(min(map(self._precedence, readers)), task)
        for holding in holdings:
            self._claim(holding, claim)

    def claims(self, holdings: Iterable[int]) -> list[Need]:
        """All claims for holdings."""
        return [claim for holding in holdings for claim in self._claims.get(holding, ())]

    def summed(self, holdings: Iterable[int], task: int) -> list[Need]:
        """The claims for holdings of one sum as a single one, if a task sums their gradients."""
        claims = self.claims(holdings)
        return [Need(min(claim.precedence for claim in claims), task)] if claims else []

    def start(self, task: int) -> Need:
        """The claim of the loss, which starts the backward pass: its precedence is above all others."""
        return Need((1, 0), task)

    def run(self, tile: Tile, number: int, ready: Iterable[int], claims: Iterable[Need]) -> list[int]:
        """Add the need of a tile with these claims, and its second run, or its copies to the host and back. Returns the task that its
        backward pass waits for; nothing, if the tile is neither recomputed nor offloads. ``ready``: what its forward pass has waited for,
        beginning with this pass."""
        if tile.operator not in self._marked | self._away:
            return []
        claims = list(claims)
        precedence = max(claim.precedence for claim in claims)
        after = {claim.task for claim in claims if claim.precedence == precedence}
        place = (BACKWARD, len(self._plan.graph.operators) - 1 - tile.operator, NEED, tile.index, 0, 0)
        need = self._list.add(place, need_name(self._plan.operator(tile), tile), TaskKind.RECOMPUTE, (), NEED_NS, after)
        self.needs[number] = Need(precedence, need)
        if tile.operator in self._away:
            self.away[number], self.back[number] = self._copies(tile, next(iter(ready)), need)
            return [self.back[number]]
        self._again[number] = self._compute(tile, (*ready, need))
        return [self._again[number]]

    def _copies(self, tile: Tile, forward: int, need: int) -> list[int]:
        """Add the copies of what a tile keeps, to its host behind its forward pass and back at its need; returns both."""
        plan, topology, op = self._plan, self._list.topology, self._plan.operator(tile)
        link, made, back = host_link(topology, tile.device), [forward], len(plan.graph.operators) - 1 - tile.operator
        duration = copy_ns(away_bytes(plan.graph, tile), link)
        for place, name, held, own in (
            (DOWN, kept_to_host_name(op, tile), link.down, (FORWARD, tile.operator, AWAY, tile.index, 0, 0)),
            (UP, kept_from_host_name(op, tile), link.up, (BACKWARD, back, AGAIN, tile.index, 0, 0)),
        ):
            resources = (offload_resource(topology, tile.device, place), *(topology.device_count + number for number in held))
            after = made if place == DOWN else [made[-1], need]
            made.append(self._list.add(own, name, TaskKind.COPY, resources, duration, after))
        return made[1:]

    def link(self) -> None:
        """Let second runs wait for those whose outputs they read. Call it when all are there."""
        for tile, makers in find_recomputation(self._plan, self._backward).links.items() if self._marked else ():
            self._list.wait_also(self._again[tile], (self._again[maker] for maker in makers))

    def _precedence(self, number: int) -> tuple[int, int]:
        """Of a tile's backward pass."""
        tile = self._plan.tiles[number]
        return -self._plan.rank(tile, "B"), tile.operator

    def _claim(self, holding: int, need: Need) -> None:
        self._claims.setdefault(holding, []).append(need)
