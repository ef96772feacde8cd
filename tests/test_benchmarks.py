"""What the end-to-end benchmark compares, and what it says of the numbers it gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import soap
from benchmarks import accuracy_report, end_to_end
from benchmarks.accuracy_report import HEAD, Plan, in_rounds, line_of, tau
from benchmarks.end_to_end import Result, conclusion, contenders
from benchmarks.models import MODELS, export_model
from benchmarks.quiet import Watch, used_seconds
from benchmarks.sparse import different
from soap import api
from soap.strategy.config import OpConfig, Strategy
from tests.extent import often

RESULTS = [
    Result("lm", "data_parallel", 100_000_000, 200_000_000, 190_000_000, 0.05),
    Result("lm", "megatron", 50_000_000, 100_000_000, 90_000_000, 0.05),
    Result("lm", "found", 40_000_000, 120_000_000, 110_000_000, 0.05),
    Result("gpt", "data_parallel", 60_000_000, 60_000_000, 59_000_000, 0.05),
    Result("gpt", "found", 58_000_000, 90_000_000, 59_000_000, 0.05),
]


def test_conclusion_counts_pairs_in_the_predicted_order() -> None:
    text = conclusion(RESULTS)
    # lm: megatron and found are measured the other way round; gpt: the predictions are too near each other to say anything.
    assert "Of 3 pairs" in text
    assert "2 are measured in the predicted order" in text
    assert "from 0.67 to 1.67" in text
    assert "Measured / predicted: median 2.00, from 1.00 to 3.00" in text


def test_contenders_are_distinct_and_fit() -> None:
    simulator = api.simulator_for("zoo:lm:tiny", "p100-4x4")
    graph, topology = simulator.graph, simulator.topology
    found = api.classical("megatron", graph, topology)
    strategies = contenders(simulator, found)
    names = list(strategies)
    assert names[0] == "data_parallel"
    assert names[-1] == "found"
    assert strategies["found"] is found
    others = [strategy for name, strategy in strategies.items() if name != "found"]
    assert all(a != b for i, a in enumerate(others) for b in others[:i])
    assert all(simulator.run(strategy).fits for strategy in others)


@pytest.mark.long
@pytest.mark.parametrize("name", often(list(MODELS), list(MODELS)[:1], pytest.mark.slow))
def test_models_can_be_planned_in_full(name: str, tmp_path: Path) -> None:
    model = soap.load(export_model(name, tmp_path), plan_only=True)
    assert all(op.partitionable for op in model.graph.operators)
    assert soap.simulate(model, soap.load_cluster("h200-8"), "single_device", optimizer_states=0).fits


def test_own_work_is_not_others_work() -> None:
    watch = Watch()
    share = watch.others_share()
    assert share is None or 0 <= share <= 1


BUSY = "import time\nwhile time.process_time() < 0.5: pass"
NESTED = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])\nprint(flush=True)\nsys.stdin.read()"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_children_of_living_children_used_is_own() -> None:
    """As ranks, which are copies of a process that stays until the launcher ends."""
    before = used_seconds()
    with subprocess.Popen([sys.executable, "-c", NESTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()  # its own child has ended
        assert used_seconds() - before > 0.4
        child.stdin.close()


def test_a_disturbed_round_is_repeated_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "wait_until_quiet", lambda limit, deadline: True)
    rounds = iter(["first", "second", "third", "fourth"])
    shares = iter([0.5, 0.02, 0.4])
    monkeypatch.setattr(end_to_end, "Watch", lambda: SimpleNamespace(others_share=lambda: next(shares)))
    assert end_to_end.quietly(lambda: next(rounds), wait_seconds=100) == ("second", 0.02)
    assert end_to_end.quietly(lambda: next(rounds), wait_seconds=-1) == ("third", 0.4)


def test_equal_strategies_are_one_with_several_names() -> None:
    one, other, third = (Strategy({"op": OpConfig((1,), (device,))}) for device in range(3))
    strategies, names = different(one, {"a": other, "b": one, "c": other, "d": third, "e": one})
    assert strategies == {"found": one, "a": other, "d": third}
    assert names == {"found": "found = b = e", "a": "a = c", "d": "d"}


def test_rounds_of_a_comparison_are_put_together() -> None:
    rounds = [[Plan("c", "m", name, 100 + r, 0, (90.0 + 10 * r,)) for name in ("a", "b")] for r in (0, 4, 1)]
    for plan, name in zip(in_rounds(rounds), ("a", "b"), strict=True):
        assert plan == Plan("c", "m", name, 101, 100, (90.0, 130.0, 100.0), (100.0, 104.0, 101.0))
        assert (plan.error, plan.apart, plan.predictions_apart) == (pytest.approx(0.01), 0.4, pytest.approx(4 / 101))


def test_tau_counts_pairs_in_the_same_order() -> None:
    assert tau([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert tau([(1, 10), (1, 20)]) == 0.0
    assert tau([(1, 10), (2, 20)], [(1, 5), (2, 4)], [(9, 9)]) == 0.0  # pairs of one group alone


def test_tables_of_several_runs_are_reported_together() -> None:
    plans = [
        Plan(cluster, "emulated-m", name, predicted * 10**6, 100 * measured * 10**4, (99.5e4 * measured, 100.5e4 * measured))
        for cluster, own in {
            "a": [("found", 104, 100), ("data_parallel", 196, 200), ("random 1", 190, 210)],
            "b": [("found", 300, 300), ("random 1", 480, 400)],
        }.items()
        for name, predicted, measured in own
    ]
    table = [f"| {' | '.join(HEAD)} |", "|---|---|---|---:|---:|---:|---:|---:|", *map(line_of, plans)]
    other = ["", "| of another kind |", "|---|", "| a | m | found | 1 | 2 | 3 | 4 | 5 |", ""]
    found = accuracy_report.read("\n".join([*table[:5], *other, *table[:2], *table[5:]]))
    assert [plan[:5] for plan in found] == [(plan.cluster, "m", *plan[2:5]) for plan in plans]
    lines = accuracy_report.report(found)
    assert lines[2:4] == ["| a | m | 3 | 4.0% | 9.5% | 0.33 | 1.000 | 2.00 |", "| b | m | 2 | 10.0% | 20.0% | 1.00 | 1.000 | 1.00 |"]
    assert lines[5] == "| model, all clusters | plans | median error | 95% within | tau across clusters | tau on one cluster |"
    assert lines[7] == "| m | 5 | 4.0% | 20.0% | 0.80 | 0.50 |"
    assert lines[-1] == "5 plans: median error 4.0%, 80% of them within 15%, mean 7.1%"


@pytest.mark.parametrize(("cell", "expected"), [("soon", "'soon' in the line"), ("0.0", "expected milliseconds above 0"), ("inf", "'inf'")])
def test_bad_lines_and_files_are_refused_in_one_line(cell: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.md"
    file.write_text(f"| {' | '.join(HEAD)} |\n| a | m | found | 1.0 | {cell} | 0 | 0 | 0 |\n")
    for own, part in ((file, expected), (tmp_path / "none.md", "none.md' cannot be read: no such file or directory; check the path")):
        with pytest.raises(SystemExit) as stopped:
            accuracy_report.main([str(own)])
        assert stopped.value.code == 2
        assert part in capsys.readouterr().err.splitlines()[-1]
