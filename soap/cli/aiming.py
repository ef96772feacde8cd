"""What ``soap-search`` measures first if its time is short: what decides among the plans that a quick search finds under the costs that are
known so far, those things first whose knowledge is worth most (``soap.api.what_decides``). Once the choice is sure, only what the
prediction of the plan that must be beaten rests on: a range of a factor of four tells nobody how long training takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from soap import api
from soap.api.informing import TILES, Thing, WhatDecides
from soap.api.predictions import announce_compiling
from soap.cli.wanted import Wanted, wanted
from soap.cluster.kinds import types_of
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.keys import TileKey
from soap.search.options import SearchOptions
from soap.strategy.config import Strategy

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
    """``sure``: nothing that could be measured changes the choice. ``todo``: what decides, the most valuable first; if the choice is sure,
    what its prediction rests on."""

    sure: bool
    todo: tuple[Wanted, ...] = ()


def aim(graph: OperatorGraph, topology: Topology, options: SearchOptions) -> Aim | None:
    """What to measure before a search with these options, by the costs that are known now; None if that cannot be said, because there is
    only one plan. KeyboardInterrupt ends it; SoapError if the search would fail, too."""
    from soap.simulator.incremental import IncrementalSimulator  # imports numba

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
