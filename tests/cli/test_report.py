"""``soap-report`` and ``--report`` as people call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")

import soap
from soap.cli import compare, diff, report, run, search, tune
from soap.cli.inputs import simulator_of
from soap.cli.report import main
from soap.report import figures
from soap.strategy.sync import parameter_server
from soap.units import format_seconds

MODEL, CLUSTER = "zoo:rnnlm:tiny", "p100-4x4"


@pytest.mark.slow
def test_shows_a_strategy_that_has_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    assert main([MODEL, "--cluster", CLUSTER, "--builtin", "data_parallel", "--on", "h100-2x8", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    text = path.read_text(encoding="utf-8")
    expected = soap.simulate(MODEL, CLUSTER, "data_parallel").makespan_ns
    assert f"data_parallel: {MODEL}@8 on {CLUSTER}" in text and format_seconds(expected / 1e9) in text and "h100-2x8" in text


@pytest.mark.slow
def test_two_strategies_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    for path, name in zip(paths, ("data_parallel", "single_device"), strict=True):
        soap.save_strategy(path, soap.classical(name, MODEL, CLUSTER), soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER))
    assert diff.main([*paths, "--model", MODEL, "--cluster", CLUSTER, "--report", str(tmp_path / "both.html")]) == 1
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert f"<h2>a.json: {MODEL}@8 on {CLUSTER}</h2>" in text and f"<h2>b.json: {MODEL}@8 on {CLUSTER}</h2>" in text


@pytest.mark.slow
def test_a_search_shows_what_it_found_and_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, strategy = tmp_path / "report.html", tmp_path / "found.json"
    options = ["--cluster", CLUSTER, "--budget", "20", "--confidence", "0", "--seed", "3", "--json"]
    assert search.main([MODEL, *options, "-o", str(strategy), "--report", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    assert f"found.json: {MODEL}@8 on {CLUSTER}" in text
    assert f"{found['search']['evaluations']:,} simulations, seed 3" in text
    assert figures.duration(json.loads(strategy.read_text())["record"]["predicted_ns"]) in text


@pytest.mark.slow
def test_a_run_shows_the_prediction_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_ranks: None
) -> None:
    page, strategy = tmp_path / "report.html", tmp_path / "plan.json"
    graph, cluster = soap.load(MODEL, plan_only=True).graph, soap.load_cluster("local:2")
    soap.save_strategy(strategy, soap.classical("data_parallel", graph, cluster), graph, cluster)
    options = ["--model", MODEL, "--cluster", "local:2", "--steps", "2", "--json"]
    assert run.main([str(strategy), *options, "--report", str(page)]) == 0
    own = json.loads(capsys.readouterr().out)["strategies"]["strategy"]
    text = page.read_text(encoding="utf-8")
    predicted, measured = figures.duration(own["predicted_ns"]), figures.duration(own["measured_ns"])
    assert f"An iteration was predicted to take {predicted} and took {measured}: " in text
    assert "plan.json" in text and "The tasks that are furthest off" in text


@pytest.mark.parametrize("options", [[], ["--clip-norm", "1"], ["--optimizer", "sgd", "--costs", "estimate"]])
def test_other_plans_of_a_run_are_priced_as_its_own(options: list[str], tmp_path: Path) -> None:
    """Ranks read their own samples, and learn the norm together, by any plan. Of the plan itself nothing is compared."""
    strategy, graph, cluster = tmp_path / "plan.json", soap.load("zoo:gpt:tiny", plan_only=True).graph, soap.load_cluster("local:2")
    soap.save_strategy(strategy, soap.classical("data_parallel", graph, cluster), graph, cluster)
    command = [str(strategy), "--model", "zoo:gpt:tiny", "--cluster", "local:2", "--compare-data-parallel", *options]
    args = run.make_parser().parse_args(command)
    job, predicted, _ = run.prepare(args)
    assert list(job.strategies) == ["strategy"]  # it is data parallelism itself, and trained once
    for name in ("data_parallel", "megatron"):
        other = soap.classical(name, graph, cluster)
        own_ns = simulator_of(job, predicted["strategy"], args.costs).makespan_ns(other)
        assert (own_ns == predicted["strategy"].makespan_ns) == (name == "data_parallel")


@pytest.mark.slow
def test_tuning_shows_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_ranks: None) -> None:
    model, spec = "zoo:full_sparse:tiny", "emulated:2x1@200Mbit/s"
    graph, cluster = soap.load(model, plan_only=True).graph, soap.load_cluster(spec)
    strategy = soap.classical("hybrid", graph, cluster)
    for name in graph.sparse:
        strategy = strategy.with_parameter(name, parameter_server(2, rows=True))
    soap.save_strategy(tmp_path / "plan.json", strategy, graph, cluster)
    page, output = tmp_path / "report.html", tmp_path / "tuned.json"
    options = ["--model", model, "--iterations", "4", "-o", str(output), "--json"]
    assert tune.main([str(tmp_path / "plan.json"), *options, "--report", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    assert f"{found['partitions']} were chosen" in text and len(found["samples"]) >= 2
    assert all(f"<td>{figures.duration(own['measured_ns'])}</td>" in text for own in found["samples"])


def test_what_is_asked_wrongly_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["-o", str(tmp_path / "report.html")]
    known = [MODEL, "--cluster", CLUSTER]
    assert main([*known, "--builtin", "data_parallel", "-o", str(tmp_path / "no" / "report.html")]) == 1
    assert "does not exist; create the folder" in capsys.readouterr().err
    assert main([*known, "--builtin", "data_parallel", "--measured", str(tmp_path / "none.json"), *out]) == 1
    assert "timeline" in capsys.readouterr().err
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    assert main([*known, "--builtin", "data_parallel", *out]) == 1
    assert capsys.readouterr().err == (
        "soap-report: error: reports need bokeh, which is not installed; install it, or soap-search[report]\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_two_files_takes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff.main(["a.json", "b.json", "--report", str(tmp_path / "both.html")]) == 2
    assert "--report without --model and --cluster" in capsys.readouterr().err


def test_all_commands_take_it() -> None:
    for command in (search, run, compare, diff, tune):
        assert "--report" in command.make_parser().format_help()
    assert "--measured" in report.make_parser().format_help()
