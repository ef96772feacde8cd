"""Losses that are cut along the positions of sequences train as a plain loop does, and in float32 as one process does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.model.graph import OperatorGraph
from soap.runtime.check import check
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL, context_parallel, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.megatron import hybrid, three_dimensional
from soap.tracing.export import export_model
from tests.kept_models import ModelFiles
from tests.runtime.exact_modules import Batch, sgd, train_plainly, worst
from tests.runtime.pool import Pool
from tests.runtime.test_exactness import FOUR, train
from tests.runtime.traced import traced

WORDS, LENGTH = 11, 7


class NextWords(nn.Module):
    """A language model with the loss of transformers: labels are shifted, and some are ignored."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.options = options

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.embedding(tokens)))
        moved = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(scores.view(-1, WORDS), moved.view(-1), **self.options)


class Logarithms(NextWords):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.embedding(tokens))).log_softmax(-1)
        return F.nll_loss(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mean": NextWords,
    "sum": lambda: NextWords(reduction="sum"),
    "smoothed": lambda: NextWords(label_smoothing=0.1),
    "logarithms": Logarithms,
}


def module_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def batch(samples: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(0, WORDS, (samples, LENGTH), generator=generator) for _ in range(2))
    labels[torch.rand(samples, LENGTH, generator=generator) < 0.3] = -100
    labels[-1] = -100  # the last sample of a batch has one label: means of parts are not the parts' means
    labels[-1, 2] = 4
    return tokens, labels


FILES = ModelFiles(
    "positions of losses", lambda name, path: export_model(module_of(name), batch(2, 0), path=path, dynamic_batch=True)
)


def cut_unevenly(graph: OperatorGraph) -> Strategy:
    """Samples in two, positions of the loss in three parts of 2 or 3 positions, on four ranks in another order than the scores."""
    return CLASSICAL["data_parallel"](graph, FOUR).with_operator(graph.operators[-1].name, OpConfig((2, 3), (3, 0, 2, 1, 3, 3)))


WAYS: dict[str, Callable[[OperatorGraph], Strategy]] = {
    "unevenly": cut_unevenly,
    "context parallel": lambda graph: context_parallel(graph, FOUR),
    "groups": lambda graph: hybrid(graph, FOUR, tensor=4, microbatches=2, scatters=True),
    "groups that share positions": lambda graph: replace(hybrid(graph, FOUR, tensor=2, context=2, microbatches=2), microbatches=2),
    "stages": lambda graph: replace(three_dimensional(graph, FOUR, tensor=2, pipeline=2, microbatches=2), microbatches=2),
    "random": lambda graph: random_strategy(graph, FOUR, random.Random(1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_have_samples_and_positions(name: str) -> None:
    graph = traced(FILES[name]).graph
    op = graph.operators[graph.producers[graph.loss][0]]
    assert [(factor.kind, factor.size, factor.summed) for factor in op.factors] == [
        ("sample", 2, True),
        ("reduction", LENGTH - (name == "logarithms"), True),
    ]
    assert bool(op.own_inputs) == (name != "sum")
    read = {operand.tensor: [dim.factor for dim in operand.dims] for operand in op.own_inputs or op.inputs}
    assert read.pop("labels") == ([0, None] if name == "sum" else [0, 1])  # a sum's tiles take all shifted labels of their samples
    assert [*read.values()] == [[0, 1, None]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_a_plain_loop(four: Pool, name: str, way: str) -> None:
    strategy = WAYS[way](traced(FILES[name]).graph)
    degrees = strategy.operators[traced(FILES[name]).graph.operators[-1].name].degrees
    assert degrees[1] == {"unevenly": 3, "stages": 2, "random": degrees[1]}.get(way, 4)
    steps = [[batch(2, 0)], [batch(3, 1)], [batch(2, 2)]]
    found = four.run(train, FILES[name], strategy, steps)
    expected = train_plainly(module_of(name).double(), steps)
    assert all(result.losses == found[0].losses for result in found)
    assert worst(found[0], expected) < 1e-9


def compared(path: str, strategy: Strategy) -> bool:
    with Trainer(traced(path, "float32"), (strategy, FOUR), optimizer=sgd) as trainer:
        return check(trainer, lambda step: batch(2, step), sgd, 3).passed


@pytest.mark.parametrize("way", ["unevenly", "groups that share positions"])
def test_in_float32_they_train_as_one_process(four: Pool, way: str) -> None:
    assert all(four.run(compared, FILES["mean"], WAYS[way](traced(FILES["mean"]).graph)))
