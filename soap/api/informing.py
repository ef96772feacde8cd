"""Which things are worth measuring before one of several plans is chosen: the errors of their costs, grouped by what makes them known."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from soap.api.deciding import DECIDING_SEED, draws_for, plan_errors, timed
from soap.cluster.topology import DeviceType
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile
from soap.profiles.keys import tile_kind
from soap.profiles.lookup import ProfiledCosts, Source
from soap.search.deciding import LEAST_CHANCE, Timed
from soap.search.information import Name, Responses, respond
from soap.search.starts import BASELINE
from soap.simulator.draws import Communicated, DrawnTasks, Draws, Error, Spreads
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy

INFORMING_DRAWS = 512
"""More than decide: an error that explains a 40th of what differs is told from chance among 200."""
RATE, TILES, LAUNCHES, UPDATES, SERVERS, LINKS, PLANS = "rate", "tiles", "launches", "updates", "servers", "links", "plans"
COMPRESSING = "compressing"


class Thing(NamedTuple):
    """What becomes known by one kind of measuring. ``what``: a device's rate, tiles of one kind of operator (``kind``), launches, updates,
    compressing, servers, links with what communication costs devices, or what the plans take beside the costs of their parts. ``device``:
    the device type's name; empty for servers, links and plans."""

    what: str
    device: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Matter:
    """How much a thing matters. ``share``: of the variance of ln(time / reference's time). ``value_ns``: by how much the expected time of
    the plan that is chosen drops if the thing is known exactly, at most. ``measured``: whether only runs of the plans say more, because all
    of it that they need is measured already, or it is the plans themselves. ``errors``: its errors that were found to matter, with their
    shares."""

    thing: Thing
    share: float
    value_ns: float
    measured: bool
    errors: tuple[tuple[Name, float], ...]


@dataclass(frozen=True)
class WhatDecides:
    """``plans``: with their times under the draws, ``reference`` among them. ``sources``: by thing, where its costs come from.
    ``members``: by thing, its errors; of ``PLANS`` one for each plan, all that it has beside those of its costs."""

    plans: tuple[Timed, ...]
    reference: Timed
    members: Mapping[Thing, Set[Name]]
    sources: Mapping[Thing, Set[Source]]
    responses: Responses

    @cached_property
    def leader(self) -> Timed:
        """The plan that is fastest on average."""
        return min(self.plans, key=lambda plan: (plan.mean_ns, plan.complexity))

    @cached_property
    def rival(self) -> Timed:
        """The fastest plan beside the reference; the reference if there is no other."""
        others = [plan for plan in self.plans if plan is not self.reference]
        return min(others, key=lambda plan: (plan.mean_ns, plan.complexity), default=self.reference)

    @cached_property
    def matters(self) -> tuple[Matter, ...]:
        """All things, those first whose knowledge is worth most."""
        places = self.plans.index(self.rival), self.plans.index(self.reference)
        shares = self.responses.shares(*places)
        found = []
        for thing, names in self.members.items():
            own = tuple((name, shares[name]) for name in self.responses.names if name in names)
            measured = self.sources.get(thing, set()) <= {Source.MEASURED}
            found.append(Matter(thing, sum(share for _, share in own), self.responses.value_ns(names), measured, own))
        return tuple(sorted(found, key=lambda one: (-one.value_ns, -one.share, one.thing)))

    @cached_property
    def unexplained(self) -> float:
        """The share of the variance that no single error explains: many small ones, and what they do together."""
        named = {name: share for one in self.matters for name, share in one.errors}
        return max(0.0, 1 - sum(named.values())) if self.rival.times_ns != self.reference.times_ns else 0.0

    @cached_property
    def value_to_measure_ns(self) -> float:
        """What it is worth to know everything that is not measured yet."""
        return self.responses.value_ns({name for one in self.matters if not one.measured for name in self.members[one.thing]})

    def is_sure(self, confidence: float) -> bool:
        """Whether the fastest plan surely beats the reference, or surely no plan is faster than it."""
        others = [plan.gains(self.reference) for plan in self.plans if plan is not self.reference]
        won = self.leader is not self.reference and self.leader.wins(self.reference) >= confidence
        return won or all(float(np.mean(gains > 1)) <= LEAST_CHANCE for gains in others)


