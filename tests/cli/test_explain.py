"""``soap-search --explain-graph``: every operator, what it may be split along, and why not further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import soap
from soap.cli.explanation import FACTORS_LEGEND, graph_document, graph_text
from soap.cli.inputs import LEGEND as SPARSE_LEGEND
from soap.cli.search import main
from soap.model.graph import Unsplit


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.inv(self.up(x))
        return torch.softmax(y, 2).square().mean()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "model.pt2"
    soap.export(Model(), (torch.randn(6, 4, 4),), path=path)
    return path


def test_a_line_per_operator(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--explain-graph"]) == 0
    out, err = capsys.readouterr()
    head, legend, empty, titles, *lines = out.splitlines()
    assert head == "model: 4 operators, 20 parameters, 1.44 kFLOP forward; 1 without a rule, kept whole"
    assert (legend, empty) == (FACTORS_LEGEND, "")
    assert " ".join(titles.split()) == "operator kind factors parameters FLOP bytes not split (size: why)"
    assert [" ".join(line.split()) for line in lines] == [
        "up linear S b=6, A b1=4, R+ k=4, P n=4 20 768 848 B",
        "linalg_inv linalg_inv - - 0 768 B 6, 4: no rule for aten.linalg_inv.default",
        "softmax softmax A d0=6, A d1=4 - 576 768 B 4: softmax needs it whole",
        "mean mean R+ d0=6, R+ d1=4, R+ d2=4 - 96 388 B",
    ]
    assert "no rule for aten.linalg_inv.default" in err


def test_json_is_one_document(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--explain-graph", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    graph = soap.load(model, plan_only=True).graph
    assert found == json.loads(json.dumps(graph_document(graph)))
    assert found["model"]["hash"] == graph.hash
    first, inverse = found["operators"][:2]
    assert first["factors"][2] == {"name": "k", "size": 4, "kind": "reduction", "summed": True}
    assert first["parameters"] == ["up.weight", "up.bias"]
    assert first["parameter_elements"] == 20
    assert first["bytes"] == {"inputs": 384, "parameters": 80, "outputs": 384, "saved": first["bytes"]["saved"]}
    assert (first["unsplit"], first["partitionable"], inverse["partitionable"]) == ([], True, False)
    assert inverse["unsplit"][0]["tensor"] == "linalg_inv"


@pytest.mark.slow
def test_a_model_of_the_zoo_with_hundreds_of_operators() -> None:
    graph = soap.load("zoo:nmt:tiny", plan_only=True).graph
    operators, _, _ = graph_text(graph_document(graph)).partition(f"\n\n{SPARSE_LEGEND}")
    lines = operators.splitlines()
    assert len(lines) == 4 + len(graph.operators)
    assert [line.split()[0] for line in lines[4:]] == [op.name for op in graph.operators]
    assert all(isinstance(one, Unsplit) and one.size > 1 for found in graph.unsplit.values() for one in found)


def test_sparse_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(100, 4), torch.nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids)).square().mean()

    soap.export(Table(), (torch.zeros(6, 3, dtype=torch.int64),), path=tmp_path / "table.pt2")
    assert main([str(tmp_path / "table.pt2"), "--explain-graph"]) == 0
    *_, legend, empty, titles, line = capsys.readouterr().out.splitlines()
    assert (legend, empty) == (SPARSE_LEGEND, "")
    assert " ".join(titles.split()) == "parameter rows look-ups touched by 1/2, 1/4, 1/8 alpha"
    # 100 * (1 - 0.99^18) = 16.5, by 9 look-ups 8.6, by 4.5 of them 4.4, by 2.25 2.2
    assert " ".join(line.split()) == "table.weight 100 18 17 9, 5, 3 0.17 assumed"
