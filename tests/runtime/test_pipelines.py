"""Pipelines train like one process in float64: every schedule, with splits inside stages, skip connections, tied weights, barriers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph, TensorKind
from soap.plan.planning import build_plan
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy
from soap.strategy.offloading import offloadable, with_offload
from soap.strategy.recomputation import recomputed
from soap.strategy.sync import SHARDED, SHARDED_STATE
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.extent import ALL, often, so_many
from tests.micro_batches import by_hand, drawn_pipeline, repeatable_parts
from tests.runtime.exact_modules import batches, converted, module_of, train_plainly, worst
from tests.runtime.pool import Pool
from tests.runtime.test_exactness import TOLERANCE, train
from tests.runtime.test_micro_batches import Contrastive
from tests.runtime.traced import checked, traced
from tests.transformers_models import MODELS

FOUR = local_topology(4)
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v", "dualpipe-v")
COUNTS = (2, 4, 7)


def pipeline(graph: OperatorGraph, schedule: str, count: int, name: str) -> Strategy:
    """A drawn pipeline. Some of its operators run twice or offload, and some states or values are in parts. With barriers the schedule is
    GPipe: any other is refused, or its order happens to meet them."""
    rng = random.Random(f"{name}/{schedule}/{count}")
    strategy = drawn_pipeline(graph, schedule, count, rng, 4)
    if MicroBatches(graph, count).barriers:
        try:
            build_plan(graph, strategy, FOUR)
        except StrategyError as error:
            assert "use schedule 'gpipe'" in str(error)
            strategy = drawn_pipeline(graph, "gpipe", count, rng, 4)
    again = [own for own in repeatable_parts(graph, count) if rng.random() < 0.2]
    kept = {tensor.name: rng.choice((SHARDED_STATE, SHARDED)) for tensor in graph.parameters if rng.random() < 0.4}
    away = [own for own in sorted(offloadable(graph)) if own not in again and rng.random() < 0.2]
    return replace(with_offload(recomputed(graph, strategy, again), away, True), parameters=kept)


def require_exact(pool: Pool, spec: str, schedule: str, count: int, name: str) -> None:
    graph = traced(spec, "float64").graph
    samples = MicroBatches(graph, 1).samples
    assert samples is not None
    result = pool.run(checked, spec, "float64", pipeline(graph, schedule, min(count, samples), name), FOUR)[0]
    assert result.passed and result.tolerance == TOLERANCE, (name, schedule, count, result.worst)


def counts(name: str, schedule: str) -> list[int]:
    """Numbers of micro-batches, drawn for this case; all of them in the largest extent."""
    return random.Random(f"{name}/{schedule}").sample(COUNTS, so_many(1, len(COUNTS)))


ZOO = [(model, schedule) for model in ("gpt", "nmt", "rnnlm", "alexnet", "dlrm", "lm1b") for schedule in SCHEDULES]


OFTEN = [("gpt", schedule) for schedule in ("1f1b", "interleaved:2", "zb-h1", "zb-v")]


@pytest.mark.parametrize("case", often(ZOO, OFTEN, pytest.mark.slow), ids="-".join)
def test_zoo_models(four: Pool, case: tuple[str, str]) -> None:
    model, schedule = case
    for count in counts(model, schedule):
        require_exact(four, f"zoo:{model}:tiny", schedule, count, model)


class Recurrent(torch.nn.Module):
    """Two recurrent layers and their mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.LSTM(8, 8, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.second(self.first(x)[0])[0], y)


@pytest.mark.slow
def test_values_stay_for_weight_gradients_that_need_them(four: Pool, tmp_path: Path) -> None:
    """In recurrent layers the gradient of one weight goes through others, behind the input gradients."""
    path = str(tmp_path / "recurrent.pt2")
    export_model(Recurrent(), (torch.randn(8, 5, 8), torch.randn(8, 5, 8)), path=path)
    graph = traced(path, "float64").graph
    border = next(op.name for op in graph.operators if op.name.startswith("second"))
    strategy = replace(by_hand(graph, [border], [(0, 1), (2, 3)], "zb-h1"), microbatches=4)
    strategy = replace(strategy, parameters={tensor.name: SHARDED for tensor in graph.parameters})
    assert not MicroBatches(graph, 4).barriers
    result = four.run(checked, path, "float64", strategy, FOUR)[0]
    assert result.passed and result.tolerance == TOLERANCE, result.worst


