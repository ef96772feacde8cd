"""What a module asks its tensors while it is traced: validation is taken as passed, a decision is told with the user's own line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soap
from soap.errors import ModelError
from soap.tracing.export import passed_assertions
from tests.tracing.programs import asserted

X = torch.linspace(0.1, 1, 32).reshape(8, 4)


class Asked(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.layer(x)).square().mean()


def gaussian(h: Tensor) -> Tensor:
    return F.gaussian_nll_loss(h, torch.zeros_like(h), h.exp())


def distribution(h: Tensor) -> Tensor:
    chosen: Tensor = torch.distributions.Normal(h, h.exp()).log_prob(torch.zeros_like(h))  # type: ignore[no-untyped-call]
    return chosen


def boxes(h: Tensor) -> Tensor:
    """As the losses of detectors begin."""
    if not (h[:, 2:].abs() + 1 >= h[:, :2] * 0).all():
        raise ValueError(f"boxes must be in [x0, y0, x1, y1] format, but got {h}")
    return h


def several(h: Tensor, checked: bool = True) -> Tensor:
    if checked and (h.isnan().any() or not torch.isfinite(h).all()):
        message = "not finite"
        raise ValueError(message)
    return h


def on_the_other_side(h: Tensor) -> Tensor:
    if torch.isfinite(h).all():
        h = h * 2
    else:
        raise ValueError("not finite")
    return h


def number(h: Tensor) -> Tensor:
    if h.abs().min().item() < 0:
        raise ValueError("negative")
    return h


def warned(h: Tensor) -> Tensor:
    if (h > 1e9).any():
        warnings.warn("large", stacklevel=1)
    return h


def many(h: Tensor) -> Tensor:
    if any(part.isnan().any() for part in h):
        raise ValueError("not a number")
    return h


PASSED = [gaussian, distribution, boxes, several, asserted, on_the_other_side, number, warned, many]


@pytest.mark.parametrize("ask", PASSED)
def test_validation_passes(ask: Callable[[Tensor], Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = torch.Tensor.__bool__, torch.SymBool.__bool__
    soap.export(Asked(ask), (X,), path=tmp_path / "m.pt2")  # which compares with eager PyTorch
    assert (torch.Tensor.__bool__, torch.SymBool.__bool__) == own
    assert "__bool__" not in torch.Tensor.__dict__
    assert capfd.readouterr().err == ""
    graph = soap.load(tmp_path / "m.pt2").graph
    assert not {op.kind for op in graph.operators} & {"any", "all", "isnan", "isfinite", "item"}


def decided(h: Tensor) -> Tensor:
    if h.sum() > 0:
        return h
    return -h


def decided_by_a_number(h: Tensor) -> Tensor:
    return h if h.sum().item() > 0 else -h


def caught(h: Tensor) -> Tensor:
    try:
        if h.sum() > 0:
            raise ValueError
        return h
    except ValueError:
        return -h


def repeated(h: Tensor) -> Tensor:
    while h.sum() > 1e9:
        h = h / 2
    return h


def behind_an_assertion(h: Tensor) -> Tensor:
    h = asserted(h)
    if h.sum() > 0:
        h = h * 2
    return h


def raised_among_others(h: Tensor) -> Tensor:
    if h.sum() > 0:
        h = h * 2
        if len(h) > 100:
            raise ValueError
    return h


DECIDED = {
    decided: "if h.sum() > 0:",
    decided_by_a_number: "return h if h.sum().item() > 0 else -h",
    caught: "if h.sum() > 0:",
    repeated: "while h.sum() > 1e9:",
    behind_an_assertion: "if h.sum() > 0:",
    raised_among_others: "if h.sum() > 0:",
}


@pytest.mark.parametrize("ask", DECIDED)
def test_decisions_are_told_with_their_line(ask: Callable[[Tensor], Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if f"def {ask.__name__}(" in text)
    with pytest.raises(ModelError) as caught:
        soap.export(Asked(ask), (X,), path=tmp_path / "m.pt2")
    said = str(caught.value)
    assert said.startswith("Asked decides by the values of tensors at ") and DECIDED[ask] in said and "\n" not in said
    place = int(said.split("test_export_guards.py:")[1].split(" ")[0])
    assert line < place <= line + 4
    assert capfd.readouterr().err == "" and list(tmp_path.iterdir()) == []


class Packed(nn.Module):
    """A recurrent layer over a packed sequence."""

    def __init__(self, kind: type[nn.RNNBase], listed: bool) -> None:
        super().__init__()
        self.inner, self.listed = nn.ModuleDict({"layer": kind(4, 6, batch_first=True)}), listed  # type: ignore[call-arg]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        known = [4, 3, 1] if self.listed else lengths
        packed = nn.utils.rnn.pack_padded_sequence(x, known, batch_first=True)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.inner["layer"](packed)[0], batch_first=True)
        return output.square().mean()


@pytest.mark.parametrize(("kind", "listed"), [(nn.LSTM, False), (nn.GRU, False), (nn.RNN, True)])
def test_packed_sequences_are_told_with_what_to_write(kind: type[nn.RNNBase], listed: bool, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"module 'inner.layer' \({kind.__name__}\) at .* expected the padded batch instead") as caught:
        soap.export(Packed(kind, listed), (torch.randn(3, 4, 4), torch.tensor([4, 3, 1])), path=tmp_path / "m.pt2")
    assert "\n" not in str(caught.value)


class Averaged(nn.Module):
    def __init__(self, kind: type[nn.Module], size: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, size), kind(size, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y if isinstance(self.norm, nn.BatchNorm1d) else y[:, :, None, None]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_cumulative_batch_norm_is_told_with_what_to_write(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"module 'norm' \({kind.__name__}\) .*momentum=None.* such as momentum=0.1") as caught:
        soap.export(Averaged(kind, 4), (X,), path=tmp_path / "m.pt2")
    assert "\n" not in str(caught.value)
    module = Averaged(kind, 4)
    module.norm.momentum = 0.1
    soap.export(module, (X,), path=tmp_path / "m.pt2")


def test_decisions_inside_of_torchs_modules_are_told_with_their_class(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5])

        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            loss: Tensor = self.head(x, words).loss
            return loss

    with pytest.raises(ModelError, match=r"Words decides by the values of tensors .* in AdaptiveLogSoftmaxWithLoss"):
        soap.export(Words(), (X, torch.randint(20, (8,))), path=tmp_path / "m.pt2")


def test_what_cannot_be_traced_for_other_reasons_has_its_line_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"torch.export cannot trace Asked: .*; at \S*test_export_guards.py:\d+ \(.*h @ torch.ones"):
        soap.export(Asked(lambda h: h @ torch.ones(3, 3)), (X,), path=tmp_path / "m.pt2")
    with pytest.raises(ModelError, match=r"dynamic shape that depends on data \(u\d+, at \S*test_export_guards.py:\d+ \("):
        soap.export(Asked(lambda h: h[h > 0]), (X,), path=tmp_path / "m.pt2")
    assert capfd.readouterr().err == ""


def test_tensors_with_values_answer_themselves() -> None:
    with passed_assertions(), pytest.raises(ValueError, match="boxes"):
        boxes(torch.full((2, 4), float("nan")))
