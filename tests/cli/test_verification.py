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
import torch

import soap
from soap import api
from soap.cli import verification
from soap.cli.options import Reading
from soap.cli.search import main
from soap.cli.training import Job
from soap.cli.trials import Times, Trial
from soap.cli.updating import Updating
from soap.errors import RuntimeFailure
from soap.measure.paired import Gain
from soap.search.chains import search as search_graph
from soap.search.options import SearchOptions
from soap.search.record import SearchResult
from soap.simulator.simulate import Simulator
from soap.strategy.classical import NAMED
from soap.strategy.named import PIPELINE
from tests.cli.refusals import assert_refused
from tests.graph_builder import mlp
from tests.search.toys import Lacking, simulated
from tests.simulator.examples import PointCosts
from tests.strategies import cluster

MODEL, CLUSTER = "zoo:rnnlm:tiny", "local:2"
READING: Reading = {"batch_dims": None, "autocast": None, "batch_norm": "global"}


def search(*arguments: str) -> int:
    return main([MODEL, "--cluster", CLUSTER, "--budget", "30", "--profile", "0", *arguments])


@pytest.mark.slow
def test_runs_them_and_keeps_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_ranks: None) -> None:
    out = tmp_path / "s.json"
    assert search("-o", str(out), "--verify", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    runs, kept = report["measured"]["runs"], report["measured"]["kept"]
    begun = [name for name in runs if name in (*NAMED, PIPELINE) and name != "data_parallel"]
    found = [name for name in ("found 1", "found 2") if name in runs]  # one may be data parallelism, by what was measured of this machine
    assert len(begun) == 1 and found and list(runs) == ["data_parallel", found[0], *begun, *found[1:]]
    fastest = min(runs, key=lambda name: runs[name]["measured_ns"])
    compared = {name: run["gain"] for name, run in runs.items() if run["gain"] is not None}
    assert list(compared) == ([] if fastest == "data_parallel" else [fastest])
    is_clear = any(own["at_least"] > own["needed"] >= 1.02 for own in compared.values())
    assert kept == (fastest if is_clear else "data_parallel")
    assert all(run["measured_ns"] > 0 and run["allowed"] for run in runs.values())
    assert report["measured"]["seconds"] > 0 and "profiled" not in report and "guard" not in report
    document = json.loads(out.read_text())
    assert document["record"]["measured"]["kept"] == kept
    strategy = soap.load_strategy(out, MODEL, CLUSTER)
    assert soap.simulate(MODEL, CLUSTER, strategy).makespan_ns == runs[kept]["predicted_ns"] == document["record"]["predicted_ns"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("cluster", ["p100-4x4", "machines.yaml"])
def test_other_machines_are_refused_at_once(cluster: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [str(tmp_path / "no.pt2"), "--cluster", cluster, "-o", str(tmp_path / "s.json"), "--verify"]
    assert_refused(capsys, main, command, 2, "--verify", repr(cluster), "local:N")


@pytest.mark.parametrize("count", ["-1", "9", "all"])
def test_how_many(count: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), "--verify", count]
    assert_refused(capsys, main, command, 2, "--verify", repr(count))


INTERRUPTED = """
import os, sys
from pathlib import Path
from soap.cli import search, trials, verification
from soap.cli.batches import DrawnBatches
from soap.runtime.comm import launch
trials.ROUNDS, verification.ASKED_S = 10**6, 1e6
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


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "training", "code"),
    [
        pytest.param(signal.SIGINT, 0, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 2, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, 143, marks=pytest.mark.long),
    ],
)
def test_interrupt_while_measuring_leaves_the_prediction_s_best_and_no_process(
    number: signal.Signals, training: int, code: int, tmp_path: Path
) -> None:
    """``training``: so many ranks have drawn a batch by then; 0: they are being started."""
    script, out = tmp_path / "script.py", tmp_path / "s.json"
    script.write_text(INTERRUPTED)
    options = ["--budget", "20", "--profile", "0", "--verify", "1"]
    command = [sys.executable, str(script), MODEL, "--cluster", CLUSTER, "-o", str(out), *options]
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
    assert stderr == f"soap-search: interrupted while verifying: what the search chose by its predictions is in {out}\n"
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
    assert outcome.kept is None and outcome.strategy == outcome.decision.kept.strategy != usual


@pytest.mark.parametrize(
    ("predicted_ns", "gain", "kept", "said"),
    [
        (80, Gain(1.2, 1.1, 20), "found 1", "kept: found 1, 1.20x data_parallel in 20 turns of both, at least 1.10x with 95% confidence"),
        (80, Gain(1.1, 1.02, 20), "data_parallel", "1.10x data_parallel in 20 turns of both, but may be only 1.02x, which is not above"),
        (80, Gain(3.0, 0.0, 4), "data_parallel", "because found 1 is 3.00x data_parallel in 4 turns of both, too few to tell"),
        (125, Gain(1.3, 1.25, 20), "data_parallel", "may be only 1.25x, which is not above 1.25x, by which it is predicted to lose"),
        (125, Gain(1.4, 1.26, 20), "found 1", "at least 1.26x"),
        (80, None, "data_parallel", "kept: data_parallel, because no time was left to compare found 1 with it"),
    ],
)
def test_what_is_not_confirmed_to_be_faster_does_not_replace_data_parallelism(
    predicted_ns: int, gain: Gain | None, kept: str, said: str
) -> None:
    graph, four = mlp(), cluster([2, 2])
    outcome = api.SearchOutcome(Simulator(graph, four, PointCosts()), found(graph, four, []))
    usual = api.classical("data_parallel", graph, four)
    best, second = (finalist.strategy for finalist in outcome.result.finalists[:2])
    runs = [
        api.Run("data_parallel", usual, 100, 100, True),
        api.Run("found 1", best, predicted_ns, 90, True, gain),
        api.Run("found 2", second, 80, 95, True),
    ]
    outcome = outcome.with_runs(runs)
    chosen = outcome.kept
    assert chosen is not None and chosen.name == kept
    assert (outcome.strategy, outcome.time_ns) == (chosen.strategy, chosen.predicted_ns)
    text = verification.text(verification.document(runs, chosen, 12.34))
    assert said in text and text.endswith("\n  verifying took 12 s")


def test_data_parallelism_may_be_the_fastest() -> None:
    graph, four = mlp(), cluster([2, 2])
    outcome = api.SearchOutcome(Simulator(graph, four, PointCosts()), found(graph, four, []))
    usual = api.classical("data_parallel", graph, four)
    runs = [api.Run("data_parallel", usual, 100, 90, True), api.Run("found 1", outcome.result.strategy, 80, 95, True)]
    assert outcome.with_runs(runs).kept is runs[0]
    assert "kept: data_parallel, the fastest measured\n" in verification.text(verification.document(runs, runs[0], 1.0))


def test_runs_follow_from_turns() -> None:
    graph, four = mlp(), cluster([2, 2])
    simulator = Simulator(graph, four, PointCosts())
    outcome = api.SearchOutcome(simulator, found(graph, four, []))
    strategies = verification._strategies(outcome, 3, None)
    best, last = [name for name in strategies if name.startswith("found")][:: len(strategies) - 3]  # data parallelism and a start, too
    assert list(strategies)[:2] == ["data_parallel", best] and list(strategies)[-1] == last
    simulations = {name: simulator.run(strategy) for name, strategy in strategies.items()}
    rounds = {"data_parallel": (100, 110, 120), best: (90, 80, 70)}  # time was over before the others were tried
    duels = {"data_parallel": (100,) * 5, best: (80, 80, 80, 80, 90)}
    usual, first = verification._runs(outcome, strategies, simulations, rounds, duels, 0.5)
    assert (usual.name, usual.measured_ns, usual.gain) == ("data_parallel", 55, None)
    assert (first.name, first.measured_ns, first.predicted_ns) == (best, 40, simulations[best].makespan_ns)
    assert first.gain == Gain(1.25, 100 / 90, 5)


def test_what_has_no_chance_by_all_that_is_known_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, four = mlp(), cluster([2, 2])
    outcome = api.SearchOutcome(Simulator(graph, four, PointCosts()), found(graph, four, []))
    everything = verification._strategies(outcome, 8, only_chances=False)
    assert next(iter(everything)) == "data_parallel" and len(everything) > 3
    chosen = list(everything.values())[2]
    monkeypatch.setattr(api.SearchOutcome, "may_win", lambda _, strategy: strategy == chosen)
    some = verification._strategies(outcome, 8, only_chances=True)
    assert list(some.values()) == [everything["data_parallel"], chosen]
    monkeypatch.setattr(api.SearchOutcome, "may_win", lambda *_: False)
    assert verification.verify(outcome, 3, "none.pt2", READING, 0, only_chances=True) is outcome  # nothing is started


def test_steps_that_take_too_long_to_compare_are_not_begun() -> None:
    graph, four = mlp(), cluster([2, 2])
    outcome = api.SearchOutcome(Simulator(graph, four, PointCosts(10**9)), found(graph, four, []))
    with pytest.raises(RuntimeFailure, match=r"comparing two strategies is predicted to take [0-9]+ s, but the limit is 60; try a smaller"):
        verification.verify(outcome, 3, "none.pt2", READING, 0, seconds=60.0)


@pytest.mark.parametrize(
    ("optimizers", "given", "rates"),
    [
        (("adam",), None, [1e-4]),
        (("adam",), 0.5, [0.5]),
        (("adam:lr=0.3",), None, [0.3]),
        (("a*=adam:lr=0.3", "sgd"), None, [0.3, 1e-4]),
        (("torch.optim.RMSprop:alpha=0.9",), None, [1e-4]),
    ],
)
def test_timed_steps_change_little_unless_a_rate_was_chosen(optimizers: tuple[str, ...], given: float | None, rates: list[float]) -> None:
    recipe = Updating(optimizers, given).timed().recipe()
    made = recipe.layout({"a": (2,), "b": (2,)}).optimizer({name: [torch.zeros(2, requires_grad=True)] for name in ("a", "b")})
    assert made is not None and sorted({group["lr"] for group in made.param_groups}, reverse=True) == rates


def test_trials_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one batch over and over: with the usual rate numbers leave their normal range, which no plan can help."""
    graph, four = mlp(), cluster([2, 2])
    outcome = api.SearchOutcome(Simulator(graph, four, PointCosts()), found(graph, four, []))
    jobs: list[Job] = []

    def started(job: Job, _: object, __: object, trial: Trial, ___: float) -> Times:
        jobs.extend((job, trial.job))
        return Times({}, {})

    monkeypatch.setattr("soap.cli.run.on_ranks", started)
    for optimizer in ("adam", Updating(("adam:lr=0.5",))):
        verification.verify(outcome, 3, "none.pt2", READING, 0, optimizer=optimizer, seconds=1e9)
    assert [job.updating for job in jobs] == [Updating(("adam",), 1e-4)] * 2 + [Updating(("adam:lr=0.5",))] * 2


def found(graph: soap.OperatorGraph, topology: soap.Topology, pins: list[tuple[str, str]]) -> SearchResult:
    return search_graph(graph, topology, simulated(graph, topology), SearchOptions(budget=30, pins=pins))


def test_finalists_are_different_fit_and_come_best_first() -> None:
    graph, four = mlp(), cluster([2, 2])
    costs = Lacking(graph, four, lambda strategy: int(len(strategy.operators["fc0"].devices) == 1))
    result = search_graph(graph, four, costs, SearchOptions(budget=200))
    times = [start.cost_ns for start in result.finalists]
    assert times == sorted(set(times)) and 4 < len(times) <= 8
    assert result.finalists[0].strategy == result.strategy
    for start in result.finalists:
        assert start.fits and (costs.makespan_ns(start.strategy), costs.lacking(start.strategy)) == (start.cost_ns, 0)
    known = {row.cost_ns for row in result.rows if row.fits} | {start.cost_ns for start in result.starts if start.fits}
    assert known.issuperset(times) and times[0] == min(known)
