"""Steps in micro-batches train like one process in float64: losses over the whole batch, dropout, barriers, pipelines by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.cluster.presets import local_topology
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.plan.planning import build_plan
from soap.runtime.check import CheckResult, check
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.strategy.recomputation import recomputed, repeatable
from soap.strategy.stages import chunks_of, devices_of_stages
from soap.strategy.sync import SHARDED_STATE
from soap.tracing.export import export_model
from tests.extent import often, so_many
from tests.micro_batches import by_hand, in_micro_batches, repeatable_parts
from tests.runtime.exact_modules import EXAMPLES, batches, converted, module_of, train_plainly, worst
from tests.runtime.pool import Pool
from tests.runtime.test_exactness import TOLERANCE, train
from tests.runtime.traced import adam, checked, sgd, traced
from tests.transformers_models import MODELS

FOUR = local_topology(4)


def some(graph: OperatorGraph, count: int) -> dict[str, Strategy]:
    """Data parallelism on two devices, all of it run twice, and random strategies, in so many micro-batches."""
    rng = random.Random(count)
    two = CLASSICAL["data_parallel"](graph, local_topology(2))
    found = {"two": two, "recompute": recomputed(graph, two, sorted(repeatable(graph)))}
    found |= {f"random {i}": random_strategy(graph, local_topology(2 + i % 3), random.Random(i)) for i in range(so_many(2, 4))}
    return {kind: in_micro_batches(graph, strategy, count, rng, 4) for kind, strategy in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", often(EXAMPLES, []))
def test_examples_train_as_a_plain_loop(four: Pool, tmp_path: Path, name: str) -> None:
    """With a batch norm, weighted losses with ignored classes, and tied weights; also in smaller batches, down to one sample, and larger
    ones; accumulated and clipped."""
    path = str(tmp_path / f"{name}.pt2")
    export_model(module_of(name), batches(name, [6])[0], path=path, dynamic_batch=True)
    sizes = [[6], [5], [1], [9]] if name != "shared" else [[6, 6], [5, 1], [9]]
    options = {"accumulate": 2, "clip_norm": 0.2} if name == "shared" else {}
    given = iter([tuple(converted(batch, torch.float64)) for batch in batches(name, [size for step in sizes for size in step])])
    steps = [[next(given) for _ in step] for step in sizes]
    expected = train_plainly(module_of(name).double(), steps, clip_norm=options.get("clip_norm"))
    graph = traced(path, "float64").graph
    for count in (2, 4)[: so_many(1, 2)]:
        for kind, strategy in some(graph, count).items():
            results = four.run(train, path, strategy, steps, options)
            assert all(result.losses == results[0].losses for result in results)
            assert worst(results[0], expected) < TOLERANCE, (count, kind, worst(results[0], expected))


class Contrastive(nn.Module):
    """Two views of each sample, of which each finds its own among the batch's; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(5, 8), nn.Linear(5, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(self.drop(self.left(x)), dim=1), F.normalize(self.right(y), dim=1)
        return F.cross_entropy(5 * a @ b.T, own)


