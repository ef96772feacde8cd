"""Bytes on the wire of each way to synchronize, by the table of what each machine sends and receives per iteration (Kim et al., "Parallax",
EuroSys 2019): w bytes of a variable, N machines with one worker and one server, m variables, a worker touching a share alpha of rows.

    dense, servers: 2w(N-1) for the machine that owns a variable, 4wm(N-1)/N where m variables are balanced
    sparse, servers: the same times alpha
    sparse, all-gather: 2 alpha w(N-1) of one variable, 2 alpha wm(N-1) of m
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from soap.cluster.topology import Topology
from soap.runtime.comm.redistribute import Traffic
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from soap.tracing.export import export_model
from tests.extent import ALL
from tests.runtime.pool import Pool
from tests.runtime.sparse_plans import by_samples, hosts, synchronized
from tests.runtime.traced import traced

ROWS, COLUMNS, TOUCHED, STEPS = 24, 4, 3, 2
ROW_BYTES = 8 * COLUMNS
TABLE_BYTES = ROWS * ROW_BYTES
DENSE_BYTES = 8 * COLUMNS * COLUMNS


class Variables(nn.Module):
    """So many tables and square matrices."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, COLUMNS) for _ in range(count))
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(count))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(())
        for table, layer in zip(self.tables, self.layers, strict=True):
            x = x + layer(table(tokens).sum(1)).square().mean()
        return x


def tokens_of(workers: int) -> torch.Tensor:
    """Two samples for each worker, whose tokens are its own row, the one that it shares with its neighbour, and one that all share."""
    rows = torch.tensor([[own, own + 1, 20] for own in range(workers)])
    return torch.cat([rows, rows.flip(1)], 1).reshape(2 * workers, 3)


@dataclass(frozen=True)
class Case:
    """``sync``: of the sparse and of the dense parameters."""

    path: str
    topology: Topology
    sparse: SyncConfig
    dense: SyncConfig

    @property
    def tokens(self) -> torch.Tensor:
        return tokens_of(self.topology.device_count)


def train(case: Case) -> Traffic:
    model = traced(case.path)
    devices = case.topology.device_count
    strategy: Strategy = by_samples(model.graph, range(devices), 2 * devices)
    assert len(model.graph.sparse) == sum(1 for t in model.graph.parameters) // 2
    with Trainer(model, (synchronized(strategy, model.graph, case.sparse, case.dense), case.topology)) as trainer:
        for _ in range(STEPS):
            trainer.step(case.tokens)
        return trainer.traffic


def measured(four: Pool, folder: Path, topology: Topology, variables: int, sparse: SyncConfig, dense: SyncConfig) -> list[Traffic]:
    """Bytes of each rank in all steps."""
    torch.manual_seed(0)
    path = folder / f"{variables}-{topology.device_count}.pt2"
    if not path.exists():
        export_model(Variables(variables), (tokens_of(topology.device_count),), path=path)
    return four.run(train, Case(str(path), topology, sparse, dense), ranks=topology.device_count)


def per_step(bytes_of_ranks: Sequence[int]) -> list[float]:
    return [count / STEPS for count in bytes_of_ranks]


SERVED, GATHERED, SUMMED = parameter_server(), SPARSE_ALL_GATHER, SyncConfig()


@pytest.mark.parametrize("machines", [2, 3, 4])
def test_one_variable(four: Pool, tmp_path: Path, machines: int) -> None:
    topology, others = hosts(*[1] * machines), machines - 1
    sparse = TOUCHED * ROW_BYTES  # alpha w
    traffic = measured(four, tmp_path, topology, 1, SERVED, SUMMED)
    moved = per_step([t.pulled_bytes + t.pushed_bytes for t in traffic])
    assert moved == [2 * sparse * others] + [2 * sparse] * others
    assert per_step([t.index_bytes for t in traffic]) == [8 * (TOUCHED + 1) * others] + [8 * (TOUCHED + 1)] * others
    assert per_step([t.synchronized_bytes for t in traffic]) == [DENSE_BYTES] * machines
    traffic = measured(four, tmp_path, topology, 1, GATHERED, SERVED)
    assert per_step([t.gathered_bytes for t in traffic]) == [2 * sparse * others] * machines
    assert per_step([t.index_bytes for t in traffic]) == [2 * 8 * (TOUCHED + 1) * others] * machines
    moved = per_step([t.pulled_bytes + t.pushed_bytes for t in traffic])
    assert sorted(moved) == sorted([2 * DENSE_BYTES * others] + [2 * DENSE_BYTES] * others)


