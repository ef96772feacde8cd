"""``soap-search --consistency``: the plan of servers and workers that it finds, writes and shows, and what it refuses, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap import api
from soap.cli.search import main
from soap.cli.simulate import main as simulate_main
from soap.cli.verification import DEFAULT_FINALISTS
from soap.elastic.planned import plan_of
from tests.cli.refusals import assert_refused
from tests.cli.test_stale_run import CLUSTER, MODEL


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def search(*words: str) -> int:
    return main([MODEL, "--cluster", "cluster.yaml", "--costs", "estimate", "-o", "found.json", *words])


@pytest.mark.parametrize("word", ["async", pytest.param("bounded:1", marks=pytest.mark.long), pytest.param("sync", marks=pytest.mark.long)])
def test_the_found_plan_is_written_shown_and_simulated_alike(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert search("--consistency", word, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    graph, cluster = soap.load(MODEL, plan_only=True).graph, soap.load_cluster("cluster.yaml")
    strategy = soap.load_strategy("found.json", graph, cluster)
    plan = plan_of(strategy, graph)
    assert strategy.consistency == found["consistency"] == word
    assert (len(plan.workers), len(plan.servers), plan.batch) == (len(found["workers"]), len(found["servers"]), found["batch"])
    assert plan.batch * len(plan.workers) == 8  # the model's
    rate = found["steady"]["samples_per_second"]
    assert api.simulate_servers(graph, cluster, strategy, costs="estimate").samples_per_second == rate
    for name in ("bipartite", "bipartite:2", "fully_connected"):
        other = api.simulate_servers(graph, cluster, name if word == "sync" else f"{name}+{word}", costs="estimate")
        assert other.samples_per_second <= 1.01 * rate
    assert {*found["designs"]} == {"bipartite", "fully connected", "naive"}
    record = json.loads(Path("found.json").read_text())["record"]
    assert record["samples_per_second"] == rate and record["search"] == found["search"]
    assert found["search"]["complete"] and found["search"]["proven"]


def test_both_commands_say_how_the_plan_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert search("--consistency", "bounded:2", "--budget", "1") == 0
    out = capsys.readouterr().out
    assert out.startswith("stale (bounded:2): ") and "fully connected" in out and "naive" in out
    assert "simulated 1 of at most " in out and "the search was ended before it was done" in out and out.endswith("wrote found.json\n")
    assert simulate_main([MODEL, "--cluster", "cluster.yaml", "--costs", "estimate", "--strategy", "found.json"]) == 0
    shown = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.split()[:1] == ["simulated"] and line.endswith("samples/s"))
    assert line in shown.splitlines() and "busiest link" in shown and "earlier minibatches that leases may lack" in shown


def test_ended_by_the_user_the_best_so_far_is_found() -> None:
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 2

    found = soap.find_servers(MODEL, "cluster.yaml", "async", costs="estimate", stopped=stopped)
    assert (found.simulated, found.complete, found.proven, found.designs) == (3, False, False, {})
    assert plan_of(found.strategy, found.simulator.graph) == found.plan


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--consistency", "bounded:x"], 2, "expected sync, bounded:D with D from 0 to 1000000, or async"),
        (["--consistency", "async", "--start", "random"], 2, "--start is for strategies that ranks run; leave it out with --consistency"),
        (["--consistency", "async", "--verify", str(DEFAULT_FINALISTS)], 2, "--verify is for strategies that ranks run"),
        (["--consistency", "async", "--cluster", "local:2"], 2, "several clusters with --consistency; expected one"),
        (["--consistency", "async", "--memory-budget", "1KiB"], 1, "no servers among 3 machines hold them: add machines, or memory"),
    ],
)
def test_what_is_refused_is_one_line(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [MODEL, "--cluster", "cluster.yaml", "-o", "found.json", *words], code, said)


@pytest.mark.parametrize(
    ("model", "cluster", "said"),
    [
        ("zoo:gpt:tiny", "local:1", "1 machines; expected a table that is looked up by rows"),
        ("zoo:alexnet:tiny", "cluster.yaml", "0 tables and 3 machines; expected a table that is looked up by rows"),
    ],
)
def test_no_tables_or_no_machines(model: str, cluster: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [model, "--cluster", cluster, "-o", "found.json", "--consistency", "async"], 1, said)
