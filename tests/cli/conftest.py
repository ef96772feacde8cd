"""Commands are called hundreds of times here, most of them for one small model on one cluster. What they work out again each time is worked
out once (the best pipeline, next to which every report shows its plan), or left out where nothing depends on it (that found plans are made
locally optimal: ``search/test_polish``, and here those in ``POLISHED``)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from soap.api import baselines, finding
from soap.simulator.communication.prices import Communication
from soap.simulator.simulate import Simulator, costs_hash

POLISHED = {
    "test_search_ends.py", "test_it_says_how_good_the_plan_is_among_all", "test_the_bound_is_of_what_is_allowed",
    "test_a_quick_search_is_not_polished",
}  # fmt: skip
"""Files and tests."""
_made: dict[Hashable, Any] = {}


@pytest.fixture(autouse=True)
def equal_work_is_done_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    make = baselines._pipeline

    def pipeline(simulator: Simulator) -> Any:
        prices = costs_hash(simulator.costs, Communication(simulator.topology))
        memory = tuple(device.type for device in simulator.topology.devices)
        key = simulator.graph.hash, simulator.topology.hash, memory, prices, simulator.optimizer_states, simulator.training
        if key not in _made:
            _made[key] = make(simulator)
        return _made[key]

    monkeypatch.setattr(baselines, "_pipeline", pipeline)
    if POLISHED.isdisjoint((request.path.name, getattr(request.node, "originalname", ""))):
        monkeypatch.setattr(finding, "MAX_POLISHED", 0)
