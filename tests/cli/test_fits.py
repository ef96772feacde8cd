"""``soap-simulate --fits``, ``--memory-budget`` and ``-o`` as people call them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import soap
from soap.api import fitting
from soap.cli.simulate import main
from soap.errors import InfeasibleError, TopologyError
from tests.cli.refusals import assert_refused

TOPOLOGY_CODE = TopologyError.exit_code
COMMAND = ["zoo:gpt:tiny", "--cluster", "p100-4x4"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides what is tried."""
    monkeypatch.setattr(fitting._Ways, "_spent", lambda self, share, more_s=0.0: False)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_says_what_fits_and_how_to_get_it(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peak = max(soap.simulate("zoo:gpt:tiny", "p100-4x4", "data_parallel").peak_bytes)
    budget = ["--memory-budget", f"{peak // 4 * 3} B"]
    assert main([*COMMAND, "--fits", *budget, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["asked"]["name"] == "data_parallel" and found["asked"]["available_bytes"] == peak // 4 * 3
    assert 1 <= len(found["ways"]) <= 3 and found["untried"] == []
    for way in found["ways"]:
        assert way["fits"] and sum(way["peak_memory_bytes"].values()) == way["peak_bytes"] <= way["available_bytes"]
    first = next(way for way in found["ways"] if way["micro_batches"] == 1)
    program, *arguments = shlex.split(first["commands"][0])
    assert program == "soap-simulate" and main([*arguments, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["predicted_ns"] == first["predicted_ns"] and simulated["fits"]
    strategy = soap.load_strategy("strategy.json", "zoo:gpt:tiny", "p100-4x4")
    assert strategy == soap.classical(first["name"], "zoo:gpt:tiny", "p100-4x4")
    assert main([*COMMAND, "--fits", *budget]) == 0
    out = capsys.readouterr().out
    assert "data_parallel does not fit" in out and "these fit, the fastest first:" in out and first["commands"][0] in out
    assert "at its peak: " in out


@pytest.mark.long
@pytest.mark.usefixtures("patient")
def test_says_it_if_it_fits_or_nothing_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--fits", "--builtin", "megatron"]) == 0
    out = capsys.readouterr().out
    assert "megatron fits: node" in out and "these fit" not in out
    for options in ([], ["--json"]):
        assert main([*COMMAND, "--fits", "--memory-budget", "40kB", *options]) == InfeasibleError.exit_code
        out, errors = capsys.readouterr()
        assert errors.startswith("soap-simulate: error: model 'zoo:gpt:tiny@8' fits into the memory of cluster 'p100-4x4' in none")
        assert errors.count("\n") == 1 and "the closest is " in errors and " of 39.1 KiB" in errors
        if options:
            assert json.loads(out)["ways"] == []
        else:
            assert "nothing that was tried fits (" in out and "closest: " in out and "what would help: " in out


@pytest.mark.slow
def test_the_peak_by_kind_is_in_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--builtin", "zero1", "--json"]) == 0
    found, simulation = json.loads(capsys.readouterr().out), soap.simulate("zoo:gpt:tiny", "p100-4x4", "zero1")
    assert found["peak_memory_bytes"] == [dict(kinds) for kinds in simulation.peak_by_kind]
    assert [sum(kinds.values()) for kinds in found["peak_memory_bytes"]] == found["expected_memory_bytes"]
    assert "host_memory" not in found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fits", "--timeline", "t.json"], "--fits with --timeline"),
        ([], "no strategy; expected --strategy FILE or --builtin NAME, or --fits to ask what fits"),
        (["--fits", "--explain"], "--fits with --explain, which is about one strategy; expected one of them"),
        (["--fits", "-o", "s.json", "--builtin", "zero1"], "--fits with --output"),
        (["-o", "s.json", "--strategy", "t.json"], "--output without --builtin NAME, which is what it writes; expected both"),
        (["--builtin", "megatron+zero9"], "'zero9' cannot be put on top of another one"),
        (["--builtin", "zero1", "--memory-budget", "much"], "'much' is no quantity"),
        (["--builtin", "zero1", "--memory-budget", "130%"], "'130%': expected a share of each device's memory"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [*COMMAND, *arguments], 2, words)


def test_a_budget_beyond_the_devices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--memory-budget '1 TB': no device of cluster 'p100-4x4' has more than 14.9 GiB; expected at most that"
    assert_refused(capsys, main, [*COMMAND, "--builtin", "zero1", "--memory-budget", "1 TB"], TOPOLOGY_CODE, words)
