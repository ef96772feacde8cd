"""How far costs may be off: every figure that can be asked for is there, and follows where the cost comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import Any, get_args, get_type_hints

import pytest

from soap.cluster.presets import preset
from soap.cluster.topology import DEVICE_KINDS, QUICKLY_MEASURED, Topology
from soap.plan.tiling import tiles_of
from soap.profiles.corrections import Correction
from soap.profiles.entries import COMPRESSION, UPDATE, Entry, Timing, compression_key, update_family, update_key
from soap.profiles.keys import TileKey, TileKeys
from soap.profiles.lookup import ProfiledCosts, Source
from soap.profiles.roofline import RooflineCosts
from soap.profiles.spreads import CLASSES, SIZES, KnownSpreads, known_spreads
from soap.simulator.costs import CostModel
from soap.simulator.draws import COMMUNICATED
from soap.strategy.compression import Int8
from soap.strategy.config import OpConfig
from tests.graph_builder import mlp

LINKS_SOURCES = {"described": "", "quick": QUICKLY_MEASURED, "measured": "measured by soap-profile links"}
CLUSTERS = {"cpu": preset("local:2"), "cuda": preset("h200-8")}


def test_links_are_known_in_no_other_way() -> None:
    known = get_type_hints(Topology.links_known.fget)["return"]
    assert set(get_args(known)) == set(LINKS_SOURCES)
    assert set(CLUSTERS) == set(DEVICE_KINDS)
    for name, source in LINKS_SOURCES.items():
        assert {replace(one, links_source=source).links_known for one in CLUSTERS.values()} == {name}


@pytest.mark.parametrize("device", DEVICE_KINDS)
@pytest.mark.parametrize("known", LINKS_SOURCES)
def test_the_file_has_all_errors_of_all_clusters(known: str, device: str) -> None:
    topology = replace(CLUSTERS[device], links_source=LINKS_SOURCES[known])
    spreads = KnownSpreads(RooflineCosts(topology), topology)
    kind = topology.devices[0].type
    errors = [*spreads.of_launch(kind), *spreads.of_update(kind), *spreads.of_server(), *spreads.of_overhead()]
    errors += [error for selects in (True, False) for error in spreads.of_compression(kind, selects=selects)]
    errors += [error for one in COMMUNICATED for error in spreads.of_communication(one)]
    assert all(error.spread >= 0 for error in errors) and len({error.name for error in errors}) >= 6
    for section in ("communication", "overhead", "plan"):
        assert all(figure > 0 for name, figure in known_spreads()[section][known][device].items() if name != "source")


def test_steps_take_longer_than_their_tasks_on_processes_of_this_machine_alone() -> None:
    found = {}
    for name in ("local:2", "local:4", "emulated:2x1@1Gbit/s", "p100-4x4", "h200-8"):
        topology = preset(name)
        spreads = KnownSpreads(RooflineCosts(topology), topology)
        (error,) = spreads.of_step()
        assert spreads.step_factor == pytest.approx(exp(error.mean)) and error.spread >= 0
        found[name] = error.mean
    known = known_spreads()["step"]["this machine"]["cpu"]["mean"]
    assert known > 0 and found == {**dict.fromkeys(found, 0.0), "local:2": known, "local:4": known}


PARTS = ("rate", "kind", "shape")
CPU = CLUSTERS["cpu"].devices[0].type
GRAPH = mlp(64, (32, 32, 32), 8)
TILE = tiles_of(GRAPH, 0, OpConfig((1,) * len(GRAPH.operators[0].factors), (0,)))[0]


def told(short_ns: int, classes: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Figures of tiles that differ by source; of estimated ones these classes."""
    known: dict[str, Any] = {source: {"cpu": {**dict.fromkeys(PARTS, each), "classes": {}}} for source, each in BY_SOURCE.items()}
    known["estimated"]["cpu"]["classes"] = classes
    corrected = {"cpu": {"rate": 0.1, "kind": 0.8}}
    updates = {source: {"cpu": {"rate": BY_SOURCE[source], "all": BY_SOURCE[source]}} for source in ("measured", "estimated")}
    return {"tile": known, "short": {"cpu": {"below_ns": short_ns}}, "corrected": corrected, "update": updates}


BY_SOURCE = {"measured": 0.2, "interpolated": 0.3, "calibrated": 0.4, "estimated": 0.5}


def spreads_of(costs: CostModel, short_ns: int = 0, **classes: dict[str, float]) -> list[float]:
    own = {name.replace("_", ", "): row for name, row in classes.items()}
    found = KnownSpreads(costs, CLUSTERS["cpu"], told(short_ns, own)).of_tile(GRAPH, TILE, CPU, backward=False)
    assert [error.name[0] for error in found] == list(PARTS)
    return [error.spread for error in found]


