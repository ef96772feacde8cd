"""``soap-search`` without options: for this machine, into ``strategy.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from soap import api
from soap.cli.search import main
from tests import made_up_machine
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:gpt:tiny", "p100-4x4"


@pytest.fixture
def slow_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's messages and sums in training take twenty times as long, so that one plan is surely the best."""
    with monkeypatch.context() as patch:
        patch.setattr(made_up_machine, "SECONDS", {what: (20 * a, 20 * b) for what, (a, b) in made_up_machine.SECONDS.items()})
        made_up_machine.keep()
    yield
    made_up_machine.keep()


@pytest.mark.slow
@pytest.mark.usefixtures("slow_sums")
def test_without_options_it_plans_for_this_machine_into_strategy_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("soap.measure.this_machine.device_count", lambda: 2)
    command = [MODEL, "--budget", "5", "--profile", "0", "--verify", "0"]
    for seed in ("0", "1"):  # the second time over the first strategy
        assert main([*command, "--seed", seed]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "wrote strategy.json"
        header = api.load_strategy_header("strategy.json")
        assert header.cluster == "local:2" and json.loads(Path("strategy.json").read_text())["record"]["search"]["seed"] == int(seed)


@pytest.mark.parametrize("content", ["precious notes", '{"model": {"layers": 3}}'])
def test_strategy_json_that_is_something_else_is_not_overwritten(
    content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("strategy.json")
    path.write_text(content)
    command = [MODEL, "--cluster", CLUSTER, "--budget", "5", "--start", "data_parallel"]
    for named in ([], ["-o", "strategy.json"]):
        assert_refused(capsys, main, [*command, *named], 2, "--output 'strategy.json' is there and seems to be", "not a strategy file")
        assert path.read_text() == content
