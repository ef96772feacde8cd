"""A plan that was not run replaces data parallelism only if it is predicted to win by more than predictions err."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import soap
from soap import api
from soap.cli.search import main
from soap.cluster.yaml_file import parse_cluster
from soap.profiles.margins import ESTIMATED_ERROR
from soap.search.options import SearchOptions
from tests.cli.refusals import assert_refused

MODEL = "zoo:lm:tiny"
PAIR = """
name: pair
hosts:
  - {name: box, devices: {type: p100, count: 2}, cpu_cores: 8, memory: 64 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 5 us}}}
"""
CLUSTER = parse_cluster(PAIR)
Capsys = pytest.CaptureFixture[str]


def search(out: Path, *options: str) -> int:
    described = out.parent / "pair.yaml"
    described.write_text(PAIR)
    return main([MODEL, "--cluster", str(described), "--budget", "20", "-o", str(out), *options])


def report(capsys: Capsys, out: Path, *options: str) -> dict[str, Any]:
    assert search(out, "--json", *options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_gain_within_the_errors_of_estimates_keeps_data_parallelism(tmp_path: Path, capsys: Capsys) -> None:
    unguarded = report(capsys, tmp_path / "u.json", "--margin", "1")
    gain = unguarded["speedup"]
    assert gain > 1 and "guard" not in unguarded and "guard" not in json.loads((tmp_path / "u.json").read_text())["record"]
    out, above = tmp_path / "s.json", f"{gain * 1.01:.4f}"
    kept = report(capsys, out, "--margin", above)
    assert (kept["same_as"], kept["speedup"]) == ("data_parallel", 1.0)
    said = {"kept": "data_parallel", "found_ns": unguarded["predicted_ns"], "gain": round(gain, 4), "margin": float(above)}
    sources = {"measured": 0.0, "interpolated": 0.0, "calibrated": 0.0, "estimated": 1.0}
    assert kept["guard"] == {**said, "shares": sources, "links": None}
    record = json.loads(out.read_text())["record"]
    assert record["guard"] == said and record["predicted_ns"] == record["data_parallel_ns"] == kept["predicted_ns"]
    graph, topology = soap.load(MODEL, plan_only=True).graph, CLUSTER
    assert soap.load_strategy(out, graph, topology) == api.classical("data_parallel", graph, topology)
    taken = report(capsys, out, "--margin", f"{gain * 0.99:.4f}")
    assert taken["guard"]["kept"] == "found" and taken["predicted_ns"] == unguarded["predicted_ns"]
    assert soap.load_strategy(out, graph, topology) == soap.load_strategy(tmp_path / "u.json", graph, topology)


def test_it_says_so_to_people(tmp_path: Path, capsys: Capsys) -> None:
    assert search(tmp_path / "s.json", "--margin", "1000") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "kept data_parallel: the fastest plan found is predicted " in out
    assert "not above the 1000.00x by which such predictions may be wrong (compute time 100% estimated, links estimated)" in out
    assert "measured costs (soap-profile, soap-profile links) decide, --margin 1 takes the plan" in out
    assert "the strategy is data_parallel" in out


def test_the_margin_is_that_of_the_costs_unless_another_is_asked_for(tmp_path: Path) -> None:
    found = api.find(MODEL, CLUSTER, SearchOptions(budget=20, margin=None))
    assert found.known_error == ESTIMATED_ERROR and found.guard is not None and found.guard.margin == ESTIMATED_ERROR
    unguarded = api.find(MODEL, CLUSTER, SearchOptions(budget=20))  # Python takes what is predicted to be fastest, as it did
    assert unguarded.guard is None and unguarded.strategy == found.result.strategy
    held = found.guard.gain <= ESTIMATED_ERROR
    assert found.guard.keeps_data_parallelism is held
    assert found.strategy == (found.usual if held else found.result.strategy)


def test_what_data_parallelism_cannot_replace_is_taken(tmp_path: Path) -> None:
    pinned = api.find(MODEL, CLUSTER, SearchOptions(budget=20, margin=1000.0, pins={"*": "@0"}))
    assert pinned.usual is None and pinned.guard is None and pinned.strategy == pinned.result.strategy
    usual = api.find(MODEL, "local:1", SearchOptions(budget=5, margin=1000.0, costs="estimate"))  # which is data parallelism itself
    assert usual.guard is None and usual.strategy == usual.result.strategy


@pytest.mark.parametrize("margin", ["0.9", "0", "much", "inf"])
def test_other_margins_are_refused(margin: str, tmp_path: Path, capsys: Capsys) -> None:
    command = [MODEL, "--cluster", "p100-4x4", "-o", str(tmp_path / "s.json"), "--margin", margin]
    assert_refused(capsys, main, command, 2, "--margin", repr(margin))
