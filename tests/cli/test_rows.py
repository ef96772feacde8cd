"""How many rows of sparse parameters batches touch: said by the user, counted on data, kept with strategies, and shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import soap
from soap.cli.search import main as search
from soap.cli.simulate import main as simulate
from soap.errors import ModelError, StrategyError
from soap.model import sparse_shares
from tests.cli.refusals import assert_refused

MODEL, TABLE = "zoo:lm:tiny", "embedding.weight"  # 101 rows, 40 look-ups


def sparse(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What ``--explain-graph`` says of the table."""
    assert search([MODEL, "--explain-graph", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["sparse"]
    assert list(found) == [TABLE]
    own: dict[str, Any] = found[TABLE]
    assert (own["rows"], own["lookups"]) == (101, 40)
    return own


def test_the_zoos_own_batch_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    own, batch = sparse(capsys), soap.load(MODEL).example_inputs[0]
    assert own["touched"][0] == len(set(batch.flatten().tolist()))
    assert (own["source"], own["alpha"]) == ("measured", own["touched"][0] / 101)


def test_alpha_is_overridden_by_name_and_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    own = sparse(capsys, "--alpha", "*=0.3", "--alpha", f"{TABLE}=0.1")
    assert (own["touched"][0], own["source"]) == (10, "given")
    assert sparse(capsys, "--alpha", f"{TABLE}=0.1", "--alpha", "*=0.3")["touched"][0] == 30


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two kinds of batches: 4 different rows, and 8."""
    (tmp_path / "rows_of_a_user.py").write_text(
        "import torch\n"
        "def batches():\n"
        "    for different in (4, 8):\n"
        "        ids = torch.arange(40).reshape(8, 5) % different\n"
        "        yield ids, ids\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rows_of_a_user", raising=False)
    return "rows_of_a_user:batches"


def test_data_is_counted(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sparse(capsys, "--data", data, "--alpha-batches", "1")["touched"][:3] == [4, 4, 4]
    assert sparse(capsys, "--data", data, "--alpha-batches", "2")["touched"][:3] == [6, 6, 6]  # ceil of the mean
    assert sparse(capsys, "--data", data, "--alpha", "*=0.02")["touched"][0] == 2
    assert sparse(capsys, "--data", f"{MODEL}@8")["source"] == "measured"


def test_python_counts_as_well(data: str) -> None:
    batch = (torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.int64))
    graph = soap.measure_rows(MODEL, [batch])
    assert graph.sparse[TABLE].touched == (1,) * 6
    assert graph.hash == soap.load(MODEL, plan_only=True).graph.hash
    assert soap.measure_rows(soap.load(MODEL), [batch]).sparse == graph.sparse
    with pytest.raises(ModelError, match=r"expected what soap\.load returns, not OperatorGraph"):
        soap.measure_rows(graph, [batch])  # type: ignore[arg-type]


def test_strategies_keep_what_they_were_made_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "strategy.json"
    common = [MODEL, "--cluster", "emulated:2x1@200Mbit/s", "--costs", "estimate"]
    assert search([*common, "-o", str(path), "--alpha", "*=0.05", "--budget", "5", "--verify", "0"]) == 0
    out = capsys.readouterr().out
    assert f"{TABLE}   101        40        5" in out and "given" in out
    expected = sparse_shares.document(sparse_shares.with_alphas(soap.load(MODEL, plan_only=True).graph, [("*", 0.05)]))
    assert json.loads(path.read_text())["record"]["sparse"] == expected

    def shown(*options: str) -> Any:
        assert simulate([*common, "--strategy", str(path), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["sparse"]

    assert shown() == expected
    assert shown("--alpha", "*=0.2")[TABLE]["touched"][0] == 20


@pytest.mark.parametrize("wrong", [{"rows": 101, "lookups": 40, "touched": [200], "source": "given"}, {"rows": 101}, 3])
def test_malformed_record(wrong: Any) -> None:
    graph = soap.load(MODEL, plan_only=True).graph
    with pytest.raises(StrategyError, match=r"^the strategy's record of sparse parameter 'embedding\.weight' is malformed; search again$"):
        sparse_shares.with_document(graph, {TABLE: wrong})


def test_record_of_another_size_is_left_out() -> None:
    graph = soap.load(MODEL, plan_only=True).graph
    other = {TABLE: {"rows": 50, "lookups": 40, "touched": [3], "source": "given"}, "head.weight": {}}
    assert sparse_shares.with_document(graph, other) == graph


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--alpha", "head*=0.1"], 3, "no sparse parameter is named 'head*'; expected one of embedding.weight"),
        (["--alpha", "*=0.9"], 3, "embedding.weight: alpha 0.9: expected more than 0 and at most 0.39604, since a batch looks up 40 rows"),
        (["--alpha", "*=2"], 2, "'*=2' is not allowed; expected GLOB=SHARE"),
        (["--alpha", "0.5"], 2, "'0.5' is not allowed; expected GLOB=SHARE"),
        (["--data", "zoo:lm:tiny@4"], 3, "no batch has the shapes [[8, 5], [8, 5]] of the inputs"),
        (["--data", "nowhere.data:f"], 1, "No module named 'nowhere'"),
        (["--alpha-batches", "0"], 2, "expected a whole number of at least 1"),
    ],
)
def test_refusals(options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, search, [MODEL, "--explain-graph", *options], code, message)


def test_models_without_sparse_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, search, ["zoo:alexnet:tiny", "--explain-graph", "--alpha", "*=0.1"], 3, "tiny@8' has no sparse parameters")
