"""Bytes on the wire of sparse parameters: those of Kim et al., "Parallax", EuroSys 2019."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.model.graph import OperatorGraph
from soap.plan.syncs.amounts import INDEX_BYTES
from soap.simulator.lowering import build_plan, lower
from soap.simulator.tasks import TaskGraph, TaskKind
from soap.strategy.sync import parameter_server
from soap.strategy.sync_contracts import Within
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import (
    PointCosts,
    batch_split,
    by_name,
    finish,
    pairwise_cluster,
)
from tests.simulator.test_servers import GATHER, ROW_SERVER, SERVER, looked_up, lowered
from tests.strategies import GPU, cluster

WIDTH = 6
ROW_BYTES = 4 * WIDTH


def machine_bytes(tasks: TaskGraph, machine: int, *names: str) -> tuple[int, int]:
    """(values, indices): bytes in and out of a machine of one device by the tasks that synchronize sparse parameters."""
    values = indices = 0
    for task in tasks.tasks:
        if task.name.startswith(names):
            assert task.flows and task.kind is TaskKind.SYNC
            moved = sum(size for source, target, size in task.flows if machine in (source, target))
            with_indices = not task.name.startswith("push")
            rows = moved // (ROW_BYTES + INDEX_BYTES * with_indices)
            assert rows * (ROW_BYTES + INDEX_BYTES * with_indices) == moved
            values, indices = values + rows * ROW_BYTES, indices + rows * INDEX_BYTES * with_indices
    return values, indices


def tables(machines: int, variables: int, rows: int, batch: int) -> OperatorGraph:
    """Tables of which each machine looks up ``batch`` rows, none of them twice."""
    g = GraphBuilder()
    found = []
    for i in range(variables):
        ids = g.input(f"ids{i}", batch * machines, dtype="int64")
        found.append(g.embedding(ids, rows, WIDTH, weight=g.parameter(f"table{i}", rows, WIDTH), name=f"find{i}"))
    return finish(g, *found)


@pytest.mark.parametrize("machines", [2, 4, 8])
@pytest.mark.parametrize("balanced", [False, True])
def test_bytes_on_the_wire_are_those_of_parallax(machines: int, balanced: bool) -> None:
    """Kim et al. 2019, Table 3: per machine, in and out, and iteration; w: bytes of a variable, alpha: share that one worker touches."""
    rows, batch, variables = 5760, 12, machines if balanced else 1
    graph, topology = tables(machines, variables, rows, batch), pairwise_cluster(*[1] * machines)
    touched = graph.sparse["table0"].touched_by(batch)
    assert touched == batch
    w, alpha_w, count = rows * ROW_BYTES, touched * ROW_BYTES, machines
    split, names = batch_split(graph, range(machines)), [f"table{i}" for i in range(variables)]
    served, gathered = (replace(split, parameters=dict.fromkeys(names, sync)) for sync in (ROW_SERVER, GATHER))
    server, gather = lowered(graph, served, topology), lowered(graph, gathered, topology)
    owner = server.plan.shards[0].devices[0]
    values, indices = machine_bytes(server, owner, "push", "pull")
    if balanced:
        assert values == 4 * alpha_w * variables * (count - 1) / count
        assert {machine_bytes(server, machine, "push", "pull") for machine in range(machines)} == {(values, indices)}
        assert machine_bytes(gather, 0, "gather")[0] == 2 * alpha_w * variables * (count - 1)
    else:
        assert values == 2 * alpha_w * (count - 1)
        assert machine_bytes(gather, 0, "gather")[0] == 2 * alpha_w * (count - 1)
    assert indices == values // (2 * ROW_BYTES) * INDEX_BYTES  # of rows that are pulled; rows come in the same order when they are pushed
    dense, on_servers = replace(graph, sparse={}), replace(split, parameters=dict.fromkeys(names, SERVER))
    tasks = [task for task in lowered(dense, on_servers, topology).tasks if task.name.startswith(("push", "pull"))]
    found = sum(size for task in tasks for source, target, size in task.flows if owner in (source, target))
    assert found == (4 * w * variables * (count - 1) / count if balanced else 2 * w * (count - 1))
    whole = sum(task.bytes for task in lowered(dense, split, topology).tasks if task.name.startswith("sync"))
    assert 2 * whole / count == 4 * w * variables * (count - 1) / count


@pytest.mark.parametrize("workers", [2, 4])
def test_local_aggregation_cuts_bytes_between_hosts_as_rows_overlap(workers: int) -> None:
    hosts, batch = 3, 16
    graph, topology = looked_up(rows=48, width=WIDTH, batch=batch * hosts * workers), cluster([workers] * hosts, GPU)
    access = graph.sparse["table"]
    alone, together = access.touched_by(batch), access.touched_by(batch * workers)
    assert alone < together < workers * alone

    def crossing(within: Within, *, pull_together: bool = True) -> tuple[int, int]:
        """Bytes between hosts by (pull, push)."""
        chosen = batch_split(graph, range(hosts * workers)).with_parameter("table", parameter_server(1, within, rows=True))
        tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts(), pull_together=pull_together)
        named, place = by_name(tasks), [device.host for device in topology.devices]
        pull, push = (named[f"{name} table[0]"].flows for name in ("pull", "push"))
        return sum(n for a, b, n in pull if place[a] != place[b]), sum(n for a, b, n in push if place[a] != place[b])

    expected: tuple[tuple[Within, int], ...] = (("none", workers * alone), ("host", together))
    for within, rows in expected:
        assert crossing(within) == ((hosts - 1) * rows * (ROW_BYTES + INDEX_BYTES), (hosts - 1) * rows * ROW_BYTES)
    pull = (hosts - 1) * workers * alone * (ROW_BYTES + INDEX_BYTES)
    assert crossing("host", pull_together=False) == (pull, (hosts - 1) * together * ROW_BYTES)
