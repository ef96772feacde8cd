"""The Python side of a compiled chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from soap.search.compiled.chain import DONE, advance, begin_chain
from soap.search.compiled.edits import UNKNOWN
from soap.search.compiled.memory import (
    ASKED,
    BEFORE,
    BEST,
    BEST_PREFETCH,
    COST,
    GRANTED,
    LOGGED,
    MOVES,
    PENDING,
    RANDOM,
    REFUSED,
    START,
    SWAPPED,
    WANTED_GRID,
    WANTED_OPERATOR,
    make_chain,
)
from soap.search.compiled.space_arrays import SearchTables, grid_tables, group_tables, neighbour_tables
from soap.search.record import MoveCount
from soap.search.space import Grid, Space, grid_of
from soap.simulator.compiled.change import KEEP, OPERATORS, PARAMETERS, PREFETCH
from soap.simulator.compiled.handles import handle
from soap.simulator.drawn_engine import make_engine
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.memory.memory_sum import NO_TABLES, MemorySum
from soap.simulator.shared import Shared
from soap.strategy.config import OpConfig, Strategy, SyncConfig

Fits = Callable[[Strategy, Engine], bool]
"""Whether a strategy that an engine proposes fits into memory."""

DEFAULT_WEIGHTS: Mapping[str, float] = {
    "redraw": 1.0, "place": 1.0, "swap": 1.0, "informed": 4.0, "group": 2.0, "segment": 1.0, "run": 1.0, "sync": 1.0,
    "recompute": 2.0, "prefetch": 0.5,
}  # fmt: skip


class Logged(NamedTuple):
    """One evaluated proposal. ``operator``: the first changed operator, by position; -1 - parameter if a parameter changes, or the
    prefetch, for which the first gathered one stands. ``operators``: how many change. ``cost_ns``: None if the simulation stopped at the
    bound, which refuses the proposal before its cost is known."""

    move: str
    operator: int
    operators: int
    cost_ns: int | None
    accepted: bool


class CompiledSpace:
    """A space as arrays, for any number of chains."""

    def __init__(self, space: Space, shared: Shared, optimizer_states: int = 2, draws: Draws | None = None) -> None:
        """``shared``: what chains' engines share. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps. ``draws``:
        of the costs, under which chains compare strategies."""
        self.space, self.shared, self.optimizer_states, self.draws = space, shared, optimizer_states, draws
        self.grids = grid_tables(space, shared.topology, shared.costs, shared.codes)
        self._kept = (self.grids, neighbour_tables(space), group_tables(space))
        self.handles = (handle(self._kept[0]), handle(self._kept[1]), handle(self._kept[2]))
        self.has_groups = len(space.groups) > 0
        self.has_segments = len(self._kept[2].segment_ptr) > 1
        self.has_syncs = len(self.grids.sync_parameter) > 0
        self.has_recompute = len(space.marks) > 0
        self.has_prefetch = space.gathers

    def number(self, position: int, grid: Grid) -> int:
        """The number of an operator's grid; -1 if its space does not have it."""
        own = self.space.operators[position]
        known = own.numbers.get(grid)
        return -1 if known is None else int(self.grids.grid_ptr[self.grids.space[position]]) + known

    def grid(self, position: int, number: int) -> Grid:
        """The grid of an operator with this number."""
        return self.space.operators[position].grids[number - int(self.grids.grid_ptr[self.grids.space[position]])]


