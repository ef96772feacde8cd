from __future__ import annotations

import gc
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from soap.errors import ModelError
from soap.tracing.calls import TileContext
from soap.tracing.load import load_model
from tests.tracing.programs import Lambda, export


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good model file."""
    module = Lambda(lambda self, x: (self.inner(x) + torch.tensor([1.0, 2.0])).square().sum(), inner=nn.Linear(3, 2))
    torch.export.save(export(module, torch.ones(4, 3)), tmp_path / "good.pt2")
    return tmp_path / "good.pt2"


def _refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


def test_missing_corrupt_and_truncated_files(saved: Path, tmp_path: Path) -> None:
    _refused(tmp_path / "nothing.pt2", "does not exist; expected a .pt2 file")
    (tmp_path / "text.pt2").write_text("hello")
    _refused(tmp_path / "text.pt2", "is not a .pt2 archive")
    (tmp_path / "empty.pt2").write_bytes(b"")
    _refused(tmp_path / "empty.pt2", "is not a .pt2 archive")
    (tmp_path / "half.pt2").write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])
    _refused(tmp_path / "half.pt2", "is not a .pt2 archive|cannot be read")
    _refused(tmp_path, "is not a .pt2 archive")


@pytest.mark.slow
def test_the_model_alone_holds_its_parameters(tmp_path: Path) -> None:
    """So who frees them frees their memory. What is traced again has none, and knows still which are tied or frozen."""
    tied, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    other = nn.Linear(3, 3)
    other.weight = tied.weight
    module = Lambda(lambda self, x: self.b(self.c(self.a(x))).square().sum(), a=tied, b=other, c=frozen)
    torch.export.save(export(module, torch.ones(4, 3)), tmp_path / "model.pt2")
    model = load_model(tmp_path / "model.pt2")
    names = {tensor.name: tensor.requires_grad for tensor in model.graph.parameters}
    assert names.keys() == model.parameters.keys() and len(model.graph.aliases) == 1 and {*names.values()} == {True, False}
    held = [StorageWeakRef(tensor.untyped_storage()) for tensor in model.parameters.values()]
    model.parameters = {}
    gc.collect()
    assert all(storage.expired() for storage in held)
    again = model.widened()
    assert again is not None and again.graph.aliases == model.graph.aliases
    assert {tensor.name: tensor.requires_grad for tensor in again.graph.parameters} == names


def test_zip_files_that_are_no_models(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("readme.txt", "hello")
    _refused(tmp_path / "other.pt2", "has the entry 'readme.txt'")
    torch.save({"weight": torch.ones(2)}, tmp_path / "state.pt2")
    _refused(tmp_path / "state.pt2", "has the entry|cannot be read")


def test_parts_that_are_garbled(saved: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.pt2"
    _rewrite(saved, changed, {"models/model.json": lambda _: b"{"})
    _refused(changed, "cannot be read")
    _rewrite(saved, changed, {"models/model.json": lambda _: b"{}"})
    _refused(changed, "cannot be read")
    _rewrite(saved, changed, {"models/model.json": None})
    _refused(changed, "cannot be read")


def _rewrite(
    source: Path, target: Path, changes: dict[str, Callable[[bytes], bytes] | None], added: dict[str, bytes] | None = None
) -> None:
    """Copy an archive, changing or leaving out (None) entries by their path below the root, and adding others."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        root = old.namelist()[0].split("/")[0]
        for name in old.namelist():
            change: Any = changes.get(name.split("/", 1)[1], lambda content: content)
            if change is not None:
                new.writestr(name, change(old.read(name)))
        for name, content in (added or {}).items():
            new.writestr(f"{root}/{name}", content)


