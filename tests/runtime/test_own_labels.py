"""Ranks that are given their own labels alone count them together, and train as a plain loop does on whole batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan, lower
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.recomputation import recomputed, repeatable
from tests.micro_batches import by_hand
from tests.runtime.exact_modules import Batch, Trained, batches, converted, module_of, sgd, train_plainly, worst
from tests.runtime.pool import Pool
from tests.runtime.test_exactness import FILES, FOUR, Options, part_of
from tests.runtime.traced import traced


def losses_of(graph: OperatorGraph) -> list[str]:
    return [op.name for op in graph.operators if op.own_inputs]


def data_parallel(graph: OperatorGraph) -> Strategy:
    return CLASSICAL["data_parallel"](graph, FOUR)


def replicated(graph: OperatorGraph) -> Strategy:
    """Two replicas of each loss, each on two ranks; one rank has tiles of both."""
    found = data_parallel(graph)
    for name in losses_of(graph):
        degrees = tuple(2 if i == 0 else 1 for i in range(len(graph.operators[graph.index[name]].factors)))
        found = found.with_operator(name, OpConfig(degrees, (3, 1, 1, 0), 2))
    return found


WAYS: dict[str, Callable[[OperatorGraph], Strategy]] = {
    "data parallel": data_parallel,
    "tensor parallel": lambda graph: CLASSICAL["megatron"](graph, FOUR),
    "replicated": replicated,
    "recomputed": lambda graph: recomputed(graph, data_parallel(graph), sorted(repeatable(graph))),
    "in micro-batches": lambda graph: replace(CLASSICAL["data_parallel"](graph, local_topology(3)), microbatches=2),
    "a pipeline": lambda graph: replace(by_hand(graph, losses_of(graph)[:1], [(2, 0), (1, 3)], "1f1b"), microbatches=3),
    "random": lambda graph: random_strategy(graph, FOUR, random.Random(3)),
}


def train(spec: str, strategy: Strategy, steps: Sequence[Sequence[Batch]], options: Options) -> tuple[Trained, list[int], list[str]]:
    """What a rank does; which labels it reads of a batch of 6; what is counted in one more step."""
    model = traced(spec)
    with Trainer(model, (strategy, FOUR), optimizer=sgd, **options) as trainer:
        losses = [trainer.step(*(part_of(trainer, part) for part in parts)) for parts in steps]
        found = Trained(losses, trainer.state_dict())
        events = trainer.trace(part_of(trainer, steps[0][0]))
        counted = sorted({event.name for event in events if event.name.startswith("count labels")})
        return found, trainer.samples()["labels"].indices, counted


def assert_exact(four: Pool, way: str, options: Options) -> list[list[int]]:
    """Batches whose samples have labels that count nothing, a little or all; some are smaller than the number of ranks."""
    graph = traced(FILES["weighted"]).graph
    strategy = WAYS[way](graph)
    sizes = [[6, 6], [5, 7], [6]] if strategy.microbatches > 1 else [[6, 6], [5, 1], [3]]
    flat = iter([tuple(converted(batch, torch.float64)) for batch in batches("weighted", [size for step in sizes for size in step])])
    steps = [[next(flat) for _ in step] for step in sizes]
    results = four.run(train, FILES["weighted"], strategy, steps, {"accumulate": 2, **options})
    assert worst(results[0][0], train_plainly(module_of("weighted").double(), steps)) < 1e-9
    topology = replace(FOUR, own_samples=True)
    tasks = lower(build_plan(graph, strategy, topology), topology, RooflineCosts(topology)).tasks
    predicted = sorted(task.name for task in tasks if task.name.startswith("count labels"))
    assert len(losses_of(graph)) == 2
    assert all(counted == predicted for _, _, counted in results)
    return [labels for _, labels, _ in results]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_share_labels_out(four: Pool, way: str) -> None:
    """Both losses read one flattened tensor, which is cut inside samples: so a rank reads labels of all of them, or none, and counts its
    own positions. ``test_part_batches`` has models whose labels are cut by samples."""
    assert {label for own in assert_exact(four, way, {}) for label in own} == {*range(6)}


@pytest.mark.long
def test_compiled_tiles_are_told_counts(four: Pool) -> None:
    assert_exact(four, "data parallel", {"compiled": True})
