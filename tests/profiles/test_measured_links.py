"""Links out of the store: only this cluster's, only if measured whole, and said."""

from __future__ import annotations

import json
import sqlite3
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.errors import ProfileError, SoapWarning
from soap.measure.link_probes import LinkTiming, Operation, Probe, decode_timing, encode_timing, probes_for
from soap.profiles import link_places as places_module
from soap.profiles.entries import Entry, Timing, update_key
from soap.profiles.exchange import export_profiles, import_profiles
from soap.profiles.keys import Environment
from soap.profiles.link_places import LinkPlace, link_place, link_places
from soap.profiles.measured_links import known_links, with_stored_links
from soap.profiles.store import Store
from soap.simulator.communication.prices import Communication
from tests.profiles.test_link_figures import timed
from tests.strategies import CPU, cluster

BOX = cluster([2, 2], CPU)
PLACE = link_place(BOX, "gloo", emulated=False)

timings = st.builds(
    LinkTiming,
    st.builds(Probe, st.sampled_from([Operation.ALL_REDUCE, Operation.ALL_TO_ALL]), st.just((0, 1, 5)), st.integers(1, 2**40)),
    st.lists(st.integers(1, 10**12), min_size=1, max_size=5).map(lambda times: tuple(one / 1e9 for one in times)),
    st.integers(0, 10**12).map(lambda ns: ns / 1e9),
    st.just("2026-01-02T03:04:05+00:00"),
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "profile.sqlite")


def twice_as_fast(topology: Topology) -> Topology:
    links = (replace(link, bandwidth_bytes_per_second=2 * link.bandwidth_bytes_per_second) for link in topology.links)
    return replace(topology, links=tuple(links))


def quietly(topology: Topology, store: Store) -> Topology:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return with_stored_links(topology, store)


@given(timings)
def test_a_timing_is_the_same_after_json(timing: LinkTiming) -> None:
    again = decode_timing(json.loads(json.dumps(encode_timing(timing))))
    assert again.probe == timing.probe and again.measured_at == timing.measured_at
    assert again.seconds == pytest.approx(timing.seconds) and again.cpu_seconds == pytest.approx(timing.cpu_seconds)
    assert encode_timing(again) == encode_timing(timing)


def test_a_cluster_gets_its_measured_links(store: Store) -> None:
    assert quietly(BOX, store) is BOX
    store.put_links(PLACE, timed(twice_as_fast(BOX)))
    found = quietly(BOX, store)
    for link, was in zip(found.links, BOX.links, strict=True):
        assert link.bandwidth_bytes_per_second == pytest.approx(2 * was.bandwidth_bytes_per_second, rel=1e-2)
    assert found.hash == BOX.hash and found.described == BOX.links
    assert found.links_source == f"measured by soap-profile links ({PLACE.text})"
    assert store.link_places() == {PLACE: len(probes_for(BOX))} and store.environments() == {}