class _Payload:
    """Unpickling this makes a folder."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def _pickles(witness: Path) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(_Payload(witness), buffer)
    legacy = io.BytesIO()
    torch.save(_Payload(witness), legacy, _use_new_zipfile_serialization=False)
    return {"zip": buffer.getvalue(), "legacy": legacy.getvalue(), "plain": pickle.dumps(_Payload(witness))}


def _pickled_entry(folder: str, name: str, path_name: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        config = json.loads(content)
        config["config"][name].update(use_pickle=True, path_name=path_name)
        return json.dumps(config).encode()

    return change


@pytest.mark.parametrize("form", ["zip", "legacy", "plain"])
@pytest.mark.parametrize(
    "place", ["weights", "weights, deep", "weights, other case", "constants", "sample inputs", "custom", "opaque", "legacy weights"]
)
def test_pickled_code_is_never_run(saved: Path, tmp_path: Path, place: str, form: str) -> None:
    witness, bad = tmp_path / "witness", tmp_path / "bad.pt2"
    payload = _pickles(witness)[form]
    weights, constants = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
    changes: dict[str, Any] = {}
    added: dict[str, bytes] = {}
    match place:
        case "weights":
            changes = {weights: _pickled_entry("weights", "inner.weight", "weight_0"), "data/weights/weight_0": lambda _: payload}
        case "weights, deep":
            changes, added = {weights: _pickled_entry("weights", "inner.weight", "x/weight_9")}, {"data/weights/x/weight_9": payload}
        case "weights, other case":
            changes, added = {weights: _pickled_entry("weights", "inner.weight", "weight_0")}, {"data/weights/WEIGHT_0": payload}
        case "constants":
            changes = {constants: _pickled_entry("constants", "lifted_tensor_0", "tensor_0"), "data/constants/tensor_0": lambda _: payload}
        case "sample inputs":
            changes = {"data/sample_inputs/model.pt": lambda _: payload}
        case "custom" | "opaque":
            name = f"{place}_obj_0"
            changes, added = {constants: _pickled_entry("constants", "lifted_tensor_0", name)}, {f"data/constants/{name}": payload}
        case "legacy weights":
            added = {"data/weights/model.pt": payload}
    _rewrite(saved, bad, changes, added)
    _refused(bad, "")
    assert not witness.exists()


def test_the_payload_would_have_run(tmp_path: Path) -> None:
    """The witness is a witness: without the checks, the same bytes make it appear."""
    witness = tmp_path / "witness"
    torch.load(io.BytesIO(_pickles(witness)["zip"]), weights_only=False)
    assert witness.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data/aotinductor/model/model.so", b"x"),
        ("extra/run.py", b"x"),
        ("version", b"1.0"),
        ("serialized_state_dict.pt", b"x"),
        ("../x", b""),
    ],
)
def test_entries_that_do_not_belong_in_a_model(saved: Path, tmp_path: Path, name: str, content: bytes) -> None:
    _rewrite(saved, tmp_path / "bad.pt2", {}, {name: content})
    _refused(tmp_path / "bad.pt2", "holds a custom object or code|has the entry")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_twice(saved: Path, tmp_path: Path) -> None:
    _rewrite(saved, tmp_path / "bad.pt2", {}, {"data/weights/weight_0": b"x"})
    _refused(tmp_path / "bad.pt2", "entries of the same name")


@pytest.mark.parametrize("target", ["torch.hub.load", "torch.ops.load_library", "_operator.attrgetter", "math.sin", "torch.utils.x"])
def test_calls_of_anything_but_operators(saved: Path, tmp_path: Path, target: str) -> None:
    def change(content: bytes) -> bytes:
        program = json.loads(content)
        program["graph_module"]["graph"]["nodes"][0]["target"] = target
        return json.dumps(program).encode()

    _rewrite(saved, tmp_path / "bad.pt2", {"models/model.json": change})
    _refused(tmp_path / "bad.pt2", "expected ATen operators only")


def test_symbolic_shapes_are_never_evaluated(saved: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    def change(content: bytes) -> bytes:
        program = json.loads(content)
        values = program["graph_module"]["graph"]["tensor_values"]
        name = next(iter(values))
        expression = f"__import__('os').mkdir({str(witness)!r})"
        values[name]["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": {"as_int": 4}}}
        return json.dumps(program).replace("expr_str", "expr\\u005fstr").encode()

    _rewrite(saved, tmp_path / "bad.pt2", {"models/model.json": change})
    _refused(tmp_path / "bad.pt2", "expected sums and products of symbols and numbers")
    assert not witness.exists()


def test_dynamic_shapes_in_a_file(tmp_path: Path) -> None:
    exported = torch.export.export(
        Lambda(lambda self, x: (x @ self.w).sum(), w=nn.Parameter(torch.ones(3, 3))),
        (torch.ones(4, 3),),
        dynamic_shapes={"args": ({0: torch.export.Dim("batch", min=2)},)},
        strict=False,
    )
    torch.export.save(exported, tmp_path / "dynamic.pt2")
    assert load_model(tmp_path / "dynamic.pt2").graph.tensors["args_0"].shape == (4, 3)


@pytest.mark.parametrize(
    "expression",
    [
        "Pow(Integer(10), Integer(99999999))",
        "Symbol('__import__')",
        "Symbol('s0', commutative=True)",
        "eval('1')",
        "s0",
        "lambda: 1",
        "Integer(5).__class__",
        "1" * 10_001,
        "1" * 9_000 + "x",
    ],
)
def test_only_sums_and_products_are_sizes(saved: Path, tmp_path: Path, expression: str) -> None:
    def change(content: bytes) -> bytes:
        program = json.loads(content)
        values = program["graph_module"]["graph"]["tensor_values"]
        values[next(iter(values))]["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": {"as_int": 4}}}
        return json.dumps(program).encode()

    _rewrite(saved, tmp_path / "bad.pt2", {"models/model.json": change})
    _refused(tmp_path / "bad.pt2", "expected sums and products of symbols and numbers")


def test_torchs_switches_are_left_as_they_were(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    load_model(saved)
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_saving_and_loading_keep_the_graph(tmp_path: Path) -> None:
    from soap.tracing.importer import import_program

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight
            self.norm.weight.requires_grad_(False)

        def forward(self, ids: torch.Tensor, *, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.out(self.norm(self.table(ids)))
            return {"logits": y, "loss": nn.functional.cross_entropy(y, labels)}

    ids = torch.tensor([1, 2, 3, 4])
    exported = export(Net(), ids, labels=ids.clone())
    torch.export.save(exported, tmp_path / "m.pt2")
    before, after = import_program(exported, name="m"), load_model(tmp_path / "m.pt2")
    assert before.graph.hash == after.graph.hash
    assert dict(before.graph.aliases) == dict(after.graph.aliases) == {"out.weight": "table.weight"}
    assert [t.requires_grad for t in after.graph.parameters] == [t.requires_grad for t in before.graph.parameters]
    assert before.input_names == after.input_names
    results = [m.reference_loss(m.example_inputs, m.parameters, TileContext(0, 0, {k: b.clone() for k, b in m.buffers.items()}))
               for m in (before, after)]  # fmt: skip
    assert torch.equal(*results)


def test_dtype_is_replaced_everywhere(saved: Path) -> None:
    model = load_model(saved, dtype="float64")
    floats = [*model.parameters.values(), *model.constants.values(), *model.example_inputs]
    assert {t.dtype for t in floats} == {torch.float64}
    assert {t.dtype for t in model.graph.tensors.values()} == {"float64"}
    assert {t.itemsize for t in model.graph.tensors.values()} == {8}
    with pytest.raises(ModelError, match="dtype 'int8': expected one of float32, float64"):
        load_model(saved, dtype="int8")


def test_zoo_models_by_name() -> None:
    model = load_model("zoo:dlrm:tiny", plan_only=True)
    assert model.graph.name == "zoo:dlrm:tiny@8"
    assert load_model("zoo:dlrm:tiny").graph.hash == model.graph.hash
    with pytest.raises(ModelError, match="nosuch"):
        load_model("zoo:nosuch")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [pytest.param("zoo:inception_v3@1024", marks=pytest.mark.long), "zoo:gpt"])
def test_planning_a_full_model_takes_no_memory(spec: str) -> None:
    model = load_model(spec, plan_only=True)
    assert sum(t.bytes for t in model.graph.parameters) > 80e6
    tensors = [*model.parameters.values(), *model.constants.values(), *model.example_inputs, *model.buffers.values()]
    held = {t.device.type if not isinstance(t, torch._subclasses.FakeTensor) else "fake" for t in tensors}
    assert held <= {"meta", "fake"}
    assert all(op.partitionable for op in model.graph.operators)
