from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.errors import ModelError, SoapWarning
from soap.model.graph import TensorKind
from soap.tracing.calls import TileContext
from soap.tracing.importer import import_program
from soap.tracing.reader import Reader
from tests.tracing.eager import equals_eager
from tests.tracing.programs import Lambda, export, imported, square


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_look_ups_shorten_are_refused_with_what_to_do(kind: Any) -> None:
    module = Lambda(lambda self, x: self.table(x).square().mean(), table=kind(10, 4, max_norm=0.5))
    expected = r"^a look-up with max_norm=0\.5 \(table\) shortens rows of parameter 'table\.weight' .* leave max_norm out"
    with pytest.raises(ModelError, match=expected):
        imported(module, torch.arange(6).reshape(2, 3))


def test_what_is_said_of_max_norm_can_be_followed() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        rows = self.table(x)
        return (rows * (0.5 / rows.norm(dim=-1, keepdim=True).clamp_min(0.5))).sum(-1).square().mean()

    equals_eager(Lambda(forward, table=nn.Embedding(10, 4)), torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_divided_by_how_often_a_row_is_looked_up(kind: Any) -> None:
    module = Lambda(lambda self, x: self.table(x).square().mean(), table=kind(10, 4, scale_grad_by_freq=True))
    with pytest.warns(SoapWarning, match="kept whole, on one device at a time"):
        equals_eager(module, torch.tensor([[1, 2, 1], [1, 5, 2]]))


def test_counters_are_updated_at_the_end_of_the_step() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (x @ self.w).sum()

    model = imported(Lambda(count, w=square(), count=torch.tensor(3)), torch.ones(2, 3))
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    model.end_step(context)
    assert context.buffers == {"count": torch.tensor(4)}


def test_instance_norm_with_running_statistics_is_refused() -> None:
    with pytest.raises(ModelError, match=r"track_running_stats=False"):
        imported(Lambda(lambda self, x: self.inner(x).sum(), inner=nn.InstanceNorm1d(3, track_running_stats=True)), torch.ones(2, 3, 4))


def test_buffers_that_nothing_changes_are_constants() -> None:
    model = imported(Lambda(lambda self, x: ((x @ self.w) * self.scale).sum(), w=square(), scale=torch.ones(4)), torch.ones(2, 3))
    assert [t.name for t in model.graph.tensors.values() if t.kind is TensorKind.CONSTANT] == ["b_scale"]
    assert list(model.constants) == ["b_scale"] and model.buffers == {}


def test_tied_weights_have_one_name_and_aliases() -> None:
    module = Lambda(lambda self, x: self.out(self.table(x)).square().sum(), table=nn.Embedding(5, 4), out=nn.Linear(4, 5, bias=False))
    module.out.weight = module.table.weight
    model = imported(module, torch.tensor([[1, 2], [3, 4]]))
    assert [p.name for p in model.graph.parameters] == ["table.weight"]
    assert dict(model.graph.aliases) == {"out.weight": "table.weight"}
    assert len(model.graph.parameter_users["table.weight"]) == 2


def test_frozen_parameters_carry_no_gradient() -> None:
    module = Lambda(lambda self, x: self.b(self.a(x)).sum(), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    module.a.requires_grad_(False)
    model = imported(module, torch.ones(2, 3))
    grads = {t.name: t.requires_grad for t in model.graph.parameters}
    assert grads == {"a.weight": False, "a.bias": False, "b.weight": True, "b.bias": True}
    backward = {op.name: model.graph.needs_backward(op) for op in model.graph.operators}
    assert backward == {"a": False, "b": True, "sum": True}


def test_what_is_computed_under_no_grad_is_detached() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        with torch.no_grad():
            scale = y.abs().amax() + 1
            mean = y.mean(0)
        return (y / scale - mean).square().sum()

    equals_eager(Lambda(forward, w=square()), torch.linspace(0, 1, 6).reshape(2, 3))


@pytest.mark.parametrize(
    "result",
    [lambda loss, y: (loss, y), lambda loss, y: {"logits": (y, y), "loss": loss}, lambda loss, y: [loss], lambda loss, y: loss.reshape(1)],
    ids=["tuple", "dictionary", "list", "one element"],
)
def test_where_the_loss_is_found(result: Callable[[Tensor, Tensor], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = x @ self.w
        return result(y.square().sum(), y)

    x = torch.linspace(0, 1, 6).reshape(2, 3)
    model = imported(Lambda(forward, w=square()), x)
    assert model.graph.tensors[model.graph.loss].shape == ()
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, (x.double() @ model.parameters["w"]).square().sum())


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "a vector": (
        lambda self, x: x @ self.w,
        r"the output has shape \[2, 4\] and dtype float64; expected a scalar floating-point loss",
    ),
    "a whole number": (lambda self, x: (x @ self.w).argmax(), "has shape .* and dtype int64; expected a scalar floating-point loss"),
    "a named vector": (lambda self, x: {"loss": x @ self.w}, r"output loss has shape \[2, 4\]"),
    "nothing": (lambda self, x: None, "returns no tensor"),
    "a constant": (lambda self, x: self.c, "is an input or a constant"),
    "a condition": (
        lambda self, x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x @ self.w,)).sum(),
        "control flow or a wrapped call .*cond",
    ),
    "as_strided": (lambda self, x: (x @ self.w).as_strided((2, 2), (1, 2)).sum(), "depends on how a tensor lies in memory"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_programs_that_cannot_be_planned(name: str) -> None:
    function, message = ERRORS[name]
    with pytest.raises(ModelError, match=message) as caught:
        imported(Lambda(function, w=square(), c=torch.tensor(1.0)), torch.ones(2, 3))
    assert "\n" not in str(caught.value)


def test_symbolic_programs_are_read_at_the_sizes_of_their_examples() -> None:
    module, batch = Lambda(lambda self, x: (x @ self.w).sum(), w=square()), torch.export.Dim("batch", min=2)
    exported = torch.export.export(module, (torch.ones(4, 3),), dynamic_shapes={"args": ({0: batch},)}, strict=False)
    assert import_program(exported, name="m").graph.tensors["args_0"].shape == (4, 3)
    assert import_program(exported, name="m", shapes=[(7, 3)]).graph.tensors["args_0"].shape == (7, 3)
    with pytest.raises(ModelError, match=r"^the program has a dynamic shape .*; expected whole numbers"):
        Reader(exported, None).read()


def test_shapes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(ModelError, match=r"dynamic shape|depends on data") as caught:
        imported(Lambda(lambda self, x: (x @ self.w).sum() + x[x > 0].sum(), w=square()), torch.ones(2, 3))
    assert "\n" not in str(caught.value)


def test_one_tensor_for_two_inputs_is_said() -> None:
    def forward(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.w[ids], labels)

    ids = torch.tensor([0, 2, 1])
    module = Lambda(forward, w=square())
    with pytest.warns(SoapWarning, match="does not read input '.*': values given for it have no effect"):
        model = imported(module, ids, ids)
    assert len(model.input_names) == len(model.example_inputs) == 2
    assert all(name in model.graph.tensors for name in model.input_names)


def test_keyword_arguments_and_their_example_inputs_agree() -> None:
    def forward(self: Any, *, x: Tensor, scale: Tensor) -> Tensor:
        return ((x @ self.w) * scale).sum()

    model = imported(Lambda(forward, w=square()), scale=torch.ones(4), x=torch.ones(2, 3))
    shapes = {name: tuple(t.shape) for name, t in zip(model.input_names, model.example_inputs, strict=True)}
    assert sorted(shapes.values()) == [(2, 3), (4,)]
    assert all(model.graph.tensors[name].shape == shape for name, shape in shapes.items())


def test_an_unknown_call_is_kept_whole_and_named_once() -> None:
    module = Lambda(lambda self, x: (torch.linalg.inv(x @ self.w @ x.T) + torch.linalg.inv(x @ x.T)).sum(), w=nn.Parameter(torch.eye(3)))
    with pytest.warns(SoapWarning, match=r"no rule for aten\.linalg_inv\.default") as caught:
        model = imported(module, torch.eye(3))
    assert len([w for w in caught if "linalg_inv" in str(w.message)]) == 1
    assert [op.partitionable for op in model.graph.operators if op.kind == "linalg_inv"] == [False, False]
    assert all(op.factors == () for op in model.graph.operators if not op.partitionable)


def test_batch_dimensions() -> None:
    def forward(self: Any, positions: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return ((x + self.table[positions]) @ self.w * scale).sum()

    module = Lambda(forward, w=square(), table=nn.Parameter(torch.ones(9, 3)))
    inputs = (torch.arange(5), torch.ones(2, 5, 3), torch.ones(2, 1, 1))
    exported = export(module, *inputs)

    def samples(**options: Any) -> dict[str, list[str]]:
        graph = import_program(exported, name="m", **options).graph
        return {op.name: [f"{f.size}" for f in op.factors if f.kind == "sample"] for op in graph.operators}

    assert samples()["matmul"] == ["2"]  # two of three inputs begin with 2
    names = import_program(exported, name="m").input_names
    assert samples(batch_dims={names[1]: 1})["matmul"] == ["5"]
    assert samples(batch_dims=dict.fromkeys(names, -1))["matmul"] == []
    wrongs: list[tuple[dict[str, int], str]] = [
        ({"nobody": 0}, "given for 'nobody'; the model's inputs are"),
        ({names[1]: 3}, "batch dimension 3 .* does not exist"),
        ({names[1]: -2}, "batch dimension -2 .* does not exist"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(ModelError, match=message):
            import_program(exported, name="m", batch_dims=wrong)


def test_operator_names_never_meet_those_of_inputs_and_parameters() -> None:
    def forward(self: Any, matmul: Tensor) -> Tensor:
        return ((matmul @ self.sum).sin() @ self.sum.T).sum()

    model = imported(Lambda(forward, sum=square()), torch.ones(2, 3))
    names = [op.name for op in model.graph.operators]
    assert len({*names, *model.input_names, *model.parameters}) == len(names) + 2