def test_a_tile_errs_as_its_class_and_size_do_where_that_is_known() -> None:
    costs = RooflineCosts(CLUSTERS["cpu"])
    ns = costs.forward_ns(GRAPH, TILE, CPU)
    assert GRAPH.operators[0].kind == "linear"
    both = {"kind": 0.1, "shape": 0.2}
    assert spreads_of(costs) == spreads_of(costs, convolution=both, short=both) == [0.5, 0.5, 0.5]
    assert spreads_of(costs, product=both) == [0.5, 0.1, 0.2]
    assert spreads_of(costs, product={"kind": 0.3}, long=both) == [0.5, 0.3, 0.2]
    assert spreads_of(costs, ns, product={"kind": 0.3}, product_long=both) == [0.5, 0.1, 0.2]
    assert spreads_of(costs, ns + 1, product={"kind": 0.3}, product_long=both, short={"shape": 0.9}) == [0.5, 0.3, 0.9]


def profiled(entries: Sequence[Entry] = (), *corrections: tuple[str, bool], states: int = 2, updates: bool = True) -> ProfiledCosts:
    known = [Correction(kind, backward, 1.5, 10, "m", "aa", "now") for kind, backward in corrections]
    return ProfiledCosts(CLUSTERS["cpu"], {CPU.name: entries}, states, {CPU.name: known}, updates)


def test_what_a_run_has_corrected_errs_less() -> None:
    assert spreads_of(profiled()) == [0.5, 0.5, 0.5]
    assert spreads_of(profiled((), ("linear", False))) == [0.1, 0.5, 0.5]  # of corrections the kind's is larger here
    assert spreads_of(profiled((), ("linear", True))) == [0.5, 0.5, 0.5]  # the other direction
    entry = Entry("linear", TileKeys(GRAPH).key(TILE), Timing(1e6, 1.0), None, 5)
    assert spreads_of(profiled([entry])) == [0.2, 0.2, 0.2]


def test_compressing_errs_by_where_it_comes_from() -> None:
    """Selections and the rest by themselves, beside the device's rate."""
    known = {"measured": dict.fromkeys(("rate", "select", "restore"), 0.1), "estimated": {"rate": 0.0, "select": 0.9, "restore": 0.7}}
    entry = Entry(COMPRESSION, compression_key(Int8(), "select", 2**13, 4), Timing(1e6, 1.0), None, 5)
    told = {"compression": {source: {"cpu": own} for source, own in known.items()}}
    for costs, expected in (
        (profiled([entry]), [0.1, 0.1, 0.1, 0.1]),
        (profiled(), [0.0, 0.9, 0.0, 0.7]),
        (RooflineCosts(CLUSTERS["cpu"]), [0.0, 0.9, 0.0, 0.7]),
    ):
        spreads = KnownSpreads(costs, CLUSTERS["cpu"], told)
        errors = [error for selects in (True, False) for error in spreads.of_compression(CPU, selects=selects)]
        assert [error.spread for error in errors] == expected
        assert [error.name[-1] for error in errors] == [CPU.name, "select", CPU.name, "restore"]


def test_updates_and_launches_err_by_where_they_come_from() -> None:
    update = Entry(UPDATE, update_key(2, 2**20), Timing(1e6, 1.0), None, 5)

    def of_update(costs: CostModel) -> list[float]:
        return [error.spread for error in KnownSpreads(costs, CLUSTERS["cpu"], told(0, {})).of_update(CPU)]

    assert of_update(profiled([update])) == of_update(profiled((), (update_family(2), False))) == [0.2, 0.2]
    for estimated in (profiled(), profiled([update], states=0), profiled([update], updates=False), RooflineCosts(CLUSTERS["cpu"])):
        assert of_update(estimated) == [0.5, 0.5]
    gpus = CLUSTERS["cuda"]
    gpu, known = gpus.devices[0].type, {"launch": {"measured": {"cuda": {"all": 0.1}}, "estimated": {"cuda": {"all": 0.3}}}}
    launched = Entry("linear", TileKey("f", (8,), (), True), Timing(1e6, 1.0), None, 5, launch_ns=(1e4, 1e4))
    for entries, expected in (([launched], 0.1), ([], 0.3)):
        (error,) = KnownSpreads(ProfiledCosts(gpus, {gpu.name: entries}), gpus, known).of_launch(gpu)
        assert error.spread == expected


@pytest.mark.parametrize("device", DEVICE_KINDS)
def test_the_file_has_all_sources_of_tiles(device: str) -> None:
    known = known_spreads()
    for source in Source:
        row = known["tile"][source.value][device]
        assert all(row[part] > 0 for part in PARTS)
        assert {name.split(", ")[0] for name in row["classes"]} <= {*CLASSES, *SIZES}
    assert set(known["update"]) == set(known["launch"]) == {"measured", "estimated"}
