"""``soap-profile`` as people call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import soap
from soap import api
from soap.cli import measuring, search, simulate
from soap.cli.profile import main
from soap.cli.wanted import MAY_BE_NEEDED, wanted
from soap.cluster.emulated import emulated_topology, parse_emulated
from soap.cluster.presets import local_topology
from soap.errors import ProfileError, SoapWarning
from soap.measure import tile_timing, upkeep_timing
from soap.measure.neighbours import Neighbours
from soap.measure.tile_timing import whole_tile
from soap.measure.timing import Sample
from soap.profiles import keys
from soap.profiles.corrections import Correction
from soap.profiles.entries import Entry, Timing
from soap.profiles.keys import environments
from soap.profiles.lookup import ProfiledCosts
from soap.profiles.roofline import RooflineCosts
from soap.profiles.store import Store, default_path
from soap.strategy.classical import CLASSICAL, NAMED, SYNCHRONIZED
from tests.cli.own_store import use_own_store
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:rnnlm:tiny", "local:2"
COMMAND = [MODEL, "--cluster", CLUSTER]
ROOT = Path(__file__).resolve().parents[2]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test begins with an empty store; this machine's rates are measured once for all."""
    use_own_store(monkeypatch, tmp_path_factory)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measure shortly and beside nobody; the keys of all that is measured."""
    seen: list[str] = []
    real = measuring.measured

    def watched(ones: Any, *others: Any) -> Any:
        seen.extend(one.key.text for one in ones)
        return real(ones, *others)

    monkeypatch.setattr(measuring, "measured", watched)
    monkeypatch.setattr(upkeep_timing, "SECONDS", 0.005)
    monkeypatch.setattr(upkeep_timing, "CHAINS", (2, 8))
    monkeypatch.setattr(tile_timing.TileTimer.time_in_turns, "__defaults__", (0.005,))
    monkeypatch.setattr(Neighbours, "__enter__", lambda self: self)
    monkeypatch.setattr(measuring, "APART", float("inf"))  # so shortly times differ as they like
    return seen


def told(capsys: Capsys, command: Sequence[str]) -> dict[str, Any]:
    assert main([*command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def everything() -> list[Any]:
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    return wanted(graph, topology, {"classical": [api.classical(name, graph, topology) for name in (NAMED if graph.sparse else CLASSICAL)]})


def in_turn() -> list[str]:
    """What strategies need is measured twice."""
    needed, others = ([one.key.text for one in everything() if (one.group in MAY_BE_NEEDED) is own] for own in (False, True))
    return [*needed, *needed, *others]


@pytest.mark.slow
def test_measures_each_computation_and_nothing_again(brief: list[str], capsys: Capsys) -> None:
    found = told(capsys, COMMAND)
    assert brief == in_turn() and len(brief) > len(set(brief))
    assert len(set(brief)) == found["measured_now"] > 30
    assert found["missing"] == []
    for counts in found["computations"].values():
        assert counts["measured"] > 0 and sum(counts.values()) == counts["measured"]
    for one in found["strategies"].values():
        assert one["shares"]["calibrated"] == one["shares"]["estimated"] == 0
        assert one["shares"]["measured"] > 0
    (place,) = environments(soap.load_cluster(CLUSTER)).values()
    entries = Store().entries(place)
    assert {entry.key.text for entry in entries} == set(brief)
    assert all(entry.forward.ns > 0 and (entry.backward is None or entry.backward.ns > 0) for entry in entries)
    before = len(brief)
    Store().put_corrections(place, [Correction("linear", False, 2.0, 8, "m", "aa", "now")])
    found = told(capsys, COMMAND)
    assert (found["measured_now"], found["corrections_dropped"], len(brief)) == (0, 0, before)
    assert [[one["of"] for one in own] for own in found["corrections"].values()] == [["linear forward"]]
    assert 0 < found["strategies"]["data_parallel"]["corrected"] < 1
    found = told(capsys, [*COMMAND, "--again"])
    assert (found["measured_now"], found["corrections_dropped"], len(brief)) == (len(set(brief)), 1, 2 * before)
    assert found["corrections"] == {} and Store().corrections(place) == []


def test_a_third_time_decides_where_two_differ(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {0: (100.0, 104.0), 1: (100.0, 120.0, 110.0), 2: (100.0, 100.0)}  # the last one's backward passes are apart
    needed = [one for one in everything() if one.group not in MAY_BE_NEEDED and one.tile is not None][: len(times)]
    seen: list[int] = []
    groups: list[int] = []

    def fake(ones: Any, *_: Any) -> list[Entry]:
        groups.append(len(ones))
        return [fake_one(one) for one in ones]

    def fake_one(one: Any) -> Entry:
        index = needed.index(one)
        ns = [*times[index], 50.0][seen.count(index)]
        backward = Timing((40.0, 80.0, 70.0)[seen.count(index)], 2.0) if index == 2 else None
        seen.append(index)
        return Entry(one.kind, one.key, Timing(ns, 1.0), backward, 7)

    monkeypatch.setattr(measuring, "measured", fake)
    pairs = SimpleNamespace(groups=lambda tiles: [tiles[start : start + 2] for start in range(0, len(tiles), 2)])
    monkeypatch.setattr(measuring, "TileTimer", lambda *_: pairs)
    monkeypatch.setattr(Neighbours, "__enter__", lambda self: self)
    topology, store = soap.load_cluster(CLUSTER), Store()
    (place,) = environments(topology).values()
    reading: Any = {"batch_dims": None, "autocast": None, "batch_norm": "global"}
    assert measuring.measure(MODEL, reading, topology, place, needed, store, None) == len(times)
    assert seen == [0, 1, 2, 0, 1, 2, 1, 2] and groups == [2, 1, 2, 1, 2]
    found = {entry.key: entry for entry in store.entries(place)}
    assert [found[one.key].forward.ns for one in needed] == [102.0, 110.0, 100.0]
    last = found[needed[2].key].backward
    assert last is not None and last.ns == 70.0


def test_a_tile_alone_takes_turns_with_others_of_the_model() -> None:
    times = [tile_timing.TileTimes(Sample(float(ns), 1.0, 7), None) for ns in (5, 6, 7)]
    one = next(one for one in everything() if one.tile is not None)
    asked: list[Any] = []

    def time_them(tiles: Any) -> list[Any]:
        asked.extend(tiles)
        return times

    graph = api.load(MODEL, plan_only=True).graph
    operands = SimpleNamespace(is_active=lambda tile: False)
    timer: Any = SimpleNamespace(groups=lambda tiles: [tiles[:3], tiles[3:]], time=time_them, graph=graph, operands=operands)
    others = [whole_tile(graph, position) for position in range(4)]
    (entry,) = measuring.measured([one], timer, cast(Any, None), [*others, one.tile])  # type: ignore[list-item]
    assert asked == [one.tile, *others[:2]] and (entry.key, entry.forward.ns) == (one.key, 5.0)


@pytest.mark.slow
def test_goes_on_where_a_budget_has_ended(brief: list[str], capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10**6))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: next(seconds)))  # each of its looks at the clock is later
    first = told(capsys, [*COMMAND, "--budget", "6"])
    assert 0 < first["measured_now"] < len(everything())
    assert len(first["missing"]) == len(everything()) - first["measured_now"]
    rest = told(capsys, COMMAND)
    assert rest["measured_now"] + first["measured_now"] == len(everything()) == len(set(brief))


def test_the_classical_strategies_come_before_the_search_space_and_the_expensive_before_the_cheap() -> None:
    groups = [one.group for one in everything()]
    assert list(dict.fromkeys(groups)) == ["runtime and updates", "classical", "other updates, and copies", "search space"]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)
    for group in ("classical", "search space"):
        costs = [one.estimated_ns for one in everything() if one.group == group]
        assert costs == sorted(costs, reverse=True) and costs


def test_lookups_are_wanted_as_they_are_and_on_rows() -> None:
    kinds = [(one.group, one.kind) for one in everything() if one.kind.startswith("embedding")]
    assert ("classical", "embedding") in kinds and ("classical", "embedding on rows") in kinds
    assert all(one.tile.sparse_lookup == one.kind.endswith(" on rows") for one in everything() if one.tile is not None)
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    space = [one.kind for one in wanted(graph, topology, {})]
    assert space.count("embedding on rows") == space.count("embedding") > 1
    gathered = SYNCHRONIZED["sparse_allgather"](graph, topology)
    first = [one.kind for one in wanted(graph, topology, {"given": [gathered]}) if one.group == "given"]
    assert "embedding on rows" in first and "embedding" not in first


@pytest.mark.slow
def test_a_strategys_computations_are_measured_before_the_space(brief: list[str], capsys: Capsys, tmp_path: Path) -> None:
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    path = tmp_path / "s.json"
    strategy = api.classical("data_parallel", graph, topology)
    head = graph.operators[graph.index["head.linear"]]
    degrees = tuple(2 if factor.name == "k" else 1 for factor in head.factors)
    strategy = strategy.with_operator(head.name, soap.OpConfig(degrees, (0, 1)))
    soap.save_strategy(path, strategy, graph, topology)
    found = told(capsys, [*COMMAND, "--strategy", str(path)])
    assert found["computations"][str(path)] == {"measured": 1, "interpolated": 0, "calibrated": 0, "estimated": 0}
    assert str(path) in found["strategies"]


@pytest.mark.slow
def test_show_says_what_is_missing_and_what_is_foreign(brief: list[str], capsys: Capsys) -> None:
    before = told(capsys, ["show", *COMMAND])
    assert all(one["shares"]["estimated"] == 1 for one in before["strategies"].values())
    assert len(before["missing"]) == len(everything()) and brief == []
    assert not default_path().exists()
    assert main(COMMAND) == 0
    out = capsys.readouterr().out
    assert "nothing is left" in out and "1 thread" in out and str(default_path()) in out
    assert main(["show", *COMMAND]) == 0
    out = capsys.readouterr().out
    assert "100% measured" in out or "% measured, " in out
    assert "not measured" not in out
    assert main(["show", MODEL, "--cluster", "local:1"]) == 0
    out = capsys.readouterr().out
    assert "100% estimated" in out and f"measured elsewhere, and not used here:\n  {len(everything())} on" in out


@pytest.mark.slow
def test_every_planner_uses_it_and_says_so(brief: list[str], capsys: Capsys, tmp_path: Path) -> None:
    priced = [*COMMAND, "--builtin", "data_parallel"]
    assert simulate.main([*priced, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["costs"]["shares"]["estimated"] == 1
    assert main(COMMAND) == 0
    capsys.readouterr()
    assert simulate.main([*priced, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["costs"]["shares"]["measured"] > 0 and after["costs"]["shares"]["estimated"] == 0
    assert "soap-profile" in after["costs"]["description"]
    assert after["costs"]["hash"] != before["costs"]["hash"]
    assert after["predicted_ns"] == soap.simulate(MODEL, CLUSTER, "data_parallel").makespan_ns
    assert simulate.main(priced) == 0
    assert "% measured" in capsys.readouterr().out
    assert simulate.main([*priced, "--json", "--costs", "estimate"]) == 0
    assert json.loads(capsys.readouterr().out) == before
    saved = []
    for name in ("a.json", "b.json"):
        assert search.main([*COMMAND, "--budget", "20", "--profile", "0", "--verify", "0", "-o", str(tmp_path / name)]) == 0
        assert "% measured" in capsys.readouterr().out
        saved.append((tmp_path / name).read_bytes())
    assert saved[0] == saved[1]
    record = json.loads(saved[0])["record"]["costs"]
    assert record["hash"] == after["costs"]["hash"] and sum(record["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert main([*COMMAND, "--again"]) == 0
    assert search.main([*COMMAND, "--budget", "20", "--profile", "0", "--verify", "0", "-o", str(tmp_path / "c.json")]) == 0
    other = json.loads((tmp_path / "c.json").read_bytes())["record"]["costs"]
    assert other["hash"] != record["hash"]


def test_a_store_that_cannot_be_read_is_a_warning_for_planners_and_an_error_here(capsys: Capsys) -> None:
    default_path().write_text("no database" * 1000)
    topology = soap.load_cluster(CLUSTER)
    with pytest.warns(SoapWarning, match="going on with estimates"):
        assert type(api.costs_for(topology)) is RooflineCosts
    assert type(api.costs_for(topology, costs="estimate")) is RooflineCosts
    assert_refused(capsys, main, ["show", *COMMAND], 6, "cannot be used", "move it away")


@pytest.mark.slow
def test_files_take_measurements_along(brief: list[str], capsys: Capsys, tmp_path: Path) -> None:
    assert main([*COMMAND]) == 0
    path = tmp_path / "profile.json"
    assert main(["export", str(path)]) == 0
    assert f"wrote {len(set(brief))} measurements" in capsys.readouterr().out
    default_path().unlink()
    assert main(["import", str(path)]) == 0
    assert main(["import", "nvidia-h200"]) == 0
    assert f"took {len(set(brief))} measurements" in capsys.readouterr().out
    assert told(capsys, COMMAND)["measured_now"] == 0
    assert isinstance(api.costs_for(soap.load_cluster(CLUSTER)), ProfiledCosts)


@pytest.mark.parametrize(
    ("count", "cores", "share", "threads", "beside"), [(1, 4, 1.0, 4, 0), (2, 4, 1.0, 2, 1), (4, 4, 1.0, 1, 0), (8, 2, 0.25, 1, 0)]
)
def test_processes_share_the_cores(
    count: int, cores: int, share: float, threads: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On emulated hosts one with a thread is measured alone, as its time is even."""
    for module in (keys, measuring):
        monkeypatch.setattr(module, "cpu_cores", lambda: cores)
    local = replace(local_topology(count), measured=True)
    (place,) = environments(local).values()
    assert measuring.place_of(local, place).clock == (torch.device("cpu"), threads, share)
    emulated = emulated_topology(parse_emulated(f"emulated:{count}x1", count), local)
    ((name, there),) = environments(emulated).items()
    assert (name, there.threads, there.neighbours) == (f"{local.devices[0].type.name}, emulated", threads, beside)
    assert measuring.place_of(emulated, there).clock == (torch.device("cpu"), threads, pytest.approx(0.75 * share))


