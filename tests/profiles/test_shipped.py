"""Measurements that come with the package are used by the presets of the same device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap import api
from soap.cluster.topology import Topology
from soap.profiles.lookup import ProfiledCosts, Source
from soap.profiles.roofline import RooflineCosts
from soap.profiles.shipped import shipped_entries
from soap.strategy.classical import single_device


def costs_of(topology: Topology) -> ProfiledCosts:
    costs = api.costs_for(topology)
    assert isinstance(costs, ProfiledCosts)
    return costs


def test_a_preset_takes_them_and_says_so() -> None:
    costs = costs_of(api.load_cluster("h200-8"))
    assert "on h200 (NVIDIA H200, torch 2.11.0; comes with this package), the rest: estimate" in costs.description
    assert isinstance(api.costs_for(api.load_cluster("h200-8"), costs="estimate"), RooflineCosts)


@pytest.mark.slow
@pytest.mark.parametrize("reading", [{}, {"autocast": "bfloat16", "autocast_device": "cuda"}])
def test_they_answer_for_models_that_were_measured(reading: dict[str, str]) -> None:
    """Equal layers have one measurement, whatever casts are called."""
    topology = api.load_cluster("h200-8")
    graph = api.load("zoo:gpt", plan_only=True, **reading).graph  # type: ignore[arg-type]
    costs = costs_of(topology)
    tiles = api.simulator_for(graph, topology).run(single_device(graph, topology)).plan.tiles
    products = [tile for tile in tiles if graph.operators[tile.operator].kind == "linear"]
    sources = [costs.answer(graph, tile, topology.devices[0].type, backward=False).source for tile in products]
    assert sources.count(Source.MEASURED) > 0.9 * len(sources)


def test_only_for_the_package_s_own_figures() -> None:
    topology = api.load_cluster("h200-8")
    assert set(shipped_entries(topology)) == {"h200"}
    own = replace(topology.devices[0].type, kernel_seconds=1e-6)
    changed = replace(topology, devices=tuple(replace(device, type=own) for device in topology.devices))
    assert shipped_entries(changed) == {} == shipped_entries(api.load_cluster("p100-4x4"))
    assert shipped_entries(replace(topology, measured=True)) == {}