@pytest.mark.parametrize("machines", [2, 4])
def test_balanced_variables(four: Pool, tmp_path: Path, machines: int) -> None:
    topology, count, others = hosts(*[1] * machines), 4, machines - 1
    sparse = TOUCHED * ROW_BYTES
    for kept in (SERVED, GATHERED):
        traffic = measured(four, tmp_path, topology, count, kept, SUMMED)
        servers, readers = 4 * sparse * count * others / machines, 2 * sparse * count * others
        assert per_step([t.pulled_bytes + t.pushed_bytes for t in traffic]) == [servers if kept is SERVED else 0] * machines
        assert per_step([t.gathered_bytes for t in traffic]) == [readers if kept is GATHERED else 0] * machines
    traffic = measured(four, tmp_path, topology, count, SUMMED, SERVED)
    assert per_step([t.pulled_bytes + t.pushed_bytes for t in traffic]) == [4 * DENSE_BYTES * count * others / machines] * machines
    assert per_step([t.synchronized_bytes for t in traffic]) == [count * TABLE_BYTES] * machines
    assert {(t.handed_bytes, t.gathered_bytes, t.index_bytes) for t in traffic} == {(0, 0, 0)}


def test_local_aggregation_moves_what_hosts_touch_together(four: Pool, tmp_path: Path) -> None:
    """Of each host's two workers 3 rows each, of which both share 2: 4 rows between hosts instead of 6. Within hosts they are handed on."""
    topology = hosts(2, 2)
    apart = measured(four, tmp_path, topology, 1, SERVED, SERVED)
    joined = measured(four, tmp_path, topology, 1, parameter_server(1, "host"), parameter_server(1, "host"))
    rows = [2 * ROW_BYTES * count for count in (3 + 3 + 3, 3, 3, 3)], [2 * ROW_BYTES * count for count in (4, 0, 4, 0)]
    dense = [2 * DENSE_BYTES * count for count in (1, 1, 3, 1)], [2 * DENSE_BYTES * count for count in (1, 0, 1, 0)]
    for traffic, sparse, other in zip((apart, joined), rows, dense, strict=True):
        assert per_step([t.pulled_bytes + t.pushed_bytes for t in traffic]) == [a + b for a, b in zip(sparse, other, strict=True)]
    assert per_step([t.handed_bytes for t in joined]) == [2 * (3 * ROW_BYTES + DENSE_BYTES)] * 4
    assert all(t.handed_bytes == 0 for t in apart)


def test_partitions_do_not_change_what_readers_move(four: Pool, tmp_path: Path) -> None:
    topology = hosts(1, 1, 1, 1)
    for partitions in (3, 5, ROWS):
        traffic = measured(four, tmp_path, topology, 1, parameter_server(partitions), SUMMED)
        assert sum(per_step([t.pulled_bytes for t in traffic])) == sum(per_step([t.pushed_bytes for t in traffic]))
        # A row that a reader keeps itself does not travel; the others are counted at both ends.
        assert sum(per_step([t.pulled_bytes for t in traffic])) < 2 * 4 * TOUCHED * ROW_BYTES


@pytest.mark.skipif(not ALL, reason="eight processes: with make test-all")
def test_eight_machines(tmp_path: Path) -> None:
    topology, sparse = hosts(*[1] * 8), TOUCHED * ROW_BYTES
    pool = Pool(8)
    try:
        for kept, expected in ((SERVED, 4 * sparse * 8 * 7 / 8), (GATHERED, 2 * sparse * 8 * 7)):
            traffic = measured(pool, tmp_path, topology, 8, kept, SERVED)
            dense = 4 * DENSE_BYTES * 8 * 7 / 8
            moved = per_step([t.pulled_bytes + t.pushed_bytes + t.gathered_bytes for t in traffic])
            assert moved == [expected + dense] * 8
    finally:
        pool.close()
