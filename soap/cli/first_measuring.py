"""What ``soap-search`` measures before it searches, within some seconds: the cluster's links, and the model's computations, those first
that decide which plan is chosen; once the choice is sure, what its prediction rests on, and no more. It measures the same as
``soap-profile links`` and ``soap-profile MODEL`` and keeps it in the same store: what is known is not measured again, and the next search
goes on with what is left. No failure here ends a search.

If the machines of a cluster are at hand, ``soap-search`` measures before it searches and runs what it found, unless it is told not
to. What the user has asked for must be possible, and its failure ends the command. What is done by default is skipped with one line if
it fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Any

from tqdm import tqdm

from soap import api
from soap.api.informing import TILES, Thing, WhatDecides
from soap.api.predictions import announce_compiling
from soap.cli import emulation, links, verification
from soap.cli import wanted as room
from soap.cli.command import UsageError, note, one_line
from soap.cli.options import Reading
from soap.cli.profile import NAMED_GROUP
from soap.cli.stopping import Stopping
from soap.cli.updating import Updating
from soap.cli.wanted import Wanted, wanted
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.kinds import types_of
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure, SoapError, StoppedBySignal
from soap.measure.link_probes import NEEDED, Probe, probes_for
from soap.model.graph import OperatorGraph
from soap.profiles.keys import Environment, TileKey, only_environment
from soap.profiles.link_places import link_place
from soap.profiles.measured_links import known_links
from soap.profiles.store import Store
from soap.runtime.comm.launched import under_launcher
from soap.search.options import SearchOptions
from soap.simulator.costs import CostSource
from soap.strategy.classical import CLASSICAL, NAMED
from soap.strategy.config import Strategy
from soap.time_limit import TimeIsUp

QUICK_BUDGET, QUICK_S = 200, 5.0
"""Proposals and seconds of a quick search: enough to see what a long one would be tempted by."""
MOST_PLANS = 4
"""Plans that are compared, beside the one that must be beaten."""
DRAWS = 256
LEAST_VALUE = 0.002
"""What is worth less than this share of an iteration is not measured: a minute of measuring is as much of eight hours of training."""
RESTS_ON = 0.9
"""Share of a plan's computation that is measured even if the choice is sure."""
DECIDING = "plans that may be chosen"
"""The group of what they need."""


@dataclass(frozen=True)
class Aim:
    """``sure``: nothing measurable changes the choice. ``todo``: what decides, the most valuable first; else what a prediction rests on."""

    sure: bool
    todo: tuple[Wanted, ...] = ()


def aim(graph: OperatorGraph, topology: Topology, options: SearchOptions) -> Aim | None:
    """What to measure before a search with these options, by the costs that are known now; None if that cannot be said, because there is
    only one plan. KeyboardInterrupt ends it; SoapError if the search would fail, too."""
    from soap.simulator.incremental import IncrementalSimulator  # compiled code

    if not IncrementalSimulator.begins_at_once():
        announce_compiling()
    seconds = QUICK_S if options.seconds is None else min(QUICK_S, options.seconds)
    outcome = api.find(graph, topology, replace(options, budget=min(QUICK_BUDGET, options.budget), seconds=seconds), polish=False)
    if outcome.result.interrupted:
        raise KeyboardInterrupt
    starts = sorted((start for start in outcome.result.starts if start.fits), key=lambda start: start.cost_ns)
    reference = outcome.usual or (starts[0].strategy if starts else None)
    others = [plan.strategy for plan in outcome.result.finalists if plan.strategy != reference][:MOST_PLANS]
    if reference is None or not others:
        return None
    plans = {"reference": reference, **{f"plan {number}": plan for number, plan in enumerate(others, 1)}}
    found = api.what_decides(outcome.simulator, plans, "reference", draws=DRAWS)
    if found.value_to_measure_ns <= LEAST_VALUE * found.reference.mean_ns:
        return Aim(sure=True, todo=tuple(_rests_on(graph, topology, reference)))
    return Aim(sure=False, todo=tuple(_most_valuable_first(graph, topology, list(plans.values()), found)))


def _rests_on(graph: OperatorGraph, topology: Topology, plan: Strategy) -> list[Wanted]:
    """What every prediction needs, then the fewest computations that make up ``RESTS_ON`` of the plan's."""
    everything = wanted(graph, topology, {DECIDING: [plan]})
    own = [one for one in everything if one.group == DECIDING]
    spent = accumulate((one.estimated_ns for one in own), initial=0)  # before each of them; the most expensive come first
    enough = RESTS_ON * sum(one.estimated_ns for one in own)
    return [*_upkeep_first(everything), *(one for one, before in zip(own, spent, strict=False) if before < enough)]


