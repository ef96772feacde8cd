from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap import zoo
from soap.plan.tiling import tiles_of
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from tests.extent import often
from tests.tracing.emulation import compare, draw_configs, emulated_loss, kept_bytes
from tests.tracing.programs import Lambda, export, imported


def _normed() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU()).double()
    return Lambda(lambda self, x: self.inner(x).square().mean(), inner=module), torch.randn(5, 3, 6, 6, dtype=torch.float64)


@pytest.mark.parametrize("factor", ["b", "c", "h"])
def test_running_statistics_move_once_however_many_tiles_a_rank_runs(factor: str) -> None:
    module, x = _normed()
    model = imported(module, x)
    configs = {}
    for op in model.graph.operators:
        names = [f.name for f in op.factors]
        split = factor if factor in names else "o" if factor == "c" else ""
        degrees = tuple(3 if name == split else 1 for name in names)
        configs[op.name] = OpConfig(degrees, (0,) * (3 if split in names else 1))
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    for _ in range(2):
        emulated_loss(model, configs, [x], model.parameters, context)
        model.end_step(context)
    for _ in range(2):
        module(x)
    norm = module.get_submodule("inner.1")
    assert set(context.buffers) == {"inner.1.running_mean", "inner.1.running_var", "inner.1.num_batches_tracked"}
    torch.testing.assert_close(context.buffers["inner.1.running_mean"], norm.running_mean)
    torch.testing.assert_close(context.buffers["inner.1.running_var"], norm.running_var)
    assert context.buffers["inner.1.num_batches_tracked"] == 2


@pytest.mark.parametrize("batch_norm", ["global", "local"])
def test_running_statistics_of_a_module_that_is_called_twice(batch_norm: Any) -> None:
    """Each call moves them, in the order of the program; another module's move with them."""
    torch.manual_seed(0)
    shared, other = nn.BatchNorm1d(4, momentum=0.3).double(), nn.BatchNorm1d(4, momentum=0.2).double()
    forward = lambda self, x: self.shared(torch.sin(3 * self.other(self.shared(x)))).square().mean()  # noqa: E731
    module, x = Lambda(forward, shared=shared, other=other), 2 + torch.randn(5, 4, dtype=torch.float64)
    model = import_program(export(module, x), name="model", dtype=torch.float64, batch_norm=batch_norm)
    configs = {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    for _ in range(2):
        emulated_loss(model, configs, [x], model.parameters, context)
        model.end_step(context)
        module(x)
    expected = dict(module.named_buffers())
    assert set(context.buffers) == set(expected)
    for name, buffer in context.buffers.items():
        torch.testing.assert_close(buffer, expected[name])


def test_running_statistics_of_regions_that_overlap_in_part() -> None:
    module, x = _normed()
    model = imported(module, x)
    (position,) = [i for i, op in enumerate(model.graph.operators) if op.kind == "batch_norm_apply"]
    op = model.graph.operators[position]
    c = [factor.name for factor in op.factors].index("c")
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    values = torch.randn(5, 6, 4, 4, dtype=torch.float64)
    sums = torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    regions = {tensor: value for tensor, value in zip([o.tensor for o in op.inputs], (values, sums), strict=True)}
    for degree in (2, 3, 2):  # 6 channels in 2 and in 3 pieces
        config = OpConfig(tuple(degree if i == c else 1 for i in range(len(op.factors))), (0,) * degree)
        for tile in tiles_of(model.graph, position, config):
            inputs = [regions[o.tensor][tuple(slice(*i) for i in box)] for o, box in zip(op.inputs, tile.inputs, strict=True)]
            parameters = [
                model.parameters[o.tensor][tuple(slice(*i) for i in box)] for o, box in zip(op.parameters, tile.parameters, strict=True)
            ]
            model.run_tile(tile, inputs, parameters, context)
    model.end_step(context)
    torch.testing.assert_close(context.buffers["inner.1.running_mean"], 0.3 * values.mean((0, 2, 3)))
    torch.testing.assert_close(context.buffers["inner.1.running_var"], 0.7 + 0.3 * values.var((0, 2, 3)))
    assert context.statistics == {}


def test_buffers_stay_when_they_are_not_to_be_updated() -> None:
    module, x = _normed()
    model = imported(module, x)
    before = {n: b.clone() for n, b in model.buffers.items()}
    context = TileContext(0, 0, dict(model.buffers), update_buffers=False)
    emulated_loss(model, {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}, [x], model.parameters, context)
    model.reference_loss([x], model.parameters, context)
    model.end_step(context)
    assert all(torch.equal(before[n], b) for n, b in model.buffers.items())


def test_a_layer_used_twice_moves_its_statistics_in_program_order() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).double()
    module = Lambda(lambda self, x: (self.norm(x) + self.norm(x * 3 + 1)).pow(3).sum(), norm=norm)
    x = torch.randn(6, 4, dtype=torch.float64)
    model = imported(module, x)
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    reference = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    emulated_loss(model, {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}, [x], model.parameters, context)
    model.end_step(context)
    model.reference_loss([x], model.parameters, reference)
    torch.testing.assert_close(context.buffers["norm.running_mean"], reference.buffers["norm.running_mean"])
    torch.testing.assert_close(context.buffers["norm.running_var"], reference.buffers["norm.running_var"])


