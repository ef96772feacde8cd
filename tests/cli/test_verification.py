"""``soap-search --verify``: the best few are run for real, and the fastest measured one is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import soap
from soap import api
from soap.cli import verification
from soap.cli.search import main
from soap.search.chains import search as search_graph
from soap.search.record import SearchResult
from soap.simulator.simulate import Simulator
from soap.strategies import NAMED
from tests.cli.refusals import assert_refused
from tests.graph_builder import mlp
from tests.search.toys import TableCosts
from tests.simulator.examples import PointCosts
from tests.strategies import cluster

MODEL, CLUSTER = "zoo:rnnlm:tiny", "local:2"


def search(*arguments: str) -> int:
    return main([MODEL, "--cluster", CLUSTER, "--budget", "30", *arguments])


@pytest.mark.slow
def test_runs_them_and_keeps_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    assert search("-o", str(out), "--verify", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    runs, kept = report["measured"]["runs"], report["measured"]["kept"]
    begun = [name for name in runs if name in NAMED and name != "data_parallel"]
    assert len(begun) == 1 and list(runs) == ["data_parallel", *begun, "found 1", "found 2"]
    fastest = min(runs, key=lambda name: runs[name]["measured_ns"])
    apart = max(runs[name]["turns_apart_ns"] for name in (fastest, "data_parallel"))
    is_clear = runs["data_parallel"]["measured_ns"] - runs[fastest]["measured_ns"] > apart
    assert kept == (fastest if is_clear else "data_parallel")
    assert all(run["measured_ns"] > 0 and run["allowed"] for run in runs.values())
    assert runs["found 1"]["predicted_ns"] < runs["found 2"]["predicted_ns"]
    document = json.loads(out.read_text())
    assert document["record"]["measured"]["kept"] == kept
    strategy = soap.load_strategy(out, MODEL, CLUSTER)
    assert soap.simulate(MODEL, CLUSTER, strategy).makespan_ns == runs[kept]["predicted_ns"] == document["record"]["predicted_ns"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("cluster", ["p100-4x4", "machines.yaml"])
def test_other_machines_are_refused_at_once(cluster: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [str(tmp_path / "no.pt2"), "--cluster", cluster, "-o", str(tmp_path / "s.json"), "--verify"]
    assert_refused(capsys, main, command, 2, "--verify", repr(cluster), "local:N")


@pytest.mark.parametrize("count", ["0", "9", "all"])
def test_how_many(count: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), "--verify", count]
    assert_refused(capsys, main, command, 2, "--verify", repr(count))


INTERRUPTED = """
import os, sys
from pathlib import Path
from soap.cli import search, verification
from soap.cli.batches import DrawnBatches
from soap.runtime import launch
verification.MOST_STEPS, verification.TIMED_S = 10**6, 1e12
real, draw = launch.launch, DrawnBatches.__call__
def drawn(self, step):  # ranks run this script as well
    Path(__file__).with_name(f"rank-{os.environ['RANK']}").touch()
    return draw(self, step)
DrawnBatches.__call__ = drawn
def begin(*args, **kwargs):
    print("measuring", file=sys.stderr, flush=True)
    return real(*args, **kwargs)
if __name__ == "__main__":
    launch.launch = begin
    sys.exit(search.main(sys.argv[1:]))
"""


def in_session(session: int) -> list[str]:
    """Command lines of the processes of a session that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(own) == session and state != "Z":
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("number", "training", "code"), [(signal.SIGINT, 0, 130), (signal.SIGINT, 2, 130), (signal.SIGTERM, 2, 143)])
def test_interrupt_while_measuring_leaves_the_prediction_s_best_and_no_process(
    number: signal.Signals, training: int, code: int, tmp_path: Path
) -> None:
    """``training``: so many ranks have drawn a batch by then; 0: they are being started."""
    script, out = tmp_path / "script.py", tmp_path / "s.json"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), MODEL, "--cluster", CLUSTER, "--budget", "20", "-o", str(out), "--verify", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "measuring\n"
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("rank-*"))) < training and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert stdout == ""
    assert stderr == f"soap-search: interrupted while measuring: the strategy predicted to be fastest is in {out}\n"
    assert "measured" not in json.loads(out.read_text())["record"]
    deadline = time.monotonic() + 10  # Python's own resource tracker ends when it notices that its pipe is closed
    while (left := in_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_data_parallelism_that_the_user_ruled_out_is_measured_but_not_kept() -> None:
    graph, four = mlp(), cluster([2, 2])
    simulator = Simulator(graph, four, PointCosts())
    outcome = api.SearchOutcome(simulator, found(graph, four, [("*", "sample:2")]))
    usual = api.classical("data_parallel", graph, four)
    assert not verification._may_be_kept(outcome, "data_parallel", usual)
    runs = [
        api.Run("data_parallel", usual, 10, 5, False),
        api.Run("found 1", outcome.result.finalists[0].strategy, 8, 7, True),
        api.Run("found 2", outcome.result.finalists[1].strategy, 9, 6, True),
    ]
    kept = outcome.with_runs(runs)
    assert kept.kept is runs[2] and kept.strategy == runs[2].strategy and kept.time_ns == 9
    assert outcome.kept is None and outcome.strategy == outcome.result.strategy


@pytest.mark.parametrize(
    ("usual_ns", "usual_apart_ns", "fastest_apart_ns", "kept"),
    [
        (100, 0, 0, "found 1"),
        (100, 9, 0, "found 1"),
        (100, 10, 0, "data_parallel"),
        (100, 0, 12, "data_parallel"),
        (80, 0, 0, "data_parallel"),
    ],
)
def test_what_beats_data_parallelism_by_noise_does_not_replace_it(
    usual_ns: int, usual_apart_ns: int, fastest_apart_ns: int, kept: str
) -> None:
    graph, four = mlp(), cluster([2, 2])
    outcome = api.SearchOutcome(Simulator(graph, four, PointCosts()), found(graph, four, []))
    usual = api.classical("data_parallel", graph, four)
    best, second = (finalist.strategy for finalist in outcome.result.finalists[:2])
    runs = [
        api.Run("data_parallel", usual, 10, usual_ns, True, usual_apart_ns),
        api.Run("found 1", best, 8, 90, True, fastest_apart_ns),
        api.Run("found 2", second, 8, 95, True, 50),
    ]
    chosen = outcome.with_runs(runs).kept
    assert chosen is not None and chosen.name == kept
    said = verification.text(verification.document(runs, chosen))
    assert f"kept: {kept}, " in said and ("no more than turns" in said) == (kept == "data_parallel" and usual_ns > 90)


def found(graph: soap.OperatorGraph, topology: soap.Topology, pins: list[tuple[str, str]]) -> SearchResult:
    return search_graph(graph, topology, TableCosts(0), budget=30, pins=pins)


def test_finalists_are_different_fit_and_come_best_first() -> None:
    graph, four = mlp(), cluster([2, 2])
    costs = TableCosts(1, overflow=lambda strategy: int(len(strategy.operators["fc0"].devices) == 1))
    result = search_graph(graph, four, costs, budget=200)
    times = [start.cost_ns for start in result.finalists]
    assert times == sorted(set(times)) and 4 < len(times) <= 8
    assert result.finalists[0].strategy == result.strategy
    for start in result.finalists:
        assert start.fits and costs.cost(start.strategy) == (start.cost_ns, 0)
    known = {row.cost_ns for row in result.rows if row.fits} | {start.cost_ns for start in result.starts if start.fits}
    assert times == sorted(known)[:8]
