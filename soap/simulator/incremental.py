"""What a search asks of a simulator, answered by the compiled one. Successive strategies mostly differ in one operator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from soap.plan.compression.training import PlannedTraining
from soap.simulator.compiled.machine_code import ENGINE
from soap.simulator.compiled.memory_tables import FITS, UNLIKELY
from soap.simulator.costs import CostModel
from soap.simulator.drawn_engine import make_engine
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folded_bound import alike, folded_engine, most_overflow_bytes
from soap.simulator.folding import Folding
from soap.simulator.memory.bound import MemoryBound
from soap.simulator.memory.hosts import hosts_may_lack
from soap.simulator.shared import Shared
from soap.simulator.simulate import CACHED_STRATEGIES, REFUSED_BYTES, REST, Simulation, Simulator, is_large, is_planned
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import OpConfig, Strategy, SyncConfig

MOST_CHANGES = 16
"""A strategy that differs from the one an engine holds in more operators and parameters than this is lowered from scratch."""

MOST_FOLDED = 2
"""So many engines of two of many equal copies are kept: strategies that are folded alike are proposals to one."""

AMPLE = 3
"""How many times a single device's needs every device must have for ``always_fits``: copies of what is read from other devices, and
buffers, come on top of those needs."""

PREFETCH = "prefetch"
LOADED = tuple(name for name in REST if name != PREFETCH)
"""What no proposal changes of a strategy."""

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
        self._lacking: OrderedDict[Hashable, int] = OrderedDict()

    @staticmethod
    def begins_at_once() -> bool:
        """False if the simulator must be compiled first."""
        return ENGINE.is_made

    @property
    def engine_costs(self) -> CostModel:
        """The cost model for engines that compiled chains of the search make for themselves."""
        return self._simulator.costs

    @property
    def shared(self) -> Shared:
        """What these engines share with its own."""
        return self._simulator.shared

    @property
    def optimizer_states(self) -> int:
        """Tensors of a parameter's size that the optimizer keeps for it."""
        return self._simulator.optimizer_states

    @property
    def training(self) -> PlannedTraining:
        """What training adds to compressed parameters."""
        return self._simulator.training

    def always_fits(self) -> bool:
        """True if every device has ``AMPLE`` times the memory that one device would need for the whole model, and every host enough."""
        graph, topology = self._simulator.graph, self._simulator.topology
        if hosts_may_lack(graph, topology, self._simulator.optimizer_states, offloading=True):
            return False
        whole = max(use.total for use in self._simulator.run(CLASSICAL["single_device"](graph, topology)).memory)
        return AMPLE * whole <= min(topology.memory_limits)

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
        if self._simulator.is_refused(strategy):
            return REFUSED_BYTES
        if self._certainly_fits(strategy):
            return 0
        if not self._is_planned(strategy) and (most := self._most_overflow_bytes(strategy)) is not None:
            return most
        if self.least_overflow_bytes(strategy) > 0:
            return self._simulator.bounds_overflow_bytes(strategy)
        found = self._simulator.overflow_bytes(strategy)
        for holder in self._engines:
            holder.told(strategy, fits=found == 0)
        return found

    def probably_lacks(self, strategy: Strategy) -> bool:
        """Whether an estimate says so (``compiled.memory_estimate``); False unless this is the last strategy whose time was asked for."""
        return any(holder.probably_lacks(strategy) for holder in self._engines)

    def estimated_share(self, strategy: Strategy) -> float | None:
        """The estimated peak by the limit (``MemoryBound.estimated_share``); None unless this is the last strategy whose time was asked
        for."""
        return next((found for holder in self._engines if (found := holder.estimated_share(strategy)) is not None), None)

    def peak_share(self, strategy: Strategy) -> float:
        """As ``Simulator.peak_share``."""
        return self._simulator.peak_share(strategy)

    def memory_of(self, engine: Engine) -> MemoryBound:
        """Bounds and estimates of the memory of what an engine holds or proposes."""
        return MemoryBound(engine, self._simulator.topology.memory_limits, self._simulator.optimizer_states)

    def bounds_overflow_bytes(self, strategy: Strategy) -> int:
        """As ``Simulator.bounds_overflow_bytes``."""
        if self._simulator.is_refused(strategy):
            return REFUSED_BYTES
        if self._certainly_fits(strategy):
            return 0
        most = None if self._is_planned(strategy) else self._most_overflow_bytes(strategy)
        return self._simulator.bounds_overflow_bytes(strategy) if most is None else most

    def _certainly_fits(self, strategy: Strategy) -> bool:
        if self._lacking and self._lacking.get(self._simulator.key(strategy)) == 0:
            return True
        return any(holder.certainly_fits(strategy) for holder in self._engines)

    def _is_planned(self, strategy: Strategy) -> bool:
        if is_planned(strategy):
            return True
        folding = self._simulator.folding(strategy, nearly=True)
        return not isinstance(folding, str) and is_planned(folding.copies.strategy)

    def _most_overflow_bytes(self, strategy: Strategy) -> int | None:
        """Bytes that the devices lack at most, added up; None if the bounds do not know."""
        key = self._simulator.key(strategy)
        if key not in self._lacking and not any(holder.has(strategy) for holder in self._engines):
            self._simulate(strategy)
        holder = next((own for own in self._engines if own.has(strategy)), None)
        return self._lacking.get(key) if holder is None else holder.most_overflow_bytes()

    def _note_lacking(self, strategy: Strategy, most_bytes: int | None) -> None:
        """Remember what the bounds say of a strategy that takes long to load."""
        if most_bytes is not None:
            self._lacking[self._simulator.key(strategy)] = most_bytes
            if len(self._lacking) > CACHED_STRATEGIES:
                self._lacking.popitem(last=False)

    def least_overflow_bytes(self, strategy: Strategy) -> int:
        """A lower bound of the bytes that the devices lack; 0 unless this is the last strategy whose time was asked for."""
        return max((holder.least_overflow_bytes(strategy) for holder in self._engines), default=0)

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
        simulator = self._simulator
        return make_engine(simulator.graph, simulator.topology, simulator.costs, self.draws, simulator.training, simulator.shared)

    def _holder(self, strategy: Strategy) -> _Holder:
        simulator = self._simulator
        return _Holder(self._engine(), simulator.optimizer_states, strategy)

    def _simulate(self, strategy: Strategy) -> int:
        distances = [holder.distance(strategy) for holder in self._engines]
        nearest = distances.index(min(distances)) if distances else 0
        if is_large(strategy) and (not distances or distances[nearest] > MOST_CHANGES):
            folding = self._simulator.folding(strategy, nearly=True)
            if not isinstance(folding, str):
                return self._folded_ns(folding, strategy)
        anew = not distances or distances[nearest] > MOST_CHANGES
        more = anew and len(self._engines) < 2
        holder = self._holder(strategy) if more else self._engines.pop(0 if anew else nearest)  # the first one was not used last
        self._engines.append(holder)
        found = holder.makespan_ns(strategy)
        if anew and not self._is_planned(strategy):
            self._note_lacking(strategy, holder.most_overflow_bytes())
        return found

    def _folded_ns(self, folding: Folding, strategy: Strategy) -> int:
        simulator, own = self._simulator, folding.copies.strategy
        known = next((known for known in self._folded if alike(known[0], folding)), None)
        if known is None:
            holder = _Holder(folded_engine(folding, simulator.costs, self.draws), simulator.optimizer_states, own)
            known = folding, holder
        kept = [other for other in self._folded if other is not known][: MOST_FOLDED - 1]
        self._folded = [known, *kept] if is_planned(own) else kept  # others take gigabytes
        found = known[1].makespan_ns(own)
        self._note_lacking(strategy, most_overflow_bytes(folding, known[1].memory))
        return found


