"""A table of 10 GB, of which a sparse file has the values, trains on four ranks of 4 GB each, which serve a quarter of its rows each."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import get_rank

import soap
from soap.errors import SoapWarning
from soap.runtime.comm.launch import launch
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy
from soap.strategy.sync import parameter_server
from soap.weights.fitting import Kind
from tests.control_groups import Group, limited
from tests.strategies import CPU, cluster
from tests.weights.test_large import ALLOWED_BYTES, most_anonymous_bytes

pytest.importorskip("safetensors")
ROWS, WIDTH, SAMPLES, RANKS = 40_000_000, 64, 32, 4
TABLE_BYTES, LIMIT_BYTES = 4 * ROWS * WIDTH, 4_000_000_000
HOSTS = cluster([1] * RANKS, CPU)
"""Each rank is a host of its own: servers are hosts'."""


class Looker(nn.Module):
    """Three rows of a table for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.table(ids).sum(1)).squeeze(1), targets)


def write_sparse(path: Path, kinds: dict[str, Kind]) -> None:
    """All zeros, but for the head's weights, which are 0.1. What is zero takes no room on the disk."""
    header: dict[str, dict[str, Any]] = {}
    place = 0
    for name, kind in kinds.items():
        size = 4 * prod(kind.shape)
        header[name] = {"dtype": "F32", "shape": [*kind.shape], "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + place)
        file.seek(8 + len(text) + header["head.weight"]["data_offsets"][0])
        file.write(torch.full((WIDTH,), 0.1).numpy().tobytes())


def trained(path: str, weights: str, strategy: Strategy, groups: Sequence[Group]) -> tuple[int, list[float]]:
    """On each rank: the most that loading took, and the losses of three steps, under the limit of its group."""
    world = open_world(RANKS, "cpu", "gloo")
    groups[get_rank()].enter()
    try:
        with most_anonymous_bytes() as loading:
            model = soap.load(path, weights=weights)
            trainer = Trainer(model, (strategy, HOSTS), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        with trainer:
            return loading[0], [trainer.step(*model.example_inputs) for _ in range(3)]
    finally:
        close_world(world)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ranks_serve_their_rows_alone(tmp_path: Path) -> None:
    with soap.without_weights():
        module = Looker()
    torch.manual_seed(0)
    ids, targets = torch.randint(ROWS, (SAMPLES, 3)), torch.rand(SAMPLES)
    with pytest.warns(SoapWarning, match="has no values"):
        soap.export(module, (ids, targets), path=tmp_path / "m.pt2")
    write_sparse(tmp_path / "w.safetensors", {name: Kind(tuple(own.shape), own.dtype) for name, own in module.state_dict().items()})
    assert (tmp_path / "w.safetensors").stat().st_size > TABLE_BYTES > 2 * LIMIT_BYTES
    assert 512 * (tmp_path / "w.safetensors").stat().st_blocks < 10**6
    graph = soap.load(tmp_path / "m.pt2", plan_only=True).graph
    strategy = soap.classical("data_parallel", graph, HOSTS)
    strategy = strategy.with_parameter("table.weight", parameter_server(RANKS, rows=True))
    with ExitStack() as made:
        groups = [made.enter_context(limited(LIMIT_BYTES)) for _ in range(RANKS)]
        found = launch(RANKS, trained, (str(tmp_path / "m.pt2"), str(tmp_path / "w.safetensors"), strategy, groups))
    loaded, losses = zip(*found.values(), strict=True)
    assert all(TABLE_BYTES // RANKS <= most <= TABLE_BYTES // RANKS + ALLOWED_BYTES for most in loaded), loaded
    assert all(own == losses[0] for own in losses)
    assert losses[0] == pytest.approx(alone(ids, targets), rel=1e-5)


def alone(ids: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """The same training with those rows alone that are looked up."""
    rows, places = ids.unique(return_inverse=True)
    table = nn.Parameter(torch.zeros(len(rows), WIDTH))
    head = nn.Linear(WIDTH, 1)
    nn.init.constant_(head.weight, 0.1)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD([table, *head.parameters()], lr=0.5)
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(head(table[places].sum(1)).squeeze(1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
