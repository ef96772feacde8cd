"""The figures of how far costs are off are those that stored measurements give, and can be measured anew."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import spread_pairs, spreads
from benchmarks.spread_pairs import Pair
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.measure.link_probe import LinkTiming
from soap.measure.link_probes import Operation, quick_probes, with_measured_links
from soap.profiles.entries import UPDATE, Entry, Timing, update_key
from soap.profiles.keys import TileKey
from soap.profiles.lookup import Source
from soap.profiles.spreads import CLASSES, known_spreads, row_name
from soap.profiles.work import Kernel

TWO = preset("local:2")


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    return spreads.fit()


def test_the_file_is_what_stored_measurements_give(fitted: dict[str, Any]) -> None:
    """python -m benchmarks.spreads fit > soap/profiles/data/spreads.json"""
    assert json.loads(json.dumps(fitted)) == known_spreads()


def test_every_row_says_where_it_comes_from(fitted: dict[str, Any]) -> None:
    def check(row: dict[str, Any], name: str) -> None:
        if any(isinstance(value, float | int | list) for value in row.values()):
            assert row["source"] and "TODO" not in row["source"], name
        for key, value in row.items():
            if isinstance(value, dict):
                check(value, f"{name} {key}")

    check(fitted, "")
    assert " s each, until 20" in fitted["tile"]["estimated"]["cpu"]["source"]  # how long models were measured


def tiles(group: str, kind: str, count: int, error: float, apart: float = 0.0, ns: float = 1e7) -> list[Pair]:
    """So many that take this much longer than said, alternately ``apart`` more and less."""
    each = [error + apart * (-1) ** number for number in range(count)]
    return [Pair(group, kind, False, "estimated", ns * math.exp(own), ns) for own in each]


def test_what_is_shared_is_told_from_what_is_each_ones_own() -> None:
    equal = [*tiles("a", "linear", 40, 0.5), *tiles("a", "relu", 40, 0.5)]
    found = spreads.components(equal)
    assert (found["rate"], found["kind"], found["shape"]) == pytest.approx((0.5, 0.0, 0.0))
    kinds = [*tiles("a", "linear", 40, 0.2), *tiles("a", "relu", 40, -0.2)]
    found = spreads.components(kinds)
    assert found["kind"] == pytest.approx(0.2, rel=0.05) and found["shape"] == pytest.approx(0) and abs(found["rate"]) < 0.05
    found = spreads.components(tiles("a", "linear", 400, 0.0, apart=0.3))
    assert found["shape"] == pytest.approx(0.3, rel=0.05) and found["rate"] < 0.05 and found["kind"] == pytest.approx(0)


def test_classes_and_sizes_have_figures_of_their_own_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [*tiles("a", "linear", 30, 0.1), *tiles("a", "embedding", 19, 0.9), *tiles("a", "relu", 25, -0.4, ns=1e5)]
    found = spreads._tiles("cpu", some, 0.05, "documents", "file")
    own = found["estimated"]["classes"]
    assert set(own) == {row_name("product", ""), "other", row_name("", "short"), "long"}
    assert own["product"]["kind"] != own["other"]["kind"] and own["product"]["source"] == "30 of these passes"
    assert found["calibrated"]["rate"] == found["interpolated"]["rate"] == found["estimated"]["rate"]  # of which there are no pairs
    assert found["interpolated"]["source"] == "as calibrated: 0 passes alone"
    with pytest.raises(SoapError, match=r"^19 passes in file: expected 20 or more"):
        spreads._tiles("cpu", some[30:49], 0.05, "documents", "file")
    kinds = ("mm", "conv2d", "scaled_dot_product_attention", "gru", "embedding on rows", "relu")
    assert set(CLASSES) == {spreads.class_of(kind) for kind in kinds}


@pytest.mark.parametrize(("error", "expected"), [(0.1, {"rate": 0.0, "all": 0.1}), (0.6, {"rate": 0.7, "all": 0.2})])
def test_updates_share_the_rate_of_tiles_if_that_explains_more(error: float, expected: dict[str, float]) -> None:
    found = spreads._updates([*tiles("a", "linear", 30, 0.4), *tiles("a", "update-2", 9, error)], {"rate": 0.7, "kind": 0.3}, "file")
    assert {part: found[part] for part in expected} == pytest.approx(expected)
    few = spreads._updates(tiles("a", "update-2", 4, error), {"rate": 0.7, "kind": 0.3}, "file")
    assert (few["rate"], few["all"], few["source"]) == (0.7, 0.3, "as an estimated kind of operator: 4 updates alone")


def entries() -> list[Entry]:
    """Products whose time grows with their length, three times as long as estimated, and an update."""
    found = []
    for length in (1000, 2000, 4000):
        work = (Kernel("float32", 1e6 * length, 1000 * length, 1),)
        (pair,) = spread_pairs.pairs_of("", [_entry("linear", TileKey("f", (length,), (), True), work, 1e9)], TWO)
        found.append(_entry("linear", TileKey("f", (length,), (), True), work, 3 * pair.predicted_ns))
    return [*found, _entry(UPDATE, update_key(2, 2**20), (), 5e6)]


def _entry(kind: str, key: TileKey, work: Sequence[Kernel], ns: float) -> Entry:
    return Entry(kind, key, Timing(ns, ns / 10), None, 5, tuple(work))


def test_pairs_have_what_each_source_would_say_without_the_measurement() -> None:
    found = list(spread_pairs.pairs_of("m", entries(), TWO))
    assert [(pair.kind, pair.source) for pair in found].count(("linear", "estimated")) == 3
    (between,) = [pair for pair in found if pair.source == Source.INTERPOLATED]
    assert abs(between.error) < 0.1 < 0.8 < next(pair.error for pair in found if pair.source == "estimated")
    (update,) = [pair for pair in found if pair.kind == "update-2"]
    assert update.measured_ns == 5e6 and update.source == "estimated"


def link_topology(longer: float) -> Topology:
    timings = []
    for probe in quick_probes(TWO):
        seconds = {Operation.STEP_MESSAGE: 7e-5, Operation.STEP_SUM: 3e-4}.get(probe.operation, 5e-5 + probe.size_bytes * 1e-9)
        timings.append(LinkTiming(probe, (seconds * longer,), 4e-5))
    return with_measured_links(TWO, timings, "quickly measured for a test")


def test_measuring_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_pairs, "CPU_PAIRS", tmp_path / "pairs.json")
    monkeypatch.setattr(spread_pairs.api, "load_cluster", lambda name: TWO)
    asked: list[str] = []

    def profiled(model: str, budget_s: float, folder: Path) -> list[Entry]:
        asked.append(model)
        if model == "broken":
            raise SoapError("soap-profile broken failed: no such model")
        return entries()

    measured = iter([1.0, 1.1, 1.3])
    monkeypatch.setattr(spread_pairs, "_profiled", profiled)
    monkeypatch.setattr(spread_pairs, "measured_local_topology", lambda count, cache: link_topology(next(measured)))
    with pytest.raises(SoapError, match="no such model"):
        spread_pairs.measure(["a", "broken"], 1.0, 2)
    spread_pairs.measure(["a", "b"], 1.0, 2)
    spread_pairs.measure(["a", "b"], 1.0, 3)
    assert asked == ["a", "broken", "b"]
    kept = spread_pairs.record()
    assert list(kept["models"]) == ["a", "b"] and len(kept["quick"]) == 3
    again = spread_pairs.cpu_pairs(kept)
    direct = [pair for model in ("a", "b") for pair in spread_pairs.pairs_of(model, entries(), TWO)]
    assert [pair[:4] for pair in again] == [pair[:4] for pair in direct]
    assert [pair.error for pair in again] == pytest.approx([pair.error for pair in direct], abs=1e-3)
    assert spreads.quick_error(kept["quick"], ["message", "sum"]) == pytest.approx(0.13, abs=0.05)
    with pytest.raises(SoapError, match=r"^2 quick measurements of links in spreads_cpu\.json: expected 3 or more"):
        spreads.quick_error(kept["quick"][:2], ["sum"])


def test_links_that_could_not_be_measured_are_no_figures() -> None:
    with pytest.raises(SoapError, match="links were not measured in training"):
        spread_pairs.quick_figures(TWO)
