from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from soap.presets import local_topology
from soap.strategies import CLASSICAL
from tests.runtime.checkpointing import save_model, train_traced
from tests.runtime.pool import Pool
from tests.runtime.traced import traced

TWO, FOUR = local_topology(2), local_topology(4)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize(("name", "kind"), [("tied", "adam"), ("tied", "sgd"), ("norm", "sgd"), ("norm", "groups")])
def test_two_ranks_data_parallel_go_on_as_four_ranks_megatron(pair: Pool, four: Pool, name: str, kind: str, tmp_path: Path) -> None:
    spec = save_model(name, tmp_path)
    graph = traced(spec, "float64").graph
    before, after = CLASSICAL["data_parallel"](graph, TWO), CLASSICAL["megatron"](graph, FOUR)
    straight = pair.run(train_traced, spec, before, TWO, kind, 6, 5, None, None)[0]
    first = pair.run(train_traced, spec, before, TWO, kind, 3, 5, None, str(tmp_path / "saved"))
    assert [rank.saved for rank in first] == [str(tmp_path / "saved" / "step-00000003")] * 2
    resumed = four.run(train_traced, spec, after, FOUR, kind, 3, 99, str(tmp_path / "saved"), None)
    assert all(rank.losses == resumed[0].losses and rank.seed == 5 for rank in resumed)
    assert first[0].losses + resumed[0].losses == pytest.approx(straight.losses, rel=1e-9)
    for key, tensor in straight.state.items():
        torch.testing.assert_close(resumed[0].state[key], tensor, rtol=1e-9, atol=1e-11)
