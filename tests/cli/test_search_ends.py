"""``soap-search`` ends in every phase, at the end of its time and by SIGTERM, with the best plan so far."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import soap
from soap.api import outcome
from soap.cli import command, search
from soap.search import chains
from soap.time_limit import TimeLimit
from tests.alarms import alarm as alarm

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="signals"), pytest.mark.usefixtures("alarm")]

MODEL, CLUSTER = "zoo:gpt:tiny", "h100-2"
PHASES: dict[str, tuple[Any, str, int]] = {
    "reading": (search.inputs, "load_graph", 1),
    "the first start": (chains, "evaluated", 1),
    "another start": (chains, "evaluated", 2),
    "proposals": (chains._Run, "_show", 5),
    "polishing": (chains, "polish_best", 1),
    "deciding": (outcome, "decision", 1),
    "the record": (outcome, "costs_record", 1),
    "the report": (search.search_report, "document", 1),
}
"""What is under way -> the function that is called by then for the last of so many times."""
NOTHING, RARE = ("reading", "the first start"), ("polishing", "the record")


def ended_in(phase: str, end: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Search; ``end`` is called within the phase. Returns the exit code."""
    place, name, count = PHASES[phase]
    real, calls = getattr(place, name), list[int]()

    def called(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            end()
        return real(*args, **more)

    monkeypatch.setattr(place, name, called)
    code = search.main([MODEL, "--cluster", CLUSTER, "--budget", "20", "--start", "megatron", *options])
    assert len(calls) >= count
    return code


def left_alone(out: Path) -> bool:
    """Whether nothing but plans was left: the answer, and the safe plan if that is another one."""
    return {*out.parent.iterdir()} <= {out, out.with_suffix(".safe.json")}


@pytest.mark.parametrize("phase", [*NOTHING, "proposals", "the report", pytest.param("deciding", marks=pytest.mark.slow)])
def test_sigterm(phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.json"
    code = ended_in(phase, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch, "-o", str(out))
    told = capsys.readouterr()
    if phase in NOTHING:
        assert (code, told.err, list(tmp_path.iterdir())) == (143, "soap-search: interrupted: nothing was found yet\n", [])
        return
    assert code == (0 if phase in ("the record", "the report") else 143)
    assert soap.load_strategy(out, MODEL, CLUSTER).operators and left_alone(out)
    assert f"wrote {out}" in told.out


@pytest.mark.parametrize("phase", [pytest.param(own, marks=[pytest.mark.slow] * (own in RARE)) for own in PHASES])
def test_time(phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(command, "TimeLimit", partial(_limit, clock=lambda: now_s[0]))

    def end() -> None:
        now_s[0] = 1e6
        os.kill(os.getpid(), signal.SIGALRM)

    out = tmp_path / "s.json"
    code = ended_in(phase, end, monkeypatch, "-o", str(out), "--time-limit", "10000", "--json")
    told = capsys.readouterr()
    if phase in NOTHING:
        assert code == 1 and list(tmp_path.iterdir()) == []
        assert "the 10000 s of --time-limit were over before there was anything to show; expected more" in told.err
        return
    assert code == 0 and left_alone(out)
    report, record = json.loads(told.out), json.loads(out.read_text())["record"]
    assert report["predicted_ns"] == record["predicted_ns"] and report["search"]["interrupted"] is False
    assert soap.load_strategy(out, MODEL, CLUSTER).operators


def _limit(seconds: float | None, since_s: float, clock: Callable[[], float]) -> TimeLimit:
    return TimeLimit(seconds, clock=clock)


def test_where_no_moment_is_left_the_searchs_own_costs_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soap.cli.stopping.FINISH_S", -1.0)
    out = tmp_path / "s.json"
    options = ("-o", str(out), "--timeline", str(tmp_path / "t.json"))
    assert ended_in("proposals", lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch, *options) == 143
    told, record = capsys.readouterr(), json.loads(out.read_text())["record"]
    assert record["decision"]["draws"] == 1 and "memory_bytes" not in record and record["data_parallel_ns"] > 0
    assert "no time was left to say more; soap-simulate --strategy" in told.out and "no time was left for pictures" in told.err
    assert left_alone(out)


def test_what_lacks_memory_is_told_without_simulating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.json"
    monkeypatch.setattr(chains, "infeasible", lambda *args, **more: pytest.fail("simulates"))
    options = ("-o", str(out), "--memory-budget", "100kB")
    assert ended_in("another start", lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch, *options) == 143
    told = capsys.readouterr().err
    assert "interrupted: the search was ended after 1 starts and 0 proposals, before a plan was found" in told and "lacks" in told


@pytest.mark.slow
def test_the_python_interface_keeps_to_its_seconds() -> None:
    found = soap.find(MODEL, CLUSTER, soap.SearchOptions(budget=20, seconds=1000))
    assert not found.brief and "decision" in found.__dict__ and "simulation" in found.__dict__  # nothing is left to do afterwards
    with pytest.raises(soap.SoapError, match=r"nothing was evaluated within 1e-09 s of searching; expected more time"):
        soap.find(MODEL, CLUSTER, soap.SearchOptions(budget=20, seconds=1e-9))
