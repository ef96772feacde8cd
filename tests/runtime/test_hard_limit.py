"""A model that four devices of 600 MB can train by mixtures alone: one is found, trains under a hard limit, and is exact.

The limit is the kernel's: what a rank takes beside its program and the model as it was loaded is counted, and a rank that wants more is
killed. So the allocator's waste and kernels' workspaces count, too, for which the search leaves a tenth. As memory binds, ranks keep only
as much of what they free as fits (``runtime.system.memory_room``); all of it would take half as much again as what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import pytest
import torch
from torch.distributed import get_rank

import soap
from soap.cli.search import main
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.plan.running.order import ExecutionOrder
from soap.runtime.check import CheckResult, check
from soap.runtime.comm.launch import launch
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.system.memory_room import LEARNED
from soap.runtime.trainer import Trainer
from soap.simulator.reference import execution_order
from soap.strategy.config import Strategy
from soap.zoo.gpt import GPT, GPTConfig
from soap.zoo.recipe import tokens
from tests.control_groups import Group, limited
from tests.runtime.traced import adam

LIMIT_BYTES, BUDGET_BYTES, RANKS, STEPS = 600_000_000, 540_000_000, 4, LEARNED + 2
CONFIG, BATCH = GPTConfig(vocabulary=8192, context=256, width=512, heads=8, layers=8), 32
ALONE = ("data_parallel", "megatron", "sequence_parallel", "zero1", "fsdp", "recompute")
"""None of these fits by itself."""
CLUSTER = f"local:{RANKS}"


@dataclass(frozen=True)
class Way:
    """A plan to train by."""

    path: str
    strategy: Strategy
    order: ExecutionOrder


def trained(way: Way, topology: Topology, groups: Sequence[Group]) -> list[float]:
    """On each rank: the losses of some steps under the limit of the rank's group."""
    model = soap.load(way.path)
    world = open_world(RANKS, "cpu", "gloo")
    try:
        groups[get_rank()].enter()
        with Trainer(model, (way.strategy, topology), way.order, optimizer=adam) as trainer:
            return [trainer.step(*model.example_inputs) for _ in range(STEPS)]
    finally:
        close_world(world)


def compared(way: Way, topology: Topology) -> CheckResult:
    """On each rank, without a limit: a step beside one process, which rank 0 is as well."""
    model = soap.load(way.path)
    with Trainer(model, (way.strategy, topology), way.order, optimizer=adam) as trainer:
        return check(trainer, lambda step: model.example_inputs, adam)


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    with ExitStack() as made:
        yield [made.enter_context(limited(LIMIT_BYTES)) for _ in range(RANKS)]


def exported(folder: Path) -> str:
    torch.manual_seed(0)
    text = tokens(BATCH, CONFIG.context + 1, CONFIG.vocabulary)
    path = str(folder / "gpt.pt2")
    soap.export(GPT(CONFIG).train(), (text[:, :-1].contiguous(), text[:, 1:].contiguous()), path=path, verify=False)
    return path


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_mixture_is_found_fits_and_is_exact(groups: list[Group], tmp_path: Path) -> None:
    path, saved = exported(tmp_path), tmp_path / "strategy.json"
    graph, topology = soap.load(path, plan_only=True).graph, soap.load_cluster(CLUSTER)
    tight = with_memory_budget(topology, f"{LIMIT_BYTES} B")
    alone = {name: soap.simulate(graph, tight, name, costs="estimate") for name in ALONE}
    assert {name: run.fits for name, run in alone.items()} == dict.fromkeys(ALONE, False)
    options = ["--memory-budget", f"{BUDGET_BYTES} B", "--profile", "0", "--verify", "0", "--budget", "500", "--pipelines", "no"]
    assert main([path, "--cluster", CLUSTER, *options, "-o", str(saved)]) == 0
    strategy = soap.load_strategy(saved, graph, topology)
    run = soap.simulate(graph, tight, strategy, costs="estimate")
    assert run.fits and max(run.peak_bytes) <= BUDGET_BYTES
    assert any(config.recompute for config in strategy.operators.values())
    assert any(sync.owner == "parts" for sync in strategy.parameters.values())
    way = Way(path, strategy, execution_order(run.tasks, run.schedule))
    losses = launch(RANKS, trained, (way, tight, groups))
    assert all(own == losses[0] for own in losses.values()) and all(map(isfinite, losses[0]))
    assert all(LIMIT_BYTES / 2 < int(group.peak.read_text()) <= 0.98 * LIMIT_BYTES for group in groups)
    found = launch(RANKS, compared, (way, topology))[0]
    assert found.passed, found.worst
    fsdp = Way(path, soap.classical("fsdp", graph, topology), execution_order(alone["fsdp"].tasks, alone["fsdp"].schedule))
    with pytest.raises(RuntimeFailure, match="killed"):
        launch(RANKS, trained, (fsdp, tight, groups))
