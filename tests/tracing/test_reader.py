from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.errors import ModelError, SoapWarning
from soap.model.graph import TensorKind
from soap.tracing.importer import import_program
from soap.tracing.model import TileContext
from soap.tracing.reader import Reader
from tests.tracing.programs import Lambda, export, imported


def _equals_eager(module: nn.Module, *inputs: Tensor) -> None:
    """The plain program's loss and gradients are the module's."""
    module = module.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    model = imported(module, *(x.clone() for x in inputs))
    parameters = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
    loss = model.reference_loss([x.clone() for x in inputs], parameters, TileContext(0, 0, dict(model.buffers)))
    expected = module(*(x.clone() for x in inputs))
    torch.testing.assert_close(loss, expected.reshape(()))
    loss.backward()
    expected.sum().backward()
    for name, p in module.named_parameters():
        if name in parameters:
            torch.testing.assert_close(parameters[name].grad, p.grad)


def _square() -> nn.Parameter:
    return nn.Parameter(torch.arange(12.0).reshape(3, 4).sin())


IN_PLACE: dict[str, Callable[..., Any]] = {
    "chain": lambda self, x: (x @ self.w).mul_(2).add_(1).sum(),
    "later uses mean the new value": lambda self, x: _later(x @ self.w),
    "through a view that is not read again": lambda self, x: (x @ self.w).view(-1).add_(1).sin().sum(),
    "on a copy": lambda self, x: _on_copy(x @ self.w),
    "on what contiguous has copied": lambda self, x: _on_contiguous(x @ self.w),
    "on what contiguous has not copied": lambda self, x: _on_same(x @ self.w),
    "on a cast": lambda self, x: _on_cast(x @ self.w),
    "on the input": lambda self, x: (x.add_(1) @ self.w).sum(),
    "copy": lambda self, x: (x @ self.w).copy_(self.w[0]).sin().sum(),
}


def _later(y: Tensor) -> Tensor:
    z = y * 2
    z.add_(y)
    return (z * y).sum()


def _on_copy(y: Tensor) -> Tensor:
    z = y.clone()
    z.mul_(3)
    return (y.sin() + z).sum()


def _on_contiguous(y: Tensor) -> Tensor:
    z = y.t().contiguous()
    z.add_(1)
    return (y.sin() + z.t()).sum()


def _on_same(y: Tensor) -> Tensor:
    z = y.contiguous()
    z.add_(1)
    return (y.sin() + z).sum()


def _on_cast(y: Tensor) -> Tensor:
    z = y.float()
    z.add_(1)
    return (y.sin() + z).sum()


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_calls_become_functional(name: str) -> None:
    _equals_eager(Lambda(IN_PLACE[name], w=_square()), torch.linspace(0, 1, 6).reshape(2, 3))


def test_a_cast_that_the_program_no_longer_needs_is_still_a_copy() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        z = y.double()
        z.add_(1)
        return (y.sin() + z).sum()

    model = imported(Lambda(forward, w=_square()), torch.linspace(0, 1, 6, dtype=torch.float32).reshape(2, 3))
    y = model.example_inputs[0] @ model.parameters["w"]
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, (y.sin() + y + 1).sum())


IN_PLACE_ON_VIEWS: dict[str, Callable[..., Any]] = {
    "a view's base is read": lambda self, x: _read(x @ self.w, lambda y: y.view(-1).add_(1)),
    "a view's view": lambda self, x: _read(x @ self.w, lambda y: y.view(-1).view(4, 2).mul_(2)),
    "a slice": lambda self, x: _read(x @ self.w, lambda y: y[:, :2].add_(1)),
    "a slice with a step": lambda self, x: _read(x @ self.w, lambda y: y[:, 1::2].mul_(y[:, ::2].clone())),
    "a column": lambda self, x: _read(x @ self.w, lambda y: y[:, -1].mul_(3)),
    "a slice of a slice of a transpose": lambda self, x: _read(x @ self.w, lambda y: y.t()[1:][:2].sin_()),
    "a diagonal": lambda self, x: _read(x @ self.w, lambda y: y.diagonal(1).fill_(2)),
    "one part of several": lambda self, x: _read(x, lambda y: y.chunk(2, 1)[1].exp_()) * self.w.sum(),
    "one row of several": lambda self, x: _read(x, lambda y: y.unbind(0)[1].cos_()) * self.w.sum(),
    "copied into a slice": lambda self, x: _read(x @ self.w, lambda y: y[:, 1:].copy_(y[:, :-1].clone())),
    "a number into a column": lambda self, x: _read(x @ self.w, lambda y: y.__setitem__((slice(None), 0), 7.0)),
    "masked": lambda self, x: _read(x @ self.w, lambda y: y[1:].masked_fill_(y[1:] > 0, -1.0)),
    "by index": lambda self, x: _read(x @ self.w, lambda y: y[:, 1:].index_fill_(1, torch.tensor([0, 2]), 5.0)),
    "twice": lambda self, x: _read(x @ self.w, lambda y: (y[:1].add_(y[1:].clone()), y.t()[2].mul_(y.t()[0].clone()))),
    "views taken before the change": lambda self, x: _before(x @ self.w),
    "parts taken before the change": lambda self, x: _parts_before(x) * self.w.sum(),
    "the base changed, a view read": lambda self, x: _base_changed(x @ self.w),
    "outputs of one call do not share memory": lambda self, x: _outputs(x @ self.w),
    "shifted to the right": lambda self, x: _shifted(x @ self.w),
    "under no_grad": lambda self, x: _without_gradient(x @ self.w),
    "of another type": lambda self, x: _read(x > 0, lambda y: y[:, 1:].logical_not_()) * self.w.sum(),
}