def test_random_numbers_follow_seed_and_step_and_leave_torchs_generator_alone() -> None:
    model = imported(Lambda(lambda self, x: F.dropout(x @ self.w, 0.5).sum(), w=nn.Parameter(torch.ones(4, 4))), torch.ones(3, 4))
    state = torch.get_rng_state()
    losses = [
        float(model.reference_loss(model.example_inputs, model.parameters, TileContext(*key, {})))
        for key in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert losses[0] == losses[1] and len(set(losses)) == 3
    assert torch.equal(state, torch.get_rng_state())


def test_random_calls_without_a_rule_draw_the_same_on_every_replica() -> None:
    def pick(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        return y.gather(1, torch.multinomial(y.softmax(1), 2)).sum()

    with pytest.warns(UserWarning, match="multinomial"):
        model = imported(Lambda(pick, w=nn.Parameter(torch.eye(4))), torch.ones(3, 4))
    compare(model, {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators})


OFTEN = {"alexnet", "dlrm", "gpt", "nmt"}
"""They have the parts of the others, but for batch norm, which ``test_rules_drawn`` draws."""


@pytest.mark.parametrize("name", often(zoo.names(), OFTEN, pytest.mark.slow))
def test_saved_bytes_are_an_upper_bound_for_the_zoo(name: str) -> None:
    kept, bound = kept_bytes(load_model(f"zoo:{name}:tiny"))
    assert kept <= bound


def test_bias_is_added_once_when_the_inner_dimension_and_others_are_split() -> None:
    module = Lambda(lambda self, x: self.inner(x).sum(), inner=nn.Linear(4, 6).double())
    model = imported(module, torch.zeros(2, 4, dtype=torch.float64))
    (op,) = [op for op in model.graph.operators if op.kind == "linear"]
    degrees = tuple({"b": 2, "k": 4, "n": 3}[f.name] for f in op.factors)
    configs = {o.name: OpConfig((1,) * len(o.factors), (0,)) for o in model.graph.operators} | {op.name: OpConfig(degrees, (0,) * 24)}
    loss = emulated_loss(model, configs, model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, 2 * module.inner.bias.sum())


def test_batched_constants_are_cut_as_the_batch_is() -> None:
    mask = torch.tril(torch.ones(5, 5)).expand(3, 1, 5, 5).contiguous().bool()
    mask[1, :, :, 2] = False

    def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (2, 2)).transpose(1, 2) for w in self.qkv)
        return F.scaled_dot_product_attention(q, k, v, self.mask).pow(2).sum()

    module = Lambda(attend, qkv=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), mask=mask).double()
    model = imported(module, torch.randn(3, 5, 4, dtype=torch.float64))
    (op,) = [op for op in model.graph.operators if op.kind == "scaled_dot_product_attention"]
    configs = {o.name: OpConfig((1,) * len(o.factors), (0,)) for o in model.graph.operators}
    for degrees in ((3, 1, 1), (3, 2, 5)):
        compare(model, configs | {op.name: OpConfig(degrees, (0,) * (degrees[0] * degrees[1] * degrees[2]))})


def _first_of_bags(self: Any, x: torch.Tensor) -> torch.Tensor:
    ids, offsets = (x[:, 0].abs() * 3).long() % 5, torch.tensor([0, 2, 2])
    return torch.ops.aten.embedding_bag.padding_idx(self.table, ids, offsets, False, self.mode, False, None, False, None)[0]


UNREAD: dict[str, Any] = {
    "sums of bags": (_first_of_bags, {"mode": 0}),
    "means of bags": (_first_of_bags, {"mode": 1}),
    "maxima of bags": (_first_of_bags, {"mode": 2}),
    "maxima": (lambda self, x: (x @ self.table.T).max(1).values, {}),
    "the largest": (lambda self, x: (x @ self.table.T).topk(2, 1)[0], {}),
    "normalised": (lambda self, x: torch.ops.aten.native_layer_norm(x @ self.table.T, [5], None, None, 1e-5)[0], {}),
    "normalised groups": (
        lambda self, x: torch.ops.aten.native_group_norm((x @ self.table.T)[..., None], None, None, 6, 5, 1, 1, 1e-5)[0], {}
    ),
    "dropped": (lambda self, x: torch.ops.aten.native_dropout(x @ self.table.T, 0.0, True)[0], {}),
    "triangular": (lambda self, x: torch.linalg.qr(x @ self.table.T)[1].abs(), {}),
    "singular values": (lambda self, x: torch.linalg.svd(x @ self.table.T, full_matrices=False)[1], {}),
    "hidden states": (lambda self, x: self.lstm(x[None] @ self.table.T)[0], {"lstm": nn.LSTM(5, 3, batch_first=True)}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:no rule for")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", UNREAD)
def test_results_that_nobody_reads_may_have_any_form(name: str, dtype: torch.dtype) -> None:
    """It depends on the type, and on whether gradients are wanted, what torch's kernels leave in them."""
    function, members = UNREAD[name]
    torch.manual_seed(0)
    module = Lambda(lambda self, x: (function(self, x).tanh() + 2).square().mean(), table=nn.Parameter(torch.randn(5, 4)), **members)
    model = import_program(export(module, torch.randn(6, 4)), name="model", dtype=dtype)
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    compare(model, {op.name: OpConfig((1,) * len(op.factors), (0,)) for op in model.graph.operators}, tolerance)
    for seed in range(3):
        compare(model, draw_configs(model.graph, random.Random(seed)), tolerance)
