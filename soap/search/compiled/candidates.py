"""The configurations that a move may propose, and their probabilities (compiled). The counterpart of ``search.space``."""

from __future__ import annotations

from math import exp, log

from soap.search.compiled.memory import CANDIDATES, RANDOM, ChainTables
from soap.search.compiled.space_arrays import NO_WEIGHT, GridTables, SearchTables
from soap.simulator.compiled.hashing import draw
from soap.simulator.compiled.jit import compiled

FIRST_LISTED = 1 + CANDIDATES


@compiled
def uniform(X: ChainTables) -> float:
    """A random number in (0, 1]."""
    return float((draw(X.at, RANDOM) >> 10) + 1) / 9007199254740992.0


@compiled
def below(X: ChainTables, count: int):  # type: ignore[no-untyped-def]
    """A random whole number from 0 to ``count`` - 1."""
    return draw(X.at, RANDOM) % count


@compiled
def find_place(Q: GridTables, X: ChainTables, grid: int, first: int) -> int:
    """The number of the structured placement of a grid that the devices ``c_dev[first:]`` are; -1 if they are none."""
    tiles, places = Q.tiles[grid], Q.places[grid]
    at = Q.place_ptr[places]
    for number in range(Q.place_count[places]):
        tile = 0
        while tile < tiles and Q.place[at + tile] == X.c_dev[first + tile]:
            tile += 1
        if tile == tiles:
            return number
        at += tiles
    return -1


@compiled
def log_weight(Q: GridTables, X: ChainTables, op: int, grid: int, first: int) -> float:
    """Logarithm of the weight of an operator's configuration. Its devices, ``c_dev[first:]``, must be distinct."""
    if find_place(Q, X, grid, first) >= 0:
        return 0.0
    allowed = True
    for tile in range(Q.tiles[grid]):
        allowed &= Q.permitted[Q.space[op] * len(X.order) + X.c_dev[first + tile]] > 0
    return Q.shuffled_log[grid] if allowed else NO_WEIGHT


@compiled
def take_current(Z: SearchTables, op: int) -> None:
    """Make the current configuration candidate 0. Its ``c_log`` is ``NO_WEIGHT`` if it lies outside of the space."""
    Q, X = Z.grids, Z.chain
    X.c_grid[0], X.c_log[0] = X.grid[op], NO_WEIGHT
    if X.grid[op] >= 0:
        for tile in range(Q.tiles[X.grid[op]]):
            X.c_dev[tile] = X.held[op * len(X.order) + tile]
        X.c_log[0] = 0.0 if X.structured[op] else Q.shuffled_log[X.grid[op]]


@compiled
def choose(X, inside):  # type: ignore[no-untyped-def]
    """Draw one of the candidates 1 to ``CANDIDATES``, and 0 if it is ``inside`` the space, in proportion to exp(``c_weight``)."""
    first = 0 if inside else 1
    most, total = X.c_weight[first], 0.0
    for slot in range(first, CANDIDATES + 1):
        most = max(most, X.c_weight[slot])
    for slot in range(first, CANDIDATES + 1):
        total += exp(X.c_weight[slot] - most)
    left, chosen = uniform(X) * total, CANDIDATES
    for slot in range(first, CANDIDATES + 1):
        left -= exp(X.c_weight[slot] - most)
        if left <= 0:
            chosen = slot
            break
    return chosen


@compiled
def draw_structured(Q: GridTables, X: ChainTables, op: int, slot: int) -> None:
    """Draw a structured configuration uniformly, into a slot."""
    space = Q.space[op]
    number = below(X, Q.structured[space])
    low, high = Q.grid_ptr[space], Q.grid_ptr[space + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if Q.before[middle] <= number:
            low = middle
        else:
            high = middle
    put_place(Q, X, slot, low, number - Q.before[low])


@compiled
def put_place(Q: GridTables, X: ChainTables, slot: int, grid: int, place: int) -> None:
    """Write a structured configuration, a grid and its placement number, into a slot."""
    tiles, first = Q.tiles[grid], slot * len(X.order)
    at = Q.place_ptr[Q.places[grid]] + place * tiles
    for tile in range(tiles):
        X.c_dev[first + tile] = Q.place[at + tile]
    X.c_grid[slot], X.c_log[slot] = grid, 0.0


@compiled
def draw_any(Q: GridTables, X: ChainTables, op: int, slot: int) -> None:
    """Draw a configuration in proportion to its weight, into a slot."""
    space = Q.space[op]
    mass = uniform(X) * Q.mass[space]
    if mass <= Q.structured[space]:
        draw_structured(Q, X, op, slot)
        return
    mass -= Q.structured[space]
    low, high = Q.grid_ptr[space], Q.grid_ptr[space + 1] - 1
    while low < high:
        middle = (low + high) // 2
        if Q.shuffled[middle] < mass:
            low = middle + 1
        else:
            high = middle
    if Q.shuffled_log[low] == NO_WEIGHT:  # rounding of the sum can lead to a grid without weight
        draw_structured(Q, X, op, slot)
        return
    first, devices = slot * len(X.order), Q.device_ptr[space + 1] - Q.device_ptr[space]
    for i in range(devices):
        X.order[i] = Q.device[Q.device_ptr[space] + i]
    placed = True
    while placed:
        for tile in range(Q.tiles[low]):
            other = tile + below(X, devices - tile)
            X.order[tile], X.order[other] = X.order[other], X.order[tile]
            X.c_dev[first + tile] = X.order[tile]
        placed = find_place(Q, X, low, first) >= 0
    X.c_grid[slot], X.c_log[slot] = low, Q.shuffled_log[low]


@compiled
def same(Q: GridTables, X: ChainTables, a: int, b: int) -> bool:
    """Whether two candidates are the same configuration."""
    equal = X.c_grid[a] == X.c_grid[b]
    if equal and X.c_grid[a] >= 0:
        for tile in range(Q.tiles[X.c_grid[a]]):
            equal &= X.c_dev[a * len(X.order) + tile] == X.c_dev[b * len(X.order) + tile]
    return equal


@compiled
def log_density(Q: GridTables, X: ChainTables, op: int, listed: int, slot: int, share: float) -> float:
    """Logarithm of the probability that ``draw_candidate`` draws this candidate, with ``listed`` suggestions."""
    drawn = exp(X.c_log[slot]) / Q.mass[Q.space[op]]
    if listed == 0:
        return log(drawn)
    equal = 0
    for other in range(FIRST_LISTED, FIRST_LISTED + listed):
        equal += same(Q, X, slot, other)
    return log(share * equal / listed + (1 - share) * drawn)


@compiled
def draw_candidate(Q: GridTables, X: ChainTables, op: int, listed: int, slot: int, share: float) -> None:
    """Draw a candidate into a slot: with probability ``share`` one of the ``listed`` suggestions uniformly (if there are any), else any
    configuration by its weight."""
    if listed > 0 and uniform(X) <= share:
        chosen = FIRST_LISTED + below(X, listed)
        for tile in range(Q.tiles[X.c_grid[chosen]]):
            X.c_dev[slot * len(X.order) + tile] = X.c_dev[chosen * len(X.order) + tile]
        X.c_grid[slot], X.c_log[slot] = X.c_grid[chosen], X.c_log[chosen]
    else:
        draw_any(Q, X, op, slot)
