"""Updates, copies and what the runtime adds to a tile."""

from __future__ import annotations

import pytest
import torch

from soap.measure import upkeep_timing
from soap.measure.upkeep_timing import BY_STATES, time_copy, time_runtime, time_update

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_timing, "SECONDS", 0.01)


@pytest.mark.parametrize("states", list(BY_STATES))
def test_optimizers_keep_as_many_tensors_as_they_are_listed_for(states: int) -> None:
    tensor = torch.zeros(8, requires_grad=True)
    tensor.grad = torch.ones(8)
    optimizer = BY_STATES[states]([tensor])
    optimizer.step()
    kept = [value for value in optimizer.state[tensor].values() if isinstance(value, torch.Tensor) and value.shape == tensor.shape]
    assert len(kept) == states


@pytest.mark.parametrize("states", list(BY_STATES))
def test_an_update_has_a_time(states: int) -> None:
    assert time_update(states, 4096, CPU).ns > 0


def test_a_copy_has_a_time() -> None:
    assert time_copy(4096, CPU).ns > 0


def test_a_tile_that_computes_nothing_has_a_time() -> None:
    found = time_runtime(CPU)
    assert found.ns > 0 and found.repetitions >= 2
    assert not torch.distributed.is_initialized()