def test_a_source_of_costs_that_is_none_is_refused() -> None:
    with pytest.raises(ProfileError, match="'data sheet': expected one of auto, estimate"):
        api.costs_for(local_topology(1), costs="data sheet")  # type: ignore[arg-type]


def spoil(path: Path) -> None:
    path.write_text('{"format": "soap-profile", "version": 1, "profiles": 3}')


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["import", "missing.json"], 6, ["missing.json", "check the path"]),
        (["import", "bad.json"], 6, ["bad.json", "profiles", "expected what soap-profile export wrote"]),
        (["export", "nowhere/x.json"], 1, ["nowhere", "create the folder"]),
        ([MODEL, "--cluster", "p100-4x4"], 2, ["p100-4x4", "expected local:N"]),
        ([*COMMAND, "--budget", "0"], 2, ["above 0"]),
        ([*COMMAND, "--strategy", "missing.json"], 5, ["missing.json"]),
        (["nosuch.pt2", "--cluster", CLUSTER], 3, ["nosuch.pt2"]),
    ],
)
def test_bad_input_is_one_line(
    command: list[str], code: int, words: list[str], capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(tmp_path / "bad.json")
    assert_refused(capsys, main, command, code, *words)


def count_measured() -> int:
    (place,) = environments(soap.load_cluster(CLUSTER)).values()
    return len(Store().entries(place))


def until(done: Callable[[], bool], seconds: float = 120.0) -> None:
    stop = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < stop
        time.sleep(0.1)


@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured() -> None:
    """With real neighbours, in a process of its own; the suite sees that none of them stays behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "soap.cli.profile", "zoo:gpt:tiny", "--cluster", CLUSTER], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    until(lambda: count_measured() >= 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert err.strip().splitlines()[-1] == "soap-profile: interrupted: what was measured is kept, and the same command goes on from there"
    assert "Traceback" not in err
    assert count_measured() >= 3
