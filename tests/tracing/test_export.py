from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.errors import ModelError, SoapError, SoapWarning
from soap.tracing.calls import TileContext
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.tracing.programs import Lambda


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), labels)


INPUTS = (torch.linspace(0, 1, 12).reshape(4, 3), torch.tensor([0, 1, 1, 0]))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    module, path = Trained(), tmp_path / "model.pt2"
    export_model(module, INPUTS, path=path)
    model = load_model(path)
    assert model.graph.name == "model"
    assert sorted(model.parameters) == ["inner.bias", "inner.weight"]
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, module(*INPUTS))
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_loss_on_top_of_the_model(tmp_path: Path) -> None:
    export_model(nn.Linear(3, 2), INPUTS[:1], path=tmp_path / "m.pt2", loss=lambda y: y.square().mean())
    model = load_model(tmp_path / "m.pt2")
    assert model.graph.tensors[model.graph.loss].shape == ()
    assert model.graph.operators[0].kind == "linear"


class Walked(nn.Module):
    """An LSTM that is called twice, the second time with the states of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lstm = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        first, states = self.lstm(self.inner(x))
        return self.lstm(first, states)[0].square().mean()


def test_states_of_an_lstm_have_as_many_dimensions_as_they_should(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In torch 2.11 a traced one's have one more, which is mended here."""
    known, asked = torch._decomp.decompositions, []
    original = known.one_layer_lstm

    def as_in_2_11(*args: object, **kwargs: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        asked.append(args)
        output, states = original(*args, **kwargs)
        return output, tuple(state.reshape(1, *state.shape[-2:]) for state in states)

    monkeypatch.setattr(known, "one_layer_lstm", as_in_2_11)
    export_model(Walked(), (torch.randn(2, 5, 3),), path=tmp_path / "m.pt2")
    assert asked and known.one_layer_lstm is as_in_2_11
    kinds = [op.kind for op in load_model(tmp_path / "m.pt2").graph.operators]
    assert kinds.count("lstm") == 2


class Plain(nn.Module):
    """With state of every kind: tied, only read, unused, updated, not persistent."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("never", torch.arange(4))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x))) * scale + self.table * self.mask


def test_a_loss_on_top_changes_no_names_and_not_the_model(tmp_path: Path) -> None:
    module = Plain()
    before = dict(module.__dict__)
    modules = dict(module._modules)
    target = torch.ones(4, 3)
    export_model(module, INPUTS[:1], {"scale": torch.ones(3)}, path=tmp_path / "m.pt2", loss=lambda y: (y - target).square().mean())
    model = load_model(tmp_path / "m.pt2")
    assert type(module) is Plain and module.__dict__ == before and module._modules == modules
    assert {*model.parameters, *model.buffers, *model.unchanged, *model.graph.aliases} == set(module.state_dict())
    assert set(model.unchanged) == {"unused", "table", "never"}
    assert list(model.input_names) == ["x", "scale"]
    names = [op.name for op in model.graph.operators]
    assert "first" in names and not any(name.startswith("model") for name in names)


def test_a_loss_that_is_a_module_keeps_its_state(tmp_path: Path) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, y: Tensor) -> Tensor:
            return (y.square() * self.weight).mean()

    module = nn.Linear(3, 2)
    export_model(module, INPUTS[:1], path=tmp_path / "m.pt2", loss=Learned())
    assert set(load_model(tmp_path / "m.pt2").parameters) == {"weight", "bias", "loss.weight"}
    assert not module._modules


def test_a_loss_on_top_of_a_forward_of_the_instance(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    usual = module.forward
    module.forward = lambda data: usual(data) * 2  # type: ignore[assignment,method-assign]
    export_model(module, INPUTS[:1], path=tmp_path / "m.pt2", loss=lambda y: y.mean())
    model = load_model(tmp_path / "m.pt2")
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, module(INPUTS[0]).mean())
    assert (list(model.input_names), set(model.parameters)) == (["data"], {"weight", "bias"})


@pytest.mark.parametrize("loss", [lambda y: y.detach().mean(), lambda y: y.argmax(-1).float().mean()])
def test_a_loss_in_which_no_parameter_has_a_part_is_refused(tmp_path: Path, loss: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match=r"^no parameter has a part in the loss: nothing could be trained; expected another output, or"):
        export_model(nn.Linear(3, 2), INPUTS[:1], path=tmp_path / "m.pt2", loss=loss)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loss", [lambda y: y.detach().mean(), lambda y: y.mean()])
def test_a_model_that_is_frozen_as_a_whole_is_warned_of(tmp_path: Path, loss: Callable[[Tensor], Tensor]) -> None:
    export_model(nn.Linear(3, 2).requires_grad_(False), INPUTS[:1], path=tmp_path / "m.pt2", loss=loss)
    with pytest.warns(SoapWarning, match=r"^the loss depends on no trainable parameter: nothing will be trained$"):
        load_model(tmp_path / "m.pt2")


def test_one_tensor_given_twice_makes_two_inputs(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    ids = torch.tensor([[1, 2], [0, 1]])
    module = Lambda(lambda self, ids, labels: F.cross_entropy(self.table(ids).flatten(0, 1), labels.flatten()), table=nn.Embedding(3, 3))
    export_model(module, (ids, ids), path=tmp_path / "m.pt2")
    model = load_model(tmp_path / "m.pt2")
    read = {o.tensor for op in model.graph.operators for o in op.inputs}
    assert len(model.input_names) == 2 and set(model.input_names) <= read
    assert [w for w in recwarn if "does not read" in str(w.message)] == []


def test_a_model_without_scalar_loss_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a scalar floating-point loss: pass loss=… to soap\.export"):
        export_model(nn.Linear(3, 2), INPUTS[:1], path=tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_torch_cannot_trace_is_one_line(tmp_path: Path) -> None:
    module = Lambda(lambda self, x: self.w.sum() if x.sum() > 0 else self.w.mean(), w=nn.Parameter(torch.ones(3)))
    said = r"^Lambda decides by the values of tensors at \S*test_export\.py:\d+ \(.* if x\.sum\(\) > 0 else"
    with pytest.raises(ModelError, match=said) as caught:
        export_model(module, INPUTS[:1], path=tmp_path / "m.pt2")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_found_before_the_export(tmp_path: Path) -> None:
    with pytest.raises(SoapError, match="missing"):
        export_model(Trained(), INPUTS, path=tmp_path / "missing" / "m.pt2")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SoapError):
        export_model(Trained(), INPUTS, path=tmp_path / "folder")


def test_an_existing_file_stays_when_the_export_fails(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    export_model(Trained(), INPUTS, path=path)
    before = path.read_bytes()
    with pytest.raises(ModelError, match="expected a scalar floating-point loss"):
        export_model(nn.Linear(3, 2), INPUTS[:1], path=path)
    assert path.read_bytes() == before


def test_what_is_no_model_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"before")
    with pytest.raises(SoapError, match="is there and seems to be a text, not a model that soap-export wrote; choose another path"):
        export_model(Trained(), INPUTS, path=path)
    assert path.read_bytes() == b"before"


class Sequences(nn.Module):
    """Samples in dimension 1, as recurrent models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x).mean(0), labels)


