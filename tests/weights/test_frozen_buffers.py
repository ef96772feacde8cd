"""Weights also have what training does not change: statistics of a frozen batch norm, means, tables, masks, unused parameters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import soap
from soap.cluster.presets import local_topology
from soap.errors import ModelError, SoapWarning
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL
from soap.weights.fitting import lacking_buffers, matched, remarks
from soap.weights.safetensors_files import INDEX, SafetensorsFiles
from tests.runtime.exact_modules import sgd

STEPS = 3
ONE = local_topology(1)


class Frozen(nn.Module):
    """Buffers of several types that are only read, one of two names, one that is no entry of the state dict, and an unused layer."""

    steps: Tensor
    mean: Tensor
    live: Tensor
    order: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.moving, self.unused = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("live", torch.ones(4, dtype=torch.bool))
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("passing", torch.full((4,), 0.5), persistent=False)
        self.other = nn.Module()
        self.other.register_buffer("mean", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        z = self.moving(self.norm(self.layer(x - self.mean)))
        return F.mse_loss(z[:, self.order] * self.live * self.passing, self.other.mean[:4].expand(8, 4))  # type: ignore[index]


def made(seed: int) -> Frozen:
    torch.manual_seed(seed)
    module = Frozen().train()
    module.norm.eval()
    if seed:
        with torch.no_grad():
            for tensor in (module.norm.running_mean, module.mean, module.moving.running_mean):
                assert tensor is not None
                tensor.normal_()
            assert module.norm.running_var is not None
            module.norm.running_var.uniform_(0.5, 2)
            module.live[1] = False
            module.order.copy_(torch.tensor([2, 0, 3, 1]))
            module.passing.fill_(3.0)  # which no weights have
    return module


X = torch.linspace(-1, 1, 48).reshape(8, 6)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "m.pt2"
    soap.export(made(0), (X,), path=path)
    return path


def written(folder: Path, state: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def trained(model: Any, folder: Path | None = None, names: dict[str, str] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, ONE), ONE), optimizer=sgd) as trainer:
        losses = [trainer.step(X) for _ in range(STEPS)]
        if folder is not None:
            trainer.save_weights(folder, names)
            trainer.save(folder / "checkpoint")
        return losses, trainer.state_dict()


def plainly(state: dict[str, Tensor]) -> tuple[list[float], Frozen]:
    """Eager PyTorch with these weights."""
    module = made(0)
    module.load_state_dict(state)
    optimizer, losses = sgd(list(module.parameters())), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(X)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_weights_train_as_the_module_that_has_them(file: Path, tmp_path: Path) -> None:
    state = made(1).state_dict()
    expected, module = plainly(state)
    model = soap.load(file, weights=written(tmp_path / "given", state))
    losses, found = trained(model, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert trained(soap.load(file))[0] != pytest.approx(expected, rel=1e-2)
    assert_equal(found, module.state_dict())
    assert_equal(load_file(tmp_path / "model.safetensors"), module.state_dict())
    again = soap.load(file, weights=tmp_path / "checkpoint")  # a checkpoint has them, too
    assert_equal({**again.unchanged}, {name: tensor for name, tensor in module.state_dict().items() if name in again.unchanged})


def test_the_state_of_another_type_and_in_several_files(file: Path, tmp_path: Path) -> None:
    state = made(1).state_dict()
    stored = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in state.items()}
    stored["order"] = stored["order"].to(torch.int32)
    names, places = sorted(stored), dict[str, str]()
    for i in range(2):
        part = {f"model.{name}": stored[name].clone() for name in names[i::2]}
        save_file(part, tmp_path / f"model-{i + 1:05}-of-00002.safetensors")
        places |= dict.fromkeys(part, f"model-{i + 1:05}-of-00002.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    expected, _ = plainly({name: t.to(state[name].dtype) for name, t in stored.items()})
    assert trained(soap.load(file, weights=tmp_path))[0] == pytest.approx(expected, rel=1e-5)
    wide = soap.load(file, weights=tmp_path, dtype="float64")
    assert wide.unchanged["mean"].dtype is torch.float64
    judged = model_in_float64(wide)
    assert judged == pytest.approx(expected[0], rel=1e-5)


def model_in_float64(model: Any) -> float:
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, ONE), ONE), optimizer=sgd) as trainer:
        return trainer.step(X.double())


def test_a_buffer_of_two_names_is_one(file: Path, tmp_path: Path) -> None:
    """Libraries write it once, and so do we where they did."""
    state = made(1).state_dict()
    expected, module = plainly(state)
    for name in ("mean", "other.mean"):
        given = {key: tensor for key, tensor in state.items() if key != name}
        model = soap.load(file, weights=written(tmp_path / name, given))
        names = matched(model, SafetensorsFiles(tmp_path / name))
        losses, _ = trained(model, tmp_path / f"{name} again", names)
        assert losses == pytest.approx(expected, rel=1e-5)
        saved = load_file(tmp_path / f"{name} again" / "model.safetensors")
        assert saved.keys() == given.keys()
        assert_equal(saved, {key: tensor for key, tensor in module.state_dict().items() if key != name})


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("mean", torch.zeros(5), r"have other shapes: mean \[5\] instead of \[6\]"),
        ("unused.weight", torch.zeros(3, 2), r"have other shapes: unused.weight \[3, 2\] instead of \[2, 2\]"),
        ("order", torch.zeros(4), "have another kind of numbers in order"),
        ("norm.running_var", torch.zeros(4, dtype=torch.int64), "have another kind of numbers in norm.running_var"),
    ],
)
def test_state_that_is_not_the_models_is_refused(file: Path, tmp_path: Path, name: str, tensor: Tensor, words: str) -> None:
    state = made(1).state_dict() | {name: tensor}
    state.pop("other.mean")
    with pytest.raises(ModelError, match=words):
        soap.load(file, weights=written(tmp_path / "given", state))


def test_state_that_weights_lack_is_told(file: Path, tmp_path: Path) -> None:
    state = made(1).state_dict()
    folder = written(tmp_path / "given", {name: tensor for name, tensor in state.items() if not name.startswith("norm.running")})
    model = soap.load(file)
    assert "lack norm.running_mean, norm.running_var, which keep the values" in lacking_buffers(model, SafetensorsFiles(folder))
    with pytest.warns(SoapWarning, match="lack norm.running_mean"):
        soap.load(file, weights=folder)
    whole = written(tmp_path / "whole", state)
    assert lacking_buffers(model, SafetensorsFiles(whole)) == "" and remarks(model, SafetensorsFiles(whole)) == []


def test_what_the_model_does_not_take_is_told(file: Path, tmp_path: Path) -> None:
    """A buffer that is no entry of the state dict, with a prefix or not, and another model's head."""
    state = made(1).state_dict()
    for prefix in ("", "model."):
        given = {f"{prefix}{name}": tensor for name, tensor in {**state, "passing": torch.ones(4), "head.bias": torch.ones(1)}.items()}
        with pytest.warns(SoapWarning, match=f"also have {prefix}head.bias, {prefix}passing; .* only its parameters and persistent"):
            soap.load(file, weights=written(tmp_path / f"given {prefix}", given))


class Masked(nn.Module):
    """Attention under a mask that is a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).square().mean()


def test_a_mask_that_makes_another_program_is_refused(tmp_path: Path) -> None:
    """Or the mask is the one that is given."""
    module = Masked()
    soap.export(module, (torch.randn(2, 6, 8),), path=tmp_path / "m.pt2")
    state = copy.deepcopy(module.state_dict())
    state["mask"][0, 3] = True
    with pytest.raises(ModelError, match="have other buffers than 'm' was exported with, by which its operators are others"):
        soap.load(tmp_path / "m.pt2", weights=written(tmp_path / "given", state))