def _read(y: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    y = y.clone()
    change(y)
    return (y * torch.arange(1.0, y.numel() + 1, dtype=torch.float64).reshape(y.shape)).sum()


def _before(y: Tensor) -> Tensor:
    transposed, part, row = y.t(), y[:, 1:3], y[0]
    part.mul_(2)
    row.add_(part[1, 0])
    return (transposed.sin() * transposed).sum() + (part * 3).sum() + row.exp().sum()


def _parts_before(y: Tensor) -> Tensor:
    first, second = y.split(2, 1)
    y.mul_(y.clone())
    first.add_(y[:, 1:])
    return first.sin().sum() + second.cos().sum() + (y * y).sum()


def _base_changed(y: Tensor) -> Tensor:
    z = y.t()
    y.add_(1)
    return (z.sin() * 2).sum()


def _outputs(y: Tensor) -> Tensor:
    values, places = torch.topk(y, 2)
    values /= values.sum(-1, keepdim=True)
    return (values * places).sum()


def _shifted(y: Tensor) -> Tensor:
    shifted = y.new_zeros(y.shape)
    shifted[..., 1:] = y[..., :-1].clone()
    shifted[..., 0] = 4.0
    return (shifted * y).sum()


def _without_gradient(y: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros_like(y)
        mask[:, 1:].add_(y[:, :-1])
        scaled = mask * 2
    return (mask * y + scaled).sum()


@pytest.mark.parametrize("name", IN_PLACE_ON_VIEWS)
def test_in_place_calls_on_views_change_all_that_shares_the_memory(name: str) -> None:
    _equals_eager(Lambda(IN_PLACE_ON_VIEWS[name], w=_square()), torch.linspace(-1, 1, 6).reshape(2, 3))


STALE: dict[str, Callable[..., Any]] = {
    "detached": lambda self, x: _detached(x @ self.w),
    "windows": lambda self, x: _windows(x @ self.w),
    "other bits": lambda self, x: _bits(x @ self.w),
}


def _detached(y: Tensor) -> Tensor:
    z = y.detach()
    z.add_(1)
    return (y * 2).sum()


def _windows(y: Tensor) -> Tensor:
    y.unfold(1, 2, 2).add_(1)
    return (y * 2).sum()


def _bits(y: Tensor) -> Tensor:
    y.view(torch.int32).add_(1)
    return (y * 2).sum()


@pytest.mark.parametrize("name", STALE)
def test_reading_memory_that_was_changed_through_a_view_that_cannot_be_undone_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"is read after '.*' has changed memory that it shares"):
        import_program(export(Lambda(STALE[name], w=_square()), torch.ones(2, 3)), name="model")


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

    _equals_eager(Lambda(forward, table=nn.Embedding(10, 4)), torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_divided_by_how_often_a_row_is_looked_up(kind: Any) -> None:
    module = Lambda(lambda self, x: self.table(x).square().mean(), table=kind(10, 4, scale_grad_by_freq=True))
    with pytest.warns(SoapWarning, match="kept whole, on one device at a time"):
        _equals_eager(module, torch.tensor([[1, 2, 1], [1, 5, 2]]))


def test_changing_a_shape_in_place_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        y.t_()
        return (y * 2).sum()

    with pytest.raises(ModelError, match="changes a tensor's shape in place"):
        imported(Lambda(forward, w=_square()), torch.ones(2, 3))


def test_in_place_on_a_parameter_is_refused() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.5)
        return (x @ self.w).sum()

    with pytest.raises(ModelError, match="changes parameter 'w' in place"):
        imported(Lambda(change, w=_square()), torch.ones(2, 3))


def test_counters_are_updated_at_the_end_of_the_step() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (x @ self.w).sum()

    model = imported(Lambda(count, w=_square(), count=torch.tensor(3)), torch.ones(2, 3))
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    model.end_step(context)
    assert context.buffers == {"count": torch.tensor(4)}


def test_instance_norm_with_running_statistics_is_refused() -> None:
    with pytest.raises(ModelError, match=r"track_running_stats=False"):
        imported(Lambda(lambda self, x: self.inner(x).sum(), inner=nn.InstanceNorm1d(3, track_running_stats=True)), torch.ones(2, 3, 4))


def test_buffers_that_nothing_changes_are_constants() -> None:
    model = imported(Lambda(lambda self, x: ((x @ self.w) * self.scale).sum(), w=_square(), scale=torch.ones(4)), torch.ones(2, 3))
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

    _equals_eager(Lambda(forward, w=_square()), torch.linspace(0, 1, 6).reshape(2, 3))


def test_in_place_under_no_grad_on_an_outer_tensor_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        with torch.no_grad():
            y.clamp_(max=1.0)
        return y.sum()

    with pytest.raises(ModelError, match=r"in place under torch\.no_grad"):
        imported(Lambda(forward, w=_square()), torch.ones(2, 3))


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
    model = imported(Lambda(forward, w=_square()), x)
    assert model.graph.tensors[model.graph.loss].shape == ()
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, (x.double() @ model.parameters["w"]).square().sum())


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "a vector": (
        lambda self, x: x @ self.w,
        r"the first output has shape \[2, 4\] and dtype float64; expected a scalar floating-point loss",
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
        imported(Lambda(function, w=_square(), c=torch.tensor(1.0)), torch.ones(2, 3))
    assert "\n" not in str(caught.value)


def test_symbolic_programs_are_read_at_the_sizes_of_their_examples() -> None:
    module, batch = Lambda(lambda self, x: (x @ self.w).sum(), w=_square()), torch.export.Dim("batch", min=2)
    exported = torch.export.export(module, (torch.ones(4, 3),), dynamic_shapes={"args": ({0: batch},)}, strict=False)
    assert import_program(exported, name="m").graph.tensors["args_0"].shape == (4, 3)
    assert import_program(exported, name="m", shapes=[(7, 3)]).graph.tensors["args_0"].shape == (7, 3)
    with pytest.raises(ModelError, match=r"^the program has a dynamic shape .*; expected whole numbers"):
        Reader(exported, None).read()


def test_in_place_calls_on_slices_of_dynamic_sizes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        y[: y.shape[0] - 1].mul_(3)
        return (y.sin() * y).sum()

    module, batch = Lambda(forward, w=_square()).double(), torch.export.Dim("batch", min=3)
    x = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3)
    exported = torch.export.export(module, (x,), dynamic_shapes={"args": ({0: batch},)}, strict=False)
    for size in (4, 3):
        model = import_program(exported, name="m", shapes=[(size, 3)])
        loss = model.reference_loss([x[:size]], model.parameters, TileContext(0, 0, {}))
        torch.testing.assert_close(loss, module(x[:size]))