CHANGES: list[dict[str, Any]] = [
    {"cluster": "0" * 16}, {"torch": "1.0"}, {"backend": "nccl"}, {"version": 0}, {"devices": "another"}, {"machine": "another"},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_was_measured_elsewhere_is_no_answer(store: Store, change: dict[str, Any]) -> None:
    store.put_links(replace(PLACE, **change), timed(BOX))
    assert quietly(BOX, store) is BOX
    assert store.link_places() == {replace(PLACE, **change): len(probes_for(BOX))}


def test_a_renamed_cluster_is_the_same(store: Store) -> None:
    store.put_links(PLACE, timed(BOX))
    assert quietly(replace(BOX, name="renamed"), store).links_source != ""


def test_its_own_hosts_come_before_emulated_ones(store: Store) -> None:
    emulated = replace(link_place(BOX, "gloo", emulated=True))
    assert link_places(BOX) == [PLACE, emulated] and emulated.machine and not PLACE.machine
    store.put_links(emulated, timed(BOX))
    assert "emulated hosts" in quietly(BOX, store).links_source
    store.put_links(PLACE, timed(BOX))
    assert "emulated hosts" not in quietly(BOX, store).links_source


def test_gpus_take_nccl_first_and_are_never_emulated() -> None:
    assert [(place.backend, place.emulated) for place in link_places(cluster([2]))] == [("nccl", False), ("gloo", False)]


def test_another_machine_s_links_are_foreign(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    local = preset("local:2")
    store.put_links(link_place(local, "gloo", emulated=False), timed(local))
    assert quietly(local, store).links_source
    monkeypatch.setattr(places_module, "cpu_model", lambda: "another processor")
    assert quietly(local, store) is local


def test_what_was_measured_in_part_is_not_used_and_that_is_said(store: Store) -> None:
    some = [one for one in timed(BOX) if one.probe.operation is not Operation.EXCHANGE]
    store.put_links(PLACE, some)
    with pytest.warns(SoapWarning, match=f"'test' are not used: only {len(some)} of {len(probes_for(BOX))} probes were measured"):
        assert with_stored_links(BOX, store) is BOX
    store.put_links(PLACE, [one for one in timed(BOX) if one.probe.operation is Operation.EXCHANGE])
    assert quietly(BOX, store).links_source


def test_what_was_measured_at_different_scales_is_not_used_and_that_is_said(store: Store) -> None:
    first, *others = timed(BOX)
    store.put_links(PLACE, [first, *(replace(one, scale=0.25) for one in others)])
    with pytest.warns(SoapWarning, match=r"measured at different scales \(0\.25, 1\); soap-profile links goes on at one"):
        assert with_stored_links(BOX, store) is BOX


def test_what_cannot_be_right_is_not_used_and_that_is_said(store: Store) -> None:
    store.put_links(PLACE, [replace(one, seconds=(1e-3,)) for one in timed(BOX)])
    with pytest.warns(SoapWarning, match="do not take longer when they are larger; measure again"):
        assert with_stored_links(BOX, store) is BOX


def test_timings_of_devices_that_the_cluster_lacks_are_passed_over(store: Store) -> None:
    strange = LinkTiming(Probe(Operation.MESSAGE, (0, 77), 8), (1.0,), 0.0)
    store.put_links(PLACE, [strange, *timed(BOX)])
    assert strange not in known_links(BOX, PLACE, store)
    assert Communication(quietly(BOX, store)).hash


ENTRY = Entry("update", update_key(2, 4096), Timing(900.0, 1.0), None, 9)
HERE = Environment("a cpu", "cpu", "2.13.0", 1, 1)


def test_a_store_from_before_links_gets_them(store: Store) -> None:
    store.put(HERE, [ENTRY])
    with sqlite3.connect(store.path) as base:
        base.executescript("DROP TABLE link_timings; DROP TABLE link_places; PRAGMA user_version = 1;")
    assert store.entries(HERE) == [ENTRY] and store.link_places() == {} and store.links(PLACE) == []
    store.put_links(PLACE, timed(BOX))
    assert store.entries(HERE) == [ENTRY] and len(store.links(PLACE)) == len(probes_for(BOX))


def test_json_takes_links_along(store: Store, tmp_path: Path) -> None:
    store.put(HERE, [ENTRY])
    store.put_links(PLACE, timed(BOX))
    count = len(probes_for(BOX)) + 1
    assert export_profiles(store, tmp_path / "a.json") == count
    other = Store(tmp_path / "other.sqlite")
    assert import_profiles(other, tmp_path / "a.json") == count
    assert other.links(PLACE) == store.links(PLACE) and other.link_places() == store.link_places()
    export_profiles(other, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operation": "gossip"}, "gossip"),
        ({"devices": [0]}, "devices"),
        ({"operation": "message", "devices": [0, 1, 2]}, "expected two devices"),
        ({"times_ns": []}, "times_ns"),
        ({"times_ns": [0]}, "times_ns"),
        ({"cpu_ns": -1}, "cpu_ns"),
    ],
)
def test_a_spoiled_file_is_one_line_and_changes_nothing(store: Store, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    store.put_links(PLACE, timed(BOX))
    export_profiles(store, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    document["links"][0]["timings"][0].update(change)
    (tmp_path / "a.json").write_text(json.dumps(document))
    other = Store(tmp_path / "other.sqlite")
    with pytest.raises(ProfileError, match=words) as error:
        import_profiles(other, tmp_path / "a.json")
    assert "\n" not in str(error.value) and not other.path.exists()


def test_a_file_of_another_version_is_refused(store: Store, tmp_path: Path) -> None:
    store.put_links(replace(PLACE, version=0), timed(BOX))
    export_profiles(store, tmp_path / "a.json")
    with pytest.raises(ProfileError, match=f"measured in version 0; expected {places_module.VERSION}: measure again"):
        import_profiles(store, tmp_path / "a.json")


def test_a_damaged_timing_is_one_line(store: Store) -> None:
    store.put_links(PLACE, timed(BOX))
    with sqlite3.connect(store.path) as base:
        base.execute("UPDATE link_timings SET entry = '{}'")
    with pytest.raises(ProfileError, match="not as it should be"):
        store.links(PLACE)


def test_the_text_of_a_place() -> None:
    place = LinkPlace("0" * 16, "box", "cpu", "a processor with 2 cores", "gloo", True, "2.13.0")
    assert place.text == "box on a processor with 2 cores, emulated hosts, gloo, torch 2.13.0"