def _upkeep_first(everything: Sequence[Wanted]) -> list[Wanted]:
    return list(takewhile(lambda one: one.tile is None, everything))


def _most_valuable_first(graph: OperatorGraph, topology: Topology, plans: Sequence[Strategy], found: WhatDecides) -> list[Wanted]:
    """What every prediction needs, then the plans' computations."""
    ranks = {matter.thing: rank for rank, matter in enumerate(found.matters)}
    everything = wanted(graph, topology, {DECIDING: plans})

    def rank(one: Wanted) -> int:
        return min(ranks.get(Thing(TILES, device.name, one.kind), len(ranks)) for device in types_of(topology))

    own = [one for one in everything if one.group == DECIDING]
    return [*_upkeep_first(everything), *sorted(own, key=lambda one: rank(one))]


def in_turn(aimed: Aim | None, unknown: Sequence[Wanted]) -> tuple[list[Wanted], list[Wanted]]:
    """What is not known, in two parts: what decides, as it was aimed at, and the rest as it was ordered."""
    by_key: dict[TileKey, Wanted] = {one.key: one for one in unknown}
    first = [one for one in (aimed.todo if aimed is not None else ()) if one.key in by_key]
    taken = {one.key for one in first}
    return first, [one for one in unknown if one.key not in taken]


DEFAULT_S = 60.0
LINKS_SHARE = 2 / 3
"""Share of the time that links may take while computations are left to measure. On one machine half a minute suffices."""
PROBE_S = 0.1
"""Seconds for each size and group: a third of what ``soap-profile links`` takes, which has no time limit."""


@dataclass(frozen=True)
class Measured:
    """What was measured now, and what is left. ``problem``: why some of it could not be measured, in one line; empty if all went well.
    ``sure``: whether measuring ended because nothing that is left is worth it."""

    seconds: float
    probes: int
    probes_left: int
    computations: int
    computations_left: int
    problem: str = ""
    sure: bool = False

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON values. The keys are part of the command's interface."""
        left = {"probes_left": self.probes_left, "computations_left": self.computations_left, "sure": self.sure}
        done = {"seconds": round(self.seconds, 1), "probes": self.probes, "computations": self.computations}
        return {**done, **left, "problem": self.problem or None}

    @property
    def text(self) -> str:
        """The result as one line."""
        left = self.probes_left + self.computations_left
        why = "the choice is sure without them" if self.sure else "with which the next search or soap-profile goes on"
        rest = f"; {left} are left, {why}" if left else ""
        if not self.probes and not self.computations:
            return f"measured nothing now{rest or ': everything was known'}"
        return f"measured first, in {self.seconds:.0f} s: {self.probes} probes of links, {self.computations} computations{rest}"


def measure_first(
    model: str,
    reading: Reading,
    graph: OperatorGraph,
    topology: Topology,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    options: SearchOptions | None = None,
) -> Measured:
    """Measure for so many seconds what the store lacks. ``options``: of the search that follows, by which measuring is aimed; None: it is
    not. KeyboardInterrupt and StoppedBySignal are raised again; what was measured is kept."""
    return _FirstMeasuring(model, reading, graph, topology, seconds, clock, options).run()