class CompiledChain:
    """One chain. Equal seeds give equal chains, whatever other chains run."""

    def __init__(
        self,
        space: CompiledSpace,
        strategy: Strategy,
        *,
        seed: int,
        proposals: int,
        start_ns: int | None = None,
    ) -> None:
        """``proposals``: the most that the log can hold. ``start_ns``: the cost that beta is relative to; by default the strategy's.
        The strategy has to fit, and so has what ``move_to`` gets, if ``run`` is told what fits."""
        self._space = space
        graph = space.space.graph
        self.engine = make_engine(space.shared, space.draws)
        self.engine.choices = space.space.syncs
        topology = space.shared.topology
        devices = topology.device_count
        tiles = sum(max(devices, len(config.devices)) for config in strategy.operators.values())
        self.engine.make_edit_room(tiles)
        most = strategy.microbatches * tiles
        self.arrays = make_chain(len(graph.operators), len(graph.parameters), devices, len(space.grids.estimate), most, proposals)
        Q, N, M = space.handles
        self.handle = handle(SearchTables(grids=Q, neighbours=N, groups=M, chain=self.arrays))
        self._memory = MemorySum(self.engine, topology.memory_limits, space.optimizer_states)
        self.slice = 1  # proposals between two questions whether the search has ended (``search.tempering``)
        at = self.arrays.at
        at[RANDOM] = at[BEFORE] = np.int64(seed)
        self.weights = DEFAULT_WEIGHTS
        self.move_to(strategy)
        at[START] = at[COST] if start_ns is None else start_ns

    @property
    def weights(self) -> Mapping[str, float]:
        """Relative frequency of each move; 0 for moves that cannot have an effect."""
        return dict(zip(MOVES, self.arrays.weight.tolist(), strict=False))

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        space, movable = self._space, len(self._space.space.movable) > 0
        possible = {"group": movable and space.has_groups, "segment": movable and space.has_segments, "sync": space.has_syncs}
        possible |= {"recompute": space.has_recompute, "prefetch": space.has_prefetch}
        self.arrays.weight[: len(MOVES)] = [weights[move] if possible.get(move, movable) else 0.0 for move in MOVES]

    def move_to(self, strategy: Strategy) -> None:
        """Go on from another strategy."""
        self.arrays.at[SWAPPED] = 0  # the engine loads into its first trial
        self.engine.load(strategy)
        cost_ns = self.engine.simulate()
        for position, op in enumerate(self._space.space.graph.operators):
            config = strategy.operators[op.name]
            distinct = len(set(config.devices)) == len(config.devices)
            self.arrays.grid[position] = self._space.number(position, grid_of(config)) if distinct else -1
        begin_chain(self.engine.world, self.handle, cost_ns, self.engine.usual_ns)

    def run(self, proposals: int, *, beta: float, focus: float, fits: Fits | None = None) -> int:
        """Go on until ``proposals`` are evaluated in all, or no move has an effect any more. Returns how many are evaluated in all.

        ``beta``: as in ``search.metropolis``. ``focus``: how strongly rough costs weigh candidates, per start cost; 0: not at all.
        ``fits``: decides whether a strategy, which the engine proposes, fits into memory before it is accepted; asked only if their
        sum cannot tell. None: every strategy fits.
        """
        if len(self._space.space.movable) == 0 and not (self._space.has_syncs or self._space.has_recompute):
            return self.proposals
        at = self.arrays.at
        last, focus = min(proposals, len(self.arrays.log_cost) - 1), focus / float(at[START])

        def go_on() -> int:
            M = NO_TABLES if fits is None else self._memory.handle()
            return int(advance(*self.engine.handles(), self.handle, M, self.engine.drawing, last, beta, focus, fits is not None))

        while True:
            try:
                done = self.engine.attempt(go_on, self._settle)
            except LookupError as error:
                if str(error) != UNKNOWN:
                    raise
                self._make_variant(int(at[WANTED_OPERATOR]), int(at[WANTED_GRID]))
                continue
            if done == DONE:
                return self.proposals
            assert fits is not None and at[PENDING] == ASKED
            self._settle()
            at[PENDING] = GRANTED if self._ask(fits) else REFUSED

    def _make_variant(self, position: int, number: int) -> None:
        grid = self._space.grid(position, number)
        Q = self._space.grids
        place = int(Q.estimate_ptr[position]) + number - int(Q.grid_ptr[Q.space[position]])
        self.arrays.variant[place] = self.engine.variant(position, grid[1:])

    def _settle(self) -> None:
        at = self.arrays.at
        self.engine.settle(swapped=bool(at[SWAPPED]), makespan_ns=int(at[COST]))
        at[SWAPPED] = 0

    def _ask(self, fits: Fits) -> bool:
        """Whether the proposed strategy fits, which the engine proposes meanwhile."""
        operators, parameters, prefetch = self._edits()
        edited = self.engine.strategy.with_changes(operators, parameters)
        self.engine.propose_changes(operators, parameters, prefetch=prefetch)
        try:
            return fits(edited if prefetch is None else replace(edited, prefetch=prefetch), self.engine)
        finally:
            self.engine.reject()

    def _edits(self) -> tuple[dict[str, OpConfig], dict[str, SyncConfig], int | None]:
        """The operators, the parameters and, if it changes, the prefetch of the proposal."""
        E, graph = self.engine.edit, self._space.space.graph
        operators: dict[str, OpConfig] = {}
        parameters: dict[str, SyncConfig] = {}
        for i in range(int(E.count[OPERATORS])):
            position, devices = int(E.operator[i]), E.dev[E.dev_ptr[i] : E.dev_ptr[i + 1]]
            operators[graph.operators[position].name] = self.engine.config(position, E.variant[i], devices, E.replicas[i], E.marked[i])
        for i in range(int(E.count[PARAMETERS])):
            name = graph.parameters[E.parameter[i]].name
            parameters[name] = self.engine.sync(name, int(E.sync[i]))
        prefetch = int(E.count[PREFETCH])
        return operators, parameters, None if prefetch == KEEP else prefetch

    @property
    def proposals(self) -> int:
        """Proposals evaluated so far."""
        return int(self.arrays.at[LOGGED])

    @property
    def start_ns(self) -> int:
        """The cost that beta is relative to."""
        return int(self.arrays.at[START])

    @property
    def cost_ns(self) -> int:
        """Cost of the current strategy."""
        return int(self.arrays.at[COST])

    @property
    def best_ns(self) -> int:
        """The lowest cost so far."""
        return int(self.arrays.at[BEST])

    @property
    def strategy(self) -> Strategy:
        """The current strategy."""
        self._settle()
        return self.engine.strategy

    @property
    def best(self) -> Strategy:
        """The strategy of the lowest cost so far."""
        X, found = self.arrays, {}
        for position, op in enumerate(self._space.space.graph.operators):
            devices = X.best_dev[X.best_dev_ptr[position] : X.best_dev_ptr[position + 1]]
            own = X.best_variant[position], devices, X.best_replicas[position], X.best_marked[position]
            found[op.name] = self.engine.config(position, *own)
        prefetch = int(X.at[BEST_PREFETCH])
        return replace(self.engine.strategy, operators=found, parameters=self.engine.syncs(X.best_sync), prefetch=prefetch)

    @property
    def moves(self) -> Mapping[str, MoveCount]:
        """Move -> its counts."""
        counts = zip(self.arrays.proposed.tolist(), self.arrays.accepted.tolist(), strict=True)
        return {move: MoveCount(*own) for move, own in zip(MOVES, counts, strict=False)}

    def log(self, first: int = 0) -> Iterator[Logged]:
        """The proposals from number ``first`` on."""
        X, last = self.arrays, self.proposals
        columns = (X.log_move, X.log_operator, X.log_count, X.log_cost, X.log_accepted)
        for move, operator, count, cost, accepted in zip(*(column[first:last].tolist() for column in columns), strict=True):
            yield Logged(MOVES[move], operator, count, cost if cost >= 0 else None, bool(accepted))