def test_shapes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(ModelError, match=r"dynamic shape|depends on data") as caught:
        imported(Lambda(lambda self, x: (x @ self.w).sum() + x[x > 0].sum(), w=_square()), torch.ones(2, 3))
    assert "\n" not in str(caught.value)


def test_one_tensor_for_two_inputs_is_said() -> None:
    def forward(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.w[ids], labels)

    ids = torch.tensor([0, 2, 1])
    module = Lambda(forward, w=_square())
    with pytest.warns(SoapWarning, match="does not read input '.*': values given for it have no effect"):
        model = imported(module, ids, ids)
    assert len(model.input_names) == len(model.example_inputs) == 2
    assert all(name in model.graph.tensors for name in model.input_names)


def test_keyword_arguments_and_their_example_inputs_agree() -> None:
    def forward(self: Any, *, x: Tensor, scale: Tensor) -> Tensor:
        return ((x @ self.w) * scale).sum()

    model = imported(Lambda(forward, w=_square()), scale=torch.ones(4), x=torch.ones(2, 3))
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

    module = Lambda(forward, w=_square(), table=nn.Parameter(torch.ones(9, 3)))
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

    model = imported(Lambda(forward, sum=_square()), torch.ones(2, 3))
    names = [op.name for op in model.graph.operators]
    assert len({*names, *model.input_names, *model.parameters}) == len(names) + 2
