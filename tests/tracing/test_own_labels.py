"""Tiles of a mean over labels that are given only their own labels, and told what to divide by, add up to the whole mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.model.regions import relative, volume, whole
from soap.plan.samples import with_own_labels
from soap.plan.tiling import tiles_of
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from tests.tracing.programs import Lambda, imported

IGNORED = torch.tensor([-100, 0, 1, 2, 3, 4])
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def labels_of(*shape: int) -> Tensor:
    return IGNORED[torch.randint(6, shape, generator=torch.Generator().manual_seed(1))]


def shifted(_: Any, out: Tensor, labels: Tensor) -> Tensor:
    """As causal language models of transformers do it."""
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(out.view(-1, 5), moved.view(-1), ignore_index=-100, reduction="mean")


def two_regions(_: Any, out: Tensor, labels: Tensor) -> Tensor:
    """Labels behind one that is not to be counted are not counted either."""
    own = labels.clamp(max=3)
    return F.cross_entropy(out[:, 1:].flatten(0, 1), own[:, 1:].masked_fill(own[:, :-1] == -100, -100).flatten())


CASES: dict[str, tuple[Loss, Tensor, tuple[int, ...]]] = {
    "classes": (lambda m, out, labels: F.cross_entropy(out, labels), labels_of(7), (7, 3)),
    "weights": (lambda m, out, labels: F.cross_entropy(out, labels.clamp(min=0), m.weight, ignore_index=2), labels_of(7), (7, 3)),
    "smoothed": (lambda m, out, labels: F.cross_entropy(out, labels, m.weight, label_smoothing=0.1), labels_of(7), (7, 3)),
    "logarithms": (lambda m, out, labels: F.nll_loss(out.log_softmax(-1), labels, m.weight), labels_of(7), (7, 3)),
    "tokens": (lambda m, out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten()), labels_of(7, 4), (7, 4, 3)),
    "first tokens": (lambda m, out, labels: F.cross_entropy(out.flatten(0, 1), labels[:, :4].flatten()), labels_of(7, 6), (7, 4, 3)),
    "next tokens": (
        lambda m, out, labels: F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        labels_of(7, 4),
        (7, 4, 3),
    ),
    "shifted": (shifted, labels_of(7, 4), (7, 4, 3)),
    "positions": (lambda m, out, labels: F.cross_entropy(out.movedim(-1, 1), labels), labels_of(7, 2, 4), (7, 2, 4, 3)),
    "masked": (lambda m, out, labels: F.cross_entropy(out, labels.masked_fill(labels > 2, -100)), labels_of(7), (7, 3)),
    "masked twice": (
        lambda m, out, labels: (lambda own: F.cross_entropy(out, own.masked_fill(own > 2, -100)))(labels.clamp(max=3)),
        labels_of(7),
        (7, 3),
    ),
    "two regions": (two_regions, labels_of(7, 4), (7, 4, 3)),
    "in float32": (lambda m, out, labels: F.cross_entropy(out.float(), labels.long()), labels_of(7).int(), (7, 3)),
}
"""Loss of scores of five classes, labels, shape of the data."""
ALL_READ = {"two regions"}
"""Labels of which two regions are read after a call are given whole: one result would have to serve both."""


def model_of(case: str) -> TracedModel:
    loss, labels, shape = CASES[case]
    torch.manual_seed(0)
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])
    module = Lambda(lambda self, x, labels: loss(self, self.scores(x), labels), scores=nn.Linear(3, 5), weight=weight)
    return imported(module, torch.randn(*shape), labels)


@pytest.mark.parametrize("case", CASES)
def test_tiles_with_their_own_labels_add_up(case: str) -> None:
    model = model_of(case)
    graph, position = model.graph, model.graph.producers[model.graph.loss][0]
    op = graph.operators[position]
    if case in ALL_READ:
        assert not op.own_inputs
        return
    assert op.own_inputs and graph.hash == model_of(case).graph.hash
    names = [name for name, _ in model.programs[op.name].inputs]
    values = dict(zip(names, model.whole_values(model.program, model.example_inputs, model.parameters, TileContext(), names), strict=True))
    labels = next(k for k, operand in enumerate(op.inputs) if operand.tensor == model.input_names[1])
    expected = model.reference_loss(model.example_inputs, model.parameters, TileContext())
    for degree in range(1, op.factors[0].size + 1):
        config = OpConfig((degree, *(min(2, factor.size) for factor in op.factors[1:])), tuple(range(degree * 2 ** (len(op.factors) - 1))))
        wide = tiles_of(graph, position, config)
        tiles = [with_own_labels(graph, tile) for tile in wide]
        given = [[values[name][relative(box, whole(values[name].shape))] for name, box in zip(names, t.inputs, strict=True)] for t in tiles]
        scores = [None if graph.tensors[o.tensor].kind == "activation" else o for o in op.inputs]
        counted = [
            model.labels_counted(tile, [None if own is None else tensor for own, tensor in zip(scores, tensors, strict=True)])
            for tile, tensors in zip(tiles, given, strict=True)
        ]
        total = sum((count for _, count in counted), torch.zeros((), dtype=torch.float64))
        assert len({call for call, _ in counted}) == 1 and total.dtype == torch.float64
        told = TileContext(counts={counted[0][0]: total}.get)
        parts = [model.run_tile(tile, tensors, [], told)[0] for tile, tensors in zip(tiles, given, strict=True)]
        assert all(part.dtype == expected.dtype for part in parts)
        assert torch.allclose(sum(parts, torch.zeros_like(expected)), expected, rtol=1e-6 if case == "in float32" else 1e-12)
        if degree > 1:
            assert all(volume(own.inputs[labels]) < volume(tile.inputs[labels]) for own, tile in zip(tiles, wide, strict=True))


def test_what_counts_no_labels_has_none_of_its_own() -> None:
    def by_hand(_: Any, out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels, reduction="sum") / (labels != -100).sum()

    module = Lambda(lambda self, x, labels: by_hand(self, self.scores(x), labels), scores=nn.Linear(3, 5))
    graph = imported(module, torch.randn(7, 3), labels_of(7)).graph
    assert not any(op.own_inputs for op in graph.operators)
