"""What reports compare with: the compiled simulator says what the other one says, to the nanosecond and the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap import api
from soap.api.baselines import baselines
from soap.profiles.roofline import RooflineCosts
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.named import usual_names
from tests.graph_builder import mlp
from tests.strategies import CPU, cluster


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [2**30, 10_000])
def test_the_compiled_simulator_says_the_same(memory_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = mlp(), cluster([2, 2], replace(CPU, memory_bytes=memory_bytes))
    found = []
    for compiled in (True, False):
        asked: list[str] = []
        monkeypatch.setattr(IncrementalSimulator, "begins_at_once", staticmethod(lambda answer=compiled: answer))
        monkeypatch.setattr(Simulator, "_simulate", _noted(asked))
        found.append(baselines(Simulator(graph, topology, RooflineCosts(topology))))
        assert bool(asked) != compiled
        monkeypatch.undo()
    ways = [way.name for way in api.fits(graph, topology, costs="estimate").ways[:1]]  # where data parallelism does not fit
    assert found[0] == found[1] and [*found[0]] == [*usual_names(graph, topology), *ways]
    assert bool(ways) == (memory_bytes < 2**30) and all(found[0][name]["overflow_bytes"] == 0 for name in ways)
    assert {"data_parallel", "zero1", "fsdp", "hsdp", "megatron", "pipeline"} < {*found[0]}
    assert any(own["overflow_bytes"] for own in found[0].values()) == (memory_bytes < 2**30)


def _noted(asked: list[str]) -> object:
    simulate = Simulator._simulate

    def noted(self: Simulator, strategy: object) -> tuple[int, int]:
        asked.append("played")
        return simulate(self, strategy)  # type: ignore[arg-type]

    return noted
