"""``soap-tune``: what is tried and chosen, that neither data nor weights are used up, and what is said of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import soap
from soap.cli import tune
from soap.cli.stopping import Stopping
from soap.cli.trials import PartitionTrial
from soap.cli.tune import main
from soap.errors import RuntimeFailure, SoapError, StoppedBySignal
from soap.runner.tuning import BATCHES, Range, Tuned, tuned_range
from soap.search.partition_tuning import MOST_SAMPLES, Sample, Tuning, choose, next_partitions
from soap.strategy.sync import parameter_server
from soap.time_limit import TimeIsUp
from tests.cli import tune_ranks
from tests.cli.refusals import assert_refused
from tests.cli.tune_ranks import CURVE, ITERATIONS, MODEL
from tests.runtime.pool import Pool

ROOT = Path(__file__).parents[2]
CLUSTER = "emulated:2x1@200Mbit/s"
TABLES = ["layers.0.weight", "layers.1.weight"]
DATA = """
import os
import soap.zoo

def batches():
    for step, batch in enumerate(soap.zoo.batches("zoo:full_sparse:tiny")):
        with open(f"rank-{os.getpid()}", "a") as asked:
            asked.write(f"{step}\\n")
        yield batch
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strategies for two hosts: tables on servers in different numbers of partitions, all-reduced, and of a model without tables."""
    folder = tmp_path_factory.mktemp("tune")
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    strategy = soap.api.classical("hybrid", model.graph, cluster)
    for name, partitions in zip(TABLES, (2, 3), strict=True):
        strategy = strategy.with_parameter(name, parameter_server(partitions, rows=True))
    of_the_found = {"measured": {"kept": "found 1", "runs": {}}, "guard": {"gain": 2.0}, "decision": {"wins": 1.0}}
    record = {"predicted_ns": 1, **of_the_found, "search": {"seed": 3}}
    soap.save_strategy(folder / "s.json", strategy, model, cluster, record)
    soap.save_strategy(folder / "dp.json", soap.api.classical("data_parallel", model.graph, cluster), model, cluster)
    dense = soap.load("zoo:alexnet:tiny", plan_only=True)
    soap.save_strategy(folder / "dense.json", soap.api.classical("data_parallel", dense.graph, cluster), dense, cluster)
    (folder / "mydata.py").write_text(DATA)
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same files in the working folder."""
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_strategy_is_written_with_the_chosen_number(folder: Path, capsys: pytest.CaptureFixture[str], kept_ranks: None) -> None:
    given, others = (folder / "s.json").read_text(), {path.name for path in folder.iterdir()}
    options = ["--data", "mydata:batches", "--batches", "2", "--iterations", "5", "--json", "--optimizer", "adam"]
    assert main(["s.json", "--model", MODEL, "-o", "out.json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    samples = [Sample(own["partitions"], own["measured_ns"]) for own in report["samples"]]
    assert 2 <= len(samples) <= MOST_SAMPLES
    for count, sample in enumerate(samples):
        assert next_partitions(samples[:count], 2, 50) == sample.partitions and (sample.time_ns or 0) > 0
    assert next_partitions(samples, 2, 50) is None
    assert report["before"] == dict(zip(TABLES, (2, 3), strict=True))
    assert all(own["predicted_ns"] > 0 for own in report["samples"])
    assert report["partitions"] in range(min(s.partitions for s in samples), 1 + max(s.partitions for s in samples))

    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    before, after = (soap.load_strategy(name, model, cluster) for name in ("s.json", "out.json"))
    assert after.operators == before.operators
    assert {name: sync.partitions for name, sync in after.parameters.items()} == dict.fromkeys(TABLES, report["partitions"])
    assert {replace(sync, partitions=1) for sync in after.parameters.values()} == {parameter_server(rows=True)}
    record = soap.api.load_strategy_contents("out.json").record
    assert not {"measured", "decision", "guard"} & set(record) and record["search"] == {"seed": 3} and record["predicted_ns"] > 1
    assert record["tuning"]["samples"] == report["samples"] and record["tuning"]["partitions"] == report["partitions"]

    assert (folder / "s.json").read_text() == given
    asked = [path.read_text().split() for path in folder.glob("rank-*")]
    assert asked == [["0", "1"], ["0", "1"]]
    left = {path.name for path in folder.iterdir() if not path.name.startswith("rank-")} - {"__pycache__"}
    assert left == others | {"out.json"}


@pytest.mark.long
def test_each_group_gets_a_number_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str], kept_ranks: None) -> None:
    options = ["--iterations", "4", "--group", TABLES[1], "--json"]
    assert main(["s.json", "--model", MODEL, "-o", "out.json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [own["parameters"] for own in report["groups"]] == [[TABLES[0]], [TABLES[1]]] and "samples" not in report
    after = soap.load_strategy("out.json", soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER))
    assert [after.sync(name).partitions for name in TABLES] == [own["partitions"] for own in report["groups"]]
    assert main(["s.json", "--model", MODEL, "-o", "out.json", "--group", "none*"]) == 2
    assert "--group none*: no sparse parameter on servers has such a name; expected some of" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_begin_alike_and_leave_nothing(ranks: int, four: Pool) -> None:
    """Each with the same losses as the others: the same weights and batches. The choice is that of the times that they are said to take."""
    outcomes = four.run(tune_ranks.tune, ranks, ranks=ranks)
    tried = {1: [1, 2, 4, 8], 2: [2, 4, 8, 1]}[ranks]
    for outcome in outcomes:
        found: Tuned = outcome["found"]
        assert [sample.partitions for sample in found.tuning.samples] == [partitions for partitions, _ in outcome["seen"]] == tried
        assert [sample.time_ns for sample in found.tuning.samples] == [CURVE.time_ns(partitions) for partitions in tried]
        losses = [losses for _, losses in outcome["seen"]]
        assert all(own == pytest.approx(losses[0], rel=1e-12) for own in losses)
        assert len(set(losses[0])) == ITERATIONS  # it does train, on other batches or with other weights
        assert outcome["changed"] == []
        assert outcome["asked"] == BATCHES
        assert found.tuning.partitions == 4
        assert list(found.parameters) == TABLES
        for name, sync in found.strategy.parameters.items():
            assert sync == (replace(outcome["given"].sync(name), partitions=4) if name in TABLES else outcome["given"].sync(name))
    assert outcomes[0]["seen"] == outcomes[-1]["seen"]


def test_partitions_are_at_most_the_rows() -> None:
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    found = tuned_range(soap.api.classical("hybrid", model.graph, cluster), model.graph, cluster)
    assert found == Range(tuple(TABLES), 2, 50)


def trial() -> PartitionTrial:
    return PartitionTrial(cast(Any, SimpleNamespace()), Range(("table",), 2, 4096), 1)


LACK = "rank 1 failed: killed by SIGKILL; is there enough memory?"

Launches = list[tuple[Sample, ...]]


def launches(monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], str | None], seen: Launches) -> None:
    """In place of ranks: runs take 1 s / P, and a launch ends at the first number of partitions of which ``fail`` says something."""

    def start(job: object, hosts: object, entry: object, own: PartitionTrial) -> Tuning:
        seen.append(own.known)
        samples = list(own.known)
        while (partitions := next_partitions(samples, own.wanted.servers, own.wanted.most)) is not None:
            assert own.notes is not None
            with Path(own.notes).open("a") as notes:
                notes.write(json.dumps({"begun": partitions}) + "\n")
                if message := fail(partitions):
                    notes.flush()
                    raise RuntimeFailure(message)
                notes.write(json.dumps({"partitions": partitions, "time_ns": 1e9 / partitions}) + "\n")
            samples.append(Sample(partitions, 1e9 / partitions))
        return choose(samples)

    monkeypatch.setattr(tune, "on_ranks", start)


