"""Answers a search's questions by the compiled simulator. Successive strategies mostly differ in one operator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from math import inf

from soap.simulator.compiled.machine_code import ENGINE
from soap.simulator.compiled.memory_sum import FITS
from soap.simulator.drawn_engine import make_engine
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folded_bound import alike, folded_engine
from soap.simulator.folding import Folding, fold
from soap.simulator.memory.memory_sum import MemorySum
from soap.simulator.shared import Shared
from soap.simulator.simulate import CACHED_STRATEGIES, MOST_PLANNED_TILES, REST, Recent, Simulation, Simulator, is_large, tile_count
from soap.simulator.steady import Played, few_are_enough, steadily_played
from soap.strategy.config import OpConfig, Strategy, SyncConfig

MOST_CHANGES = 16
"""A strategy that differs from the one an engine holds in more operators and parameters than this is lowered from scratch."""

CACHED_STEADY = 256
"""So many answers about plans of many micro-batches are kept: peaks of all devices."""

MOST_FOLDED = 2
"""So many engines of two of many equal copies are kept: strategies that are folded alike are proposals to one."""

PREFETCH = "prefetch"
LOADED = tuple(name for name in REST if name != PREFETCH)
"""Fields of a strategy that no proposal changes."""

Change = tuple[str, OpConfig | SyncConfig | int]
"""An operator's configuration, how a parameter is synchronized, or the prefetch."""


class IncrementalSimulator:
    """Finds times by delta simulation and memory from the plan; both equal ``Simulator``'s, to the nanosecond and the byte.

    Two engines hold a strategy each: one follows small changes, the other takes strategies that differ in more.
    """

    def __init__(self, simulator: Simulator, draws: Draws | None = None) -> None:
        """``draws``: of the costs; then what is found is the cost of a strategy under all of them, rather than its time."""
        self._simulator = simulator
        self.draws = draws
        self._engines: list[_Holder] = []
        self._folded: list[tuple[Folding, _Holder]] = []
        self._answers: OrderedDict[Hashable, int] = OrderedDict()
        self._steady: Recent[tuple[Played | None]] = Recent(CACHED_STEADY)

    @staticmethod
    def begins_at_once() -> bool:
        """False if the simulator must be compiled first."""
        return ENGINE.is_made

    @property
    def shared(self) -> Shared:
        """The part that its engines share with those that compiled chains of the search make for themselves."""
        return self._simulator.shared

    @property
    def optimizer_states(self) -> int:
        """Tensors of a parameter's size that the optimizer keeps for it."""
        return self._simulator.optimizer_states

    def makespan_ns(self, strategy: Strategy) -> int:
        """Time of one iteration, or its cost under all draws. StrategyError if the strategy does not fit the graph or the cluster."""
        key = self._simulator.key(strategy)
        found = self._answers.get(key)  # a key takes long to hash
        if found is None:
            found = self._answers[key] = self._simulate(strategy)
            if len(self._answers) > CACHED_STRATEGIES:
                self._answers.popitem(last=False)
        return found

    def overflow_bytes(self, strategy: Strategy) -> int:
        """Bytes of memory that the devices lack, added up, as ``Simulator.cost`` has them."""
        if (steady := self.steady(strategy)) is not None:
            return steady.overflow_bytes(self._simulator)
        holder, folding = self._holding(strategy)
        if not self._simulator.is_refused(strategy) and holder.certainly_fits():
            return 0
        return self._simulator.overflow_of_played(strategy, holder.engine, folding)

    def steady(self, strategy: Strategy) -> Played | None:
        """A plan of very many tiles from few of its micro-batches (``steady``); None if it is played whole."""
        if tile_count(strategy) <= MOST_PLANNED_TILES or not few_are_enough(self._simulator, strategy):
            return None
        key = self._simulator.key(strategy)
        found = self._steady.recall(key)
        if found is None:
            found = (steadily_played(self._simulator, strategy, self.draws),)
            self._steady.keep(key, found)
        return found[0]

    def folding(self, strategy: Strategy, syncs: Iterable[SyncConfig]) -> Folding | None:
        """A large strategy as two of its copies, whose parameters may have those of ``syncs`` that ``Folding.syncs`` has; None if it is
        not large or cannot be folded."""
        known = self._simulator
        usual = known.folding(strategy, nearly=True) if is_large(strategy) else ""
        if isinstance(usual, str):
            return None
        found = fold(known.graph, known.topology, strategy, known.training, syncs=syncs)
        return usual if isinstance(found, str) else found

    def fits(self, strategy: Strategy, engine: Engine, folding: Folding | None = None) -> bool:
        """Whether a strategy that an engine holds or proposes fits into memory; with ``folding`` as two of its copies."""
        return self._simulator.overflow_of_played(strategy, engine, folding) == 0

    def peak_share(self, strategy: Strategy) -> float:
        """As ``Simulator.peak_share``."""
        if (steady := self.steady(strategy)) is not None:
            return inf if steady.lacking_bytes else self._simulator.share(steady.peaks)
        holder, folding = self._holding(strategy)
        return self._simulator.share_of_played(strategy, holder.engine, folding)

    def _holding(self, strategy: Strategy) -> tuple[_Holder, Folding | None]:
        """The engine that holds or proposes a strategy, which it simulates now if none does. If it is folded: as what."""
        holder = next((holder for holder in self._engines if holder.has(strategy)), None)
        if holder is None:
            folding = self._simulator.folding(strategy, nearly=True) if is_large(strategy) else ""
            if not isinstance(folding, str):
                holder = self._folded_holder(folding)
                holder.makespan_ns(folding.copies.strategy)
                return holder, folding
            self._simulate(strategy)
            holder = next(holder for holder in self._engines if holder.has(strategy))
        return holder, None

    def outcome(self, strategy: Strategy) -> Simulation | FoldedSimulation | None:
        """As ``Simulator.outcome``."""
        return self._simulator.outcome(strategy)

    def engine_for(self, strategy: Strategy) -> Engine | None:
        """An engine of its own that holds this strategy, simulated; None if the strategy is so large that it is folded."""
        if is_large(strategy):
            return None
        engine = self._engine()
        engine.load(strategy)
        engine.simulate()
        return engine

    def _engine(self) -> Engine:
        return make_engine(self.shared, self.draws)

    def _holder(self, strategy: Strategy) -> _Holder:
        simulator = self._simulator
        return _Holder(self._engine(), simulator.optimizer_states, strategy)

    def _simulate(self, strategy: Strategy) -> int:
        if (steady := self.steady(strategy)) is not None:
            return steady.makespan_ns
        distances = [holder.distance(strategy) for holder in self._engines]
        nearest = distances.index(min(distances)) if distances else 0
        anew = not distances or distances[nearest] > MOST_CHANGES
        if anew and is_large(strategy):
            folding = self._simulator.folding(strategy, nearly=True)
            if not isinstance(folding, str):
                return self._folded_holder(folding).makespan_ns(folding.copies.strategy)
        more = anew and len(self._engines) < 2
        holder = self._holder(strategy) if more else self._engines.pop(0 if anew else nearest)  # the first one was not used last
        self._engines.append(holder)
        return holder.makespan_ns(strategy)

    def _folded_holder(self, folding: Folding) -> _Holder:
        """The engine for strategies that are folded like this one."""
        simulator, own = self._simulator, folding.copies.strategy
        known = next((known for known in self._folded if alike(known[0], folding)), None)
        if known is None:
            known = folding, _Holder(folded_engine(folding, simulator.costs, self.draws), simulator.optimizer_states, own)
        kept = [other for other in self._folded if other is not known][: MOST_FOLDED - 1]
        self._folded = [known, *kept] if tile_count(own) <= MOST_PLANNED_TILES else kept  # others take gigabytes
        return known[1]


