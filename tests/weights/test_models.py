"""Models that are exported without weights are planned as those with weights, and train as they do with weights from a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import soap
from soap.cli.run import main
from soap.errors import ModelError, SoapWarning
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.weights.fitting import Kind, matched
from soap.weights.safetensors_files import SafetensorsFiles
from tests.cli.refusals import assert_refused
from tests.extent import often
from tests.runtime.pool import Pool
from tests.transformers_models import ARCHITECTURES
from tests.weights.test_files import mapped_file, written

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
TIED, COUNTED = "gpt2", "llama"
"""Tied weights; buffers that are no entries of the state dict."""


Made = Callable[[str], tuple[nn.Module, dict[str, str]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Makes each once."""
    return cache(lambda name: _made(name, tmp_path_factory.mktemp(name)))


def _made(name: str, folder: Path) -> tuple[nn.Module, dict[str, str]]:
    """A module, and its files: with values, without, and the values alone."""
    torch.manual_seed(0)
    module, inputs = ARCHITECTURES[name]()
    with soap.without_weights():
        empty, _ = ARCHITECTURES[name]()
    assert {p.device.type for p in empty.parameters()} == {"meta"} and {b.device.type for b in empty.buffers()} <= {"cpu"}
    files = {kind: str(folder / f"{name}-{kind}.pt2") for kind in ("full", "empty")}
    soap.export(module.train(), (), inputs, path=files["full"], loss=lambda output: output.loss)
    with pytest.warns(SoapWarning, match="has no values"):
        soap.export(empty.train(), (), inputs, path=files["empty"], loss=lambda output: output.loss)
    module.save_pretrained(folder / name)
    return module, {**files, "weights": str(folder / name)}


def loss_of(model: Any) -> float:
    assert isinstance(model, TracedModel)
    return float(model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, dict(model.buffers))))


@pytest.mark.slow
@pytest.mark.parametrize("name", often([TIED, COUNTED], [TIED]))
def test_without_weights_it_is_the_same_model(name: str, made: Made) -> None:
    module, files = made(name)
    full, empty = (soap.load(files[kind], plan_only=True) for kind in ("full", "empty"))
    assert full.graph.hash == empty.graph.hash and full.graph.aliases == empty.graph.aliases
    given = soap.load(files["empty"], weights=files["weights"])
    assert loss_of(given) == loss_of(soap.load(files["full"]))
    state = module.state_dict()
    for own, tensor in given.parameters.items():
        assert torch.equal(tensor, state[own]) and mapped_file(tensor).startswith(files["weights"])


class Scaled(nn.Module):
    """Has a buffer that is no entry of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.arange(1.0, 4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale).square().mean()


def test_buffers_that_the_module_computes_are_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = Scaled(), (torch.randn(4, 3),)
    with soap.without_weights():
        empty = Scaled()
    soap.export(module, inputs, path=tmp_path / "full.pt2")
    with pytest.warns(SoapWarning, match="has no values"):
        soap.export(empty, inputs, path=tmp_path / "empty.pt2")
    (tmp_path / "weights").mkdir()
    written(tmp_path / "weights", module.state_dict())
    given = soap.load(tmp_path / "empty.pt2", weights=tmp_path / "weights")
    assert loss_of(given) == loss_of(soap.load(tmp_path / "full.pt2")) > 0


@pytest.mark.parametrize("name", often([TIED, COUNTED], [TIED]))
def test_a_file_s_own_weights_are_its_memory(name: str, made: Made) -> None:
    module, files = made(name)
    before = Path(files["full"]).read_bytes()
    model, state = soap.load(files["full"]), module.state_dict()
    assert {own: mapped_file(tensor) for own, tensor in model.parameters.items()} == dict.fromkeys(model.parameters, files["full"])
    for own, tensor in model.parameters.items():
        assert torch.equal(tensor, state[own])
        with torch.no_grad():
            tensor.zero_()
    assert Path(files["full"]).read_bytes() == before


def planned(path: str) -> str:
    """Where a strategy is that cuts the model's parameters."""
    cluster, graph = soap.load_cluster("local:2"), soap.load(path, plan_only=True).graph
    soap.save_strategy("s.json", soap.classical("megatron", graph, cluster), graph, cluster)
    return "s.json"


@pytest.mark.slow
@pytest.mark.usefixtures("kept_ranks")
def test_ranks_train_from_weights_and_write_them_as_the_original_class_reads_them(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, files = made(TIED)
    command = [planned(files["empty"]), "--cluster", "local:2", "--steps", "2", "--lr", "0.1"]
    capsys.readouterr()  # the library may have warned
    assert_refused(capsys, main, [*command, "--model", files["empty"]], 3, "exported without weights", "--weights")
    assert main([*command, "--model", files["full"], "--save-weights", "a"]) == 0
    assert main([*command, "--model", files["empty"], "--weights", files["weights"], "--save-weights", "b"]) == 0
    assert "weights" in capsys.readouterr().out
    a, b = (SafetensorsFiles(Path(name)) for name in "ab")
    assert a.kinds == b.kinds and all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.kinds)
    (Path("a") / "config.json").write_bytes((Path(files["weights"]) / "config.json").read_bytes())
    trained = type(module).from_pretrained("a")
    state = trained.state_dict()
    assert all(torch.equal(state[name], a.tensor(name)) for name in a.kinds)
    assert not torch.equal(state["lm_head.weight"], module.state_dict()["lm_head.weight"])
    capsys.readouterr()
    assert_refused(capsys, main, [*command, "--model", files["full"], "--save-weights", "a"], 1, "has weights already")