def what_decides(
    simulator: Simulator,
    plans: Mapping[str, Strategy],
    reference: str = BASELINE,
    *,
    draws: int = INFORMING_DRAWS,
    compiled: bool = True,
) -> WhatDecides:
    """Which errors of the costs decide among plans (by name). ``reference``: the name of one of them, data parallelism by default.
    ``compiled``: see ``drawn_times``. StrategyError if a plan does not fit the graph or the cluster."""
    noted = NotedSpreads(draws_for(simulator, 1).spreads, simulator)
    for plan in plans.values():
        outcome = simulator.predict(plan)
        tasks = outcome.tasks.tasks
        noted.of_plan = set()
        DrawnTasks(outcome.tasks, Draws(noted, 1), outcome.between_hosts)  # asks for the errors of every task
        noted.keep(launched=any(task.launch_ns for task in tasks), overheads=any(task.cpu_overhead_ns for task in tasks))
    usual = simulator.data_parallel
    found = timed(simulator, plans, usual, draws, reference=plans[reference], compiled=compiled)
    same = draws_for(simulator, draws, seed=DECIDING_SEED)
    scores = {name: np.log(same.factors([Error(name, 1.0)])) for own in noted.members.values() for name in own}
    own = {(PLANS, name): np.log(same.factors(plan_errors(simulator, plan, usual))) for name, plan in plans.items()}
    own = {name: score for name, score in own.items() if score.any()}
    members = noted.members | ({Thing(PLANS): set(own)} if own else {})
    place = list(plans).index(reference)
    responses = respond(np.array([plan.times_ns for plan in found], np.float64), scores | own, place)
    return WhatDecides(tuple(found), found[place], members, noted.sources, responses)


class NotedSpreads:
    """Spreads that note what is asked. ``members``: by thing, the names of its errors. ``sources``: where its costs come from."""

    def __init__(self, spreads: Spreads, simulator: Simulator) -> None:
        self._spreads, self._costs = spreads, simulator.costs
        self._links = Source.MEASURED if simulator.topology.links_known == "measured" else Source.ESTIMATED
        self.members: dict[Thing, set[Name]] = {}
        self.sources: dict[Thing, set[Source]] = {}
        self.of_plan: set[tuple[Thing, Error, Source]] = set()

    def keep(self, *, launched: bool, overheads: bool) -> None:
        """Keep what was asked for a plan. Launches and overheads are asked for always: whether the plan has any."""
        overhead = {error.name for error in self._spreads.of_overhead()}
        for thing, error, source in self.of_plan:
            if error.spread and (launched or thing.what != LAUNCHES) and (overheads or error.name not in overhead):
                self.members.setdefault(thing, set()).add(error.name)
                self.sources.setdefault(thing, set()).add(source)

    def of_tile(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> tuple[Error, ...]:
        """Of the time of one pass over a tile."""
        source = Source.ESTIMATED
        if isinstance(self._costs, ProfiledCosts):
            source = self._costs.answer(graph, tile, device, backward=backward).source
        own = Thing(TILES, device.name, tile_kind(graph, tile))
        return self._note(self._spreads.of_tile(graph, tile, device, backward=backward), own, source, device.name)

    def of_launch(self, device: DeviceType) -> tuple[Error, ...]:
        """Of the time to launch a tile."""
        source = self._costs.launch_source(device) if isinstance(self._costs, ProfiledCosts) else Source.ESTIMATED
        return self._note(self._spreads.of_launch(device), Thing(LAUNCHES, device.name), source, device.name)

    def of_update(self, device: DeviceType) -> tuple[Error, ...]:
        """Of the time of a device's update."""
        source = self._costs.update_source(device) if isinstance(self._costs, ProfiledCosts) else Source.ESTIMATED
        return self._note(self._spreads.of_update(device), Thing(UPDATES, device.name), source, device.name)

    def of_server(self) -> tuple[Error, ...]:
        """Of the time of a parameter server's work."""
        return self._note(self._spreads.of_server(), Thing(SERVERS), Source.ESTIMATED)

    def of_compression(self, device: DeviceType, *, selects: bool) -> tuple[Error, ...]:
        """Of the time of a device's work for compressed gradients."""
        source = self._costs.compression_source(device) if isinstance(self._costs, ProfiledCosts) else Source.ESTIMATED
        errors = self._spreads.of_compression(device, selects=selects)
        return self._note(errors, Thing(COMPRESSING, device.name), source, device.name)

    def of_communication(self, kind: Communicated) -> tuple[Error, ...]:
        """Of the time that a communication takes."""
        return self._note(self._spreads.of_communication(kind), Thing(LINKS), self._links)

    def of_overhead(self) -> tuple[Error, ...]:
        """Of the time for which a communication keeps devices busy."""
        return self._note(self._spreads.of_overhead(), Thing(LINKS), self._links)

    @property
    def hash(self) -> str:
        """As the spreads' own."""
        return self._spreads.hash

    def _note(self, errors: tuple[Error, ...], thing: Thing, source: Source, device: str = "") -> tuple[Error, ...]:
        for error in errors:
            self.of_plan.add((Thing(RATE, device) if error.name[0] == RATE else thing, error, source))
        return errors
