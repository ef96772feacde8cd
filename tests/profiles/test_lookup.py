"""Costs from measurements: what was measured wins, what lies between is interpolated, the rest is calibrated, and all of it says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile, tiles_of
from soap.profiles.corrections import Correction
from soap.profiles.entries import Entry, Timing, runtime_key, update_key
from soap.profiles.keys import TileKeys, environments, tile_kind
from soap.profiles.lookup import Answer, ProfiledCosts, Source, foreign, read_corrections, read_profiles
from soap.profiles.roofline import RooflineCosts, runtime_seconds, work_seconds
from soap.profiles.shares import shares, text
from soap.profiles.store import Store
from soap.profiles.work import backward_work, forward_work
from soap.simulator.costs import nanoseconds
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import OpConfig, Strategy
from tests.extent import FEW
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.strategies import CPU, GPU, cases, cluster

TOPOLOGY = cluster([2], CPU)
GRAPH = mlp(64, (32, 32, 32), 8)
RUNTIME = Entry("runtime", runtime_key(), Timing(100.0, 1.0), None, 9)


def cut(graph: OperatorGraph, position: int, *degrees: int) -> Tile:
    wanted = degrees or (1,) * len(graph.operators[position].factors)
    return tiles_of(graph, position, OpConfig(wanted, (0,) * prod(wanted)))[0]


def second_linear(graph: OperatorGraph) -> int:
    return [i for i, op in enumerate(graph.operators) if op.kind == "linear"][1]


def entry(graph: OperatorGraph, tile: Tile, forward_ns: float, backward_ns: float | None = None) -> Entry:
    backward = None if backward_ns is None else Timing(backward_ns, 1.0)
    works = forward_work(graph, tile), backward_work(graph, tile)
    return Entry(tile_kind(graph, tile), TileKeys(graph).key(tile), Timing(forward_ns, 1.0), backward, 9, *works)


def costs(entries: Sequence[Entry], topology: Topology = TOPOLOGY, optimizer_states: int = 2) -> ProfiledCosts:
    return ProfiledCosts(topology, {CPU.name: [RUNTIME, *entries]}, optimizer_states)


def correction(kind: str, factor: float, *, backward: bool = False) -> Correction:
    return Correction(kind, backward, factor, 10, "m", "aa", "now")


def estimated_ns(graph: OperatorGraph, tile: Tile, *, backward: bool = False) -> float:
    work = (backward_work if backward else forward_work)(graph, tile)
    return 1e9 * work_seconds(work, CPU, graph.operators[tile.operator].kind, backward=backward)


LINEAR = second_linear(GRAPH)


def test_what_was_measured_is_the_answer_and_the_runtime_comes_on_top() -> None:
    tile = cut(GRAPH, LINEAR)
    found = costs([entry(GRAPH, tile, 5000.0, 7000.0)])
    forward, backward = (found.answer(GRAPH, tile, CPU, backward=b) for b in (False, True))
    assert (forward.ns, forward.source) == (5100, Source.MEASURED)
    assert (backward.ns, backward.source) == (7000, Source.MEASURED)
    assert (found.forward_ns(GRAPH, tile, CPU), found.backward_ns(GRAPH, tile, CPU)) == (5100, 7000)


def test_on_a_gpu_what_launching_takes_is_told_apart() -> None:
    """Of what was not measured it is the median of its kind, else of all; what the runtime adds is launching, too."""
    graph = transformer()
    linear = next(i for i, op in enumerate(graph.operators) if op.kind == "linear")
    first, part, elsewhere = cut(graph, linear), cut(graph, linear, *sample_degrees(graph, linear, 2)), cut(graph, len(graph.operators) - 1)
    topology = cluster([2], GPU)
    measured = replace(entry(graph, first, 5000.0, 7000.0), launch_ns=(900.0, 1300.0))
    found = ProfiledCosts(topology, {GPU.name: [RUNTIME, measured]})
    assert (found.forward_ns(graph, first, GPU), found.backward_ns(graph, first, GPU)) == (5000, 7000)
    launches = [[found.launch_ns(graph, tile, GPU, backward=way) for way in (False, True)] for tile in (first, part, elsewhere)]
    assert launches == [[1000, 1300]] * 3
    assert costs([entry(GRAPH, cut(GRAPH, LINEAR), 1.0)]).launch_ns(GRAPH, cut(GRAPH, LINEAR), CPU, backward=False) == 0
    assert RooflineCosts(topology).launch_ns(graph, first, GPU, backward=False) == 0
    assert found.hash != ProfiledCosts(topology, {GPU.name: [RUNTIME, replace(measured, launch_ns=(900.0, 1301.0))]}).hash


def test_what_is_left_out_costs_nothing_and_calibrates_nothing() -> None:
    tile, half = cut(GRAPH, LINEAR), cut(GRAPH, LINEAR, 2, 1, 1)
    left_out = replace(entry(GRAPH, tile, 5.0), forward_work=(), backward_work=())
    found = costs([left_out])
    backward = found.answer(GRAPH, tile, CPU, backward=True)
    assert (found.forward_ns(GRAPH, tile, CPU), backward.ns, backward.source) == (105, 1, Source.MEASURED)
    assert found.answer(GRAPH, half, CPU, backward=False).source is Source.ESTIMATED


def test_equal_layers_have_one_answer() -> None:
    graph = mlp(64, (32, 32, 32, 32), 8)
    first = second_linear(graph)
    found = costs([entry(graph, cut(graph, first), 5000.0, 7000.0)])
    twin = next(i for i, op in enumerate(graph.operators) if i > first and op.kind == "linear")
    assert found.answer(graph, cut(graph, twin), CPU, backward=False).source is Source.MEASURED


def test_sparse_lookups_are_measured_and_calibrated_apart() -> None:
    g = GraphBuilder()
    ids = g.input("ids", 64, 8, dtype="int64")
    graph = g.build(g.mean(g.embedding(ids, 1000, 8, name="table")))
    whole, part, half = cut(graph, 0), cut(graph, 0, 4, 1, 1, 1), cut(graph, 0, 2, 1, 1, 1)
    by_rows = [replace(tile, sparse_lookup=True) for tile in (whole, part)]
    found = costs([entry(graph, whole, 5000.0, 7000.0), entry(graph, by_rows[0], 9000.0, 800.0), entry(graph, by_rows[1], 3000.0, 800.0)])
    answers = [found.answer(graph, tile, CPU, backward=False) for tile in (whole, by_rows[0])]
    assert [(answer.ns, answer.source) for answer in answers] == [(5100, Source.MEASURED), (9100, Source.MEASURED)]
    sources = [found.answer(graph, tile, CPU, backward=True).source for tile in (half, replace(half, sparse_lookup=True))]
    assert sources == [Source.CALIBRATED, Source.INTERPOLATED]
    factors = {kind for kind, _ in found.profiles[CPU.name].factors}
    assert factors == {"embedding", "embedding on rows"}


def test_the_runtime_is_estimated_where_it_was_not_measured() -> None:
    tile = cut(GRAPH, LINEAR)
    found = ProfiledCosts(TOPOLOGY, {CPU.name: [entry(GRAPH, tile, 5000.0, 7000.0)]})
    assert found.forward_ns(GRAPH, tile, CPU) == nanoseconds(5000e-9 + runtime_seconds(CPU))


def sample_degrees(graph: OperatorGraph, position: int, degree: int) -> tuple[int, ...]:
    return (degree, *(1 for _ in graph.operators[position].factors[1:]))


def test_between_two_measured_tiles_it_is_linear_in_logarithms() -> None:
    small, middle, large = (cut(GRAPH, LINEAR, *sample_degrees(GRAPH, LINEAR, degree)) for degree in (16, 4, 1))
    found = costs([entry(GRAPH, small, 1000.0, 2000.0), entry(GRAPH, large, 16000.0, 8000.0)])
    answer = found.answer(GRAPH, middle, CPU, backward=False)
    assert (answer.ns, answer.source) == (4100, Source.INTERPOLATED)  # a quarter of the samples, half of the way: 4000 and the runtime
    assert found.backward_ns(GRAPH, middle, CPU) == pytest.approx(4000, abs=1)


def test_nothing_is_extrapolated() -> None:
    inside, outside, aside = cut(GRAPH, LINEAR, 4, 1, 1), cut(GRAPH, LINEAR, 32, 1, 1), cut(GRAPH, LINEAR, 4, 1, 4)
    found = costs([entry(GRAPH, cut(GRAPH, LINEAR, degree, 1, 1), 1000.0 * 16 / degree, 1.0) for degree in (1, 16)])
    sources = [found.answer(GRAPH, tile, CPU, backward=False).source for tile in (inside, outside, aside)]
    assert sources == [Source.INTERPOLATED, Source.CALIBRATED, Source.CALIBRATED]


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6), st.data())
def test_interpolation_is_monotone_where_the_measurements_are(times: list[int], data: st.DataObject) -> None:
    graph = mlp(64, (32, 32), 8)
    degrees = sorted(data.draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=2, max_size=len(times), unique=True)))
    position = second_linear(graph)
    measured = [
        entry(graph, cut(graph, position, degree, 1, 1), float(ns), 1.0)
        for degree, ns in zip(degrees, sorted(times, reverse=True)[: len(degrees)], strict=True)
    ]
    found = costs(measured)
    inside = [degree for degree in range(degrees[0], degrees[-1] + 1) if 64 % degree == 0]
    answers = [found.answer(graph, cut(graph, position, degree, 1, 1), CPU, backward=False) for degree in inside]
    assert all(answer.source in (Source.MEASURED, Source.INTERPOLATED) for answer in answers)
    assert [a.ns for a in answers] == sorted((a.ns for a in answers), reverse=True)


def test_a_kind_is_calibrated_by_the_median_of_what_it_took() -> None:
    graph = mlp(64, (32, 16, 8, 4), 2)
    linears = [i for i, op in enumerate(graph.operators) if op.kind == "linear"]
    tiles = [cut(graph, i) for i in linears]
    measured = [entry(graph, tile, f * estimated_ns(graph, tile), 1.0) for tile, f in zip(tiles, (2, 3, 50), strict=False)]
    asked = tiles[3]
    answer = costs(measured).answer(graph, asked, CPU, backward=False)
    assert answer.source is Source.CALIBRATED
    assert answer.ns == pytest.approx(3 * estimated_ns(graph, asked) + 100, abs=1)


def test_a_kind_without_measurements_takes_part_in_the_median_of_kinds_only_if_there_are_some() -> None:
    graph = transformer()
    kinds = list(dict.fromkeys(op.kind for op in graph.operators))
    first = {kind: next(i for i, op in enumerate(graph.operators) if op.kind == kind) for kind in kinds}
    asked = cut(graph, first[kinds[3]])
    tiles = [cut(graph, first[kind]) for kind in kinds[:3]]
    measured = [entry(graph, tile, f * estimated_ns(graph, tile)) for f, tile in zip((2, 3, 9), tiles, strict=True)]
    few, enough = (costs(own).answer(graph, asked, CPU, backward=False) for own in (measured[:2], measured))
    assert (few.source, enough.source) == (Source.ESTIMATED, Source.CALIBRATED)
    assert few.ns == pytest.approx(estimated_ns(graph, asked) + 100, abs=1)
    assert enough.ns == pytest.approx(3 * estimated_ns(graph, asked) + 100, abs=1)


def test_updates_by_bytes() -> None:
    points = [Entry("update", update_key(2, size), Timing(ns, 1.0), None, 9) for size, ns in ((1024, 1000.0), (2**20, 32000.0))]
    found = costs(points)
    answers = {size: found.update_answer(size, CPU) for size in (16, 1024, 2**15, 2**20, 2**22)}
    assert {size: answer.source for size, answer in answers.items()} == {
        16: Source.CALIBRATED, 1024: Source.MEASURED, 2**15: Source.INTERPOLATED, 2**20: Source.MEASURED, 2**22: Source.CALIBRATED,
    }  # fmt: skip
    assert [answers[size].ns for size in (16, 1024, 2**20, 2**22)] == [1000, 1000, 32000, 128000]
    assert answers[2**15].ns == pytest.approx(1000 * 32**0.5, abs=1)
    other = costs(points, optimizer_states=0)
    assert other.update_ns(4096, CPU) == RooflineCosts(TOPOLOGY, 0).update_ns(4096, CPU)
    assert other.update_answer(4096, CPU).source is Source.ESTIMATED
    unlike = ProfiledCosts(TOPOLOGY, {CPU.name: [RUNTIME, *points]}, 2, measured_updates=False)  # another optimizer with two states
    assert unlike.update_answer(1024, CPU) == Answer(RooflineCosts(TOPOLOGY, 2).update_ns(1024, CPU), Source.ESTIMATED)
    assert unlike.hash != found.hash


def test_another_device_is_estimated() -> None:
    other = replace(CPU, name="another")
    topology = replace(TOPOLOGY, devices=(TOPOLOGY.devices[0], replace(TOPOLOGY.devices[1], type=other)))
    tile = cut(GRAPH, LINEAR)
    found = costs([entry(GRAPH, tile, 5000.0, 7000.0)], topology)
    assert found.answer(GRAPH, tile, other, backward=False).source is Source.ESTIMATED
    assert found.forward_ns(GRAPH, tile, other) == RooflineCosts(topology).forward_ns(GRAPH, tile, other)


def test_the_hash_is_of_all_that_enters_an_answer_and_of_nothing_else() -> None:
    one = entry(GRAPH, cut(GRAPH, LINEAR), 5000.0, 7000.0)
    base = costs([one])
    assert len(base.hash) == 16 and base.hash == costs([one]).hash
    same = replace(one, measured_at="tomorrow", repetitions=100)
    assert costs([same]).hash == base.hash
    others = [
        costs([replace(one, forward=Timing(5001.0, 1.0))]), costs([replace(one, backward=None)]), costs([]),
        costs([one], optimizer_states=0), costs([replace(one, kind="conv2d")]),
        costs([one], cluster([2], replace(CPU, kernel_seconds=2e-6))),
        costs([one, entry(GRAPH, cut(GRAPH, LINEAR, 2, 1, 1), 1.0, 1.0)]),
    ]  # fmt: skip
    assert len({base.hash, RooflineCosts(TOPOLOGY).hash, *(other.hash for other in others)}) == 9


def test_order_in_the_store_does_not_matter() -> None:
    entries = [entry(GRAPH, cut(GRAPH, LINEAR, degree, 1, 1), 1000.0 / degree, 5.0) for degree in (1, 2, 8)]
    assert costs(entries).hash == costs(entries[::-1]).hash


@given(cases(max_moves=4))
@FEW
def test_answers_are_positive_whole_and_repeatable(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    device = topology.devices[0].type
    tiles = [tile for position, op in enumerate(graph.operators) for tile in tiles_of(graph, position, chosen.operators[op.name])]
    measured = [entry(graph, tile, 10.0 + i, 20.0 + i) for i, tile in enumerate(tiles[::2]) if tile.size]
    pair = [ProfiledCosts(topology, {device.name: measured}) for _ in range(2)]
    for tile in tiles:
        for ask in ("forward_ns", "backward_ns"):
            first, again = (getattr(own, ask)(graph, tile, device) for own in pair)
            assert type(first) is int and first >= 1 and first == again


def test_shares_of_a_prediction() -> None:
    strategy = CLASSICAL["data_parallel"](GRAPH, TOPOLOGY)
    tiles = [tile for i, op in enumerate(GRAPH.operators) for tile in tiles_of(GRAPH, i, strategy.operators[op.name])]
    every = [entry(GRAPH, tile, 1000.0, 2000.0) for tile in tiles]
    updates = [Entry("update", update_key(2, size), Timing(50.0, 1.0), None, 9) for size in (1, 2**30)]
    all_known, none_known = costs([*every, *updates]), RooflineCosts(TOPOLOGY)
    found = [shares(own, Simulator(GRAPH, TOPOLOGY, own).run(strategy).tasks) for own in (all_known, none_known)]
    assert found[1] == {"measured": 0.0, "interpolated": 0.0, "calibrated": 0.0, "estimated": 1.0}
    assert sum(found[0].values()) == pytest.approx(1, abs=1e-3)
    simulation = Simulator(GRAPH, TOPOLOGY, all_known).run(strategy)
    computed = sum(task.duration_ns for task in simulation.tasks.tasks if task.kind.value in ("forward", "backward", "update"))
    measured = sum(task.duration_ns for task in simulation.tasks.tasks if task.kind.value in ("forward", "backward"))
    assert found[0]["measured"] == pytest.approx(measured / computed, abs=1e-4)
    assert found[0]["interpolated"] == pytest.approx(1 - measured / computed, abs=1e-4)
    assert text({"measured": 0.9, "interpolated": 0.0, "calibrated": 0.1, "estimated": 0.0}, 0.0) == "90% measured, 10% calibrated"


def test_only_the_devices_own_environment_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "profile.sqlite")
    ((_, here),) = environments(TOPOLOGY).items()
    old = replace(here, torch="1.0")
    one = entry(GRAPH, cut(GRAPH, LINEAR), 5000.0, 7000.0)
    store.put(old, [one, RUNTIME])
    assert read_profiles(TOPOLOGY, store) == {}
    assert foreign(TOPOLOGY, store) == {old: 2}
    store.put_corrections(replace(here, torch="0.9"), [correction("linear", 2.0)])
    assert read_corrections(TOPOLOGY, store) == {} and foreign(TOPOLOGY, store) == {old: 2}
    store.put_corrections(here, [correction("linear", 2.0)])
    assert read_corrections(TOPOLOGY, store) == {CPU.name: [correction("linear", 2.0)]} and read_profiles(TOPOLOGY, store) == {}
    store.put(here, [one])
    assert read_profiles(TOPOLOGY, store) == {CPU.name: [one]}
    assert foreign(TOPOLOGY, store) == {old: 2}
