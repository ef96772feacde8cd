"""The fastest plan, and the safe one, which replaces data parallelism only if it is faster in nearly all draws of the costs; and what is
said about both."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

import soap
from soap import api
from soap.api import finding, outcome, predictions
from soap.cli import plan_summary, simulate, spare_plans, stopping
from soap.cli.command import UsageError
from soap.cli.search import HASTY_DRAWS, main
from soap.cluster.topology import QUICKLY_MEASURED
from soap.cluster.yaml_file import parse_cluster
from soap.search.deciding import DECIDING_DRAWS, DEFAULT_CONFIDENCE
from soap.search.options import SearchOptions
from tests.cli.refusals import assert_refused

MODEL = "zoo:lm:tiny"
PAIR = """
name: pair
hosts:
  - {name: box, devices: {type: p100, count: 2}, cpu_cores: 8, memory: 64 GiB, links: {intra: {bandwidth: BANDWIDTH, latency: 5 us}}}
"""
CLOSE, SLOW = "16 GB/s", "30 MB/s"
"""Bandwidths at which a plan of ``MODEL`` wins by little, and by much."""
Capsys = pytest.CaptureFixture[str]


def described(bandwidth: str) -> str:
    return PAIR.replace("BANDWIDTH", bandwidth)


def search(out: Path, bandwidth: str, *options: str) -> int:
    cluster = out.parent / "pair.yaml"
    cluster.write_text(described(bandwidth))
    return main([MODEL, "--cluster", str(cluster), "--budget", "40", "-o", str(out), *options])


def report(capsys: Capsys, out: Path, bandwidth: str, *options: str) -> dict[str, Any]:
    assert search(out, bandwidth, "--json", *options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_the_fastest_plan_and_the_safe_one_are_both_written(tmp_path: Path, capsys: Capsys) -> None:
    """``--confidence`` says which of both is the answer; the other one goes into a file of its own."""
    out, safe_out, fastest_out = (tmp_path / name for name in ("s.json", "s.safe.json", "s.fastest.json"))
    taken = report(capsys, out, CLOSE)
    own = taken["decision"]
    first, usual = own["plans"][own["fastest"]], own["plans"]["data_parallel"]
    assert (own["answer"], own["kept"], own["safe"], own["reference"]) == ("fastest", own["fastest"], "data_parallel", "data_parallel")
    assert own["confidence"] == DEFAULT_CONFIDENCE > first["wins"] > 0.5 and first["mean_ns"] < usual["mean_ns"]
    assert own["draws"] == DECIDING_DRAWS and (usual["wins"], usual["gain"]) == (0.5, [1.0, 1.0])
    assert first["predicted_ns"] == taken["predicted_ns"] and first["gain"] == [taken["range"]["speedup"][place] for place in (0, -1)]
    assert taken["strategy"] == str(out) and taken["files"] == {"fastest": str(out), "safe": str(safe_out)}
    graph, topology = soap.load(MODEL, plan_only=True).graph, parse_cluster(described(CLOSE))
    fastest, safe = (soap.load_strategy(path, graph, topology) for path in (out, safe_out))
    assert safe == api.classical("data_parallel", graph, topology) != fastest
    records = [json.loads(path.read_text())["record"] for path in (out, safe_out)]
    assert records[0]["decision"] == own and records[1]["decision"] == {**own, "answer": "safe", "kept": "data_parallel"}
    assert [record["predicted_ns"] for record in records] == [first["predicted_ns"], usual["predicted_ns"]]
    assert records[1]["beside"] == "s.json" and "beside" not in records[0]
    assert records[1]["predicted_ns"] == records[1]["data_parallel_ns"] == records[0]["data_parallel_ns"]

    kept = report(capsys, out, CLOSE, "--confidence", "1")
    assert kept["same_as"] == "data_parallel" == kept["decision"]["kept"] and kept["decision"]["plans"] == own["plans"]
    assert kept["files"] == {"safe": str(out), "fastest": str(fastest_out)} and not safe_out.exists()  # of the search before
    assert [soap.load_strategy(path, graph, topology) for path in (out, fastest_out)] == [safe, fastest]
    surely = report(capsys, out, CLOSE, "--confidence", f"{first['wins'] - 1e-3}")
    assert surely["decision"]["kept"] != "data_parallel" and surely["range"]["wins"] >= first["wins"] - 1e-3
    assert surely["decision"]["safe"] == surely["decision"]["fastest"] and surely["files"] == {"fastest": str(out), "safe": str(out)}
    assert not safe_out.exists() and not fastest_out.exists()


def test_a_file_that_no_search_wrote_is_not_lost(tmp_path: Path, capsys: Capsys) -> None:
    out, other = tmp_path / "s.json", tmp_path / "s.safe.json"
    for own in ("notes", None):
        if own is None:  # a strategy file of the user's own
            other.unlink()
            api.find(MODEL, parse_cluster(described(CLOSE)), SearchOptions(budget=1)).save(other)
        else:
            other.write_text(own)
        before = other.read_bytes()
        command = [MODEL, "--cluster", "p100-4x4", "-o", str(out)]
        assert_refused(capsys, main, command, 2, str(other), "not written next to 's.json', and is where the safe plan goes; move it")
        assert other.read_bytes() == before and not out.exists()


def test_what_an_earlier_search_wrote_is_removed_and_nothing_else(tmp_path: Path) -> None:
    out, safe, fastest = (tmp_path / name for name in ("s.json", "s.safe.json", "s.fastest.json"))
    found = api.find(MODEL, "h100-2", SearchOptions(budget=1, costs="estimate", starts=("data_parallel",)))
    found.save(safe, beside="s.json")
    found.save(fastest, beside="t.json")
    spare_plans.check_beside(str(tmp_path / "other.json"), [str(safe)])
    with pytest.raises(UsageError, match=r"was not written next to 's.json', and is where the fastest plan goes"):
        spare_plans.check_beside(str(out), [])
    with pytest.raises(UsageError, match="where the safe plan goes, next to"):
        spare_plans.check_beside(str(tmp_path / "x.json"), [str(tmp_path / "x.safe.json")])
    spare_plans.drop_beside(str(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.fastest.json"]


def test_plans_of_this_machine_are_safe_unless_they_are_run() -> None:
    options = SearchOptions(budget=1, costs="estimate", starts=("data_parallel",))
    assert [api.find(MODEL, cluster, options).decision.answer for cluster in ("local:2", "h100-2")] == ["safe", "fastest"]
    assert api.find(MODEL, "local:2", replace(options, confidence=0)).decision.answer == "fastest"


def test_a_plan_that_wins_by_much_is_taken(tmp_path: Path, capsys: Capsys) -> None:
    found = report(capsys, tmp_path / "s.json", SLOW)
    assert found["decision"]["plans"][found["decision"]["kept"]]["wins"] == 1.0 and found["decision"]["kept"] != "data_parallel"
    low, middle, high = found["range"]["time_ns"]
    assert low < middle < high and low < found["predicted_ns"] < high
    assert found["range"]["speedup"][0] > 1
    for (least, most), expected in zip(found["memory_range_bytes"], found["expected_memory_bytes"], strict=True):
        assert least < most == expected  # what is expected has been enough for every rank measured


def test_it_says_so_to_people(tmp_path: Path, capsys: Capsys) -> None:
    assert search(tmp_path / "s.json", CLOSE) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("found: found") and line.endswith("the safe one is data_parallel (below)") for line in lines)
    (fastest,) = [line for line in lines if line.startswith("fastest: found")]
    (safe,) = [line for line in lines if line.startswith("safe: data_parallel")]
    assert " of 64 " in fastest and fastest.endswith("s.json") and safe.endswith("- " + str(tmp_path / "s.safe.json"))
    assert "the answer is the fastest plan; --confidence 0.9 makes it the other one; measured costs (soap-profile" in " ".join(lines)
    assert lines[-1] == f"wrote {tmp_path / 's.json'} (fastest) and {tmp_path / 's.safe.json'} (safe)"
    assert search(tmp_path / "s.json", CLOSE, "--confidence", "1") == 0
    assert "the answer is the safe plan; --confidence 0 makes it the other one" in capsys.readouterr().out
    assert search(tmp_path / "s.json", SLOW) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "data_parallel, which it beats in 64 of 64 draws of the costs" in out


@pytest.mark.slow
def test_python_decides_alike(tmp_path: Path, capsys: Capsys) -> None:
    for confidence, given in ((None, ()), (0.99, ("--confidence", "0.99"))):
        found = api.find(MODEL, parse_cluster(described(CLOSE)), SearchOptions(budget=40, patience=0.5, confidence=confidence))
        told = report(capsys, tmp_path / "s.json", CLOSE, *given)
        assert api.decision_record(found.decision) == told["decision"] and found.time_ns == told["predicted_ns"]
        assert found.range == told["range"]
        assert found.strategy == (found.fastest if confidence is None else found.safe) and found.fastest != found.safe == found.usual
        assert found.other is not None and found.other.strategy == (found.safe if confidence is None else found.fastest)


def test_a_range_is_found_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = predictions.timed
    monkeypatch.setattr(predictions, "timed", lambda *args, **options: asked.append(args) or real(*args, **options))
    found = soap.simulate(MODEL, "p100-4x4", "megatron")
    assert asked == [] and found.makespan_ns > 0
    assert found.range["draws"] == DECIDING_DRAWS and found.range["time_ns"] == sorted(found.range["time_ns"]) and len(asked) == 1
    usual = soap.simulate(MODEL, "p100-4x4", "data_parallel").range
    assert usual["speedup"] == [1.0, 1.0, 1.0] and usual["wins"] == 0.5


def test_a_step_that_takes_longer_than_its_tasks_moves_the_range_and_is_said() -> None:
    topology = parse_cluster(described(CLOSE))
    for name, factor in (("local:2", api.simulate(MODEL, "local:2", "megatron", costs="estimate").range["step_factor"]), ("pair", 1.0)):
        cluster = topology if name == "pair" else name
        found = api.simulate(MODEL, cluster, "megatron", costs="estimate")
        usual = api.classical("data_parallel", found.simulator.graph, found.simulator.topology)
        tasks, whole = (api.timed(found.simulator, {"a": found.strategy, "b": usual}, usual, whole=whole) for whole in (False, True))
        longer = [[a / b for a, b in zip(*(own[place].times_ns for own in (whole, tasks)), strict=True)] for place in (0, 1)]
        assert longer[0] == pytest.approx(longer[1], rel=1e-5)  # of all plans alike
        assert geometric_mean(longer[0]) == pytest.approx(factor, rel=1e-4)
        assert [own.wins(whole[1]) for own in whole] == [own.wins(tasks[1]) for own in tasks]
        said = plan_summary.range_text(found.range)
        assert (f"steps here take {factor:.2f} times as long as their tasks" in said) == (name == "local:2")
    assert factor == 1.0


def decided(fastest: str, safe: str, wins: dict[str, float]) -> str:
    times = {"predicted_ns": 2_000_000, "mean_ns": 2_500_000, "time_ns": [1_000_000, 3_000_000]}
    plans = {name: {**times, "wins": share, "gain": [0.9, 1.2]} for name, share in wins.items()}
    found = {"answer": "fastest", "kept": fastest, "fastest": fastest, "safe": safe, "reference": "data_parallel", "plans": plans}
    return plan_summary.decided_text({**found, "confidence": 0.9, "draws": 64}, at_hand=False)


def test_what_is_said_of_both_plans() -> None:
    same = "not run: found 1 is the fastest plan on average and the safe one"
    won = ": it beats data_parallel in 64 of 64 draws of the costs (0.90 to 1.20x)"
    assert decided("found 1", "found 1", {"found 1": 1.0}) == same + won
    both = decided("found 1", "found 2", {"found 1": 0.78125, "found 2": 1.0})
    lines = [line.split() for line in both.splitlines()[1:3]]
    times = ["2.000", "ms", "1.000", "ms", "to", "3.000", "ms", "2.500", "ms"]
    assert lines[0] == ["fastest:", "found", "1", *times, "50", "of", "64", "0.90", "to", "1.20x"]
    assert lines[1] == ["safe:", "found", "2", *times, "64", "of", "64", "0.90", "to", "1.20x"]
    assert decided("data_parallel", "data_parallel", {"data_parallel": 0.5}) == same.replace("found 1", "data_parallel")


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_while_it_is_decided(signals: int, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decided in a hurry then; a second one ends that, too, and what is known without simulating is saved."""
    real, draws = outcome.decision, list[int]()

    def decision(*args: Any, **options: Any) -> Any:
        draws.append(options["draws"])
        if len(draws) <= signals:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(outcome, "decision", decision)
    monkeypatch.setattr(stopping, "GRACE_S", 0.0)
    out = tmp_path / "s.json"
    assert search(out, SLOW, "--json") == 130
    assert draws == [DECIDING_DRAWS, HASTY_DRAWS]
    said = capsys.readouterr()
    if signals == 1:
        assert json.loads(said.out)["decision"]["draws"] == HASTY_DRAWS
        assert json.loads(out.read_text())["record"]["decision"]["draws"] == HASTY_DRAWS
        assert "the best strategy so far is in " in said.err
    else:
        told, record = json.loads(said.out), json.loads(out.read_text())["record"]
        assert told["brief"] and told["strategy"] == str(out) and told["decision"] == record["decision"]
        assert record["decision"]["draws"] == 1  # by what the search compared plans by
        done = f"interrupted after {record['search']['evaluations']} evaluations"
        assert said.err == f"soap-search: {done}: the best strategy so far is in {out}\n"


