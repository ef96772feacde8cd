"""Buffers that the forward pass moves: plans on two and four ranks train and leave buffers as eager PyTorch does, with equal copies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.errors import StrategyError
from soap.model.graph import KEEP_STATE, NEXT_STATE, OperatorGraph
from soap.search.constraints import parse
from soap.search.descent import propose_descent
from soap.search.space import build_space
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import OpConfig, Strategy, settled, settled_config
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.extent import often, so_many
from tests.kept_models import ModelFiles
from tests.runtime.exact_modules import train_plainly, worst
from tests.runtime.pool import Pool
from tests.runtime.state_modules import EXAMPLES, SAMPLES, Noisy, batches_of, checked, go_on, module_of, train
from tests.search.toys import drawn_from

TOLERANCE = 1e-9
FIXED = ("codebook",)
"""Of whose number of samples torch.export makes a fact."""


def export_example(name: str, path: Path) -> None:
    export_model(module_of(name), batches_of(name, [SAMPLES])[0], path=path, dynamic_batch=name not in FIXED)


FILES = ModelFiles("state", export_example)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Each example exported in float64."""
    return FILES


def strategies(graph: OperatorGraph, ranks: int, randoms: int) -> dict[str, Strategy]:
    topology = local_topology(ranks)
    result = {name: CLASSICAL[name](graph, topology) for name in ("data_parallel", "model_parallel", "megatron")}
    return result | {f"random {i}": random_strategy(graph, topology, random.Random(i)) for i in range(randoms)}


def assert_exact(
    pool: Pool, path: str, name: str, ranks: int, sizes: Sequence[Sequence[int]], options: Mapping[str, Any] | None = None, randoms: int = 1
) -> None:
    given = iter(batches_of(name, [size for step in sizes for size in step]))
    steps = [[next(given) for _ in step] for step in sizes]
    expected = train_plainly(module_of(name), [[tuple(part) for part in parts] for parts in steps])
    for kind, strategy in strategies(load_model(path).graph, ranks, randoms).items():
        results = pool.run(train, path, strategy, ranks, steps, options, ranks=ranks)
        expected.losses = expected.losses[: len(steps) - 1]
        assert worst(results[0].trained, expected) < TOLERANCE, (kind, worst(results[0].trained, expected))
        for result in results:
            for buffer in load_model(path).state.values():
                assert torch.equal(result.buffers[buffer], results[0].buffers[buffer]), (kind, buffer)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", often(list(EXAMPLES), ["warm-up"]))
def test_every_plan_moves_buffers_as_eager_does(four: Pool, files: dict[str, str], name: str, ranks: int) -> None:
    assert_exact(four, files[name], name, ranks, [[SAMPLES]] * 4, randoms=so_many(0, 6))


@pytest.mark.parametrize("name", often(["queue", "hooked"], []))
def test_each_micro_batch_moves_buffers(four: Pool, files: dict[str, str], name: str) -> None:
    """Also of other sizes than the model's, fewer than devices, and fewer of them."""
    assert_exact(four, files[name], name, 4, [[6, 6], [6, 3], [2, 5], [6]], {"accumulate": 2}, randoms=0)


@pytest.mark.parametrize("name", often(["observed", "balanced", "flags"], ["flags"]))
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "float64"])
def test_a_check_compares_moved_buffers(four: Pool, files: dict[str, str], name: str, dtype: str) -> None:
    for kind, strategy in strategies(load_model(files[name]).graph, 4, 2).items():
        result = four.run(checked, files[name], strategy, 4, [6, 4, 6], name, dtype)[0]
        assert result.passed, (kind, result.worst)
        assert result.compared == 3 * (1 + 2 * len(load_model(files[name]).parameters) + len(load_model(files[name]).buffers))


def test_random_numbers_in_buffers_are_the_same_on_all_ranks(four: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "noisy.pt2")
    export_model(Noisy().double(), batches_of("warm-up", [SAMPLES])[0], path=path)
    for kind, strategy in strategies(load_model(path).graph, 4, 2).items():
        result = four.run(checked, path, strategy, 4, [SAMPLES] * 3, "warm-up", "float64")[0]
        assert result.passed, (kind, result.worst)


@pytest.mark.parametrize("name", often(["warm-up", "gan"], ["gan"]))
def test_a_run_goes_on_from_a_checkpoint(four: Pool, files: dict[str, str], name: str, tmp_path: Path) -> None:
    """On other ranks by another plan, with buffers that are entries of the state dict and others."""
    graph = load_model(files[name]).graph
    first, then = CLASSICAL["data_parallel"](graph, local_topology(4)), random_strategy(graph, local_topology(2), random.Random(5))
    four.run(go_on, files[name], first, 4, name, range(2), str(tmp_path))
    found = four.run(go_on, files[name], then, 2, name, range(2, 5), str(tmp_path), ranks=2)[0]
    module = module_of(name)
    expected = train_plainly(module, [[tuple(batch)] for batch in batches_of(name, [SAMPLES] * 5)])
    expected.losses = expected.losses[2:]
    assert worst(found, expected) < TOLERANCE
    module.load_state_dict(found.state)


def test_other_configurations_than_the_settled_ones_are_refused(files: dict[str, str]) -> None:
    graph, topology = load_model(files["codebook"]).graph, local_topology(2)
    strategy = CLASSICAL["data_parallel"](graph, topology)
    strategy.validate(graph, 2)
    for name, words in ((KEEP_STATE, "keeps changed buffers on every device"), (NEXT_STATE, "assembles the buffers")):
        wrong = strategy.with_operator(name, OpConfig((), (1,)))
        with pytest.raises(StrategyError, match=words):
            wrong.validate(graph, 2)
        assert settled(graph, wrong, 2) == strategy
    with pytest.raises(StrategyError, match=f"operator '{KEEP_STATE}' has one configuration alone"):
        parse(graph, 2, [(KEEP_STATE, "@0")], [])


def test_a_search_leaves_the_settled_operators_alone(files: dict[str, str]) -> None:
    graph = load_model(files["codebook"]).graph
    space, draw = build_space(graph, 4, allowed=parse(graph, 4, [("*", "@0-1")], [])), random.Random(0)
    fixed = {graph.index[NEXT_STATE], graph.index[KEEP_STATE]}
    assert not fixed & set(space.movable)
    references = tuple(CLASSICAL[name](graph, local_topology(4)) for name in ("model_parallel", "data_parallel"))
    space, strategy = replace(space, references=references), references[1]
    for _ in range(200):
        proposal = propose_descent(draw, space, strategy)
        strategy = strategy if proposal is None else proposal.strategy
        strategy.validate(graph, 4)
    for position in fixed:
        assert [drawn_from(space.operators[position], draw)] * 2 == [settled_config(graph.operators[position], 4)] * 2