class Auxiliary(torch.nn.Module):
    """Layers each of which has a loss of its own, as routers of experts do; the loss is their sum, each scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | float = 0.0
        for place, layer in enumerate(self.layers):
            x = layer(x).tanh()
            total = total + 0.1 * (place + 1) * x.square().mean()
        return torch.nn.functional.mse_loss(x, y) + total / 2


@pytest.mark.parametrize("schedule", often(list(SCHEDULES), ["1f1b"], pytest.mark.slow))
def test_losses_of_several_stages(four: Pool, tmp_path: Path, schedule: str) -> None:
    """They are no barrier: the gradient by each is known before their sum is."""
    path = str(tmp_path / "auxiliary.pt2")
    torch.manual_seed(1)
    export_model(Auxiliary(), (torch.randn(8, 6), torch.randn(8, 6)), path=path)
    graph = traced(path, "float64").graph
    assert len(graph.loss_terms) == 5 and not MicroBatches(graph, 4).barriers
    named = [op.name for op in graph.operators if op.name.startswith("layers.")]
    groups = [(0, 1), (2, 3)] if schedule == "interleaved:2" else [(0,), (1,), (2,), (3,)]
    for count in (3, 4)[: so_many(1, 2)]:
        strategy = replace(by_hand(graph, named[1:4], groups, schedule), microbatches=count)
        result = four.run(checked, path, "float64", strategy, FOUR)[0]
        assert result.passed and result.tolerance == TOLERANCE, (count, result.worst)
    for count in range(4, 4 + so_many(0, 3)):
        require_exact(four, path, schedule, count, "auxiliary")


FAMILIES = [(name, schedule) for name in MODELS for schedule in SCHEDULES]


@pytest.mark.parametrize("case", often(FAMILIES, []), ids="-".join)
def test_transformers(four: Pool, tmp_path: Path, case: tuple[str, str]) -> None:
    pytest.importorskip("transformers")
    name, schedule = case
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    path = str(tmp_path / f"{name}.pt2")
    export_model(module, (), inputs, path=path)
    for count in counts(name, schedule):
        require_exact(four, path, schedule, count, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", often(["shared", "conv norm"], ["shared"]))
def test_uneven_batches_train_as_a_plain_loop(four: Pool, tmp_path: Path, name: str) -> None:
    """Tied weights, and batch norm; in smaller batches, down to one sample, and larger ones; accumulated and clipped."""
    path = str(tmp_path / f"{name}.pt2")
    export_model(module_of(name), batches(name, [6])[0], path=path, dynamic_batch=True)
    sizes = ([[6, 6], [5, 1], [9]] if ALL else [[6, 6], [5, 1]]) if name == "shared" else [[6], [5], [1], [9]]
    options = {"accumulate": 2, "clip_norm": 0.2} if name == "shared" else {}
    given = iter([tuple(converted(batch, torch.float64)) for batch in batches(name, [size for step in sizes for size in step])])
    steps = [[next(given) for _ in step] for step in sizes]
    expected = train_plainly(module_of(name).double(), steps, clip_norm=options.get("clip_norm"))
    graph = traced(path, "float64").graph
    schedules = (SCHEDULES if ALL else ("1f1b", "zb-h1")) if name == "shared" else ("gpipe",)
    for schedule in schedules:
        results = four.run(train, path, pipeline(graph, schedule, 3, name), steps, options)
        assert all(result.losses == results[0].losses for result in results)
        assert worst(results[0], expected) < TOLERANCE, (schedule, worst(results[0], expected))


def lost_by(path: str, strategy: Strategy) -> tuple[set[str], bool, set[str]]:
    """Run on each rank: the parameters of which the model has no values any more, whether the state dict is what was loaded, and the
    constants that the rank has."""
    model = load_model(path, dtype="float64")
    before = {name: tensor.detach().clone() for name, tensor in model.parameters.items()}
    with Trainer(model, (strategy, FOUR), take_over=True) as trainer:
        state = trainer.state_dict()
        same = all(torch.equal(state[name], tensor) for name, tensor in before.items()) if trainer.rank == 0 else True
        trainer.step(*model.example_inputs)
        kept = {name: tensor for name, tensor in model.constants.items() if not tensor.is_meta}
        own = trainer.sizes.of().constants
        assert {name: t.data_ptr() for name, t in own.items()} == {name: t.data_ptr() for name, t in kept.items()}  # once
        return {name for name, tensor in model.parameters.items() if tensor.is_meta}, same, {*own}


def test_ranks_let_go_of_the_other_stages(four: Pool) -> None:
    spec = "zoo:gpt:tiny"
    graph = traced(spec, "float64").graph
    borders = [graph.operators[len(graph.operators) * part // 4].name for part in (1, 2, 3)]
    strategy = replace(by_hand(graph, borders, [(0,), (1,), (2,), (3,)], "1f1b"), microbatches=4)
    plan = build_plan(graph, strategy, FOUR)
    names = {tensor.name for tensor in graph.parameters}
    constants = {tensor.name for tensor in graph.tensors.values() if tensor.kind is TensorKind.CONSTANT}
    assert constants
    for rank, (lost, same, kept) in enumerate(four.run(lost_by, spec, strategy)):
        assert lost == names - {shard.parameter for shard in plan.shards if rank in shard.devices} and same
        assert 0 < len(lost) < len(names)
        assert kept == (constants if rank == 0 else set())  # places of words


@pytest.mark.slow
def test_a_contrastive_loss(four: Pool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = str(tmp_path / "contrastive.pt2")
    export_model(Contrastive().train(), (torch.randn(7, 5), torch.randn(7, 5), torch.arange(7)), path=path)
    for schedule, count in (("gpipe", 4), ("1f1b", 7)):
        require_exact(four, path, schedule, count, "contrastive")
