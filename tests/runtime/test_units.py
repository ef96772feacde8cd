"""Tiles that are computed together: which ones, and that they compute what they do one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from soap import api
from soap.cluster.presets import local_topology
from soap.runtime.program import prepared
from soap.runtime.program.program import compile_program
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL
from tests.extent import often

CONFIGS = ("gpt:tiny", "resnet50:tiny", "rnnlm:tiny", "dlrm:tiny")


def _units(spec: str, name: str, devices: int, rank: int) -> list[list[str]]:
    """Names of the operators of each unit."""
    model, topology = api.load(f"zoo:{spec}"), api.load_cluster(f"local:{devices}")
    plan = build_plan(model.graph, CLASSICAL[name](model.graph, topology), topology)
    program = compile_program(plan)
    return [[plan.operator(plan.tiles[tile]).name for tile in unit.tiles] for unit in prepared.units_of(program, model, rank).values()]


def test_data_parallelism_is_one_unit() -> None:
    graph = api.load("zoo:gpt:tiny", plan_only=True).graph
    assert _units("gpt:tiny", "data_parallel", 2, 1) == [[op.name for op in graph.operators]]


def test_sums_end_units() -> None:
    found = _units("gpt:tiny", "megatron", 2, 0)
    assert len(found) > 4
    assert any(unit[-1].endswith("attention.output") for unit in found)


@pytest.mark.slow
def test_running_statistics_stay_outside() -> None:
    names = [name for unit in _units("resnet50:tiny", "data_parallel", 2, 0) for name in unit]
    assert names
    assert not [name for name in names if "norm" in name and "statistics" not in name]


def _losses(spec: str, compiled: bool, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, topology = api.load(f"zoo:{spec}", dtype="float64"), local_topology(1)
    strategy = CLASSICAL["data_parallel"](model.graph, topology)
    with Trainer(model, (strategy, topology), compiled=compiled, **options) as trainer:
        return [trainer.step(*model.example_inputs) for _ in range(3)], trainer.state_dict()


def _same(spec: str) -> None:
    losses, state = _losses(spec, True)
    expected, others = _losses(spec, False)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert losses[0] != losses[-1]
    for name, tensor in others.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("spec", often(list(CONFIGS), {*CONFIGS} - {"resnet50:tiny", "dlrm:tiny"}))
def test_flat_programs_compute_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def uncompiled(flat: torch.fx.GraphModule, dynamic: bool) -> Callable[..., Any]:
        ran.append(len(flat.graph.nodes))
        return flat

    monkeypatch.setattr(torch, "compile", uncompiled)
    _same(spec)
    assert sum(ran) > 10


@pytest.mark.long
def test_compiled_programs_compute_the_same() -> None:
    if prepared.missing_compiler():
        pytest.skip(f"{prepared.missing_compiler()}")
    _same("dlrm:tiny")
