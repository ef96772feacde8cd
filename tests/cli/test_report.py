"""``soap-report`` and ``--report`` as people call them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")

import soap
from soap.cli import compare, diff, report, search
from soap.cli.report import main
from soap.report import figures
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
    for command in (search, compare, diff):
        assert "--report" in command.make_parser().format_help()
    assert "--measured" in report.make_parser().format_help()
