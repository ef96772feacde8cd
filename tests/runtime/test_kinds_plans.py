"""Each kind of model, and random modules, under classical and random strategies on four ranks: they train like one process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from soap.api import export
from soap.cluster.presets import local_topology
from soap.strategy.classical import CLASSICAL, random_strategy
from tests.extent import often
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced
from tests.tracing.kinds import KINDS
from tests.tracing.random_programs import draw_module
from tests.tracing.test_kinds import TRAINED, exported

FOUR = local_topology(4)
NAMED = ("data_parallel", "model_parallel", "megatron", "one_weird_trick")
QUICK = ("in_batch_negatives", "moe_top_2")


def _trains(four: Pool, name: str, path: str, dtype: str | None, classical: tuple[str, ...], randoms: int) -> float:
    """The largest error of all plans."""
    graph = traced(path, dtype).graph
    strategies = {kind: CLASSICAL[kind](graph, FOUR) for kind in classical}
    strategies |= {f"random {i}": random_strategy(graph, FOUR, random.Random(f"{name}/{i}")) for i in range(randoms)}
    worst = 0.0
    for kind, strategy in strategies.items():
        result = four.run(checked, path, dtype, strategy, FOUR)[0]
        assert result.passed, (name, kind, result.worst)
        worst = max(worst, result.worst.error)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_kind_trains_like_one_process(four: Pool, name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = exported(name, tmp_path)
    _trains(four, name, path, "float64", (), 1)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_every_kind_trains_like_one_process(four: Pool, name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Four classical strategies and three random ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = exported(name, tmp_path)
    record_property("tally", ["kinds of models under seven plans: worst error", name, _trains(four, name, path, "float64", NAMED, 3)])


@pytest.mark.parametrize("seed", often(range(40), (0,), pytest.mark.slow))
def test_random_programs_train_like_one_process(four: Pool, seed: int, tmp_path: Path) -> None:
    """In the module's own type; by one random strategy each, data parallelism and the placement of whole operators."""
    module, args = draw_module(seed)
    path = str(tmp_path / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(module, args, path=path)
    _trains(four, f"random {seed}", path, None, ("data_parallel", "model_parallel"), 1)


def test_the_quick_ones_are_kinds() -> None:
    assert set(QUICK) <= set(KINDS)
