"""What operators take of memory, worked out without values, is what they really take with values."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import soap
from soap.model.graph import RECURRENT_KINDS, Footprint
from soap.plan.tiling import tiles_of
from soap.simulator.memory.footprint import Use, kept_places, kept_share
from soap.strategy.config import OpConfig
from soap.tracing import footprints
from soap.tracing.footprints import _Trials, find_footprints, layouts_of, like
from soap.tracing.importer import import_program
from soap.tracing.load import load_model
from tests.extent import often
from tests.tracing.emulation import kept_bytes as really_kept

ZOO = ["alexnet", "gpt", "resnet50", "dlrm", "inception_v3", "rnnlm"]


@pytest.mark.parametrize("name", often(ZOO, {*ZOO} - {"resnet50", "inception_v3"}, pytest.mark.slow))
def test_as_with_values(name: str) -> None:
    """``emulation`` counts every piece of memory that autograd keeps; the rest of it are activations, parameters and the batch."""
    model = load_model(f"zoo:{name}:tiny")
    kept, _ = really_kept(model)
    found = sum(footprints[0].kept_bytes for footprints in model.graph.footprints.values())
    assert set(model.graph.footprints) == {op.name for op in model.graph.operators}
    assert found <= kept <= found + sum(tensor.bytes for tensor in model.graph.tensors.values())
    assert found < sum(op.saved_bytes for op in model.graph.operators)


class Net(torch.nn.Module):
    """A linear layer, its GELU, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.first(x)).exp().sum()


def test_by_hand() -> None:
    model = import_program(torch.export.export(Net(), (torch.zeros(4, 6),)), name="net")
    linear, rest = (model.graph.footprints[name] for name in ("first", "sum"))
    # Kept: the input, for the weight's gradient; not the weight, as nobody wants the input's.
    # Gradients of weight and bias lie row by row, and so does what it makes.
    assert linear[0] == Footprint(0, 0, 0, frozenset({0}), in_rows=frozenset({1, 2, 3}))
    # GELU keeps its input, which is the linear layer's output; exp keeps its result, 4 x 5 floats; GELU's result is kept by nobody, but
    # there when exp makes its own, before the sum takes its 4 bytes. Backward, exp's result goes before the input's gradient comes.
    assert rest == (Footprint(80, 80 - 4, 0, frozenset({0}), in_rows=frozenset({0, 1})),)


class Labelled(torch.nn.Module):
    """A loss of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 50)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x), labels)


class Normed(torch.nn.Module):
    """A norm by its root mean square, and a loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.exp(), (6,), self.weight).sum()


