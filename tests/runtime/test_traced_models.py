"""Real models under real strategies on four ranks train like one process: the zoo, and ``transformers`` models exported as documented."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from soap.presets import local_topology
from soap.strategies import CLASSICAL, random_strategy
from soap.zoo import names
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced

FOUR = local_topology(4)
QUICK = ("gpt", "dlrm", "rnnlm")
"""The others take longer, having more operators even when tiny."""


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def transformers_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """GPT-2 and ResNet from small configs, saved by torch.export.save."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("transformers")
    ids, labels = torch.randint(0, 60, (8, 10)), torch.randint(0, 60, (8, 10))
    gpt2 = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=60, n_positions=16, bos_token_id=0, eos_token_id=1, resid_pdrop=0.1
    )
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=5)
    modules = {
        "gpt2": (transformers.GPT2LMHeadModel(gpt2), {"input_ids": ids, "labels": labels, "use_cache": False}),
        "resnet": (
            transformers.ResNetForImageClassification(resnet),
            {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 5, (8,))},
        ),
    }
    paths = {}
    for name, (module, kwargs) in modules.items():
        paths[name] = str(folder / f"{name}.pt2")
        torch.export.save(torch.export.export(module.train(), (), kwargs), Path(paths[name]))
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_transformers_models_train_like_one_process(four: Pool, transformers_models: dict[str, str], name: str, dtype: str) -> None:
    spec = transformers_models[name]
    graph = traced(spec, dtype).graph
    assert all(op.partitionable for op in graph.operators)
    strategies = [build(graph, FOUR) for build in CLASSICAL.values()]
    strategies += [random_strategy(graph, FOUR, random.Random(seed)) for seed in range(3)]
    for strategy in strategies:
        results = four.run(checked, spec, dtype, strategy, FOUR)
        assert results[0].tolerance == {"float32": 1e-4, "float64": 1e-9}[dtype]
        assert results[0].passed, results[0].worst
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names()])
def test_zoo_models_train_like_one_process(four: Pool, name: str) -> None:
    spec = f"zoo:{name}:tiny"
    graph = traced(spec, "float64").graph
    for strategy in (CLASSICAL["megatron"](graph, FOUR), random_strategy(graph, FOUR, random.Random(name))):
        result = four.run(checked, spec, "float64", strategy, FOUR)[0]
        assert result.passed, result.worst


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_zoo_models_under_many_strategies(four: Pool, name: str) -> None:
    spec = f"zoo:{name}:tiny"
    graph = traced(spec, "float64").graph
    for seed in range(10):
        result = four.run(checked, spec, "float64", random_strategy(graph, FOUR, random.Random(seed)), FOUR)[0]
        assert result.passed, (seed, result.worst)
