"""What a search is told: values that cannot be are refused when they are given, and the command makes the same value as a script."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

import soap
from soap.cli import first_measuring
from soap.cli.search import main, make_parser
from soap.cli.search_options import search_options
from soap.cli.updating import Updating
from soap.errors import ProfileError, SoapError, StrategyError
from soap.search.options import DEFAULT_BUDGET, SearchOptions
from soap.simulator.draws import Risk
from soap.strategy.config import SyncConfig
from soap.strategy.sync import parameter_server
from tests.cli.refusals import assert_refused
from tests.graph_builder import mlp

GRAPH = mlp()


def test_it_is_one_value() -> None:
    options = SearchOptions(budget=7, pins={"fc*": "sample:2"}, starts=["megatron"], syncs=[SyncConfig()], uncut={"fc1.weight"})
    assert options == SearchOptions(budget=7, pins=[("fc*", "sample:2")], starts=("megatron",), syncs=(SyncConfig(),), uncut=["fc1.weight"])
    assert options != replace(options, seed=1) and hash(options) == hash(replace(options))
    assert soap.SearchOptions is SearchOptions and SearchOptions().budget == DEFAULT_BUDGET
    with pytest.raises(FrozenInstanceError):
        options.budget = 8  # type: ignore[misc]


def test_what_it_was_given_may_change_afterwards() -> None:
    pins, starts = {"fc*": "sample:2"}, ["megatron"]
    options = SearchOptions(pins=pins, starts=starts)
    pins["*"], starts[0] = "@0", "data_parallel"
    assert options == SearchOptions(pins={"fc*": "sample:2"}, starts=["megatron"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, StrategyError, "budget 0: expected at least 1 proposal"),
        ({"beta": 0.0}, StrategyError, "beta 0.0: expected a positive number"),
        ({"beta": float("nan")}, StrategyError, "beta nan: expected a positive number"),
        ({"patience": 1.5}, StrategyError, "patience 1.5: expected a share of the budget above 0 and up to 1"),
        ({"seconds": 0}, StrategyError, "seconds 0: expected a positive number of seconds"),
        ({"cores": 0}, StrategyError, "cores 0: expected at least 1, or None for all"),
        ({"confidence": 1.5}, StrategyError, "confidence 1.5: expected a share from 0 to 1"),
        ({"confidence": float("nan")}, StrategyError, "confidence nan: expected a share from 0 to 1"),
        ({"risk": "q90"}, StrategyError, "risk 'q90': expected one of 'mean', 'tail', 'q80', 'worst', or None for the most likely costs"),
        ({"risk": 0.8}, StrategyError, "risk 0.8: expected one of 'mean',"),
        ({"risk": ""}, StrategyError, "risk '': expected one of 'mean',"),
        ({"draws": 0}, StrategyError, "draws 0: expected 1 to 1024"),
        ({"optimizer_states": -1}, StrategyError, "optimizer_states -1: expected 0 or more tensors"),
        ({"costs": "guess"}, ProfileError, "costs 'guess': expected one of auto, estimate"),
    ],
)
def test_values_that_cannot_be(options: dict[str, Any], error: type[SoapError], message: str) -> None:
    with pytest.raises(error) as raised:
        SearchOptions(**options)
    assert str(raised.value).startswith(message)


def test_a_risk_may_be_told_by_its_word() -> None:
    assert SearchOptions(risk="q80").risk is Risk.Q80


def told(*arguments: str) -> SearchOptions:
    args = make_parser().parse_args(["m.pt2", "--cluster", "local:2", "-o", "s.json", *arguments])
    return search_options(args, Updating(tuple(args.optimizer or ("adam",))), GRAPH)


def test_the_command_makes_the_same_value() -> None:
    assert told("--patience", "1") == SearchOptions(patience=1.0)
    found = told(
        "--budget", "9", "--seed", "3", "--beta", "5", "--seconds", "2", "--patience", "0.5", "--start", "megatron", "--start", "dynamic",
        "--pin", "fc*=sample:2", "--forbid", "*=@1", "--sync", "parameter_server:4", "--costs", "estimate", "--confidence", "0.5",
        "--risk", "q80",
    )  # fmt: skip
    assert found == SearchOptions(
        budget=9, seed=3, beta=5.0, seconds=2.0, patience=0.5, starts=("megatron", "dynamic"), pins={"fc*": "sample:2"},
        forbidden={"*": "@1"}, syncs=(parameter_server(4),), costs="estimate", confidence=0.5, risk=Risk.Q80,
    )  # fmt: skip
    assert told("--risk", "none", "--patience", "1") == SearchOptions(patience=1.0, risk=None)


def test_the_command_refuses_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: object) -> None:
        raise AssertionError("measured for a search that cannot be")

    monkeypatch.setattr(first_measuring, "profile", measured)
    command = ["zoo:rnnlm:tiny", "--cluster", "local:2", "-o", str(tmp_path / "s.json"), "--profile", "9", "--patience", "2"]
    assert_refused(capsys, main, command, StrategyError.exit_code, "patience 2.0: expected a share of the budget above 0 and up to 1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_tells_what_an_optimizer_needs() -> None:
    """Momentum keeps one tensor."""
    assert told("--optimizer", "sgd:momentum=0.9").optimizer_states == 1
    usual = told()
    asked = told("--optimizer", "adam")
    assert (asked.optimizer_states, asked.uncut, asked.together) == (usual.optimizer_states, (), ())


def test_every_option_has_a_default_and_is_told_in_the_docstring() -> None:
    assert SearchOptions() == SearchOptions(**{field.name: getattr(SearchOptions(), field.name) for field in fields(SearchOptions)})
    said = SearchOptions.__doc__ or ""
    assert [field.name for field in fields(SearchOptions) if f"``{field.name}" not in said] == []