def _unlike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies differ in what no proposal changes."""
    return any(getattr(one, name) != getattr(other, name) for name in LOADED)


class _Holder:
    """An engine, the strategy that it holds, and perhaps a proposal that is neither accepted nor rejected yet."""

    def __init__(self, engine: Engine, optimizer_states: int, strategy: Strategy) -> None:
        self._engine, self.memory = engine, MemoryBound(engine, engine.topology.memory_limits, optimizer_states)
        self._last: tuple[Strategy, tuple[int, int]] | None = None
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
        """What differs from what is held and, if there is a proposal, from that."""
        known = [self._held] if self._proposed is None else [self._held, self._proposed]
        return [self._changes(own, strategy) for own in known]

    def certainly_fits(self, strategy: Strategy) -> bool:
        """True if this is the last strategy simulated here, and the upper bound of its memory fits."""
        return self.has(strategy) and self._judged(strategy)[0] == FITS

    def least_overflow_bytes(self, strategy: Strategy) -> int:
        """A lower bound of the bytes that the devices lack if this is the last strategy simulated here; else 0."""
        return self._judged(strategy)[1] if self.has(strategy) else 0

    def most_overflow_bytes(self) -> int | None:
        """An upper bound of the bytes that the devices lack by the last strategy simulated here; None if hosts may lack some."""
        found = self.memory.most_overflow_bytes()
        return None if found is None else int(found.sum())

    def probably_lacks(self, strategy: Strategy) -> bool:
        """True if this is the last strategy simulated here, and its estimated memory is unlikely to fit."""
        return self.has(strategy) and self.memory.likely() == UNLIKELY

    def estimated_share(self, strategy: Strategy) -> float | None:
        """As ``MemoryBound.estimated_share``, if this is the last strategy simulated here; else None."""
        return self.memory.estimated_share() if self.has(strategy) else None

    def told(self, strategy: Strategy, *, fits: bool) -> None:
        """Learn whether a strategy fits, if it is the last one simulated here."""
        if self.has(strategy):
            self.memory.likely()
            self.memory.told(fits=fits)

    def _judged(self, strategy: Strategy) -> tuple[int, int]:
        """(verdict of the bounds, bytes that are lacking at least), computed once for each strategy."""
        if self._last is None or self._last[0] is not strategy:
            verdict = self.memory.verdict()
            self._last = strategy, (verdict, self.memory.least_overflow_bytes())
        return self._last[1]

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
                self._engine.accept()
                self._held, changes = self._proposed, known[1]
            else:
                self._engine.reject()
            self._proposed = None
        if len(changes) > MOST_CHANGES or _unlike(strategy, self._held):
            self._load(strategy)
            return self._engine.makespan_ns
        if not changes:
            return self._engine.makespan_ns
        operators = {name: config for name, config in changes if isinstance(config, OpConfig)}
        parameters = {name: sync for name, sync in changes if isinstance(sync, SyncConfig)}
        prefetch = next((value for _, value in changes if isinstance(value, int)), None)
        found = self._engine.propose_changes(operators, parameters, prefetch=prefetch)
        assert found is not None  # there is no bound
        self._proposed = strategy
        return found

    def _load(self, strategy: Strategy) -> None:
        self._engine.load(strategy)
        self._engine.simulate()
        self._held = strategy

    def _changes(self, held: Strategy, strategy: Strategy) -> list[Change]:
        graph = self._engine.graph
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
