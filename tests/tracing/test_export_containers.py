"""Arguments and outputs in classes of their own: files hold plain containers, the module gets its own."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.errors import ModelError
from soap.tracing.example import plainly
from soap.tracing.load import load_model
from tests.extent import every

Batch = namedtuple("Batch", "x y")  # as loaders make them


class Typed(NamedTuple):
    x: Tensor
    y: Tensor
    scale: float = 1.0


@dataclass
class Data:
    x: Any
    y: Any
    steps: int = 3
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.x, Tensor) and self.x.device.type == "cpu"  # is not run again with what a trace has
        self.made += 1

    @property
    def double(self) -> Tensor:
        return self.x * 2 / 2


@dataclass(frozen=True)
class Outer:
    inner: dict[str, Any]
    note: str = "a"


class Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class User(UserDict[str, Any]):
    source = "loader"


class Registered:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


torch.utils._pytree.register_pytree_node(Registered, lambda one: ([one.x, one.y], "context"), lambda parts, context: Registered(*parts))


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


X, Y = torch.linspace(0, 1, 30).reshape(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])


class Net(nn.Module):
    def __init__(self, take: Callable[[Any], tuple[Tensor, Tensor]], give: Callable[[Tensor, Tensor], Any] = lambda loss, x: loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.take, self.give = nn.Linear(5, 4), take, give

    def forward(self, batch: Any) -> Any:
        x, y = self.take(batch)
        return self.give(F.cross_entropy(self.layer(x), y), x)


def attributes(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.x, batch.y


def items(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


CASES: dict[str, tuple[Any, Callable[[Any], tuple[Tensor, Tensor]], tuple[str, str]]] = {
    "named tuple": (Batch(X, Y), attributes, ("batch_x", "batch_y")),
    "typed named tuple": (Typed(X, Y), lambda b: (b.x * b.scale, b.y), ("batch_x", "batch_y")),
    "dataclass": (Data(X, Y), lambda b: (b.double, b.y), ("batch_x", "batch_y")),
    "nested": (Outer({"k": [Batch(X, Y)]}), lambda b: attributes(b.inner["k"][0]), ("batch_inner_k_0_x", "batch_inner_k_0_y")),
    "subclass of a dictionary": (Attributes(x=X, y=Y), attributes, ("batch_x", "batch_y")),
    "user dictionary": (User(x=X, y=Y), lambda b: items(b if b.source == "loader" else {}), ("batch_x", "batch_y")),
    "ordered": (OrderedDict(y=Y, x=X), items, ("batch_y", "batch_x")),
    "registered": (Registered(X, Y), attributes, ("batch_0", "batch_1")),
}


@pytest.mark.parametrize(("case", "dynamic"), every(3, [(case, dynamic) for case in CASES for dynamic in (False, True)]))
def test_inputs_in_classes_of_their_own(case: str, dynamic: bool, tmp_path: Path) -> None:
    import soap

    batch, take, names = CASES[case]
    soap.export(Net(take), (batch,), path=tmp_path / "m.pt2", dynamic_batch=dynamic)
    model = load_model(tmp_path / "m.pt2")
    assert tuple(model.input_names) == names
    assert model.record is not None and model.record.compared
    assert __name__ not in str(torch.export.load(tmp_path / "m.pt2").call_spec.in_spec)
    if dynamic:
        sizes = {"x": (9, 5), "y": (9,)}
        assert model.resized([sizes["y" if n.endswith(("y", "_1")) else "x"] for n in names]).graph.tensors[names[0]].shape[0] == 9


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor


Returned = namedtuple("Returned", "logits loss")

OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": lambda loss, x: Answer(x, loss),
    "named tuple": lambda loss, x: Returned(x, loss),
    "registered": Registered,
    "nested": lambda loss, x: (loss, [Batch(x, x)]),
}


@pytest.mark.parametrize("batch", [{"x": X, "y": Y}, User(x=X, y=Y)], ids=["plain", "not plain"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_in_classes_of_their_own(case: str, batch: Any, tmp_path: Path) -> None:
    import soap

    soap.export(Net(items, OUTPUTS[case]), (batch,), path=tmp_path / "m.pt2")
    model = load_model(tmp_path / "m.pt2")
    assert model.record is not None and model.record.compared
    assert model.graph.tensors[model.graph.loss].shape == ()


def test_libraries_batches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    import soap

    encoding = transformers.BatchEncoding({"x": X, "y": Y})
    output = BaseModelOutput(last_hidden_state=X, hidden_states=(Y,))
    soap.export(Net(lambda b: (b["x"], b.y)), (encoding,), path=tmp_path / "a.pt2")
    soap.export(Net(lambda b: (b.last_hidden_state, b["hidden_states"][0])), (output,), path=tmp_path / "b.pt2")
    assert tuple(load_model(tmp_path / "a.pt2").input_names) == ("batch_x", "batch_y")
    assert tuple(load_model(tmp_path / "b.pt2").input_names) == ("batch_last_hidden_state", "batch_hidden_states_0")


@pytest.mark.parametrize("named", [False, True])
def test_objects_that_hold_tensors_are_refused_by_name(named: bool, tmp_path: Path) -> None:
    import soap

    args: tuple[Any, ...] = () if named else ([Opaque(X, Y)],)
    kwargs = {"batch": [Opaque(X, Y)]} if named else {}
    said = r"^argument 'batch'\[0\] is a \S+\.Opaque, which holds tensors" if named else r"^argument 0\[0\] is a \S+\.Opaque, which holds"
    with pytest.raises(ModelError, match=said):
        soap.export(Net(lambda b: attributes(b[0])), args, kwargs, path=tmp_path / "m.pt2")
    with pytest.raises(ModelError, match=r"^the output is a \S+\.Opaque, which holds tensors"):
        soap.export(Net(items, Opaque), ({"x": X, "y": Y},), path=tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_plain_containers_stay_what_they_are() -> None:
    nest = ({"a": [X, (1, None, "b")]}, OrderedDict(c=Y))
    assert plainly(nest, "x") == (nest, None)
    assert plainly(nest, "x")[0] is nest
