"""``fits``: whether a model fits into the memory of a cluster's devices, and if not, the fastest ways that do, within seconds.

Ways are strategies with names (``strategy.named.saving_names``), and ways to take a step's samples in several smaller batches, one after
the other, so that less is kept at a time. None is searched.

Where each sample goes through by itself, several batches are a plan with micro-batches, and train to the same numbers. Where operators need
several samples at once (batch norm), micro-batches save nothing. Then the model is made anew for fewer samples, and several of its batches
join in a step (``soap-run --accumulate``): each is normalized by itself, so that numbers are others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from soap import collector
from soap.api.models import Cluster, Model, planned_graph, topology_of
from soap.api.predictions import simulator_for
from soap.cluster.memory_budget import with_memory_budget
from soap.errors import StrategyError
from soap.model.batch import MicroBatches, samples_of
from soap.model.graph import OperatorGraph, TensorKind
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.delivery import box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan
from soap.plan.syncs.bucketing import sums_of_one
from soap.search.options import OPTIMIZER_STATES
from soap.search.recomputing import recompute_to_fit
from soap.search.to_fit import Budgeted
from soap.simulator.costs import CostSource
from soap.simulator.folded import FoldedSimulation
from soap.simulator.kernels import Kernels
from soap.simulator.memory.certain import certainly_lacks
from soap.simulator.memory.hosts import lacking_on_hosts
from soap.simulator.memory.sizes import overflow_bytes
from soap.simulator.simulate import Simulator, is_large, tile_count
from soap.strategy.config import Strategy
from soap.strategy.named import (
    DATA_PARALLEL,
    JOIN,
    MICRO_BATCHES,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    WIDTH,
    base_of,
    named,
    on_top,
    saving_names,
    warn_without_effect,
)
from soap.strategy.recomputation import RECOMPUTED, run_levels
from soap.time_limit import TimeIsUp

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator


COUNTS = (2, 4, 8)
"""In how many batches samples are tried to go through."""
BASES = (DATA_PARALLEL, "zero1", "fsdp")
"""The strategies that are tried with micro-batches."""
READING_SECONDS = 0.08
"""For each operator, what it takes to make a model of the zoo for another batch: 0.05 to 0.1 s of a core for gpt, inception_v3, nmt_gnmt
and resnet101 (Intel Xeon, 2026-11-27). It is not begun if that would take too long."""
ZOO = "zoo:"

Smaller = Callable[[int], OperatorGraph]
"""The model for a batch of so many samples."""


def counts(graph: OperatorGraph) -> Iterator[int]:
    """Into how many batches the samples may be divided, fewest first."""
    samples = samples_of(graph)
    yield from (count for count in COUNTS if samples is not None and samples % count == 0)


def in_micro_batches(base: str, count: int) -> str:
    """The name of a strategy whose samples go through in so many micro-batches."""
    return f"{base}{JOIN}{MICRO_BATCHES}{WIDTH}{count}"


def couples_samples(graph: OperatorGraph) -> bool:
    """Whether operators need several samples at once, so that micro-batches save nothing."""
    return bool(MicroBatches(graph, COUNTS[0]).barriers)


def smaller_zoo(graph: OperatorGraph) -> Smaller | None:
    """Makes a model of the zoo for fewer samples; None if it is no model of the zoo."""
    spec, found, _ = graph.name.partition("@")
    return (lambda samples: planned_graph(f"{spec}@{samples}", sum_dtype=graph.sum_dtype)) if spec.startswith(ZOO) and found else None


def kept_between(plan: Plan, count: int) -> list[dict[str, int]]:
    """For each device the bytes by kind that a step of several batches holds beside what one batch does: the other batches, and gradients
    that only stay if the step goes on."""
    batch = sum(tensor.bytes for tensor in plan.graph.tensors.values() if tensor.kind is TensorKind.INPUT)
    found = [{MemoryKind.BATCH.value: (count - 1) * batch, MemoryKind.GRADIENTS.value: 0} for _ in range(plan.device_count)]
    for number in sums_of_one(plan):
        shard = plan.shards[number]
        for device in shard.devices:
            found[device][MemoryKind.GRADIENTS] += box_bytes(plan, shard.parameter, shard.box)
    return found


MOST_WAYS = 3
SECONDS = 9.0
"""No way but the first is begun that is not expected to be over after so many seconds of a core. What else the machine does changes no
answer."""
TILE_SECONDS = 3e-4
"""Seconds that it takes to play a tile in full, at least: 0.3 to 0.5 ms of a core where two copies do not do (Intel Xeon, 2026-11-27)."""
TO_FIT = 0.6
"""When more than this share of the time is over, it is not found out how little has to be recomputed for a way to fit."""
BY_SAVINGS = ("fsdp", "hsdp", "zero1")
"""Ways to share parameters, those first that save most."""
THIS = "this strategy"
"""Name of a strategy that was given without one."""


@dataclass(frozen=True)
class Way:
    """A strategy, how long a step with all samples takes, and the memory of the device that it fills most.

    ``model``: name of the model that it is for. ``micro_batches``: in how many batches the samples go through, one after the other, before
    the update (``soap-run --accumulate``); the model then is that of a smaller batch. ``lacking_bytes``: what devices lack at their
    expected peaks, and hosts, added up. ``by_kind``: what ``peak_bytes`` is made of (``Simulation.peak_by_kind``); they add up to it.
    ``budgeted``: of a way that recomputes as little as fits, how near that is to the best choice; ``base``: the strategy on top of which it
    does so.
    """

    name: str
    model: str
    strategy: Strategy
    time_ns: int
    device: str
    peak_bytes: int
    available_bytes: int
    by_kind: dict[str, int]
    lacking_bytes: int
    micro_batches: int = 1
    budgeted: Budgeted | None = None
    base: str = ""

    @property
    def fits(self) -> bool:
        """Whether every device and host has enough memory."""
        return self.lacking_bytes == 0


@dataclass(frozen=True)
class Fit:
    """The outcome of ``fits``. ``asked``: what was asked about. ``ways``: if it does not fit, the fastest that do. ``tried``: names of all
    that were tried. ``untried``: names of those for which there was no time. ``closest``: if nothing fits, what lacks least."""

    asked: Way
    ways: tuple[Way, ...] = ()
    tried: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    closest: Way | None = None

    @property
    def fits(self) -> bool:
        """Whether what was asked about fits."""
        return self.asked.fits


def fits(
    model: Model,
    cluster: Cluster,
    strategy: Strategy | str = DATA_PARALLEL,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
    training: PlannedTraining = PLAIN,
    kernels: Kernels = "eager",
    seconds: float = SECONDS,
    smaller: Smaller | None = None,
) -> Fit:
    """Say whether a strategy fits into the devices' memory, and if not, the fastest ways that do.

    ``optimizer_states``, ``costs``, ``memory_budget``, ``kernels``: as for ``simulate``. ``training``: as for ``SearchOptions``.
    ``seconds``: no way is begun that is not expected to be over after so many seconds of a core, except the one that saves most (sharded
    and recomputed, and if nothing fits, the same in micro-batches). ``smaller``: makes the model for fewer samples; by default models of
    the zoo are made anew, and others not. SoapError in one line if the arguments do not fit together."""
    begin_s, topology = time.process_time(), with_memory_budget(topology_of(cluster), memory_budget)
    simulator = simulator_for(model, topology, optimizer_states=optimizer_states, costs=costs, training=training, kernels=kernels)
    graph = simulator.graph
    name, chosen = (strategy, named(strategy, graph, topology)) if isinstance(strategy, str) else (THIS, strategy)
    if isinstance(strategy, str):
        warn_without_effect(name, topology)
    with collector.seldom():
        asked = _way(simulator, name, chosen)
        return Fit(asked) if asked.fits else _Ways(simulator, asked, begin_s, seconds, smaller or smaller_zoo(graph)).found()


def fastest_that_fits(simulator: Simulator) -> Way | None:
    """The fastest way to take all samples at once that ``fits`` finds if data parallelism does not fit; None if it finds none."""
    begin_s = time.process_time()
    asked = _way(simulator, DATA_PARALLEL, simulator.data_parallel)
    with collector.seldom():
        return next(iter(_Ways(simulator, asked, begin_s, SECONDS, None).found().ways), None)


class _Candidate(NamedTuple):
    """A way. ``cost_ns``: how long a step takes, or 0 if that is not known."""

    name: str
    strategy: Strategy
    cost_ns: int


class _Ways:
    """Looks for ways that fit. Where the compiled simulator is there, it says how long each way takes, and which lack memory: what saves
    most first, then the fastest, until enough of them fit; these are played in full. Else all are played, those first that save most, as
    long as there is time."""

    def __init__(self, simulator: Simulator, asked: Way, begin_s: float, seconds: float, smaller: Smaller | None) -> None:
        self._simulator, self._asked, self._smaller = simulator, asked, smaller
        self._begin_s, self._seconds = begin_s, seconds
        self._tile_s = {folded: TILE_SECONDS for folded in (False, True)}
        self._tried: list[str] = []
        self._untried: list[str] = []
        self._evaluator: IncrementalSimulator | None = None
        self._shares: dict[str, float] = {}  # by name, the peak by the limit of the device that is filled most
        self._late = False
        names, again = saving_names(simulator.topology), bool(run_levels(simulator.graph, RECOMPUTED))  # else these change nothing
        self._names = sorted((own for own in names if again or {RECOMPUTE, SELECTIVE}.isdisjoint(own.split(JOIN))), key=_by_savings)

    def found(self) -> Fit:
        """The outcome: what was asked about, and the ways."""
        candidates, played = list[_Candidate](), list[Way]()
        try:
            self._look(candidates, played)
        except TimeIsUp:  # of the command that asks
            self._begin_s = -inf
            self._untried += [name for name in self._tried if name not in {*self._untried, *(way.name for way in played)}]
        ways = sorted((way for way in played if way.fits), key=lambda way: way.time_ns)[:MOST_WAYS]
        tried = tuple(name for name in self._tried if name not in self._untried)
        return Fit(self._asked, tuple(ways), tried, tuple(self._untried), None if ways else self._closest(candidates, played))

    def _look(self, candidates: list[_Candidate], played: list[Way]) -> None:
        """Add the ways that are looked at, and those that are played."""
        candidates += self._candidates()
        for own in sorted(candidates, key=lambda own: (own.name != self._names[0], own.cost_ns)):
            if self._evaluator is not None and sum(way.fits for way in played if way.name != self._names[0]) >= MOST_WAYS:
                break  # none of those left is faster
            if self._shares and (self._spent(1) or self._spent(1, self._expected_s(own.strategy))):  # what to expect takes long to find
                self._untried.append(own.name)
            elif self._share(own.name, own.strategy) <= 1:
                played.append(self._played(own.name, own.strategy))
        played += self._to_fit(candidates)
        played += self._in_parts(played)

    def _share(self, name: str, strategy: Strategy) -> float:
        """The peak by the limit, of the device that is filled most; 1 where only playing it in full tells."""
        begin_s, (folded, tiles) = time.process_time(), self._played_tiles(strategy)
        self._shares[name] = 1.0 if self._evaluator is None else self._evaluator.peak_share(strategy)
        self._tile_s[folded] = max(self._tile_s[folded], (time.process_time() - begin_s) / tiles)
        return self._shares[name]

    def _played(self, name: str, strategy: Strategy) -> Way:
        """A way, played in full."""
        begin_s, (folded, tiles) = time.process_time(), self._played_tiles(strategy)
        way = _way(self._simulator, name, strategy)
        self._tile_s[folded] = max(self._tile_s[folded], (time.process_time() - begin_s) / tiles)
        return way

    def _spent(self, share: float, more_s: float = 0.0) -> bool:
        """Whether this share of the time is over, or will be ``more_s`` from now."""
        return time.process_time() - self._begin_s + more_s > share * self._seconds

    def _expected_s(self, strategy: Strategy) -> float:
        """About what it takes to play a strategy in full, if it takes as long for each tile as the slowest one did, of those that are made
        of equal copies or of the others."""
        folded, tiles = self._played_tiles(strategy)
        return self._tile_s[folded] * tiles

    def _played_tiles(self, strategy: Strategy) -> tuple[bool, int]:
        """Whether two copies are played, as it is made of equal ones, and how many tiles that are."""
        folding = self._simulator.folding(strategy, nearly=True)
        if isinstance(folding, str):
            return False, tile_count(strategy)
        return True, tile_count(folding.copies.strategy)

    def _candidates(self) -> list[_Candidate]:
        """The ways."""
        from soap.simulator.incremental import IncrementalSimulator  # compiled code

        graph, topology = self._simulator.graph, self._simulator.topology
        late = self._late = self._spent(0.5)  # then there is no time to weigh them, and few are played
        self._evaluator = None if late or not IncrementalSimulator.begins_at_once() else IncrementalSimulator(self._simulator)
        known, found = [self._asked.strategy], list[_Candidate]()
        for name in self._names:
            if found and (len(found) == MOST_WAYS if late else self._spent(0.5)):
                self._untried.append(name)
                continue
            strategy = named(name, graph, topology)
            if strategy in known:
                continue
            known.append(strategy)
            self._tried.append(name)
            if certainly_lacks(graph, topology, strategy):
                continue
            if found and not late and self._spent(1, self._expected_s(strategy)):
                self._untried.append(name)
            else:
                found.append(self._looked_at(name, strategy))
        return found

    def _looked_at(self, name: str, strategy: Strategy) -> _Candidate:
        """A strategy with the time that the compiled simulator, if it is there, finds for it."""
        return _Candidate(name, strategy, 0 if self._evaluator is None else self._evaluator.makespan_ns(strategy))

    def _to_fit(self, candidates: Sequence[_Candidate]) -> list[Way]:
        """The fastest strategy that lacks memory, and does not if all its runs are recomputed, with as little recomputed as fits."""
        asked, evaluator = self._asked, self._evaluator
        known = (_Candidate(asked.name, asked.strategy, asked.time_ns), *candidates)
        wholes = {own.name for own in candidates if self._shares.get(own.name, 2) <= 1}
        lacking = (own for own in known if own.name == asked.name or self._shares.get(own.name, 0) > 1)
        bases = [own for own in lacking if on_top(own.name, RECOMPUTE) in wholes]
        if not bases or evaluator is None:
            return []
        base = min(bases, key=lambda own: own.cost_ns)
        name = f"{base.name}, recomputed to fit"
        if self._spent(TO_FIT, self._expected_s(base.strategy)):
            self._untried.append(name)
            return []
        self._tried.append(name)

        def share(strategy: Strategy) -> float:
            in_time = not self._spent(1, 2 * self._expected_s(strategy))  # the last one is played in any case
            return evaluator.peak_share(strategy) if in_time else 0

        own = self._simulator
        made = recompute_to_fit(own.graph, own.topology, base.strategy, own.costs, share)
        return [replace(_way(own, name, made.strategy), budgeted=made, base=base.name)]

    def _in_parts(self, played: Sequence[Way]) -> list[Way]:
        """Ways whose samples go through in several batches, in as few as fit. ``played``: the ways so far. If none of these fits, what
        saves most in the most micro-batches, whatever the time."""
        coupled, found = couples_samples(self._simulator.graph), list[Way]()
        if not self._late and not is_large(self._asked.strategy):
            found = self._in_smaller_batches() if coupled else self._in_micro_batches(played)
        if not coupled and not any(way.fits for way in (*played, *found)):
            names = [in_micro_batches(self._names[0], count) for count in counts(self._simulator.graph)]
            legal = [(name, made) for name in reversed(names) if name not in self._tried and (made := self._legal(name)) is not None]
            self._tried += [name for name, _ in legal[:1]]
            found += [self._played(name, strategy) for name, strategy in legal[:1]]
        return found

    def _legal(self, name: str) -> Strategy | None:
        """The strategy of this name; None if there are more devices than samples in a micro-batch."""
        try:
            strategy = named(name, self._simulator.graph, self._simulator.topology)
            strategy.validate(self._simulator.graph, self._simulator.topology.device_count)
            return strategy
        except StrategyError:
            return None

    def _in_micro_batches(self, played: Sequence[Way]) -> list[Way]:
        """Plans with micro-batches, if they may be among the fastest."""
        found = list[Way]()
        for base, count in ((base, count) for base in BASES for count in counts(self._simulator.graph)):
            name = in_micro_batches(base, count)
            if any(way.fits and way.name.startswith(base + JOIN) for way in found) or (strategy := self._legal(name)) is None:
                continue
            if self._spent(1) or self._spent(1, self._expected_s(strategy)):
                self._untried.append(name)
                continue
            self._tried.append(name)
            slowest_ns = sorted(way.time_ns for way in (*played, *found) if way.fits)[MOST_WAYS - 1 : MOST_WAYS]
            if not slowest_ns or self._looked_at(name, strategy).cost_ns < slowest_ns[0]:
                found.append(self._played(name, strategy))
        return found

    def _in_smaller_batches(self) -> list[Way]:
        """Data parallelism of the model for fewer samples."""
        own, found = self._simulator, list[Way]()
        for count in counts(own.graph) if self._smaller is not None else ():
            assert self._smaller is not None
            if self._spent(1, READING_SECONDS * len(own.graph.operators) + self._expected_s(self._asked.strategy)):
                self._untried.append(f"{DATA_PARALLEL} in {count} batches")
                break
            self._tried.append(f"{DATA_PARALLEL} in {count} batches")
            samples = samples_of(own.graph) or count
            simulator = Simulator(self._smaller(samples // count), own.topology, own.costs, own.optimizer_states, own.training)
            strategy = named(DATA_PARALLEL, simulator.graph, own.topology)
            found.append(_way(simulator, DATA_PARALLEL, strategy, count))
            if found[-1].fits:
                break
        return found

    def _closest(self, candidates: Sequence[_Candidate], played: Sequence[Way]) -> Way:
        """The way that lacks least, if nothing fits: among what was played, and the way that is known to lack least."""
        nearest = min((own for own in candidates if own.name in self._shares), key=lambda own: self._shares[own.name], default=None)
        late = nearest is None or self._spent(1, self._expected_s(nearest.strategy))
        further = [] if nearest is None or late else [_way(self._simulator, nearest.name, nearest.strategy)]
        return min([self._asked, *played, *further], key=lambda way: way.lacking_bytes)


def _by_savings(name: str) -> tuple[bool, bool, int, int]:
    """Sort key: ways that save most first; those that split operators otherwise than data parallelism later, as they move more, and those
    with something on hosts last, as these update slowly."""
    parts = name.split(JOIN)
    split = base_of(name)[0] not in (DATA_PARALLEL, RECOMPUTE, *BY_SAVINGS)
    again = next((place for place, own in enumerate((RECOMPUTE, SELECTIVE)) if own in parts), 2)
    shared = next((place for place, own in enumerate(BY_SAVINGS) if own in parts), 3)
    return OFFLOAD in parts, split, again, shared


def _way(simulator: Simulator, name: str, strategy: Strategy, micro_batches: int = 1) -> Way:
    """A strategy, played in full; two of its copies if it is made of nearly equal ones."""
    folded, topology = "" if micro_batches > 1 else simulator.run_folded(strategy, nearly=True), simulator.topology
    found = simulator.run(strategy) if isinstance(folded, str) else folded
    peaks, kinds, step_ns = list(found.peak_bytes), [dict(own) for own in found.peak_by_kind], found.makespan_ns
    if micro_batches > 1 and not isinstance(found, FoldedSimulation):
        step_ns = found.step_ns(micro_batches)
        for device, more in enumerate(kept_between(found.plan, micro_batches)):
            peaks[device] += sum(more.values())
            kinds[device] = {kind: size + more.get(kind, 0) for kind, size in kinds[device].items()}
    lacking = overflow_bytes(peaks, topology) + lacking_on_hosts(found.host_memory, topology)
    limits = topology.memory_limits
    fullest = max(range(len(peaks)), key=lambda device: peaks[device] / limits[device])
    on, peak = topology.devices[fullest].name, peaks[fullest]
    return Way(name, simulator.graph.name, strategy, step_ns, on, peak, limits[fullest], kinds[fullest], lacking, micro_batches)
