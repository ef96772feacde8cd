"""What is measured first is what decides, and nothing more once the choice is sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import soap
from soap import api
from soap.cli import first_measuring
from soap.cli.first_measuring import DECIDING, RESTS_ON, Aim, Measured, aim, in_turn, measure_first
from soap.cli.wanted import UPKEEP, Wanted, wanted
from soap.errors import InfeasibleError
from soap.measure.link_probes import NEEDED, Probe, probes_for
from soap.profiles import spreads
from soap.profiles.keys import only_environment
from soap.profiles.store import Store
from soap.search.options import SearchOptions
from tests.cli.own_store import use_own_store
from tests.known_figures import known_figures

MODEL, CLUSTER = "zoo:rnnlm:tiny", "local:2"
OPTIONS = SearchOptions(budget=30)


class Aimed:
    """Aims that are given, one after the other, and what is measured by them."""

    def __init__(self, *aims: Aim | BaseException | None) -> None:
        self.aims, self.passes, self.probes = list(aims), list[list[Wanted]](), list[Probe]()

    def aim(self, *_: Any) -> Aim | None:
        found = self.aims.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    def links(self, topology: Any, todo: Sequence[Probe], *_: Any) -> int:
        self.probes += todo
        return len(todo)

    def computations(self, model: Any, reading: Any, topology: Any, place: Any, todo: Sequence[Wanted], *_: Any) -> int:
        self.passes.append(list(todo))
        return len(todo)

    def measure(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 60.0, clock: Any = lambda: 0.0) -> Measured:
        monkeypatch.setattr(first_measuring, "aim", self.aim)
        monkeypatch.setattr(first_measuring, "_links", self.links)
        monkeypatch.setattr(first_measuring, "_computations", self.computations)
        graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
        return measure_first(MODEL, {}, graph, topology, seconds, clock, OPTIONS)  # type: ignore[typeddict-item]


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    use_own_store(monkeypatch, tmp_path_factory)


def unknown() -> list[Wanted]:
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    return first_measuring._unknown(graph, topology, only_environment(topology), Store())


@pytest.mark.long
def test_what_decides_comes_first_and_then_what_decides_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    every = unknown()
    first, second = (every[-1], every[5]), (every[5], every[-2], every[0])
    found = Aimed(Aim(False, first), Aim(False, second))
    measured = found.measure(monkeypatch)
    assert found.passes[0] == list(first)
    assert found.passes[1][:2] == [every[-2], every[0]]  # not what was measured before
    assert found.passes[1][2:] == [one for one in every if one not in (*first, *second)]
    assert measured.computations == len(every) and measured.computations_left == 0 and not measured.sure
    assert found.aims == [] and measured.probes == len(probes_for(soap.load_cluster(CLUSTER)))


@pytest.mark.long
def test_nothing_is_measured_if_the_choice_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    every = probes_for(soap.load_cluster(CLUSTER))
    more = [probe for probe in every if probe.operation not in NEEDED]
    monkeypatch.setattr(first_measuring, "_unknown_probes", lambda *_: more)
    found = Aimed(Aim(True))
    measured = found.measure(monkeypatch)
    assert found.passes == [] and found.probes == [] and measured.sure and measured.problem == ""
    left = measured.probes_left + measured.computations_left
    assert left == len(unknown()) + len(more) > len(unknown())
    assert measured.text == f"measured nothing now; {left} are left, the choice is sure without them"
    assert measured.document["sure"] is True


def test_if_the_choice_is_sure_what_its_prediction_rests_on_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    every = unknown()
    now = Aimed(Aim(True, (every[0], every[4])))
    assert now.measure(monkeypatch).computations == 2 and now.passes == [[every[0], every[4]]]
    then = Aimed(Aim(False, (every[3],)), Aim(True, (every[3], every[0], every[4])))
    measured = then.measure(monkeypatch)
    assert then.passes == [[every[3]], [every[0], every[4]]] and measured.sure
    assert measured.computations_left == len(every) - 3


@pytest.mark.parametrize("sure_after", ["links", "what decides"])
def test_measuring_ends_once_the_choice_is_sure(sure_after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = unknown()
    first = Aim(False, (every[3], every[1]))
    found = Aimed(Aim(True)) if sure_after == "links" else Aimed(first, Aim(True))
    measured = found.measure(monkeypatch)
    assert found.passes == ([] if sure_after == "links" else [[every[3], every[1]]]) and found.probes
    assert measured.sure and measured.computations_left == len(every) - measured.computations > 0
    assert measured.text.endswith("are left, the choice is sure without them")


def test_without_an_aim_all_is_measured_in_its_usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Aimed(InfeasibleError("nothing fits"))
    measured = found.measure(monkeypatch)
    assert found.passes == [unknown()] and measured.problem == "" and not measured.sure and measured.computations_left == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError, ZeroDivisionError])
def test_ctrl_c_and_mistakes_of_ours_end_measuring(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(error):
        Aimed(error()).measure(monkeypatch)


def test_aiming_takes_no_time_from_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on only while aiming."""
    now, seconds, every = [0.0], list[float](), unknown()

    class Slow(Aimed):
        def aim(self, *_: Any) -> Aim | None:
            now[0] += 100
            return super().aim()

        def computations(self, *args: Any) -> int:
            seconds.append(args[-1])
            return super().computations(*args)

    found = Slow(Aim(False, tuple(every[:2])), None)
    measured = found.measure(monkeypatch, 60.0, lambda: now[0])
    assert seconds == [60.0, 60.0] and measured.seconds == 200.0 and measured.computations_left == 0


