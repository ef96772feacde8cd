"""Where a search begins: which starts there are, in which order they are evaluated, how they are brought into the space, and for which
further ones they call: those that save memory where it binds, shared parameters, pipelines and layers on servers where these are faster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from soap.cluster.topology import Topology
from soap.search.allowed_space import allowed_syncs
from soap.search.constraints import brought_inside
from soap.search.grid import MOST_EVALUATED, MOST_SCHEDULES, MOST_TILES, Mixture, by_other_schedules, mixtures, pipelines_may_pay
from soap.search.layer_placement import layer_placement
from soap.search.lossy import lossy_starts, lossy_ways
from soap.search.offloading import budgeted_offloading, offloading_starts, with_offloading
from soap.search.options import SearchOptions
from soap.search.pipelining import PROMISING, is_cut, is_legal, keeps_stages, pipeline_start, require_inside
from soap.search.recomputing import recompute_to_fit, recomputing_starts, with_recomputation
from soap.search.record import Recorder
from soap.search.rough_costs import RoughCosts
from soap.search.shares import shifted
from soap.search.sharing import shared_starts
from soap.search.space import Space
from soap.search.starts import (
    BASELINE,
    INITIAL,
    Start,
    are_allowed,
    check_start,
    different,
    reference_strategies,
    starting_strategies,
)
from soap.strategy.config import Strategy
from soap.strategy.named import (
    GATHER_AGAIN,
    OFFLOAD,
    OFFLOAD_KEPT,
    PIPELINE,
    RECOMPUTE,
    SEQUENCE_PARALLEL,
    UNEVEN,
    base_of,
    is_simulated,
    named,
    on_top,
    saving_starts,
)
from soap.strategy.ralp import RALP
from soap.strategy.sync import in_one_partition

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator

NO_STARTS: Mapping[str, Callable[[], Strategy]] = MappingProxyType({})
AWAY = ((OFFLOAD,), (RECOMPUTE, OFFLOAD), (OFFLOAD_KEPT, OFFLOAD))
"""What is put on a pipeline for which devices lack memory, where hosts may keep something (``soap.search.offloading``)."""


def inside(space: Space, options: SearchOptions, strategy: Strategy) -> Strategy:
    """The strategy with what violates the constraints changed; itself if nothing does."""
    return require_inside(strategy, in_one_partition(brought_inside(space, strategy), options.uncut))


def first_starts(
    space: Space, topology: Topology, options: SearchOptions, names: Sequence[str] | None, usual: Start
) -> dict[str, Strategy]:
    """Name -> strategy, in the order of evaluation: the starts for which no costs need to be known."""
    saving = () if usual.fits else [name for name in saving_starts(topology) if options.recompute is not False or RECOMPUTE not in name]
    strategies = starting_strategies(space.graph, topology, names, options.initial, options.seed, space.syncs, saving)
    strategies[BASELINE] = usual.strategy
    found = {name: inside(space, options, own) for name, own in strategies.items() if name == INITIAL or keeps_stages(space, own)}
    lossy = lossy_starts(space.graph, found.get(BASELINE, usual.strategy), options.compressions, lossy_ways(topology))
    return found | {name: inside(space, options, own) for name, own in lossy.items() if keeps_stages(space, own)}


def with_starts(
    space: Space,
    topology: Topology,
    evaluator: IncrementalSimulator,
    recorder: Recorder,
    options: SearchOptions,
    first: Mapping[str, Strategy],
    further: Mapping[str, Callable[[], Strategy]],
    evaluate: Callable[[str, Strategy], None],
) -> Space:
    """Evaluate all starts but those that are recorded already. Returns the space with what they call for, and with what informed proposals
    borrow from."""
    strategies = dict(first)

    def tried(name: str, strategy: Strategy) -> None:
        strategies[name] = inside(space, options, strategy)
        evaluate(name, strategies[name])

    for name, strategy in first.items():
        if all(strategy is not start.strategy for start in recorder.starts):
            evaluate(name, strategy)
    for name, make in further.items():
        if keeps_stages(space, own := make()):
            tried(name, own)
    more = _More(space, topology, evaluator, recorder, options, tried)
    more.everything()
    space = more.space
    references = reference_strategies(space.graph, topology, (own for own in strategies.values() if not is_cut(own)))
    return replace(space, references=different(inside(space, options, own) for own in references if keeps_stages(space, own)))


def start_names(options: SearchOptions, further_starts: Collection[str]) -> list[str] | None:
    """The starts that the options name, without those made elsewhere; None if they name none. StrategyError if there is no such start."""
    names = [name for name in options.starts or () if name not in further_starts]
    for name in names:
        check_start(name)
    return None if options.starts is None else [name for name in names if not is_simulated(name)]


@dataclass
class _More:
    """Starts that split matrices in stages, share parameters, have layers on servers, recompute, offload or are pipelines, as far as what
    was recorded before calls for them. ``space``: with what they do. ``evaluate``: records a start."""

    space: Space
    topology: Topology
    evaluator: IncrementalSimulator
    recorder: Recorder
    options: SearchOptions
    evaluate: Callable[[str, Strategy], None]

    @property
    def _least_ns(self) -> float:
        """The cost of the best start that fits; infinite if none does."""
        return min((start.cost_ns for start in self.recorder.starts if start.fits), default=inf)

    def everything(self) -> None:
        """Evaluate all of them."""
        topology, evaluator, recorder, options = self.topology, self.evaluator, self.recorder, self.options
        may_pay = self._mixtures()
        self._sharing()
        self._layers_on_servers()
        self._uneven_shares()
        if (more := recomputing_starts(self.space, topology, evaluator, recorder.starts, wanted=options.recompute)) is not None:
            self.space, recorder.budgeted = with_recomputation(self.space), more[1]
            for name, strategy in more[0].items():
                if keeps_stages(self.space, strategy):
                    self.evaluate(name, strategy)
        if offloading := offloading_starts(self.space.graph, topology, recorder.starts, options):
            self.space = with_offloading(self.space)
            for name, strategy in offloading.items():
                self.evaluate(name, strategy)
            away = budgeted_offloading(self.space.graph, topology, evaluator, recorder.starts)
            recorder.budgeted = {**recorder.budgeted, **away}
            for name, own in away.items():
                self.evaluate(name, own.strategy)
        wanted = True if options.starts is not None and PIPELINE in options.starts else options.pipelines
        best = min((start for start in recorder.starts if start.fits), key=lambda start: start.cost_ns, default=None)
        many = best is not None and evaluator.steady(best.strategy) is not None  # a pipeline of its own kind would take minutes to tell
        wanted = False if wanted is None and (many or not may_pay) else wanted
        pipeline = pipeline_start(self.space, topology, evaluator, recorder.starts, wanted=wanted, named=options.starts is not None)
        if pipeline is not None:
            self.evaluate(PIPELINE, pipeline)
            self._pipelines_that_save()

    def _mixtures(self) -> bool:
        """If data parallelism lacks memory and nobody names starts, evaluate the ``grid.mixtures`` that rough costs expect to be faster
        than the best start that fits, the most promising first; pipelines that only another schedule than 1F1B makes as fast by that one;
        and the best pipeline of all by a few more. Returns whether a pipeline that keeps everything may be."""
        space, topology, options, evaluator = self.space, self.topology, self.options, self.evaluator
        lacking = any(start.name == BASELINE and not start.fits for start in self.recorder.starts)
        if options.starts is not None or not lacking:
            return True
        left, count, pipelines = MOST_TILES, 0, list[tuple[Start, Mixture]]()
        rough = RoughCosts(evaluator.shared)
        found = mixtures(space.graph, topology, rough, evaluator.optimizer_states, recompute=options.recompute is not False)
        for own in found:
            if count == MOST_EVALUATED or (count and left < 0):
                break
            at_most_ns, schedules = self._least_ns, list[str]()
            hopeless = own.least_ns > at_most_ns or (own.lacking_bytes > 0 and at_most_ns < inf)
            if hopeless or (own.stages > 1 and options.pipelines is False):
                continue
            if own.expected_ns > PROMISING * at_most_ns and not (schedules := by_other_schedules(own)[:1]):
                continue  # only another schedule could make it the best
            left -= own.tiles
            if (count and left < 0) or (start := self._mixture(reduce(on_top, schedules, own.name))) is None:
                continue
            count += 1
            if start.fits and own.stages > 1:
                pipelines.append((start, own))
        if pipelines:
            start, own = min(pipelines, key=lambda one: one[0].cost_ns)
            known = {one.name for one in self.recorder.starts}
            for schedule in by_other_schedules(own)[:MOST_SCHEDULES]:
                name = on_top(own.name, schedule)
                name = on_top(name, GATHER_AGAIN) if GATHER_AGAIN in start.name else name
                if name not in known:
                    self._mixture(name)
        return pipelines_may_pay(topology, found, PROMISING * self._least_ns)

    def _mixture(self, name: str) -> Start | None:
        """Evaluate a mixture unless the space is without it. If it lacks memory where sequences are split as well, it gathers them again in
        the backward pass."""
        space, topology = self.space, self.topology
        strategy = named(name, space.graph, topology)
        allowed = are_allowed(strategy.parameters, space.syncs) and is_legal(space, topology, strategy)
        if not allowed or not keeps_stages(space, strategy):
            return None
        self.evaluate(name, strategy)
        start = self.recorder.starts[-1]
        keeps = name.startswith(SEQUENCE_PARALLEL) and GATHER_AGAIN not in name and self.options.recompute is not False
        return start if start.fits or not keeps else self._mixture(on_top(name, GATHER_AGAIN))

    def _sharing(self) -> None:
        """Evaluate starts whose parameters are owned in parts, if they are faster than all others that fit. If there are any, every
        parameter of the space may be owned so; else the space stays as it was, so that a search which gains nothing by it is as without
        it."""
        space, options, evaluator = self.space, self.options, self.evaluator
        if options.syncs or options.starts is not None:
            return
        syncs = allowed_syncs(space.graph, self.topology, options, saving=True)
        for name, strategy in shared_starts(space.graph, self.topology, self.recorder.starts, syncs).items():
            faster = keeps_stages(space, strategy) and evaluator.makespan_ns(strategy) < self._least_ns
            if faster and evaluator.overflow_bytes(strategy) == 0:
                self.evaluate(name, strategy)
                self.space = replace(space, syncs=syncs)

    def _layers_on_servers(self) -> None:
        """Evaluate the starts ``ralp`` and ``ralp:N`` that the options name; if they name none at all, ``ralp`` where some hosts are
        servers, a cut gains enough, and constraints and methods allow it."""
        space, topology, options = self.space, self.topology, self.options
        asked = [name for name in options.starts or () if is_simulated(name) and base_of(name)[0] == RALP]
        usual = options.starts is None and topology.servers and not options.syncs
        for name in asked or ((RALP,) if usual else ()):
            found = layer_placement(space.graph, topology, self.evaluator, self.evaluator.shared.costs, count=base_of(name)[1])
            strategy = brought_inside(space, found.strategy)
            if asked or (found.friendly and strategy is found.strategy):
                self.evaluate(name, strategy)

    def _uneven_shares(self) -> None:
        """Where devices differ, and nobody names starts, evaluate data parallelism with shares that suit their speed, if that is
        allowed."""
        graph = self.space.graph
        if self.options.starts is not None:
            return
        strategy = named(on_top(BASELINE, UNEVEN), graph, self.topology)
        if strategy != named(BASELINE, graph, self.topology) and brought_inside(self.space, strategy) is strategy:
            self.evaluate(UNEVEN, shifted(graph, self.evaluator, strategy))

    def _pipelines_that_save(self) -> None:
        """If the pipeline that was evaluated last does not fit, evaluate what saves memory on top of it until something does."""
        graph, topology, starts, recompute = self.space.graph, self.topology, self.recorder.starts, self.options.recompute
        base = starts[-1].strategy
        if starts[-1].fits:
            return
        if recompute is not False:
            self.space, name = with_recomputation(self.space), f"{PIPELINE}, recompute"
            made = recompute_to_fit(graph, topology, base, self.evaluator.shared.costs, self.evaluator.peak_share)
            if is_legal(self.space, topology, made.strategy):
                self.recorder.budgeted = {**self.recorder.budgeted, name: made}
                self.evaluate(name, made.strategy)
        for added in AWAY if self.space.by_field.get("offload") else ():
            name = PIPELINE
            for own in added:
                name = on_top(name, own)
            strategy = named(name, graph, topology, base)
            if starts[-1].fits or (recompute is False and RECOMPUTE in added) or not is_legal(self.space, topology, strategy):
                continue
            self.evaluate(name, strategy)
