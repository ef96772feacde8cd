"""How far costs may be off: every figure that can be asked for is there, and follows where the cost comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from soap.cluster.presets import preset
from soap.cluster.topology import DEVICE_KINDS, QUICKLY_MEASURED, Topology
from soap.profiles.roofline import RooflineCosts
from soap.profiles.spreads import KnownSpreads, known_spreads
from soap.simulator.draws import COMMUNICATED

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
    errors += [error for one in COMMUNICATED for error in spreads.of_communication(one)]
    assert all(error.spread >= 0 for error in errors) and len({error.name for error in errors}) >= 6
    for section in ("communication", "overhead", "plan"):
        assert all(figure > 0 for name, figure in known_spreads()[section][known][device].items() if name != "source")