def _unlike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies differ in what no proposal changes."""
    return any(getattr(one, name) != getattr(other, name) for name in LOADED)


class _Holder:
    """An engine, the strategy that it holds, and perhaps a proposal that is neither accepted nor rejected yet."""

    def __init__(self, engine: Engine, optimizer_states: int, strategy: Strategy) -> None:
        self.engine, self._memory = engine, MemorySum(engine, engine.topology.memory_limits, optimizer_states)
        self._judged: tuple[Strategy, bool] | None = None
        self._held = strategy
        self._proposed: Strategy | None = None
        self._parameters = frozenset(parameter.name for parameter in engine.graph.parameters)
        self._asked: tuple[Strategy, list[list[Change]]] | None = None
        self._load(strategy)

    def distance(self, strategy: Strategy) -> int:
        """The smallest number of changes from what is held, or proposed, to a strategy."""
        self._asked = strategy, self._all_changes(strategy)
        return min(map(len, self._asked[1]))

    def _all_changes(self, strategy: Strategy) -> list[list[Change]]:
        """The changes from what is held and, if there is a proposal, from that."""
        known = [self._held] if self._proposed is None else [self._held, self._proposed]
        return [self._changes(own, strategy) for own in known]

    def certainly_fits(self) -> bool:
        """Whether even the sum of all that devices ever hold fits, of the strategy that was simulated last; worked out once for each."""
        last = self._proposed or self._held
        if self._judged is None or self._judged[0] is not last:
            self._judged = last, self._memory.verdict() == FITS
        return self._judged[1]

    def has(self, strategy: Strategy) -> bool:
        """Whether this is the last strategy simulated here."""
        return strategy is (self._proposed or self._held)

    def makespan_ns(self, strategy: Strategy) -> int:
        """Simulate a strategy. It stays a proposal, because most strategies are rejected."""
        asked, self._asked = self._asked, None
        known = asked[1] if asked is not None and asked[0] is strategy else self._all_changes(strategy)
        changes = known[0]
        if self._proposed is not None:
            if len(known[1]) < len(changes):
                self.engine.accept()
                self._held, changes = self._proposed, known[1]
            else:
                self.engine.reject()
            self._proposed = None
        if len(changes) > MOST_CHANGES or _unlike(strategy, self._held):
            self._load(strategy)
            return self.engine.makespan_ns
        if not changes:
            self._held = strategy  # perhaps another object
            return self.engine.makespan_ns
        operators = {name: config for name, config in changes if isinstance(config, OpConfig)}
        parameters = {name: sync for name, sync in changes if isinstance(sync, SyncConfig)}
        prefetch = next((value for _, value in changes if isinstance(value, int)), None)
        found = self.engine.propose_changes(operators, parameters, prefetch=prefetch)
        assert found is not None  # there is no bound
        self._proposed = strategy
        return found

    def _load(self, strategy: Strategy) -> None:
        self.engine.load(strategy)
        self.engine.simulate()
        self._held = strategy

    def _changes(self, held: Strategy, strategy: Strategy) -> list[Change]:
        graph = self.engine.graph
        found: list[Change] = []
        for op in graph.operators:
            new, old = strategy.operators[op.name], held.operators[op.name]
            if new is not old and new != old:
                found.append((op.name, new))
        if held.parameters is not strategy.parameters:
            for name in {**held.parameters, **strategy.parameters}:
                if name in self._parameters and (new_sync := strategy.sync(name)) != held.sync(name):
                    found.append((name, new_sync))
        if held.prefetch != strategy.prefetch:
            found.append((PREFETCH, strategy.prefetch))
        return found
