"""What compression costs: by passes over memory on data sheets, and by what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soap.cli.wanted import COMPRESSED, compressions, wanted
from soap.measure.upkeep_timing import matrix_of, time_compression
from soap.plan.compression.seam import LINE_BYTES, WORKS, Layout, Work, layout_of
from soap.profiles.entries import COMPRESSION, Entry, Timing, compression_key, decode, encode
from soap.profiles.lookup import ProfiledCosts
from soap.profiles.roofline import RooflineCosts
from soap.strategy.compression import Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq
from tests.search.test_lossy import GRAPH
from tests.strategies import CPU, GPU, cluster

EVERY: tuple[Compression, ...] = (
    Rgc(0.01, "exact"),
    Rgc(0.01, "sampled"),
    Rgc(0.01, "search", ragged=True),
    RgcAsq(0.01, "search"),
    Chunked(),
    PowerSgd(2),
    Bf16(),
    Int8(),
)
FOUR, GPUS = cluster([1] * 4, CPU), cluster([4], GPU)
HOST, DEVICE = FOUR.devices[0].type, GPUS.devices[0].type


def layout(how: Compression, elements: int = 2**20, peers: int = 4) -> Layout:
    return layout_of(how, matrix_of(elements), 4, peers)


def works(how: Compression) -> tuple[Work, ...]:
    return WORKS if len(layout(how).exchanges) > 1 else ("select", "restore")


@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.word)
def test_sheets_price_passes_and_calls(how: Compression) -> None:
    """At least a pass over the gradient to select, and a write of the sum; a slower memory takes longer by its share."""
    costs = RooflineCosts(FOUR)
    for work in works(how):
        own = layout(how)
        effort = own.effort(how, work, on_host=True)
        expected = (effort.traffic_bytes + LINE_BYTES * effort.scattered) / HOST.memory_bandwidth_bytes_per_second
        assert abs(costs.compression_ns(how, own, work, HOST) - 1e9 * (expected + effort.calls * HOST.kernel_seconds)) <= 1
        if work != "combine":
            assert effort.traffic_bytes >= own.whole_bytes and effort.calls > 0
    slow = replace(HOST, memory_bandwidth_bytes_per_second=HOST.memory_bandwidth_bytes_per_second / 2, kernel_seconds=0.0)
    times = [costs.compression_ns(how, layout(how), "select", kind) for kind in (replace(HOST, kernel_seconds=0.0), slow)]
    assert times[1] == pytest.approx(2 * times[0], rel=1e-4)


def test_a_search_for_thresholds_launches_kernels_on_gpus() -> None:
    """More than an exact selection does; but four steps in five reuse a threshold. Trimmed top-k is the exact one there."""
    calls = {name: layout(how).effort(how, "select", on_host=False).calls for name, how in {
        "exact": Rgc(0.01, "exact"), "trimmed": Rgc(0.01, "trimmed"), "search": Rgc(0.01, "search"), "sampled": Rgc(0.01, "sampled"),
    }.items()}  # fmt: skip
    assert calls["sampled"] < calls["exact"] == calls["trimmed"] < calls["search"]


def measured(how: Compression, work: Work, elements: int, ns: float, peers: int = 4) -> Entry:
    return Entry(COMPRESSION, compression_key(how, work, elements, peers), Timing(ns, 1.0), None, 5)


def test_what_was_measured_counts() -> None:
    """At a measured size the measurement, between two sizes something in between; below the smallest as much, above the largest in
    proportion. Another number of peers, and another method, are estimated."""
    how = Rgc(0.01, "exact")
    entries = [measured(how, "select", 2**13, 1e5), measured(how, "select", 2**19, 4e6)]
    assert [decode(encode(entry)) for entry in entries] == entries
    costs, estimated = ProfiledCosts(FOUR, {HOST.name: entries}), RooflineCosts(FOUR)

    def ask(elements: int, work: Work = "select", own: Compression = how, peers: int = 4) -> int:
        return costs.compression_ns(own, layout(own, elements, peers), work, HOST)

    assert ask(2**13) == ask(2**10) == 100_000 and ask(2**19) == 4_000_000 and ask(2**21) == 16_000_000
    assert 100_000 < ask(2**16) < 4_000_000
    for own, work, peers in ((how, "restore", 4), (how, "select", 8), (Rgc(0.02, "exact"), "select", 4)):
        asked = layout(own, 2**19, peers)
        assert ask(2**19, work, own, peers) == estimated.compression_ns(own, asked, work, HOST)  # type: ignore[arg-type]
    assert costs.hash != ProfiledCosts(FOUR, {HOST.name: entries[:1]}).hash


def test_ragged_messages_take_what_padded_ones_take_and_a_little_more() -> None:
    """They are not measured by themselves, so that a search compares both by one source: what was measured of padded ones counts, and what
    is done about lengths is estimated."""
    padded = Rgc(0.01, "search")
    ragged = replace(padded, ragged=True)
    costs = ProfiledCosts(FOUR, {HOST.name: [measured(padded, "select", 2**19, 4e6), measured(padded, "restore", 2**19, 3e6)]})
    estimated = RooflineCosts(FOUR)
    for work, measured_ns in (("select", 4_000_000), ("restore", 3_000_000)):
        sheet = [estimated.compression_ns(how, layout(how, 2**19), work, HOST) for how in (padded, ragged)]  # type: ignore[arg-type]
        found = costs.compression_ns(ragged, layout(ragged, 2**19), work, HOST)  # type: ignore[arg-type]
        assert found == measured_ns + sheet[1] - sheet[0] > measured_ns
    sizes = layout(ragged, 2**19)
    assert costs.compression_ns(ragged, sizes, "combine", HOST) == estimated.compression_ns(ragged, sizes, "combine", HOST)


def test_profiles_want_what_the_methods_do_to_the_model() -> None:
    names = {one.key: one for one in compressions(GRAPH, 4, [RgcAsq(0.01), Int8()])}
    settings = {one.compressing.how for one in names.values() if one.compressing}
    assert settings == {RgcAsq(0.01, "search"), Rgc(0.01, "sampled"), Int8()}  # the output layer is not averaged
    assert {one.compressing.elements for one in names.values() if one.compressing} == {2**13, 2**16, 2**19}
    assert all(one.kind == COMPRESSION and one.group == COMPRESSED for one in names.values())
    assert compressions(GRAPH, 1, [Int8()]) == [] and not [one for one in wanted(GRAPH, FOUR, {}) if one.kind == COMPRESSION]


@pytest.mark.slow
@pytest.mark.parametrize("how", EVERY, ids=lambda how: how.word)
def test_every_work_can_be_timed(how: Compression) -> None:
    for work in works(how):
        found = time_compression(how, work, 2**10, 3, torch.device("cpu"))
        assert found.ns > 0 and found.repetitions >= 1
