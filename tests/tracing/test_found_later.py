"""Footprints are found when they are first asked for, by those who ask."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from soap.runtime.trainer import Trainer
from soap.strategy.classical import data_parallel
from soap.tracing import footprints
from soap.tracing.execute import TracedModel
from soap.tracing.footprints import find_footprints
from soap.tracing.load import load_program
from tests.runtime.pool import Pool
from tests.runtime.traced import sgd
from tests.strategies import CPU, cluster


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.last(self.hidden(inputs).relu()) ** 2).mean()


def read() -> TracedModel:
    return load_program(torch.export.export(Small(), (torch.ones(4, 6),)), "small")


class Sought:
    """Stands for ``find_footprints``, and counts how often it is called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: TracedModel, *, on_gpus: bool = False) -> Any:
        self.count += 1
        return find_footprints(model, on_gpus=on_gpus)


def test_they_are_sought_once_by_whoever_asks_first() -> None:
    with patch.object(footprints, "find_footprints", sought := Sought()):
        graph = read().graph
        assert sought.count == 0
        with torch.no_grad(), torch.device("meta"):  # wherever it is asked
            found, parts = dict(graph.footprints), dict(graph.part_footprints)
        assert sought.count == 1 and found and {*found} <= {op.name for op in graph.operators}
    assert (found, parts) == find_footprints(read())
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert type(other.footprints) is dict and other == graph


def test_parameters_are_not_held_for_them() -> None:
    model = read()
    graph, held = model.graph, [weakref.ref(tensor) for tensor in model.parameters.values()]
    del model
    gc.collect()
    assert held and not any(ref() is not None for ref in held)
    assert graph.footprints


def sought_by_ranks() -> int:
    """Run on each rank: how often it has sought footprints."""
    with patch.object(footprints, "find_footprints", sought := Sought()):
        model = read()
        topology = cluster([2], CPU)
        with Trainer(model, (data_parallel(model.graph, topology), topology), optimizer=sgd) as trainer:
            trainer.step(*model.example_inputs)
    return sought.count


def test_ranks_that_are_handed_their_part_do_not_ask(pool: Pool) -> None:
    assert pool.run(sought_by_ranks, ranks=2)[1] == 0
