"""Where a choice turns over, where it is known by construction or can be looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.figure import Figure as Canvas

from soap.api import sensitivity
from soap.api.what_if import gain_with
from soap.cluster.overheads import ColdPenalty, CpuOverhead, Port, Share
from soap.cluster.topology import Host, Topology
from soap.plan.tiling import tiles_of
from soap.profiles.entries import Entry, Timing
from soap.profiles.keys import TileKeys, tile_kind
from soap.profiles.lookup import ProfiledCosts
from soap.profiles.roofline import RooflineCosts
from soap.profiles.scaled import ScaledCosts
from soap.search.plot import draw, tornado
from soap.search.sensitivity import MOST, PRECISION, Figure, Sensitivity, known_figures, sensitivities, turning_point, with_figure
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import OpConfig
from tests.graph_builder import mlp
from tests.strategies import CPU, GPU, cluster

GRAPH = mlp(64, (256, 256, 256), 8)
TOPOLOGY = replace(
    cluster([2, 2], CPU),
    ports=(Port(0, 0, 700, 100), Port(1, 0, 300, 50)),
    cpu_overhead=CpuOverhead(((2, Share(100, 10)),), ((4, Share(200, 20)),)),
    cold_penalty=ColdPenalty(((1000, 50), (2000, 80))),
)
PLAN, USUAL = CLASSICAL["single_device"](GRAPH, TOPOLOGY), CLASSICAL["data_parallel"](GRAPH, TOPOLOGY)


@pytest.mark.parametrize(
    ("gain", "below", "above"),
    [
        (lambda f: 0.8 * f**0.5, None, 1.5625),
        (lambda f: 1.2 * f**0.5, 1 / 1.44, None),
        (lambda f: 1.5 / f, None, 1.5),
        (lambda f: 1.05, None, None),
        (lambda f: 0.05 * f, None, None),
        (lambda f: 0.11 * f, None, 1 / 0.11),
        (lambda f: 1.3 - abs(f - 1), 0.7, 1.3),
        (lambda f: 1.0, None, None),  # no gain is no win, nowhere
    ],
)
def test_turning_points_of_known_gains(gain: Callable[[float], float], below: float | None, above: float | None) -> None:
    for upwards, expected in ((False, below), (True, above)):
        found = turning_point(gain, upwards=upwards)
        assert (found is None) is (expected is None)
        if found is not None and expected is not None:
            assert found == pytest.approx(expected, rel=PRECISION - 1)
            assert (gain(found) > 1) != (gain(1.0) > 1) and 1 / MOST <= found <= MOST


@pytest.mark.parametrize("figure", Figure)
def test_one_figure_is_changed_and_nothing_else(figure: Figure) -> None:
    host = Host("host0", 4, 2**34, core=CPU)
    topology = replace(TOPOLOGY, hosts=(host, TOPOLOGY.hosts[1]))
    assert with_figure(topology, figure, 1.0) == topology
    twice = with_figure(topology, figure, 2.0)
    changed = {
        "rate": [(a.type.flops("float32"), b.type.flops("float32")) for a, b in zip(twice.devices, topology.devices, strict=True)],
        "memory": [
            (a.type.memory_bandwidth_bytes_per_second, b.type.memory_bandwidth_bytes_per_second)
            for a, b in zip(twice.devices, topology.devices, strict=True)
        ],
        "kernel": [(a.type.kernel_seconds, b.type.kernel_seconds) for a, b in zip(twice.devices, topology.devices, strict=True)],
        "inside": [
            (a.bandwidth_bytes_per_second, b.bandwidth_bytes_per_second)
            for a, b in zip(twice.links, topology.links, strict=True)
            if "network" not in a.name
        ],
        "between": [
            (a.bandwidth_bytes_per_second, b.bandwidth_bytes_per_second)
            for a, b in zip(twice.links, topology.links, strict=True)
            if "network" in a.name
        ],
        "latency": [(a.latency_seconds, b.latency_seconds) for a, b in zip(twice.links, topology.links, strict=True)],
        "overhead": [
            *((a.fixed_ns, b.fixed_ns) for a, b in zip(twice.ports, topology.ports, strict=True)),
            *((a.permille, b.permille) for a, b in zip(twice.ports, topology.ports, strict=True)),
            (twice.cpu_overhead.of_all_reduce(2).fixed_ns, 100),
            (twice.cpu_overhead.of_exchange(4).permille, 20),
            (twice.cold_penalty.longer_ns(3000), 80),
        ],
    }
    own = dict(zip(Figure, ("rate", "memory", "inside", "between", "latency", "overhead", "kernel"), strict=True))[figure]
    for name, pairs in changed.items():
        assert pairs and all(new == pytest.approx(2 * old if name == own else old) for new, old in pairs), name
    if figure in (Figure.RATE, Figure.MEMORY, Figure.LAUNCH):
        assert twice.hosts[0].core == twice.devices[0].type and twice.hosts[1].core is None


@pytest.mark.parametrize("figure", Figure)
@pytest.mark.parametrize("kind", [CPU, GPU])
def test_estimates_follow_a_figure_exactly(figure: Figure, kind: object) -> None:
    topology = cluster([2], CPU if kind is CPU else GPU)
    scaled = with_figure(topology, figure, 0.37)
    found = ScaledCosts(RooflineCosts(topology, 1), topology, scaled, 1)
    expected, device = RooflineCosts(scaled, 1), scaled.devices[0].type
    for position, op in enumerate(GRAPH.operators):
        (tile, *_) = tiles_of(GRAPH, position, USUAL.operators[op.name])
        assert found.forward_ns(GRAPH, tile, device) == expected.forward_ns(GRAPH, tile, device)
        assert found.backward_ns(GRAPH, tile, device) == expected.backward_ns(GRAPH, tile, device)
    assert found.update_ns(12345, device) == expected.update_ns(12345, device)
    assert found.updates_rows_alone == expected.updates_rows_alone
    assert len(found.hash) == 16 and (found.hash == ScaledCosts(RooflineCosts(topology, 1), topology, topology, 1).hash) is (
        expected.hash == RooflineCosts(topology, 1).hash
    )


def test_measured_times_are_scaled_as_their_estimates() -> None:
    topology, one = cluster([2], CPU), OpConfig((1, 1, 1), (0,))
    position = next(i for i, op in enumerate(GRAPH.operators) if op.kind == "linear")
    (tile,) = tiles_of(GRAPH, position, one)
    entry = Entry(tile_kind(GRAPH, tile), TileKeys(GRAPH).key(tile), Timing(3e6, 1.0), Timing(5e6, 1.0), 9)
    costs = ProfiledCosts(topology, {CPU.name: [entry]})
    scaled = with_figure(topology, Figure.RATE, 0.5)
    estimates = [RooflineCosts(own).forward_ns(GRAPH, tile, own.devices[0].type) for own in (topology, scaled)]
    assert estimates[1] > 1.2 * estimates[0]
    found = ScaledCosts(costs, topology, scaled).forward_ns(GRAPH, tile, scaled.devices[0].type)
    measured = costs.forward_ns(GRAPH, tile, topology.devices[0].type)
    assert found == pytest.approx(measured * estimates[1] / estimates[0], abs=1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_found_turning_points_turn_a_simulation_over(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from soap.api import what_if

    monkeypatch.setattr(what_if, "plays_compiled", lambda *_: compiled)
    simulator = Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY))
    found = sensitivity(simulator, PLAN, USUAL)
    assert [one.width for one in found] == sorted((one.width for one in found), reverse=True) and all(one.is_known for one in found)

    def gain(figure: Figure, factor: float) -> float:
        topology = with_figure(TOPOLOGY, figure, factor)
        other = Simulator(GRAPH, topology, RooflineCosts(topology))
        return other.makespan_ns(USUAL) / other.makespan_ns(PLAN)

    turned = 0
    for one in found:
        assert (one.usual, one.at_half, one.at_double) == (gain(one.figure, 1.0), gain(one.figure, 0.5), gain(one.figure, 2.0))
        for factor in (one.below, one.above):
            if factor is not None:
                turned += 1
                nearer = factor / PRECISION if factor > 1 else factor * PRECISION
                assert (gain(one.figure, factor) > 1) != (one.usual > 1) == (gain(one.figure, nearer) > 1)
        if one.below is None:
            assert (gain(one.figure, 1 / MOST) > 1) == (one.usual > 1)
    assert turned >= 2


def test_answers_are_asked_for_once() -> None:
    asked: list[tuple[Figure, float]] = []

    def gain(figure: Figure, factor: float) -> float:
        asked.append((figure, factor))
        return 1.3 / factor

    found = sensitivities(gain, [Figure.RATE])
    assert [one.figure for one in found if one.is_known] == [Figure.RATE] and len(found) == len(Figure)
    assert {figure for figure, _ in asked} == {Figure.RATE} and len(asked) < 30
    kept = gain_with(Simulator(GRAPH, TOPOLOGY, RooflineCosts(TOPOLOGY)), PLAN, USUAL)
    assert kept(Figure.RATE, 2.0) == kept(Figure.RATE, 2.0) and kept.cache_info().hits == 1  # type: ignore[attr-defined]


def test_figures_that_a_cluster_lacks_are_not_asked() -> None:
    alone: Topology = cluster([2], CPU)
    inside = [link for link in alone.links if "network" not in link.name]
    one_host = replace(alone, links=tuple(replace(link, index=i) for i, link in enumerate(inside)))
    assert set(Figure) - set(known_figures(one_host)) == {Figure.BETWEEN, Figure.OVERHEAD}
    assert set(Figure) - set(known_figures(cluster([1, 1], CPU, latency_seconds=0.0))) == {Figure.INSIDE, Figure.LATENCY, Figure.OVERHEAD}
    assert known_figures(TOPOLOGY) == list(Figure)


FOUND = [
    Sensitivity(Figure.RATE, None, 1.2, 1.1, 1.4, 0.9),
    Sensitivity(Figure.BETWEEN, None, None, 1.1, 1.05, 1.08),
    Sensitivity(Figure.OVERHEAD, None, None, 1.1, 1.1, 1.1, is_known=False),
]


def test_bars_are_the_ranges() -> None:
    axes = Canvas().subplots()
    draw(axes, FOUND)
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]  # type: ignore[attr-defined]
    assert [pytest.approx(end) for end in ((1.1, 1.4), (1.1, 1.05), (1.1, 0.9), (1.1, 1.08))] == ends
    heights = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches]  # type: ignore[attr-defined]
    assert heights[0] == heights[2] and heights[1][1] == pytest.approx(heights[3][0])  # on one side beside each other
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["device rate\nturns at 1.2x", "links between hosts\nturns nowhere within 10x"]
    assert [line.get_xdata()[0] for line in axes.lines] == [1.1, 1.0]  # type: ignore[index]


def test_equal_tornados_are_equal_bytes() -> None:
    data = tornado(FOUND, "a.svg")
    assert data.startswith(b"<?xml") and tornado(FOUND, "a.svg") == data
