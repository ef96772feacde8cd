"""``soap-run --eval-model``: what dropout and batch norm make of a model in training does not enter its evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import soap
from soap.cli.run import main
from soap.tracing.export import export_model
from soap.weights.safetensors_files import SafetensorsFiles
from tests.cli.refusals import assert_refused
from tests.runtime.test_evaluation import Classifier, Norm, batch

pytest.importorskip("safetensors")


def rows() -> Iterator[list[torch.Tensor]]:
    for step in range(100):
        x, y = batch(step)
        yield [x.float(), y]


@pytest.mark.slow
@pytest.mark.usefixtures("kept_ranks")
def test_another_program_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = tuple(next(rows()))
    for module, path in ((Norm().train(), "t.pt2"), (Norm().eval(), "e.pt2"), (Classifier().eval(), "o.pt2")):
        export_model(module, example, path=Path(path))
    cluster, graph = soap.load_cluster("local:2"), soap.load("t.pt2", plan_only=True).graph
    soap.save_strategy("s.json", soap.classical("data_parallel", graph, cluster), graph, cluster)
    data = f"{__name__}:rows"
    words = ["s.json", "--model", "t.pt2", "--cluster", "local:2", "--steps", "3", "--data", data, "--eval-data", data, "--eval-steps", "2"]
    assert main([*words, "--eval-model", "e.pt2", "--save-weights", "w", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["evaluation"]
    module, saved = Norm().eval(), SafetensorsFiles(Path("w"))
    module.load_state_dict({name: saved.tensor(name) for name in saved.kinds})
    with torch.no_grad():
        losses = [float(module(*own)) for _, own in zip(range(2), rows(), strict=False)]
    assert found == {"data": data, "batches": 2, "model": "e.pt2", "loss": pytest.approx(sum(losses) / 2, rel=1e-5)}
    assert_refused(capsys, main, words, 8, "--eval-model FILE.pt2, the same module exported in evaluation mode")
    assert_refused(capsys, main, [*words, "--eval-model", "o.pt2"], 8, "; expected the parameters of 't'")