@pytest.mark.slow
def test_the_aim_is_what_the_plans_of_a_quick_search_need(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    seen: list[Any] = []
    real = first_measuring.api.what_decides

    def watched(*args: Any, **options: Any) -> Any:
        seen.append((args, real(*args, **options)))
        return seen[-1][1]

    monkeypatch.setattr(first_measuring.api, "what_decides", watched)
    monkeypatch.setattr(first_measuring, "LEAST_VALUE", -1.0)  # never sure: how fast this machine is counts
    aimed = aim(graph, topology, OPTIONS)
    assert aimed is not None and not aimed.sure
    ((_, plans, reference), found) = seen[0]
    assert reference in plans and 2 <= len(plans) <= first_measuring.MOST_PLANS + 1
    assert plans[reference] == soap.classical("data_parallel", graph, topology)
    upkeep = [one for one in aimed.todo if one.tile is None]
    assert upkeep == list(aimed.todo[: len(upkeep)]) and len(upkeep) < len(aimed.todo)
    kinds = list(dict.fromkeys(one.kind for one in aimed.todo[len(upkeep) :]))
    assert kinds == [one.thing.kind for one in found.matters if one.thing.kind in kinds] and len(kinds) > 2
    assert {one.group for one in aimed.todo[len(upkeep) :]} == {DECIDING}
    first, rest = in_turn(aimed, unknown())
    assert first and len(first) + len(rest) == len(unknown()) and in_turn(None, rest) == ([], rest)


def test_without_errors_a_choice_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_figures(lambda section, part: 0.0)
    monkeypatch.setattr(spreads, "known_spreads", lambda: known)
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    aimed = aim(graph, topology, OPTIONS)
    assert aimed is not None and aimed.sure
    everything = wanted(graph, topology, {DECIDING: [soap.classical("data_parallel", graph, topology)]})
    upkeep, own = ([one for one in everything if one.group == group] for group in (UPKEEP, DECIDING))
    assert aimed.todo[: len(upkeep)] == tuple(upkeep)
    ns = [one.estimated_ns for one in aimed.todo[len(upkeep) :]]
    assert sum(ns) >= RESTS_ON * sum(one.estimated_ns for one in own) > sum(ns[:-1])  # and not one more
    assert ns == sorted((one.estimated_ns for one in own), reverse=True)[: len(ns)] and len(ns) < len(own)


def test_a_quick_search_is_not_polished() -> None:
    for polish in (False, True):
        assert api.find(MODEL, CLUSTER, OPTIONS, polish=polish).result.locally_optimal is polish


def test_a_single_device_has_nothing_to_aim_at(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = soap.load(MODEL, plan_only=True).graph
    found = aim(graph, soap.load_cluster("local:1"), OPTIONS)
    assert found is None or found.sure
