"""Ranks that are given only the samples that they read train like one process; what is wrong with parts is one line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import soap
from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.plan.samples import Samples
from soap.runtime.check import check
from soap.runtime.inputs import PartBatch
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import Strategy
from tests.extent import FEW, so_many
from tests.graph_builder import mlp
from tests.micro_batches import in_micro_batches
from tests.runtime.cases import optimizer, train
from tests.runtime.exact_modules import batches, converted, module_of, train_plainly, worst
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, random_order, split
from tests.runtime.pool import Pool
from tests.runtime.test_exactness import FILES, strategies
from tests.runtime.test_exactness import train as train_file
from tests.runtime.test_training import NAMED, assert_equal_to_one_process
from tests.runtime.traced import checked, sgd, traced
from tests.strategies import cases

FOUR = local_topology(4)


@pytest.mark.parametrize("name", ["uneven data parallel", "replicas", "several tiles on a device", "tied weight split in two ways"])
def test_named_strategies_train_like_one_process(pool: Pool, name: str) -> None:
    assert_equal_to_one_process(pool.run(train, NAMED[name], None, 2, False, True))


@given(cases(max_devices=3), st.randoms(use_true_random=False))
@settings(FEW, suppress_health_check=list(HealthCheck))
def test_random_strategies_train_like_one_process(pool: Pool, case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, strategy, topology)
    assert_equal_to_one_process(pool.run(train, plan, random_order(plan, rng), 2, False, True))


def test_parts_are_what_indexing_by_their_numbers_gives() -> None:
    whole, read = torch.arange(24).reshape(8, 3), {"x": Samples(0, 8, ((1, 3), (6, 8))), "y": Samples(None, 0, ())}
    part = PartBatch.cut([whole, whole], read)
    assert torch.equal(part.tensors[0], whole[read["x"].indices]) and torch.equal(part.tensors[1], whole) and part.size == 8


def test_traced_steps_are_given_parts_as_well(pool: Pool) -> None:
    assert_equal_to_one_process(pool.run(train, NAMED["several tiles on a device"], None, 2, True, True))


def bytes_given(spec: str, strategy: Strategy) -> tuple[int, int]:
    """Bytes of the batch that this rank was given, and of the whole batch; the step is compared with one process."""
    model = traced(spec)
    with Trainer(model, (strategy, FOUR), optimizer=sgd) as trainer:
        part = PartBatch.cut(model.example_inputs, trainer.samples())
        assert check(trainer, lambda _: [part], sgd, 1, whole=lambda _: model.example_inputs).passed
        return trainer.input_bytes, sum(tensor.nbytes for tensor in model.example_inputs)


@pytest.mark.parametrize("model", ["dlrm", "gpt"])
def test_each_rank_of_data_parallelism_is_given_its_share(four: Pool, model: str) -> None:
    """Labels of a mean over what is not to be ignored as well, which all ranks count together (``plan.samples``)."""
    spec = f"zoo:{model}:tiny"
    strategy = CLASSICAL["data_parallel"](traced(spec).graph, FOUR)
    for own, whole in four.run(bytes_given, spec, strategy):
        assert own * 4 == whole


class Summed(nn.Sequential):
    """A sum over labels, of which some are ignored, divided by what the module is given."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(super().forward(x), labels, reduction="sum") / count


def test_labels_of_a_sum_are_shared_out(four: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, -100, 2] * 4)
    path = tmp_path / "m.pt2"
    soap.export(Summed(nn.Linear(8, 3)), (torch.randn(16, 8), labels, torch.tensor(12.0)), path=path, verify=False)
    graph = traced(str(path)).graph
    for own, whole in four.run(bytes_given, str(path), CLASSICAL["data_parallel"](graph, FOUR)):
        assert (own - 8) * 4 == whole - 8  # all but the number by which it is divided


@pytest.mark.long
@pytest.mark.parametrize("model", ["alexnet", "rnnlm", "gpt", "dlrm", "lm1b", "nmt"])
def test_zoo_models(four: Pool, model: str) -> None:
    """By random strategies, in micro-batches, and several batches accumulated."""
    spec = f"zoo:{model}:tiny"
    graph = traced(spec).graph
    for number in range(so_many(2, 6)):
        rng = random.Random(number)
        strategy = random_strategy(graph, FOUR, rng)
        if number % 2:
            strategy = in_micro_batches(graph, strategy, 2, rng, 4)
        results = four.run(checked, spec, "float64", strategy, FOUR, 2, sgd, 1 + number % 2, None, True)
        assert results[0].passed and results[0].tolerance == 1e-9, (number, results[0].worst)


@pytest.mark.long
@pytest.mark.parametrize("name", ["weighted"])
def test_batches_of_other_sizes_accumulated(four: Pool, name: str) -> None:
    """Uneven, smaller than the number of ranks, one sample."""
    sizes = [[6, 6], [5, 1], [3], [9, 6]]
    flat = iter([tuple(converted(batch, torch.float64)) for batch in batches(name, [size for step in sizes for size in step])])
    steps = [[next(flat) for _ in step] for step in sizes]
    expected = train_plainly(module_of(name).double(), steps)
    found = strategies(traced(FILES[name]).graph)
    for kind in ("three", "recompute", "random 0"):
        results = four.run(train_file, FILES[name], found[kind], steps, {"accumulate": 2}, (), "float64", False, True)
        assert worst(results[0], expected) < 1e-9, (kind, worst(results[0], expected))


def run_failing(what: str) -> str:
    """Rank 1 reads all of "x", rank 0 the first half, rank 2 the second one."""
    plan = plan_of(mlp(batch=8), split((0, 1), b=2), fc0=split((0, 1, 1, 2), 2, b=2), cross_entropy=split((0, 1, 2), b=3))
    torch.manual_seed(0)
    model = HandModel(plan.graph)
    try:
        with Trainer(model, plan, optimizer=optimizer, dtype=torch.float64) as trainer:
            whole = model.inputs(trainer.rank if what == "other" else 0)
            part = PartBatch.cut(whole, trainer.samples())
            if what == "short" and trainer.rank == 1:
                part = PartBatch([tensor[1:] for tensor in part.tensors], 8)
            elif what == "whole" and trainer.rank == 1:
                trainer.step(*whole)
            elif what == "tensors":
                part = PartBatch(part.tensors[:1], 8)
            elif what == "mixed":
                trainer.step(part, *whole)
            elif what == "many":
                trainer.step(part, part)
            elif what == "size" and trainer.rank == 2:
                part = PartBatch(part.tensors, 9)
            trainer.step(part)
    except RuntimeFailure as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other", "rank 1 was given other samples 0 to 3 of input 'x' than rank 0: a sample is the same on all ranks that read it; seed"),
        ("short", "input 'x' has 7 samples in a part of a batch: expected 8, those of a batch of 8 that this rank reads (Trainer.samples)"),
        ("whole", "rank 1 was given the whole batch, rank 0 its part of the batch; expected the same on all ranks"),
        ("tensors", "1 tensors in a part of a batch: expected 2 (x, y)"),
        ("mixed", "a Tensor given to a step beside parts of batches: expected parts alone, or tensors alone"),
        ("many", "2 parts of batches given to a step: expected one"),
        ("size", "input 'x' has shape (9, 16): expected (8, 16), the whole batch, on every rank"),
    ],
)
def test_one_line_for_what_users_get_wrong(pool: Pool, what: str, message: str) -> None:
    for found in pool.run(run_failing, what):
        assert message in found
        assert "\n" not in found