@dataclass
class _FirstMeasuring:
    """Measuring for some seconds. ``problems``: what could not be measured and why. The time that aiming takes is not measuring's."""

    model: str
    reading: Reading
    graph: OperatorGraph
    topology: Topology
    seconds: float
    clock: Callable[[], float]
    options: SearchOptions | None
    problems: list[str] = field(default_factory=list)
    probes: int = 0
    computations: int = 0
    aiming_s: float = 0.0
    sure: bool = False

    def __post_init__(self) -> None:
        self.began = self.clock()

    def run(self) -> Measured:
        """Links, then computations, as long as there is time and the choice is not sure. No choice is sure by links of this machine that
        were not measured: what messages take on shared cores is assumed until then, and may be ten times as long."""
        probes: list[Probe] = []
        todo: list[Wanted] = []
        try:
            store = Store()
            place = only_environment(self.topology)
            probes = _unknown_probes(self.topology, store)
            todo = _unknown(self.graph, self.topology, place, store)
        except Exception as error:  # any error: a search can do without measurements
            self.problems.append(_line(error))
        assumed = any(probe.operation in NEEDED for probe in probes)
        aimed = self._aim() if (probes or todo) and not assumed else None
        if probes and not self.sure:
            self._measure("links", lambda: self._probe(probes, store, has_more=bool(todo)))
        if assumed and self.probes and todo:
            aimed = self._aim()
        if todo:
            self._measure("computations", lambda: self._compute(aimed, todo, place, store))
        left = len(probes) - self.probes, len(todo) - self.computations
        return Measured(self.clock() - self.began, self.probes, left[0], self.computations, left[1], "; ".join(self.problems), self.sure)

    def _probe(self, todo: Sequence[Probe], store: Store, *, has_more: bool) -> None:
        self.probes += _links(self.topology, todo, store, self.seconds * (LINKS_SHARE if has_more else 1.0))

    def _compute(self, aimed: Aim | None, todo: Sequence[Wanted], place: Environment, store: Store) -> None:
        """What decides first, then what decides by that, and the rest; once the choice is sure, only what its prediction rests on."""
        room.require_for_tiles(self.graph, self.topology)
        first, rest = in_turn(aimed, todo)
        if first and not self.sure:
            self._compute_these(first, place, store)
            first, rest = in_turn(self._aim() if rest and self._left_s() > 0 else None, rest)
        self._compute_these(first if self.sure else [*first, *rest], place, store)

    def _compute_these(self, todo: Sequence[Wanted], place: Environment, store: Store) -> None:
        if todo and (left_s := self._left_s()) > 0:
            self.computations += _computations(self.model, self.reading, self.topology, place, todo, store, left_s)

    def _left_s(self) -> float:
        return self.seconds + self.aiming_s - (self.clock() - self.began)

    def _aim(self) -> Aim | None:
        """What decides by all that is known now; None if it cannot be said, and everything is measured in its usual order."""
        if self.options is None:
            return None
        began = self.clock()
        try:
            found = aim(self.graph, self.topology, self.options)
        except SoapError:  # measuring can do without an aim, and the search that follows says what is wrong
            return None
        finally:
            self.aiming_s += self.clock() - began
        self.sure = found is not None and found.sure
        return found

    def _measure(self, what: str, measuring: Callable[[], None]) -> None:
        try:
            measuring()
        except (KeyboardInterrupt, StoppedBySignal):
            raise
        except Exception as error:
            self.problems.append(f"{what}: {_line(error)}")


def _unknown_probes(topology: Topology, store: Store) -> list[Probe]:
    """Probes without which links count as not measured come first."""
    place = link_place(topology, links.backend_of("auto", topology), emulated=family(topology.name) == EMULATED)
    known = {timing.probe for timing in known_links(topology, place, store)}
    return sorted((probe for probe in probes_for(topology) if probe not in known), key=lambda probe: probe.operation not in NEEDED)


def _unknown(graph: OperatorGraph, topology: Topology, place: Environment, store: Store) -> list[Wanted]:
    known = {entry.key for entry in store.entries(place)}
    classical = [api.classical(name, graph, topology) for name in (NAMED if graph.sparse else CLASSICAL)]
    return [one for one in wanted(graph, topology, {NAMED_GROUP: classical}) if one.key not in known]


def _links(topology: Topology, todo: Sequence[Probe], store: Store, seconds: float) -> int:
    emulated = family(topology.name) == EMULATED
    place = link_place(topology, links.backend_of("auto", topology), emulated=emulated)
    hosts = emulation.limits(topology, 1.0) if emulated else ()
    stop_at = time.time() + seconds
    return links.measure(topology, place, todo, store, hosts, seconds_per_probe=PROBE_S, stop_at=stop_at) or 0


def _computations(
    model: str, reading: Reading, topology: Topology, place: Environment, todo: Sequence[Wanted], store: Store, seconds: float
) -> int:
    from soap.cli.measuring import measure  # torch

    whole_ns, done_ns = max(1, sum(one.estimated_ns for one in todo)), 0
    with tqdm(total=len(todo), desc="measuring computations", unit="computation", disable=None, leave=False) as bar:

        def progress(one: Wanted) -> None:
            nonlocal done_ns
            done_ns += one.estimated_ns
            bar.set_postfix_str(f"{done_ns / whole_ns:.0%} of their time", refresh=False)
            bar.update()

        return measure(model, reading, topology, place, todo, store, None, progress, time.monotonic() + seconds)


