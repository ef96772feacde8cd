"""``soap-simulate --sensitivity`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.cli.simulate import main
from soap.search.sensitivity import Figure
from tests.cli.refusals import assert_refused

COMMAND = ["zoo:rnnlm:tiny", "--cluster", "h100-2x2"]
Capsys = pytest.CaptureFixture[str]


@pytest.mark.long
@pytest.mark.slow
def test_table_document_and_plot_say_the_same(tmp_path: Path, capsys: Capsys) -> None:
    command = [*COMMAND, "--builtin", "model_parallel", "--sensitivity", "--plot", str(tmp_path / "t.png")]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["sensitivity"]
    assert found["gain"] == pytest.approx(report["speedup"], abs=1e-4)
    assert {one["figure"] for one in found["figures"]} == {figure.value for figure in Figure}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    for one in found["figures"]:
        (line,) = [own for own in lines if own.startswith(f"  {one['figure']}  ")]
        if not one["known"]:
            assert line.endswith("no such figure")
            continue
        assert f"{one['gain_at_half']:.2f}x" in line and f"{one['gain_at_double']:.2f}x" in line
        for side in ("turns_below", "turns_above"):
            assert one[side] is None or f"{one[side]:.2g}x" in line
        assert line.endswith("not within a factor of 10") is (one["turns_below"] is None and one["turns_above"] is None)


def test_without_the_option_nothing_is_added(capsys: Capsys) -> None:
    assert main([*COMMAND, "--builtin", "data_parallel", "--json"]) == 0
    assert "sensitivity" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--builtin", "data_parallel", "--sensitivity"], 5, ["--sensitivity compares with data_parallel", "expected another one"]),
        (["--builtin", "megatron", "--plot", "t.png"], 2, ["--plot without --sensitivity"]),
        (["--builtin", "megatron", "--sensitivity", "--plot", "t.jpg"], 1, ["'t.jpg'", ".png, .svg, .pdf"]),
        (["--builtin", "megatron", "--sensitivity", "--plot", "nowhere/t.png"], 1, ["nowhere"]),
    ],
)
def test_what_cannot_be_asked_for(
    options: list[str], code: int, words: list[str], capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, main, [*COMMAND, *options], code, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_same_from_python() -> None:
    from soap import api

    simulator = api.simulator_for("zoo:rnnlm:tiny", "h100-2x2")
    plan, usual = (api.classical(name, simulator.graph, simulator.topology) for name in ("single_device", "data_parallel"))
    found = api.sensitivity(simulator, plan, usual)
    times = [soap.simulate("zoo:rnnlm:tiny", "h100-2x2", name).makespan_ns for name in ("data_parallel", "single_device")]
    assert {one.usual for one in found} == {times[0] / times[1]}
