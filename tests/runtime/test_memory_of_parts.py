"""Predicted memory of ranks that are given only the samples that they read, and the tensors that these make, counted on the fly."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soap
from soap import api
from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.plan.running.order import ExecutionOrder
from soap.runtime.inputs import PartBatch
from soap.runtime.trainer import Trainer
from soap.simulator.reference import execution_order
from soap.strategy.config import Strategy
from tests.runtime.pool import Pool
from tests.runtime.test_memory import MOST_OVER, STATES, Live
from tests.runtime.traced import sgd


def counted_parts(path: str, strategy: Strategy, topology: Topology, order: ExecutionOrder) -> int:
    """Run on each rank: the most bytes that it holds in two steps, given its own samples alone."""
    model = api.load(path)
    gc.collect()
    with Live() as live, Trainer(model, (strategy, topology), order, optimizer=sgd) as trainer:
        own = PartBatch.cut(model.example_inputs, trainer.samples())
        for _ in range(2):
            trainer.step(own)
    return live.most_bytes


def test_own_samples_are_counted(pool: Pool, tmp_path: Path) -> None:
    class Labelled(nn.Sequential):
        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(images), labels)

    path, images = tmp_path / "m.pt2", torch.randn(64, 3000)
    soap.export(Labelled(nn.Linear(3000, 4)), (images, torch.randint(4, (64,))), path=path, verify=False)
    topology = replace(local_topology(2), own_samples=True)
    graph = api.load(path, plan_only=True).graph
    strategy = api.classical("data_parallel", graph, topology)
    whole, own = (
        api.simulator_for(graph, given, optimizer_states=STATES, costs="estimate").run(strategy) for given in (local_topology(2), topology)
    )
    saved = [a["batch"] - b["batch"] for a, b in zip(whole.peak_by_kind, own.peak_by_kind, strict=True)]
    assert saved == [(images.nbytes + 64 * 8) // 2] * 2  # labels as well
    found = pool.run(counted_parts, str(path), strategy, topology, execution_order(own.tasks, own.schedule), ranks=2)
    assert all(most <= peak <= MOST_OVER * most for most, peak in zip(found, own.peak_bytes, strict=True)), (found, own.peak_bytes)
    assert all(most > images.nbytes // 2 for most in found)