def saved_twice(folder: str) -> str:
    """What the second of two calls says."""
    model = soap.load("zoo:dlrm:tiny")
    cluster = soap.load_cluster("local:2")
    with soap.Trainer(model, (soap.classical("data_parallel", model, cluster), cluster)) as trainer:
        trainer.save_weights(folder)
        with pytest.raises(soap.RuntimeFailure) as caught:
            trainer.save_weights(folder)
        return str(caught.value)


def test_a_trainer_writes_no_second_set_into_a_folder(four: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    for said in four.run(saved_twice, str(folder), ranks=2):
        assert said == f"folder {str(folder)!r} has weights already (model.safetensors); choose another folder, or remove them"


@pytest.mark.long
@pytest.mark.usefixtures("kept_ranks")
def test_a_checkpoint_has_all_values(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, files = made(TIED)
    command = [planned(files["empty"]), "--cluster", "local:2", "--lr", "0.1"]
    assert main([*command, "--steps", "2", "--model", files["empty"], "--weights", files["weights"], "--save", "c"]) == 0
    assert main([*command, "--steps", "2", "--model", files["empty"], "--resume", "c", "--save-weights", "d"]) == 0
    assert main([*command, "--steps", "4", "--model", files["full"], "--save-weights", "e"]) == 0
    d, e = (SafetensorsFiles(Path(name)) for name in "de")
    assert all(torch.allclose(d.tensor(name), e.tensor(name), rtol=1e-5, atol=1e-7) for name in e.kinds)


class Known:
    """Weights of these shapes."""

    said, is_mapped = "w", True

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self.kinds = {name: Kind(shape, torch.int64 if name.endswith("tracked") else dtype) for name, shape in shapes.items()}

    def tensor(self, name: str) -> torch.Tensor:
        raise NotImplementedError


def mlp(tmp_path: Path) -> tuple[Any, dict[str, tuple[int, ...]]]:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    soap.export(module, (torch.randn(6, 3),), path=tmp_path / "m.pt2", loss=torch.sum)
    return soap.load(tmp_path / "m.pt2", plan_only=True), {name: tuple(t.shape) for name, t in module.state_dict().items()}


def test_names_may_have_a_prefix_more_or_less(tmp_path: Path) -> None:
    model, shapes = mlp(tmp_path)
    own = {name: name for name in shapes if name in model.parameters or name in model.buffers}
    assert matched(model, Known({**shapes, "further": (1,)})) == own
    assert matched(model, Known({f"base.model.{name}": shape for name, shape in shapes.items()})) == {n: f"base.model.{n}" for n in own}


def test_weights_of_another_model_are_told_by_five_names(tmp_path: Path) -> None:
    model, shapes = mlp(tmp_path)
    with pytest.raises(ModelError, match=r"lack 0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 1 more; expected those of 'm'"):
        matched(model, Known({"other": (1,)}))
    with pytest.raises(ModelError, match=r"lack 2.bias; expected"):
        matched(model, Known({name: shape for name, shape in shapes.items() if name != "2.bias"}))
    with pytest.raises(ModelError, match=r"other shapes: 2.weight \[4, 2\] instead of \[2, 4\]; expected"):
        matched(model, Known({**shapes, "2.weight": (4, 2)}))
    with pytest.raises(ModelError, match=r"another kind of numbers in 0\.weight"):
        matched(model, Known(shapes, torch.int64))


def test_weights_of_another_floating_point_type_become_the_model_s(made: Made, tmp_path: Path) -> None:
    _, files = made(TIED)
    full = soap.load(files["full"])
    (tmp_path / "half").mkdir()
    written(tmp_path / "half", {name: tensor.detach().half() for name, tensor in full.parameters.items()})
    model = soap.load(files["empty"], weights=tmp_path / "half")
    cluster = soap.load_cluster("local:1")
    with soap.Trainer(model, (soap.classical("single_device", model.graph, cluster), cluster)) as trainer:
        assert {tensor.dtype for tensor in trainer.state_dict().values()} == {torch.float32}


@pytest.mark.slow
def test_a_module_all_on_the_meta_device_lacks_its_buffers_values(tmp_path: Path) -> None:
    with torch.device("meta"):
        module, inputs = ARCHITECTURES[COUNTED]()
    with pytest.warns(SoapWarning, match="has no values"):
        soap.export(module.train(), (), inputs, path=tmp_path / "m.pt2", loss=lambda output: output.loss)
    assert soap.load(tmp_path / "m.pt2", plan_only=True).graph.operators
    with pytest.raises(ModelError, match=r"exported without the values of .*; make the module under soap.without_weights"):
        soap.load(tmp_path / "m.pt2")


def test_inputs_without_values_stay_so(tmp_path: Path) -> None:
    """They are no examples: nothing is counted on them. What the module makes while it is traced is where its parameters are."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            places = torch.arange(ids.shape[1])
            return (self.table(ids) * places[:, None]).sum()

    with torch.device("meta"), pytest.warns(SoapWarning, match="has no values"):
        soap.export(Looked(), (torch.zeros(4, 6, dtype=torch.long),), path=tmp_path / "m.pt2")
    soap.export(Looked(), (torch.zeros(4, 6, dtype=torch.long),), path=tmp_path / "full.pt2")
    model, full = (soap.load(tmp_path / name, plan_only=True) for name in ("m.pt2", "full.pt2"))
    assert [tensor.is_meta for tensor in model.example_inputs] == [True]
    assert [op.kind for op in model.graph.operators] == [op.kind for op in full.graph.operators]