@pytest.mark.slow
def test_a_contrastive_loss_is_a_barrier(four: Pool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = str(tmp_path / "contrastive.pt2")
    export_model(Contrastive().train(), (torch.randn(7, 5), torch.randn(7, 5), torch.arange(7)), path=path)
    graph = traced(path, "float64").graph
    assert MicroBatches(graph, 2).barriers
    for count in (2, 4, 7)[-so_many(1, 3) :]:
        for kind, strategy in some(graph, count).items():
            results = four.run(checked, path, "float64", strategy, FOUR)
            assert results[0].passed and results[0].tolerance == TOLERANCE, (count, kind, results[0].worst)


PAIRS = [(model, count) for model in ("alexnet", "rnnlm", "gpt", "dlrm", "lm1b", "nmt") for count in (2, 4, 7)]


@pytest.mark.long  # `test_pipelines` and `test_mixtures` have gpt in micro-batches
@pytest.mark.parametrize("pair", PAIRS)
def test_zoo_models(four: Pool, pair: tuple[str, int]) -> None:
    model, count = pair
    graph = traced(f"zoo:{model}:tiny", "float64").graph
    for number in range(so_many(1, 4)):
        rng = random.Random(f"{model}/{count}/{number}")
        strategy = in_micro_batches(graph, random_strategy(graph, FOUR, rng), count, rng, 4)
        results = four.run(checked, f"zoo:{model}:tiny", "float64", strategy, FOUR)
        assert results[0].passed and results[0].tolerance == TOLERANCE, (number, results[0].worst)


FAMILIES = ("gpt2", "llama", "t5", "clip")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name in FAMILIES] or [*MODELS][:3])
def test_transformers(four: Pool, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    path = str(tmp_path / f"{name}.pt2")
    export_model(module, (), inputs, path=path)
    graph = traced(path, "float64").graph
    samples = MicroBatches(graph, 1).samples
    assert samples is not None
    for count in sorted({min(count, samples) for count in (2, 4, 7)}):
        rng = random.Random(f"{name}/{count}")
        strategy = in_micro_batches(graph, random_strategy(graph, FOUR, rng), count, rng, 4)
        results = four.run(checked, path, "float64", strategy, FOUR)
        assert results[0].passed and results[0].tolerance == TOLERANCE, (count, results[0].worst)



def pipelined(strategy: Strategy, optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> CheckResult:
    """On each rank: two steps of gpt whose stages run by 1F1B."""
    model = traced("zoo:gpt:tiny", "float64")
    with Trainer(model, build_plan(model.graph, strategy, FOUR), optimizer=optimizer, seed=5) as trainer:
        return check(trainer, lambda step: model.example_inputs, optimizer, 2)


@pytest.mark.parametrize("count", often([2, 4, 7], [4], pytest.mark.slow))
def test_pipelines_by_hand(four: Pool, count: int) -> None:
    """Three stages, the last on two devices, with tensor splits, states in parts, and operators that run twice; 1F1B."""
    graph = traced("zoo:gpt:tiny", "float64").graph
    borders = [graph.operators[len(graph.operators) * part // 3].name for part in (1, 2)]
    rng = random.Random(count)
    strategy = by_hand(graph, borders, [(0,), (1,), (2, 3) if count < 7 else (3,)], "1f1b")
    strategy = in_micro_batches(graph, strategy, count, rng, 4)
    split = CLASSICAL["megatron"](graph, local_topology(2))
    for op in graph.operators[len(graph.operators) * 2 // 3 :]:
        config = split.operators[op.name]
        if len({*config.degrees}) > 1 and config.degrees[0] == 1:
            strategy = strategy.with_operator(op.name, config.placed(config.degrees, tuple(2 + d for d in config.devices), config.replicas))
    for own in (strategy, recomputed(graph, strategy, repeatable_parts(graph, count)[::2])):
        own = replace(own, parameters={tensor.name: SHARDED_STATE for tensor in graph.parameters[::2]})
        for optimizer in (sgd, adam):
            results = four.run(pipelined, own, optimizer)
            assert results[0].passed and results[0].tolerance == TOLERANCE, results[0].worst


class Gated(nn.Module):
    """Embedding, two gated layers with norms, and a head, as in Llama but for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.RMSNorm(8), "gate": nn.Linear(8, 16), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            y = layer["norm"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return F.cross_entropy(self.head(x).flatten(0, 1), own.flatten())


@pytest.mark.parametrize("base", ["megatron", "sequence_parallel"])
@pytest.mark.parametrize("shape", often([":2x2+recompute", "+zero1", ":2x2+zero1", "+fsdp"], [":2x2+recompute"], pytest.mark.slow))
def test_groups_and_stages_and_micro_batches_by_name(four: Pool, tmp_path: Path, base: str, shape: str) -> None:
    """Both matrices of a gate are split like the one that reads their product: one sum a layer. All operators of a stage are on its
    devices, and ranks train as one process."""
    torch.manual_seed(5)
    path = str(tmp_path / "gated.pt2")
    export_model(Gated().train(), (torch.randint(0, 24, (8, 6)), torch.randint(0, 24, (8, 6))), path=path)
    graph, topology = traced(path, "float64").graph, FOUR
    name = f"{base if ':' in shape else f'{base}:2'}{shape}+microbatches:4"
    strategy = named(name, graph, topology)
    pairs = {op.name: zip(op.factors, strategy.operators[op.name].degrees, strict=True) for op in graph.operators}
    split = {own: [factor.name for factor, degree in pair if degree > 1][-1:] for own, pair in pairs.items()}
    for layer in ("layers.0", "layers.1"):
        assert [split[f"{layer}.{own}"] for own in ("gate", "up", "down")] == [["n"], ["n"], ["k"]]
    stages, chunks = devices_of_stages(graph, strategy), chunks_of(graph, strategy.stages)
    assert all({*strategy.operators[op.name].devices} == stages[chunk] for op, chunk in zip(graph.operators, chunks, strict=True))
    results = four.run(checked, path, "float64", strategy, topology)
    assert results[0].passed and results[0].tolerance == TOLERANCE, results[0].worst
