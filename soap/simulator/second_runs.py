"""The tasks that marks add to tiles (``plan.marks``): their rows, and when the backward pass needs what a tile has made.

A row that is *needed* waits until the backward pass comes there, so that nothing is made again, or comes back, before that. That is the
first of the tile's readers, in the order of the backward pass, that has a gradient for it: of those whose action comes first
(``Plan.rank``; without micro-batches there is but one), the reader with the highest position. A reader whose mark is needed together with
the tile's (``Marked.together``), as it reads what the tile makes again, needs it as soon as it is needed itself. So the need has a
*precedence*, which is above the tile's own, and it waits for nothing below this precedence: tasks cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from soap.cluster.host_links import host_link
from soap.plan.marks.seam import FORWARD as FORWARD_PASS
from soap.plan.marks.seam import MOMENT_NS, NOTHING, Marked, On, Row, Takes, all_marked
from soap.plan.plan import Fetch, Plan, tile_task_name
from soap.plan.recomputation import second_links
from soap.plan.tiling import Tile
from soap.simulator.communication.offloading import DOWN, UP, copy_ns, offload_resource
from soap.simulator.memory.sizes import away_bytes
from soap.simulator.task_list import BACKWARD, FORWARD, TaskList
from soap.simulator.tasks import TaskKind


class Need(NamedTuple):
    """A reader's claim: the ``precedence`` of the pass that the backward pass has come to, and the task after which that is so. Passes come
    in falling precedence, (- rank of the action, position of the operator)."""

    precedence: tuple[int, int]
    task: int


class SecondRuns:
    """Adds the rows of marks while the backward pass is lowered, last operator first. ``backward``: tile -> its backward task, for the
    tiles that have one so far. ``compute``: adds a second run of a tile, after these tasks. ``price``: how long
    something takes on the tile's device. ``needs``: by tile; ``rows``: by name of a row the tasks by tile."""

    def __init__(
        self,
        plan: Plan,
        tasks: TaskList,
        backward: Mapping[int, int],
        compute: Callable[[Tile, Row, Iterable[int]], int],
        price: Callable[[Tile, Takes], int],
    ) -> None:
        self._plan, self._list, self._backward = plan, tasks, backward
        self._compute, self._price = compute, price
        self._claims: dict[int, list[Need]] = {}
        self.needs: dict[int, Need] = {}
        self.rows: dict[str, dict[int, int]] = {}

    def note_fetch(self, number: int) -> None:
        """Note what the readers of a region claim of the holdings on their own device. All its readers have been lowered."""
        if not self._plan.marked:
            return
        fetch = self._plan.fetches[number]
        local = [piece.holding for piece in fetch.pieces if self._plan.holdings[piece.holding].device == fetch.device]
        links = len(local) == len(fetch.pieces)
        carries = self._plan.graph.tensors[fetch.tensor].requires_grad
        if not links and self._gathers(fetch):
            for piece in fetch.pieces:
                for tile in {tile for tile, _ in fetch.consumers} & self.needs.keys():
                    self._claim(piece.holding, self.needs[tile])
            return
        for holding in local:
            held = self._plan.holdings[holding]
            together = [all_marked()[mark] for mark in self._mark(held.tile).together]
            again = held.reduction is None or self._plan.tiles[held.tile].operator in self._plan.summed_again
            for tile, _ in fetch.consumers:
                if links and again and tile in self.needs and self._mark(tile) in together:
                    self._claim(holding, self.needs[tile])
                elif carries and tile in self._backward:
                    self._claim(holding, Need(self._precedence(tile), self._backward[tile]))

    def note_return(self, fetches: Iterable[int], holdings: Iterable[int], task: int) -> None:
        """Note a task that brings gradients of these fetches back to these holdings."""
        if not self._plan.marked:
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
        """Add the rows of a tile with these claims. Returns the tasks that its backward pass waits for. ``ready``: what its forward pass
        has waited for, beginning with this pass."""
        (forward, *values), rows, made = ready, self._plan.marked.get(tile.operator, NOTHING).rows, list[int]()
        for row in rows:
            after = {forward if place == FORWARD_PASS else made[place] for place in row.after}
            if row.needed:
                claims = list(claims)
                precedence = max(claim.precedence for claim in claims)
                after |= {claim.task for claim in claims if claim.precedence == precedence}
                self.needs[number] = Need(precedence, len(self._list.tasks))
            made.append(self._compute(tile, row, (*values, *after)) if row.again else self._add(row, tile, after))
            self.rows.setdefault(row.name, {})[number] = made[-1]
        return [task for row, task in zip(rows, made, strict=True) if row.before_backward]

    def _add(self, row: Row, tile: Tile, after: Iterable[int]) -> int:
        """Add a row that is no second run."""
        topology, device = self._list.topology, tile.device
        first, position = (BACKWARD, len(self._plan.graph.operators) - 1 - tile.operator) if row.backward else (FORWARD, tile.operator)
        resources: tuple[int, ...] = () if row.on is On.NOTHING else (device,)
        if row.on > On.DEVICE:
            link = host_link(topology, device)
            place, held = (DOWN, link.down) if row.on is On.TO_HOST else (UP, link.up)
            resources = (offload_resource(topology, device, place), *(topology.device_count + number for number in held))
        match row.takes:
            case Takes.MOMENT:
                duration = MOMENT_NS
            case Takes.COPY:
                duration = copy_ns(away_bytes(self._plan.graph, tile), host_link(topology, device))
            case _:
                duration = self._price(tile, row.takes)
        name = tile_task_name(row.verb, self._plan.operator(tile), tile)
        return self._list.add((first, position, row.stage, tile.index, 0, 0), name, TaskKind(row.kind), resources, duration, after)

    def link(self) -> None:
        """Let second runs wait for those whose outputs they read. Call it when all are there."""
        again = self.rows.get("again", {})
        for tile, makers in second_links(self._plan, self._backward).items():
            self._list.wait_also(again[tile], (again[maker] for maker in makers))

    def first_needs(self, tiles: Iterable[int]) -> set[int]:
        """The tasks that say that the backward pass needs the first of these tiles; none if it needs none."""
        needs = [self.needs[tile] for tile in tiles if tile in self.needs]
        first = max((need.precedence for need in needs), default=None)
        return {need.task for need in needs if need.precedence == first}

    def _gathers(self, fetch: Fetch) -> bool:
        """Whether a region is gathered again of parts that are made again."""
        maker = self._plan.tiles[self._plan.holdings[fetch.pieces[0].holding].tile].operator
        return maker in self._plan.gathered_again and maker in self._plan.recomputed_operators - self._plan.light_operators

    def _mark(self, tile: int) -> Marked:
        return self._plan.marked.get(self._plan.tiles[tile].operator, NOTHING)

    def _precedence(self, number: int) -> tuple[int, int]:
        """Of a tile's backward pass."""
        tile = self._plan.tiles[number]
        return -self._plan.rank(tile, "B"), tile.operator

    def _claim(self, holding: int, need: Need) -> None:
        self._claims.setdefault(holding, []).append(need)