def test_open_batch_dimensions_by_name(tmp_path: Path) -> None:
    inputs = (torch.ones(3, 5, 4), torch.zeros(5, dtype=torch.long))
    export_model(Sequences(), inputs, path=tmp_path / "m.pt2", dynamic_batch={"x": 1, "labels": 0})
    model = load_model(tmp_path / "m.pt2", batch_dims={"x": 1})
    assert model.graph.tensors["x"].shape == (3, 5, 4)
    assert model.resized([(3, 2, 4), (2,)]).graph.tensors["x"].shape == (3, 2, 4)


def test_what_cannot_stay_open_is_one_line(tmp_path: Path) -> None:
    def refused(match: str, module: nn.Module, *inputs: Tensor, **options: object) -> None:
        with pytest.raises(ModelError, match=match) as caught:
            export_model(module, inputs, path=tmp_path / "m.pt2", **{"dynamic_batch": True, **options})  # type: ignore[arg-type]
        assert "\n" not in str(caught.value) and not (tmp_path / "m.pt2").exists()

    fixed = Lambda(lambda self, x: x.reshape(4, 3).sum() * self.w, w=nn.Parameter(torch.ones(())))
    refused(r"^torch.export cannot trace Lambda: the number of samples cannot stay open \(", fixed, torch.ones(4, 3))
    refused(r"^dynamic_batch: sizes \[1\]; expected example inputs with one number of samples, at least 2", fixed, torch.ones(1, 3))
    refused(r"^dynamic_batch: no input has a dimension", fixed, torch.ones(()))
    unknown = r"^dynamic_batch: 'z' has no dimension 0; expected one of args\[0\] and its dimension"
    refused(unknown, fixed, torch.ones(4, 3), dynamic_batch={"z": 0})
    refused(r"^dynamic_batch: 'args\[0\]' has no dimension 2", fixed, torch.ones(4, 3), dynamic_batch={"args[0]": 2})