@pytest.mark.parametrize(
    ("device", "weight", "kept"),
    [("cpu", "bfloat16", 4 * 30), ("cuda", "float32", 4 * 30), ("cuda", "bfloat16", 2 * 30 + 4 * 5)],
)
def test_a_gpus_norm_is_one_kernel_that_keeps_a_number_a_row(device: Literal["cpu", "cuda"], weight: str, kept: int) -> None:
    """And its input, if values and weight are of one type; elsewhere torch makes it of several calls, which keep a wide copy."""
    exported = torch.export.export(Normed(getattr(torch, weight)), (torch.zeros(5, 6, dtype=torch.bfloat16),))
    model = import_program(exported, name="normed", autocast_device=device)
    assert model.graph.footprints["rms_norm"][0].kept_bytes == kept


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cross_entropy_keeps_and_makes_one_tensor_of_the_logits_size(
    autocast: torch.dtype | None, device: Literal["cpu", "cuda"]
) -> None:
    """In float32, whatever the logits are: the gradient of narrow ones is cast from that one when what was kept has gone."""
    exported = torch.export.export(Labelled(), (torch.zeros(40, 6), torch.zeros(40, dtype=torch.int64)))
    model = import_program(exported, name="labelled", autocast=autocast, autocast_device=device)
    own = model.graph.footprints["cross_entropy_loss"][0]
    logits = 40 * 50 * 4
    assert logits <= own.kept_bytes <= logits + 16
    assert own.backward_bytes <= (0 if autocast is None else logits // 2) + 40 * 20


def test_recurrent_layers_really_run_if_they_are_small() -> None:
    """A share of what their libraries keep is there however small a tile is."""
    model = load_model("zoo:rnnlm:tiny", plan_only=True)
    recurrent = [op.name for op in model.graph.operators if op.kind in RECURRENT_KINDS]
    for name in recurrent:
        (own,) = model.graph.footprints[name]
        assert 0 < own.fixed_bytes[Use.KEPT] < own.kept_bytes
    assert len(recurrent) == 4


@pytest.mark.slow
def test_with_and_without_values_alike() -> None:
    with_values, without = (load_model("zoo:gpt:tiny", plan_only=plan_only) for plan_only in (False, True))
    assert find_footprints(with_values) == (dict(without.graph.footprints), {}) and without.graph.footprints == with_values.graph.footprints
    assert with_values.graph.hash == without.graph.hash


class Activated(torch.nn.Module):
    """An activation, which its operator keeps whole for all of the linear layer's outputs; and one that is cut with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().sum()


@pytest.mark.parametrize("degrees", [(1, 1, 1), (4, 1, 1), (1, 8, 1), (1, 1, 4), (2, 4, 1), (4, 1, 8), (2, 2, 2), (8, 8, 16)])
def test_what_does_not_shrink_with_a_factor(degrees: tuple[int, int, int]) -> None:
    """By samples, outputs, and inputs of the second layer: of the activation its tiles keep what they read, whatever they make."""
    model = import_program(torch.export.export(Activated(), (torch.zeros(8, 8),)), name="activated")
    position = next(i for i, op in enumerate(model.graph.operators) if "second" in op.name)
    op = model.graph.operators[position]
    (weight, _), (out,) = op.parameters, op.outputs
    sample, made, read = out.dims[0].factor, out.dims[1].factor, weight.dims[1].factor
    chosen = dict(zip((sample, made, read), degrees, strict=True))
    config = OpConfig(tuple(chosen[i] for i in range(len(op.factors))), tuple(range(math.prod(degrees))))
    for tile in tiles_of(model.graph, position, config):
        assert kept_share(model.graph, op, tile.intervals) == (8 // degrees[0]) * (16 // degrees[2]) * 4


class Twice(torch.nn.Module):
    """A layer that reads what another one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().sum()


@pytest.mark.parametrize(("device", "sum_dtype", "wide"), [("cpu", "float32", 4), ("cuda", "float32", 0), ("cpu", "own", 0)])
def test_parts_of_a_sum_alone_keep_wide_copies_of_16_bit_operands(device: Literal["cpu", "cuda"], sum_dtype: str, wide: int) -> None:
    """And on CPUs alone, for sums in float32: GPUs multiply 16-bit operands as they are. What keeps nothing by single cuts keeps nothing by
    several."""
    exported = torch.export.export(Twice(), (torch.zeros(64, 8),))
    graph = import_program(exported, name="twice", dtype=torch.bfloat16, autocast_device=device, sum_dtype=sum_dtype).graph
    op = next(op for op in graph.operators if "second" in op.name)
    (weight, _), (out,) = op.parameters, op.outputs
    samples, made, read = (dim.factor for dim in (*out.dims, weight.dims[1]))

    def kept(**cut: int) -> int:
        parts = {samples: cut.get("samples", 1), made: cut.get("made", 1), read: cut.get("read", 1)}
        return kept_share(graph, op, [(0, factor.size // parts[i]) for i, factor in enumerate(op.factors)])

    assert [kept(), kept(samples=4), kept(made=4), kept(samples=4, made=4)] == [0, 0, 0, 0]
    for parts, by_samples, by_outputs in product((2, 4, 32), (1, 2, 4, 64), (1, 2, 16)):  # each copy shrinks with what it is cut by
        copies = 64 // by_samples * 32 // parts + 16 // by_outputs * 32 // parts
        assert kept(read=parts, samples=by_samples, made=by_outputs) == wide * copies
    assert kept_places(graph, op, [(0, factor.size // (2 if i == read else 1)) for i, factor in enumerate(op.factors)]) == (
        frozenset() if wide else {0, 1}
    )


class Convolved(torch.nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(4, 32, 3, padding=1), torch.nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().sum()


@pytest.mark.slow
def test_parts_of_a_convolution_keep_wide_copies_of_weights_however_few_samples() -> None:
    """Of a tile that is cut along the image, too."""
    exported = torch.export.export(Convolved(), (torch.zeros(32, 4, 8, 8),))
    graph = import_program(exported, name="convolved", dtype=torch.bfloat16).graph
    op = graph.operators[graph.index["second"]]
    weight, (out,) = op.parameters[0], op.outputs
    samples, made, height = (dim.factor for dim in out.dims[:3])
    read = weight.dims[1].factor

    def kept(**cut: int) -> int:
        parts = {samples: cut.get("samples", 1), made: cut.get("made", 1), read: cut["read"], height: cut.get("height", 1)}
        return kept_share(graph, op, [(0, factor.size // parts.get(i, 1)) for i, factor in enumerate(op.factors)])

    for parts, by_samples, by_outputs in product((2, 4, 32), (1, 2, 8, 32), (1, 2, 16)):
        images, weights = 32 // by_samples * 32 // parts * 8 * 8, 16 // by_outputs * 32 // parts * 9
        assert kept(read=parts, samples=by_samples, made=by_outputs) == 4 * (images + weights)
        assert kept(read=parts, samples=by_samples, made=by_outputs, height=4) >= 4 * (images // 2 + weights)


def test_a_file_is_priced_for_the_devices_of_the_cluster(tmp_path: Path) -> None:
    module = Twice().bfloat16()
    soap.export(module, (torch.zeros(64, 8, dtype=torch.bfloat16),), path=tmp_path / "m.pt2", verify=False)
    given: dict[str, Any] = {"costs": "estimate", "sum_dtype": "float32"}
    simulators = [soap.api.simulator_for(tmp_path / "m.pt2", name, **given) for name in ("local:2", "p100-4x4")]
    footprints = [max(one.kept_bytes for one in own.graph.footprints["second"]) for own in simulators]
    assert footprints[0] > footprints[1] == 0 and len({own.graph.hash for own in simulators}) == 1


class Layers(torch.nn.Module):
    """Equal layers, with views, a transposition and parts of one tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.wide = torch.nn.ModuleList(torch.nn.Linear(6, 18) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.wide:
            one, two, three = layer(x).chunk(3, -1)
            x = x + torch.bmm(torch.bmm(one, two.transpose(1, 2)).softmax(-1), three)
        return x.square().mean()


@pytest.mark.slow
def test_however_many_layers_each_kind_of_operator_runs_and_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = [], _Trials._run
    monkeypatch.setattr(_Trials, "_run", lambda self, tile, regions: ran.append(tile) or run(self, tile, regions))
    found = {}
    for count in (3, 5):
        model = import_program(torch.export.export(Layers(count), (torch.zeros(4, 5, 6),)), name="layers")
        ran.clear()
        second = {name: own for name, own in model.graph.footprints.items() if name.startswith(("wide.1", "bmm_2", "bmm_3"))}
        found[count] = len(ran), len(model.graph.operators), second
    (few_runs, few, one), (many_runs, many, other) = found[3], found[5]
    assert many_runs == few_runs > 0 and many > few
    assert one == other and len(one) == 3


def test_results_of_an_equal_operator_lie_as_those_of_the_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all operators run, footprints are the same; so is how results lie and which of them share memory."""
    model = import_program(torch.export.export(Layers(4), (torch.zeros(4, 5, 6),)), name="layers")
    first = find_footprints(model)
    monkeypatch.setattr(footprints, "layouts_of", lambda results, operands: None)
    assert find_footprints(model) == first
    x = torch.zeros(4, 6)
    made = (*x.view(2, 2, 6).transpose(0, 1).chunk(2, -1), torch.zeros(3), torch.zeros(8)[2:6].view(2, 2))
    known = layouts_of(made, (x,))
    assert known is not None
    again = like(known, (x,))
    assert [(t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in again] == [
        (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in made
    ]
    assert [t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in again] == [True, True, False, False]
    assert again[2].untyped_storage()._cdata != again[3].untyped_storage()._cdata
    assert layouts_of((x.view(torch.int32),), (x,)) is None
