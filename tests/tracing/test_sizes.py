"""Symbolic programs at given sizes are what exporting at these sizes makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.errors import ModelError
from soap.tracing.calls import TileContext
from soap.tracing.export import export_model
from soap.tracing.load import load_model


class Mixed(nn.Module):
    """Sizes in views, factories, slices and arithmetic; a block without gradients; a recurrent layer; an input without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.norm, self.memory = nn.BatchNorm1d(8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        x = self.memory(self.embedding(tokens))[0]
        with torch.no_grad():
            y = x * 2
        x = self.norm(self.layer(x).reshape(-1, 8) + y.flatten(0, 1)).view(tokens.shape[0], -1, 8) * scale[:, None]
        x = torch.cat([x, x.new_zeros(tokens.shape[0] * 2, x.shape[1], 8)])[: tokens.shape[0]] + torch.arange(x.shape[0]).view(-1, 1, 1)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def inputs(samples: int, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    tokens, labels = (torch.randint(0, 8, (samples, length), generator=generator) for _ in range(2))
    return tokens, labels, torch.linspace(0.5, 1.5, length)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    module = Mixed().train()
    export_model(module, inputs(6), path=folder / "open.pt2", dynamic_batch=True)
    export_model(module, inputs(6), path=folder / "six.pt2")
    export_model(module, inputs(4), path=folder / "four.pt2")
    return folder


def shapes(samples: int, length: int = 5) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in inputs(samples, length)]


@pytest.mark.slow
def test_an_open_program_is_the_fixed_one_of_its_examples(paths: Path) -> None:
    fixed, opened = (load_model(paths / name) for name in ("six.pt2", "open.pt2"))
    assert opened.graph.hash == fixed.graph.hash
    assert load_model(paths / "open.pt2", plan_only=True).graph.hash == fixed.graph.hash
    assert all(torch.equal(a, b) for a, b in zip(opened.example_inputs, inputs(6), strict=True))


@pytest.mark.parametrize("samples", [4, 1, 9])
def test_other_sizes_compute_what_the_module_does(paths: Path, samples: int) -> None:
    base = load_model(paths / "open.pt2")
    model = base.resized(shapes(samples))
    assert model.parameters == {} and model.example_inputs == ()
    assert model.graph.tensors["tokens"].shape == (samples, 5)
    torch.manual_seed(0)
    expected = Mixed().train()(*inputs(samples))
    context = TileContext(0, 0, {name: tensor.clone() for name, tensor in base.buffers.items()})
    torch.testing.assert_close(model.reference_loss(inputs(samples), base.parameters, context), expected)
    if samples == 4:
        assert model.graph.hash == load_model(paths / "four.pt2").graph.hash
        wide = model.widened()
        assert wide is not None and wide.graph.tensors[wide.graph.loss].dtype == "float64"
        assert wide.graph.tensors["tokens"].shape == (4, 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([(2, 5), (3, 5), (5,)], r"^input 'labels' has shape \[3, 5\]: expected \[s\d+, 5\] as the program was exported"),
        ([(2, 4), (2, 4), (5,)], r"^input 'tokens' has shape \[2, 4\]: expected \[s\d+, 5\]"),
        ([(0, 5), (0, 5), (5,)], r"^input 'tokens' has shape \[0, 5\]"),
        ([(2, 5, 1), (2, 5), (5,)], r"^input 'tokens' has shape \[2, 5, 1\]"),
    ],
)
def test_shapes_that_the_program_does_not_have(paths: Path, wrong: Sequence[Sequence[int]], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(paths / "open.pt2").resized(wrong)
    assert "\n" not in str(caught.value)


def test_a_fixed_program_says_how_to_export(paths: Path) -> None:
    with pytest.raises(ModelError, match=r"^the program was exported for one batch size: soap.export\(..., dynamic_batch=True\)"):
        load_model(paths / "four.pt2").resized(shapes(3))
    with pytest.raises(ModelError, match=r"^the program was exported for one batch size"):
        load_model(paths / "four.pt2", plan_only=True).resized(shapes(3))


class Named(nn.Module):
    """Inputs with names that Python has, which fx numbers when it copies a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, input: Tensor, max: Tensor) -> Tensor:
        return (self.layer(input) * max).square().mean()


def test_names_that_python_has(tmp_path: Path) -> None:
    module, batch = Named(), (torch.rand(4, 3), torch.rand(4, 2))
    export_model(module, batch, path=tmp_path / "m.pt2", dynamic_batch=True)
    model = load_model(tmp_path / "m.pt2")
    assert list(model.input_names) == ["input", "max"]
    assert model.resized([(7, 3), (7, 2)]).graph.tensors["input"].shape == (7, 3)
    torch.testing.assert_close(model.reference_loss(batch, model.parameters, TileContext()), module(*batch))


def test_ranges_of_the_user_are_kept(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    exported = torch.export.export(Mixed(), inputs(4), dynamic_shapes=({0: batch}, {0: batch}, None), strict=False)
    torch.export.save(exported, tmp_path / "m.pt2")
    model = load_model(tmp_path / "m.pt2")
    assert model.resized(shapes(8)).graph.tensors["tokens"].shape == (8, 5)
    with pytest.raises(ModelError, match=r"^size 9: expected 2 to 8, as the program was exported; export it anew"):
        model.resized(shapes(9))


@pytest.mark.slow
def test_zoo_models_are_made_anew() -> None:
    model = load_model("zoo:dlrm:tiny")
    own = [model.graph.tensors[name].shape for name in model.input_names]
    small = model.resized([(3, *shape[1:]) for shape in own])
    assert small.graph.hash == load_model("zoo:dlrm:tiny@3").graph.hash
    with pytest.raises(ModelError, match=r"^zoo:dlrm:tiny@3 has inputs of shapes"):
        model.resized([(3, *own[0][1:]), *own[1:]])