def _line(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__


ESTIMATE: CostSource = "estimate"
MEASURING_SHARE, MOST_SHARE = 0.3, 0.4
"""Parts of the time that is left that measuring may take, and after which it is ended."""


@dataclass(frozen=True)
class Wish:
    """What to measure and run. ``profile_s``: seconds of measuring, 0 for none. ``finalists``: number of strategies to run, 0 for none.
    ``asked``: whether the user has asked for the runs. ``problem``: why nothing is done by default, or empty."""

    profile_s: float = 0.0
    finalists: int = 0
    asked: bool = False
    problem: str = ""


def check_asked(cluster: str, profile_s: float | None, finalists: int | None, costs: CostSource) -> None:
    """UsageError or RuntimeFailure if this machine cannot do what the user has asked for."""
    if profile_s and family(cluster) is None:
        raise UsageError(
            f"--profile measures this machine, and --cluster is {cluster!r}; expected --cluster local:N or emulated:HxD@RATE, or no "
            "--profile"
        )
    if profile_s and costs == ESTIMATE:
        raise UsageError("--profile with --costs estimate, which ignores measurements; leave one of them out")
    if profile_s and family(cluster) == EMULATED:
        require_support()
    if finalists:
        verification.check_possible(cluster)


def check_none_asked(profile_s: float | None, finalists: int | None) -> None:
    """UsageError if measuring or running is asked for with several clusters: plans that were run do not compare with predicted ones."""
    for option, value in (("--profile", profile_s), ("--verify", finalists)):
        if value:
            raise UsageError(f"{option} with several --cluster, which are compared by predictions; expected one --cluster, or no {option}")


def wish(topology: Topology, profile_s: float | None, finalists: int | None, costs: CostSource) -> Wish:
    """What to measure and run for this cluster. None stands for options that the user has not given."""
    usable = (profile_s, finalists) != (0, 0) and family(topology.name) is not None and topology.device_count > 1
    problem, at_hand = "", usable and not under_launcher(os.environ)
    if at_hand and family(topology.name) == EMULATED and (profile_s is None or finalists is None):
        try:
            require_support()
        except RuntimeFailure as error:
            at_hand, problem = False, f"nothing is measured or run: {error}"
    usual_s = DEFAULT_S if at_hand and costs != ESTIMATE else 0.0
    usual = verification.DEFAULT_FINALISTS if at_hand else 0
    wanted = usual_s if profile_s is None else profile_s, usual if finalists is None else finalists
    return Wish(*wanted, asked=bool(finalists), problem=problem)


def profile(
    prog: str,
    model: str,
    reading: Reading,
    graph: OperatorGraph,
    topology: Topology,
    wish: Wish,
    stopping: Stopping,
    options: SearchOptions | None = None,
) -> tuple[Measured | None, Wish]:
    """Measure, first what decides a search with these options. Returns what is still to be done. After Ctrl-C the search goes on, but
    nothing is run behind it; after SIGTERM it ends at once, with the best of its starts."""
    limit = stopping.limit
    try:
        with limit.part(MOST_SHARE):
            seconds = limit.seconds(MEASURING_SHARE, wish.profile_s) or wish.profile_s
            measured = measure_first(model, reading, graph, topology, seconds, options=options)
    except TimeIsUp:
        note(prog, "the time for measuring is over: the search goes on with what is known")
        return None, wish
    except (KeyboardInterrupt, StoppedBySignal) as error:
        if isinstance(error, StoppedBySignal):  # while ranks were measuring
            stopping.number = error.number
        if not stopping.is_terminated:
            stopping.go_on()
            note(prog, "measuring interrupted: the search goes on with what is known and will run nothing afterwards; Ctrl-C ends it")
        return None, replace(wish, finalists=0)
    if measured.problem:
        note(prog, f"not everything was measured; the search goes on with what is known: {measured.problem}")
    return measured, wish


def verify(
    prog: str,
    outcome: api.SearchOutcome,
    model: str,
    reading: Reading,
    seed: int,
    data: str | None,
    wish: Wish,
    optimizer: str | Updating = "adam",
    most_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[api.SearchOutcome, float | None]:
    """Run the strategies. Returns the outcome with what was measured, and the seconds that it took. If it fails: an error if the user
    has asked for it; otherwise one line, and None. ``most_s``: seconds for it; None: the usual ones."""
    began = clock()
    seconds = verification.ASKED_S if wish.asked else verification.DEFAULT_S
    if most_s is not None and most_s < 2 * verification.STARTING_S:
        note(prog, f"nothing was verified: {most_s:.0f} s are left for it; the search's choice by predictions stands")
        return outcome, None
    seconds = seconds if most_s is None else min(seconds, most_s)
    try:
        chances = not wish.asked  # plans that cannot win are not run by default
        outcome = verification.verify(outcome, wish.finalists, model, reading, seed, data, optimizer, seconds=seconds, only_chances=chances)
    except StoppedBySignal:
        raise
    except Exception as error:
        if wish.asked:
            raise
        why = one_line(str(error)) or type(error).__name__
        note(prog, f"nothing was verified; the search's choice by predictions stands: {why}")
        return outcome, None
    return outcome, clock() - began