def test_a_run_without_enough_memory_raises_the_minimum(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: Launches = []
    launches(monkeypatch, lambda partitions: LACK if partitions < 8 else None, seen)
    found = tune.sample(trial())
    assert found is not None
    expected = [Sample(2, None), Sample(4, None), *(Sample(count, 1e9 / count) for count in (8, 16, 32))]
    assert list(found.samples) == expected and found.partitions == 32
    assert seen == [(), tuple(expected[:1]), tuple(expected[:2])]
    assert capsys.readouterr().err == f"soap-tune: 2 partitions: {LACK}\nsoap-tune: 4 partitions: {LACK}\n"


def test_a_run_that_fails_at_the_end_needs_no_further_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Launches = []
    launches(monkeypatch, lambda partitions: "rank 0 failed: MemoryError: " if partitions > 16 else None, seen)
    found = tune.sample(trial())
    assert found is not None and len(seen) == 1
    assert [(sample.partitions, sample.time_ns is None) for sample in found.samples] == [
        (2, False),
        (4, False),
        (8, False),
        (16, False),
        (32, True),
    ]


def test_other_failures_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Launches = []
    launches(monkeypatch, lambda partitions: "rank 0 failed: no network" if partitions == 4 else None, seen)
    with pytest.raises(RuntimeFailure, match="no network"):
        tune.sample(trial())
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("error", "number"),
    [(KeyboardInterrupt(), signal.SIGINT), (StoppedBySignal("all ranks have ended", signal.SIGTERM), signal.SIGTERM), (TimeIsUp(), None)],
)
def test_what_ends_the_runs_leaves_the_best_of_them(error: BaseException, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: object, hosts: object, entry: object, own: PartitionTrial) -> Tuning:
        assert own.notes is not None
        Path(own.notes).write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"begun": 8}]))
        raise error

    lines: list[dict[str, float]] = [{"partitions": 2, "time_ns": 5e8}, {"partitions": 4, "time_ns": 2e8}]
    monkeypatch.setattr(tune, "on_ranks", start)
    stopping = Stopping()
    found = tune.sample(trial(), (), stopping)
    assert found is not None and found.partitions == 4 and [one.partitions for one in found.samples] == [2, 4]
    assert stopping.number == number
    lines.clear()  # nothing ran
    with pytest.raises(type(error)):
        tune.sample(trial(), (), stopping)