@pytest.mark.parametrize("confidence", [0.0, 0.05, 1.0])
def test_whether_a_plan_is_worth_running_does_not_depend_on_the_confidence(confidence: float) -> None:
    found = api.find(MODEL, parse_cluster(described(CLOSE)), SearchOptions(budget=40, patience=0.5, confidence=confidence))
    best = found.result.strategy
    assert best != found.usual is not None and found.may_win(best) and found.may_win(found.usual)
    slow = api.classical("megatron", found.simulator.graph, found.simulator.topology)
    assert not found.may_win(slow)


def test_without_data_parallelism_the_best_start_is_what_must_be_beaten() -> None:
    pinned = api.find(MODEL, parse_cluster(described(CLOSE)), SearchOptions(budget=20, pins={"*": "@0"}))
    assert pinned.usual is None and pinned.decision.reference is not None
    assert pinned.decision.reference.name in {start.name for start in pinned.result.starts}
    usual = api.find(MODEL, "local:1", SearchOptions(budget=5, costs="estimate"))  # which is data parallelism itself
    assert usual.decision.kept is usual.decision.reference is usual.decision.fastest and usual.strategy == usual.result.strategy


def test_a_simulated_plan_has_a_range(capsys: Capsys) -> None:
    command = [MODEL, "--cluster", "p100-4x4", "--builtin", "megatron"]
    assert simulate.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["range"]
    assert found["draws"] == DECIDING_DRAWS and found["shares"] == [0.1, 0.5, 0.9]
    assert simulate.main(command) == 0
    low, _, high = (ns / 1e6 for ns in found["time_ns"])
    assert f"megatron: {low:.3f} ms to {high:.3f} ms (80%); " in capsys.readouterr().out


