"""Configurations that a move may propose, and with what probability (compiled). The counterpart of ``search.space``."""

from __future__ import annotations

from math import exp, log

from soap.search.compiled.memory import CANDIDATES, RANDOM, ChainTables
from soap.search.compiled.tables import NO_WEIGHT, GridTables
from soap.simulator.compiled.hashing import draw
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.state import State

FIRST_LISTED = 1 + CANDIDATES


@compiled
def uniform(W: ChainTables) -> float:
    """In (0, 1]."""
    return float((draw(W.at, RANDOM) >> 10) + 1) / 9007199254740992.0


@compiled
def below(W: ChainTables, count: int):  # type: ignore[no-untyped-def]
    """One of so many numbers."""
    return draw(W.at, RANDOM) % count


@compiled
def find_place(Q: GridTables, W: ChainTables, grid: int, first: int) -> int:
    """Which structured placement of a grid the devices ``c_dev[first:]`` are; -1 if none."""
    tiles, places = Q.tiles[grid], Q.places[grid]
    at = Q.place_ptr[places]
    for number in range(Q.place_count[places]):
        tile = 0
        while tile < tiles and Q.place[at + tile] == W.c_dev[first + tile]:
            tile += 1
        if tile == tiles:
            return number
        at += tiles
    return -1


@compiled
def log_weight(Q: GridTables, W: ChainTables, op: int, grid: int, first: int) -> float:
    """Logarithm of the weight of an operator's configuration on distinct devices."""
    if find_place(Q, W, grid, first) >= 0:
        return 0.0
    allowed = True
    for tile in range(Q.tiles[grid]):
        allowed &= Q.permitted[Q.space[op] * len(W.order) + W.c_dev[first + tile]] > 0
    return Q.shuffled_log[grid] if allowed else NO_WEIGHT


@compiled
def take_current(Q: GridTables, C: State, W: ChainTables, op: int) -> None:
    """The current configuration becomes candidate 0; ``c_log`` is ``NO_WEIGHT`` if it lies outside of the space."""
    W.c_grid[0], W.c_log[0] = W.grid[op], NO_WEIGHT
    if W.grid[op] >= 0:
        for tile in range(C.tiles[op]):
            W.c_dev[tile] = C.dev[C.dev_ptr[op] + tile]
        W.c_log[0] = 0.0 if W.structured[op] else Q.shuffled_log[W.grid[op]]


@compiled
def choose(W, inside):  # type: ignore[no-untyped-def]
    """One of the candidates 0 (if it is ``inside``) to ``CANDIDATES`` in proportion to exp(``c_weight``)."""
    first = 0 if inside else 1
    most, total = W.c_weight[first], 0.0
    for slot in range(first, CANDIDATES + 1):
        most = max(most, W.c_weight[slot])
    for slot in range(first, CANDIDATES + 1):
        total += exp(W.c_weight[slot] - most)
    left, chosen = uniform(W) * total, CANDIDATES
    for slot in range(first, CANDIDATES + 1):
        left -= exp(W.c_weight[slot] - most)
        if left <= 0:
            chosen = slot
            break
    return chosen


@compiled
def draw_structured(Q: GridTables, W: ChainTables, op: int, slot: int) -> None:
    """One of the structured configurations, uniformly."""
    space = Q.space[op]
    number = below(W, Q.structured[space])
    low, high = Q.grid_ptr[space], Q.grid_ptr[space + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if Q.before[middle] <= number:
            low = middle
        else:
            high = middle
    put_place(Q, W, slot, low, number - Q.before[low])


@compiled
def put_place(Q: GridTables, W: ChainTables, slot: int, grid: int, place: int) -> None:
    """A structured configuration."""
    tiles, first = Q.tiles[grid], slot * len(W.order)
    at = Q.place_ptr[Q.places[grid]] + place * tiles
    for tile in range(tiles):
        W.c_dev[first + tile] = Q.place[at + tile]
    W.c_grid[slot], W.c_log[slot] = grid, 0.0


@compiled
def draw_any(Q: GridTables, W: ChainTables, op: int, slot: int) -> None:
    """A configuration in proportion to its weight."""
    space = Q.space[op]
    mass = uniform(W) * Q.mass[space]
    if mass <= Q.structured[space]:
        draw_structured(Q, W, op, slot)
        return
    mass -= Q.structured[space]
    low, high = Q.grid_ptr[space], Q.grid_ptr[space + 1] - 1
    while low < high:
        middle = (low + high) // 2
        if Q.shuffled[middle] < mass:
            low = middle + 1
        else:
            high = middle
    if Q.shuffled_log[low] == NO_WEIGHT:  # the sum was rounded
        draw_structured(Q, W, op, slot)
        return
    first, devices = slot * len(W.order), Q.device_ptr[space + 1] - Q.device_ptr[space]
    for i in range(devices):
        W.order[i] = Q.device[Q.device_ptr[space] + i]
    placed = True
    while placed:
        for tile in range(Q.tiles[low]):
            other = tile + below(W, devices - tile)
            W.order[tile], W.order[other] = W.order[other], W.order[tile]
            W.c_dev[first + tile] = W.order[tile]
        placed = find_place(Q, W, low, first) >= 0
    W.c_grid[slot], W.c_log[slot] = low, Q.shuffled_log[low]


@compiled
def same(Q: GridTables, W: ChainTables, a: int, b: int) -> bool:
    """Whether two candidates are the same configuration."""
    equal = W.c_grid[a] == W.c_grid[b]
    if equal and W.c_grid[a] >= 0:
        for tile in range(Q.tiles[W.c_grid[a]]):
            equal &= W.c_dev[a * len(W.order) + tile] == W.c_dev[b * len(W.order) + tile]
    return equal


@compiled
def log_density(Q: GridTables, W: ChainTables, op: int, listed: int, slot: int, share: float) -> float:
    """Logarithm of the probability with which ``draw_candidate`` gives a candidate, if so many are listed."""
    drawn = exp(W.c_log[slot]) / Q.mass[Q.space[op]]
    if listed == 0:
        return log(drawn)
    equal = 0
    for other in range(FIRST_LISTED, FIRST_LISTED + listed):
        equal += same(Q, W, slot, other)
    return log(share * equal / listed + (1 - share) * drawn)


@compiled
def draw_candidate(Q: GridTables, W: ChainTables, op: int, listed: int, slot: int, share: float) -> None:
    """One that is listed, uniformly, with probability ``share`` (if any is), or any."""
    if listed > 0 and uniform(W) <= share:
        chosen = FIRST_LISTED + below(W, listed)
        for tile in range(Q.tiles[W.c_grid[chosen]]):
            W.c_dev[slot * len(W.order) + tile] = W.c_dev[chosen * len(W.order) + tile]
        W.c_grid[slot], W.c_log[slot] = W.c_grid[chosen], W.c_log[chosen]
    else:
        draw_any(Q, W, op, slot)