def test_too_little_memory_for_any_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launches(monkeypatch, lambda partitions: "CUDA out of memory. Tried", [])
    with pytest.raises(SoapError, match=r"^no run succeeded, with partitions: 2, 4, 8, 16, 32; expected at least one that fits"):
        tune.sample(trial())
    assert capsys.readouterr().err.count("\n") == MOST_SAMPLES


def test_text_has_samples_fit_and_choice() -> None:
    tuning = choose([Sample(2, None), *(Sample(count, 1e6 * (100 + 64 / count + count)) for count in (4, 8, 16))])
    head = {"model": "m", "cluster": "c", "processes": 2, "shared_cores": None, "servers": 2, "strategy": "out.json"}
    shown = tune.document(tuning, dict.fromkeys((2, 4, 8, 16), 90_000_000))
    text = tune.text({**head, **shown, "iterations": 20, "batches": 1, "before": {"a": 2, "b": 2}})
    assert [line.split() for line in text.splitlines()[2:7]] == [
        ["partitions", "measured", "fitted", "predicted"],
        ["2", "failed", "134.0", "ms", "90.000", "ms"],
        ["4", "120.0", "ms", "120.0", "ms", "90.000", "ms"],
        ["8", "116.0", "ms", "116.0", "ms", "90.000", "ms"],
        ["16", "120.0", "ms", "120.0", "ms", "90.000", "ms"],
    ]
    assert "100 ms + 64 ms / P + 1 ms * P, from which the runs deviate by 0.0%" in text
    assert "8 partitions; 2 until now" in text and text.endswith("wrote out.json")
    few = tune.document(choose([Sample(1, 1e6), Sample(2, 2e6)]), {1: 1, 2: 2})
    assert few["fit"] is None
    assert "none of so few runs" in tune.text({**head, **few, "iterations": 20, "batches": 4, "before": {"a": 1, "b": 4}})


def test_nothing_to_tune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["no sparse parameter on servers", "soap-search --start hybrid"]
    assert_refused(capsys, main, ["dp.json", "--model", MODEL, "-o", "out.json"], 5, *words, f"sparse are {', '.join(TABLES)}")
    dense = ["dense.json", "--model", "zoo:alexnet:tiny", "-o", "out.json"]
    assert_refused(capsys, main, dense, 5, *words, "the model has no sparse parameter")
    assert not (folder / "out.json").exists()


@pytest.mark.slow
def test_bad_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["s.json", "--model", MODEL]
    assert_refused(capsys, main, common, 2, "-o/--output")
    assert_refused(capsys, main, [*common, "-o", "s.json"], 2, "--output 's.json' is the same file as STRATEGY")
    assert_refused(capsys, main, [*common, "-o", "no/out.json"], 1, "folder 'no' does not exist")
    assert_refused(capsys, main, [*common, "-o", "out.json", "--iterations", "0"], 2, "--iterations", "at least 1")
    assert_refused(capsys, main, [*common, "-o", "out.json", "--emulate-scale", "0.5"], 2, "add --emulate")
    assert_refused(capsys, main, ["no.json", "--model", MODEL, "-o", "out.json"], 5, "no.json", "cannot be read")
    assert_refused(capsys, main, [*common, "-o", "out.json", "--cluster", "h200-2"], 5, "another cluster")


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupt_leaves_nothing(folder: Path) -> None:
    command = [sys.executable, "-m", "soap.cli.tune", "s.json", "--model", MODEL, "-o", "out.json", "--data", "mydata:batches"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [*command, "--iterations", "100000000"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while len(list(folder.glob("rank-*"))) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (130, "soap-tune: interrupted: nothing was chosen yet\n")
    ranks = [int(path.name.removeprefix("rank-")) for path in folder.glob("rank-*")]
    assert len(ranks) == 2
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    assert not (folder / "out.json").exists()
    assert list(folder.glob("soap-tune-*")) == [] and list(folder.glob(".*.tmp")) == []