@pytest.mark.parametrize("confidence", ["1.1", "-1", "much", "inf"])
def test_other_confidences_are_refused(confidence: str, tmp_path: Path, capsys: Capsys) -> None:
    command = [MODEL, "--cluster", "p100-4x4", "-o", str(tmp_path / "s.json"), "--confidence", confidence]
    assert_refused(capsys, main, command, 2, "--confidence", repr(confidence))


@pytest.mark.parametrize("risk", [None, "q80"])
def test_files_say_by_which_draws_plans_were_compared(risk: str | None) -> None:
    graph, topology = soap.load(MODEL, plan_only=True), parse_cluster(PAIR.replace("BANDWIDTH", CLOSE))
    record = soap.find(graph, topology, soap.SearchOptions(budget=1, costs="estimate", risk=risk, draws=3)).record["search"]
    assert (record["risk"], record["draws"]) == ((None, 0) if risk is None else ("q80", 3))
    quick = replace(topology, links_source=QUICKLY_MEASURED)  # whose figures are others
    other = soap.find(graph, quick, soap.SearchOptions(budget=1, costs="estimate", risk=risk)).record["search"]
    assert len(record["spreads"]) == len(other["spreads"]) == 16 and record["spreads"] != other["spreads"]


def test_large_searches_compare_by_the_most_likely_costs_and_decide_under_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, options = parse_cluster(described(SLOW)), SearchOptions(budget=40)
    assert api.find(MODEL, cluster, options).compared_by is not None
    monkeypatch.setattr(finding, "MOST_DRAWN_TILES", 7)  # the model has four operators
    found, plain = api.find(MODEL, cluster, options), api.find(MODEL, cluster, replace(options, risk=None))
    assert found.compared_by is None and found.result.strategy == plain.result.strategy
    assert found.decision.draws == DECIDING_DRAWS and len(found.decision.kept.times_ns) == DECIDING_DRAWS
