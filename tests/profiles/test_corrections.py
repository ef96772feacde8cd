"""Corrections: which answers they multiply, and that costs say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from soap.profiles.corrections import CORRECTED, Correction
from soap.profiles.entries import Entry, Timing, update_family, update_key
from soap.profiles.lookup import ProfiledCosts, Source
from soap.profiles.roofline import RooflineCosts
from soap.profiles.shares import corrected, text
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from tests.profiles.test_lookup import GRAPH, LINEAR, RUNTIME, TOPOLOGY, correction, costs, cut, entry, sample_degrees
from tests.strategies import CPU


def corrected_costs(entries: Sequence[Entry], *corrections: Correction, optimizer_states: int = 2) -> ProfiledCosts:
    return ProfiledCosts(TOPOLOGY, {CPU.name: entries}, optimizer_states, {CPU.name: corrections})


def test_corrections_multiply_answers_of_their_kind_and_direction_whatever_their_source() -> None:
    small, middle, large = (cut(GRAPH, LINEAR, *sample_degrees(GRAPH, LINEAR, degree)) for degree in (16, 4, 1))
    ends = [RUNTIME, entry(GRAPH, small, 1000.0, 2000.0), entry(GRAPH, large, 16000.0, 20000.0)]
    for entries, tile, source in (
        (ends, large, Source.MEASURED),
        (ends, middle, Source.INTERPOLATED),
        ([RUNTIME, entry(GRAPH, small, 1000.0, 2000.0)], large, Source.CALIBRATED),
        ([RUNTIME], large, Source.ESTIMATED),
    ):
        plain, found = costs(entries[1:]), corrected_costs(entries, correction("linear", 1.5))
        before, after = (own.answer(GRAPH, tile, CPU, backward=False) for own in (plain, found))
        assert (after.source, after.corrected, before.corrected) == (source, True, False) and before.source is source
        assert after.ns == pytest.approx(1.5 * before.ns, abs=2)  # each is rounded up
        assert found.answer(GRAPH, tile, CPU, backward=True) == plain.answer(GRAPH, tile, CPU, backward=True)
    assert corrected_costs(ends, correction("linear", 1.5)).forward_ns(GRAPH, large, CPU) == 1.5 * (16000 + 100)
    assert corrected_costs(ends, correction("add", 1.5)).answer(GRAPH, large, CPU, backward=False).ns == 16100


def test_updates_are_corrected_by_their_optimizer() -> None:
    known = Entry("update", update_key(2, 4096), Timing(50.0, 1.0), None, 9)
    own, others = (corrected_costs([known], correction(update_family(states), 3.0)) for states in (2, 0))
    assert (own.update_ns(4096, CPU), others.update_ns(4096, CPU)) == (150, 50)
    assert (own.update_answer(4096, CPU).corrected, others.update_answer(4096, CPU).corrected) == (True, False)


def test_corrections_without_measurements_correct_estimates() -> None:
    tile, found = cut(GRAPH, LINEAR), ProfiledCosts(TOPOLOGY, {}, 2, {CPU.name: [correction("linear", 4.0)]})
    estimate = RooflineCosts(TOPOLOGY)
    assert found.forward_ns(GRAPH, tile, CPU) == pytest.approx(4 * estimate.forward_ns(GRAPH, tile, CPU), abs=5)
    assert found.backward_ns(GRAPH, tile, CPU) == pytest.approx(estimate.backward_ns(GRAPH, tile, CPU), abs=1)
    assert found.description == f"{estimate.description}; {CORRECTED}"


def test_what_a_correction_does_is_part_of_the_hash_and_where_it_is_from_is_not() -> None:
    one = correction("linear", 1.5)
    plain = costs([])
    hashes = {
        corrected_costs([RUNTIME], own).hash
        for own in (one, replace(one, factor=1.6), replace(one, backward=True), replace(one, kind="add"))
    }
    assert len(hashes | {plain.hash}) == 5
    assert corrected_costs([RUNTIME], replace(one, model="n", tasks=99, strategy_hash="b", calibrated_at="")).hash in hashes
    assert CORRECTED in corrected_costs([RUNTIME], one).description and CORRECTED not in plain.description


def test_the_corrected_part_of_a_prediction() -> None:
    strategy = CLASSICAL["data_parallel"](GRAPH, TOPOLOGY)
    found = corrected_costs([RUNTIME], correction("linear", 2.0), correction("linear", 2.0, backward=True))
    simulation = Simulator(GRAPH, TOPOLOGY, found).run(strategy)
    kinds = {None: 0, "linear": 0}
    for task in simulation.tasks.tasks:
        if task.kind.value in ("forward", "backward", "update"):
            linear = task.tile is not None and simulation.plan.operator(simulation.plan.tiles[task.tile]).kind == "linear"
            kinds["linear" if linear else None] += task.duration_ns
    assert corrected(found, simulation.tasks) == pytest.approx(kinds["linear"] / sum(kinds.values()), abs=1e-3) and kinds["linear"]
    assert corrected(RooflineCosts(TOPOLOGY), simulation.tasks) == 0
    assert text({"measured": 1.0}, 0.25) == "100% measured; 25% corrected by soap-compare --calibrate"
