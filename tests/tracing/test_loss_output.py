"""Which output of a module is the loss: named, numbered or the first one; and what is told of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soap
from soap.cli import export
from soap.tracing.calls import TileContext
from soap.tracing.example import loss_position, which_loss
from soap.tracing.export import evaluation, exported_program

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 3


class Model(nn.Module):
    def __init__(self, result: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.result = nn.Linear(4, 3), result
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.linear(x)
        return self.result(self, x, z, nn.functional.cross_entropy(z, y))


def program(result: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> Any:
    return exported_program(Model(result), (X, Y))


@pytest.mark.parametrize(
    ("result", "position", "told"),
    [
        (lambda m, x, z, loss: loss, 0, ""),
        (lambda m, x, z, loss: (loss, z), 0, "output 0, of 0 float32[], 1 float32[8, 3]"),
        (lambda m, x, z, loss: (loss, x.mean()), 0, "output 0, of 0 float32[], 1 float32[]"),
        (lambda m, x, z, loss: (loss, 3.0), 0, "output 0, of 0 float32[], 1 no tensor"),
        (lambda m, x, z, loss: {"logits": z, "loss": loss}, 1, "output loss, of logits float32[8, 3], loss float32[]"),
        (lambda m, x, z, loss: {"mean": z.mean(), "loss": loss}, 1, "output loss, of mean float32[], loss float32[]"),
    ],
)
def test_the_loss_is_told(result: Callable[..., Any], position: int, told: str) -> None:
    assert loss_position(found := program(result)) == position
    assert which_loss(found) == (told, "")


@pytest.mark.parametrize(
    ("result", "first", "other"),
    [
        (lambda m, x, z, loss: (z, loss), "0 float32[8, 3] is no loss: a loss is one floating-point number", "1"),  # nanoGPT's
        (lambda m, x, z, loss: (torch.tensor(1.0), loss), "0 float32[] is no loss: no parameter has a part in it", "1"),
        (lambda m, x, z, loss: (m.two * 3, loss), "0 float32[] is no loss: no parameter has a part in it", "1"),
        (lambda m, x, z, loss: (x.mean(), loss), "0 float32[] is no loss: no parameter has a part in it", "1"),
        (lambda m, x, z, loss: (loss.detach(), loss), "0 float32[] is no loss: no parameter has a part in it", "1"),
        (lambda m, x, z, loss: ((z.argmax(1) == 1).float().mean(), loss), "0 float32[] is no loss: no parameter has a part in it", "1"),
        (lambda m, x, z, loss: {"out": (z, loss)}, "out.0 float32[8, 3] is no loss", "out.1"),
        (lambda m, x, z, loss: {"loss": z, "nll": loss}, "loss float32[8, 3] is no loss", "nll"),
    ],
)
def test_what_cannot_be_it_is_refused_beside_what_can(result: Callable[..., Any], first: str, other: str) -> None:
    with pytest.raises(soap.ModelError) as refused:
        loss_position(program(result))
    steps = "".join(f"[{step}]" if step.isdigit() else f"[{step!r}]" for step in other.split("."))
    assert str(refused.value).startswith(f"output {first}")
    assert f"expected output {other} float32[]: choose it by soap-export --loss {other}, or by loss=lambda output: output{steps}" in str(
        refused.value
    )


def test_what_may_be_one_too_is_said(tmp_path: Path) -> None:
    model = Model(lambda m, x, z, loss: (z.mean(), loss))
    with pytest.warns(soap.errors.SoapWarning, match=r"^output 0 is taken for the loss, and output 1 may be one, too: .*--loss 1"):
        assert soap.export(model, (X, Y), path=tmp_path / "m.pt2", verify=False) == "output 0, of 0 float32[], 1 float32[]"
    with pytest.raises(soap.ModelError, match="no parameter has a part in the loss: nothing could be trained"):
        soap.export(model, (X, Y), path=tmp_path / "m.pt2", verify=False, loss=lambda output: output[1].detach())


@pytest.mark.parametrize(
    ("result", "name", "refused"),
    [
        (lambda m, x, z, loss: (z, loss), "1", None),
        (lambda m, x, z, loss: {"out": [z, loss]}, "out.1", None),
        (lambda m, x, z, loss: (z, loss), "2", "--loss 2: the output is a tuple without '2'; expected one of 0, 1"),
        (lambda m, x, z, loss: {"logits": z, "loss": loss}, "lss", "the output is a dict without 'lss'; .*: did you mean 'loss'"),
        (lambda m, x, z, loss: loss, "loss.1", "the output is a Tensor without 'loss'; expected a module that returns several"),
    ],
)
def test_outputs_by_name_and_number(result: Callable[..., Any], name: str, refused: str | None, tmp_path: Path) -> None:
    model, alone, path = Model(result), Model(lambda m, x, z, loss: loss), tmp_path / "m.pt2"
    alone.load_state_dict(model.state_dict())
    if refused is not None:
        with pytest.raises(soap.ModelError, match=refused):
            soap.export(model, (X, Y), path=path, loss=export.loss_field(name))
        assert not path.exists()
        return
    soap.export(model, (X, Y), path=path, loss=export.loss_field(name))
    read = soap.load(path)
    torch.testing.assert_close(read.reference_loss(read.example_inputs, read.parameters, TileContext(0, 0, {})), alone(X, Y).detach())


def test_evaluation_mode_is_told(tmp_path: Path) -> None:
    dropping = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Dropout(0.1))
    recurrent = nn.LSTM(4, 3, num_layers=2, dropout=0.2)
    normal = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    attending = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1)
    for model in (dropping, recurrent, normal, attending):
        assert evaluation(model.train()) == ""
    said = "evaluation mode is exported as it is: dropouts that drop nothing ({}); call train() first for a model to train"
    assert evaluation(dropping.eval()) == said.format("1, …")
    assert evaluation(recurrent.eval()) == said.format("LSTM")
    assert evaluation(attending.eval()).startswith(said.format("self_attn, …")[:90])
    assert "normalisations whose statistics stay (1)" in evaluation(normal.eval())
    assert evaluation(nn.Sequential(nn.Dropout(0.0)).eval()) == ""
    frozen = nn.Sequential(normal, nn.Linear(3, 1)).train()
    frozen[0].eval()  # as is usual for a part that is not trained
    assert evaluation(frozen) == ""
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5), nn.Flatten(0)).eval()
    with pytest.warns(soap.errors.SoapWarning, match=r"dropouts that drop nothing \(1\)"):
        soap.export(model, (X[:1],), path=tmp_path / "m.pt2", verify=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        soap.export(model.train(), (X[:1],), path=tmp_path / "m.pt2", verify=False)
