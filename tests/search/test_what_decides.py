"""Which things decide between plans. Spreads are such that the answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from soap.api import timed
from soap.api.informing import LAUNCHES, LINKS, RATE, SERVERS, TILES, UPDATES, Thing, WhatDecides, what_decides
from soap.api.informing import PLANS as OWN
from soap.cluster.topology import QUICKLY_MEASURED
from soap.plan.tiling import tiles_of
from soap.profiles import spreads
from soap.profiles.entries import Entry, Timing
from soap.profiles.keys import TileKeys, tile_kind
from soap.profiles.lookup import ProfiledCosts, Source
from soap.profiles.roofline import RooflineCosts
from soap.search.deciding import LEAST_CHANCE
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from tests.graph_builder import mlp
from tests.known_figures import known_figures
from tests.strategies import CPU, cluster

GRAPH, TOPOLOGY = mlp(64, (128, 128, 128), 8), cluster([2, 2], CPU)
DRAWS = 256
USUAL = CLASSICAL[BASELINE](GRAPH, TOPOLOGY)
PLANS = {"alone": CLASSICAL["single_device"](GRAPH, TOPOLOGY), BASELINE: USUAL}


def only(monkeypatch: pytest.MonkeyPatch, *kept: tuple[str, str]) -> None:
    """Leave a spread only to these: (what, part)."""
    known = known_figures(lambda what, part: 0.3 if (what, part) in kept else 0.0)
    monkeypatch.setattr(spreads, "known_spreads", lambda: known)


def found(plans: dict[str, Strategy] = PLANS, costs: Any = None) -> WhatDecides:
    simulator = Simulator(GRAPH, TOPOLOGY, costs or RooflineCosts(TOPOLOGY))
    return what_decides(simulator, plans, draws=DRAWS, compiled=False)


@pytest.mark.parametrize(
    ("what", "part", "thing"),
    [
        ("tile", "rate", Thing(RATE, CPU.name)),
        ("communication", "all", Thing(LINKS)),
        ("update", "all", Thing(UPDATES, CPU.name)),
    ],
)
def test_the_only_error_there_is_decides_all(what: str, part: str, thing: Thing, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, (what, part))
    told = found()
    (one,) = told.matters
    assert one.thing == thing and not one.measured
    assert one.share > 0.9 and one.share + told.unexplained == pytest.approx(1)
    assert one.value_ns == pytest.approx(told.responses.value_of_all_ns, rel=0.35, abs=1)  # only rare draws turn these choices over
    assert told.value_to_measure_ns == one.value_ns


def test_kinds_of_operators_are_things_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ("tile", "kind"), ("tile", "shape"))
    told = found()
    things = {one.thing for one in told.matters}
    assert things == {Thing(TILES, CPU.name, op.kind) for op in GRAPH.operators}
    first = max(told.matters, key=lambda one: one.share)
    assert first.thing.kind == "linear" and first.share > 0.5  # where the model's time goes
    for one in told.matters:
        assert one.share == pytest.approx(sum(share for _, share in one.errors))
        assert {name[0] for name, _ in one.errors} <= {"kind", "shape"}


def test_errors_that_no_plan_has_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """These processors launch nothing, no message costs them anything, and there are no servers."""
    only(monkeypatch, ("communication", "all"), ("launch", "all"), ("overhead", "all"), ("server", "all"))
    told = found()
    assert set(told.members) == {Thing(LINKS)} and told.members[Thing(LINKS)] == {("communication",)}
    alone = found({"again": PLANS["alone"], "alone": PLANS["alone"], BASELINE: PLANS["alone"]})
    assert not alone.members and alone.matters == () and alone.unexplained == 0


def test_what_plans_take_beside_their_parts_is_a_thing_that_only_runs_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ("plan", "all"))  # which many small errors make up, one for each operator that is unlike
    told = found()
    (one,) = told.matters
    assert one.thing == Thing(OWN) and one.measured and one.share > 0.99 and told.unexplained < 0.01
    assert [name for name, _ in one.errors] == [(OWN, "alone")]  # data parallelism has none
    assert told.value_to_measure_ns == 0


@pytest.mark.parametrize(("source", "measured"), [("", False), (f"{QUICKLY_MEASURED}, 2026", False), ("measured, 2026", True)])
def test_links_that_were_measured_in_seconds_are_worth_measuring(source: str, measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ("communication", "all"))
    topology = replace(TOPOLOGY, links_source=source)
    told = what_decides(Simulator(GRAPH, topology, RooflineCosts(topology)), PLANS, draws=DRAWS, compiled=False)
    (one,) = told.matters
    assert one.thing == Thing(LINKS) and one.measured is measured and (told.value_to_measure_ns > 0) is not measured


def test_servers_are_a_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    from soap.strategy.sync import parameter_server

    only(monkeypatch, ("server", "all"))
    servers = USUAL.with_changes(parameters={one.name: parameter_server(2) for one in GRAPH.parameters})
    told = found({"servers": servers, BASELINE: USUAL})
    assert set(told.members) == {Thing(SERVERS)}
    assert Thing(LAUNCHES, CPU.name) not in told.sources


def test_what_is_measured_is_not_worth_measuring() -> None:
    keys = TileKeys(GRAPH)
    entries = {}
    for plan in PLANS.values():
        for position, op in enumerate(GRAPH.operators):
            for tile in tiles_of(GRAPH, position, plan.operators[op.name]):
                if op.kind == "linear":
                    entries[keys.key(tile)] = Entry(tile_kind(GRAPH, tile), keys.key(tile), Timing(9e3, 1.0), Timing(9e3, 1.0), 9)
    told = found(costs=ProfiledCosts(TOPOLOGY, {CPU.name: list(entries.values())}))
    by_kind = {one.thing.kind: one for one in told.matters if one.thing.what == TILES}
    assert by_kind["linear"].measured and told.sources[by_kind["linear"].thing] == {Source.MEASURED}
    assert not any(one.measured for kind, one in by_kind.items() if kind != "linear")
    open_ones = {name for one in told.matters if not one.measured for name in told.members[one.thing]}
    assert told.value_to_measure_ns == told.responses.value_ns(open_ones)


def test_times_are_those_by_which_plans_are_chosen() -> None:
    told = found()
    simulator = Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY))
    assert list(told.plans) == timed(simulator, PLANS, USUAL, DRAWS, compiled=False)
    assert told.reference.name == BASELINE and told.rival.name == "alone"


@pytest.mark.parametrize("confidence", [0.6, 0.9, 0.999])
def test_a_choice_is_sure_if_wins_are_many_or_few(confidence: float) -> None:
    told = found()
    wins = told.rival.wins(told.reference)
    assert told.is_sure(confidence) is (wins >= confidence or wins <= LEAST_CHANCE)
