"""Sparse and dense parameters, synchronized in any way, train as a plain loop does in one process, in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from soap.cluster.topology import Topology
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import parameter_server
from tests.extent import ALL, every, often
from tests.runtime.exact_modules import Batch, Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import FILES, OPTIMIZERS, ROWS, batch_of, module_of, train_alone
from tests.runtime.sparse_plans import SYNCS, by_samples, hosts, random_synchronized, synchronized
from tests.runtime.traced import traced

TOLERANCE = 1e-9
FOUR = hosts(1, 2, 1)
SERVED = parameter_server(2)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return FILES


def train(
    path: str, strategy: Strategy, topology: Topology, steps: Sequence[Sequence[Batch]], optimizer: str, options: Mapping[str, Any]
) -> Trained:
    """What a rank does: each step's micro-batches at once."""
    with Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS[optimizer], **options) as trainer:
        losses = [trainer.step(*(t for part in parts for t in part)) for parts in steps]
        return Trained(losses, trainer.state_dict())


def assert_exact(
    four: Pool,
    files: Mapping[str, str],
    name: str,
    strategy: Strategy,
    optimizer: str = "sgd",
    sizes: Sequence[Sequence[int]] = ((6,), (6,)),
    topology: Topology = FOUR,
    **options: Any,
) -> None:
    """Training by the strategy equals the plain loop. ``sizes``: samples of each step's micro-batches."""
    steps = [[batch_of(size, 10 * i + k) for k, size in enumerate(parts)] for i, parts in enumerate(sizes)]
    results = four.run(train, files[name], strategy, topology, steps, optimizer, options, ranks=topology.device_count)
    assert all(result.losses == results[0].losses for result in results)
    lazy = list(traced(files[name]).graph.sparse) if options.get("lazy_sparse") else ()
    expected = train_alone(module_of(name), steps, OPTIMIZERS[optimizer], clip_norm=options.get("clip_norm"), lazy=lazy)
    assert worst(results[0], expected) < TOLERANCE, worst(results[0], expected)


@pytest.mark.parametrize(("sync", "optimizer"), every(4, list(product(SYNCS, OPTIMIZERS))))
def test_every_method_with_every_optimizer(four: Pool, files: dict[str, str], sync: str, optimizer: str) -> None:
    """Of three tables' rows few are touched, by none, one or several ranks; batches are uneven (6 samples on 4 ranks)."""
    graph = traced(files["words"]).graph
    dense = SERVED if sync in ("servers", "local") else None
    strategy = synchronized(by_samples(graph, range(4), 6), graph, SYNCS[sync], dense)
    assert_exact(four, files, "words", strategy, optimizer, ((6,), (6,), (6,)))


def test_rows_travel_in_all_these_plans(files: dict[str, str]) -> None:
    graph = traced(files["words"]).graph
    for name, sync in SYNCS.items():
        plan = build_plan(graph, synchronized(by_samples(graph, range(4), 6), graph, sync, SERVED), FOUR)
        table = {"allreduce": 0, "zero": 0, "fsdp": 0, "hsdp": 0, "allgather": 1}.get(name, min(sync.partitions, ROWS))
        assert [(own.contract.has_servers, len(own.shards)) for own in plan.syncs if own.contract.by_rows] == [
            (name != "allgather", count) for count in [table] if count
        ]
        assert [len(own.shards) for own in plan.syncs if own.contract.has_servers and not own.contract.by_rows] == [2] * 4


@pytest.mark.parametrize("sync", often(["allgather", "server", "local"], ["allgather", "local"]))
def test_every_kind_of_look_up(four: Pool, files: dict[str, str], sync: str) -> None:
    graph = traced(files["tables"]).graph
    strategy = synchronized(by_samples(graph, range(4), 6), graph, SYNCS[sync], SERVED if sync == "local" else None)
    assert_exact(four, files, "tables", strategy, "adagrad")


@pytest.mark.parametrize("sync", ["allgather", "servers", "local"])
def test_tables_split_by_rows_and_columns(four: Pool, files: dict[str, str], sync: str) -> None:
    """One look-up of the shared table splits rows, the other columns, so that the table is cut into cells by both."""
    graph = traced(files["words"]).graph
    strategy = by_samples(graph, range(4), 6)
    first, second = (op for op in graph.operators if op.name.startswith("words"))
    for op, degrees, devices in ((first, {"v": 2, "b": 2}, (0, 3, 2, 3)), (second, {"d": 3}, (1, 0, 3))):
        parts = tuple(degrees.get(factor.name, 1) for factor in op.factors)
        strategy = strategy.with_operator(op.name, OpConfig(parts, devices))
    for optimizer in ("sgd", "adam"):
        assert_exact(four, files, "words", synchronized(strategy, graph, SYNCS[sync], SERVED), optimizer)


@pytest.mark.parametrize(
    ("sync", "optimizer"), every(4, list(product(["allgather", "servers", "local"], ["momentum", "adagrad", "adam"])))
)
def test_rows_without_gradient_stay_if_asked_for(four: Pool, files: dict[str, str], sync: str, optimizer: str) -> None:
    graph = traced(files["words"]).graph
    strategy = synchronized(by_samples(graph, range(4), 6), graph, SYNCS[sync])
    steps = ((6,), (6,), (6,), (6,))
    assert_exact(four, files, "words", strategy, optimizer, steps, lazy_sparse=True)
    if sync == "allgather":  # which does not depend on the method
        assert_exact(four, files, "words", by_samples(graph, range(4), 6), optimizer, steps, lazy_sparse=True)


@pytest.mark.parametrize("sync", often(["allgather", "servers", "local"], ["allgather", "local"]))
def test_clipped_by_the_norm_of_all_gradients(four: Pool, files: dict[str, str], sync: str) -> None:
    graph = traced(files["words"]).graph
    strategy = synchronized(by_samples(graph, range(4), 6), graph, SYNCS[sync], SERVED)
    for optimizer in ("adagrad", "adam"):
        assert_exact(four, files, "words", strategy, optimizer, ((6,), (6,)), clip_norm=0.05)
    assert_exact(four, files, "words", strategy, "sgd", ((6,), (6,)), clip_norm=1e6)


@pytest.mark.slow
@pytest.mark.parametrize("sync", often(["allgather", "servers", "local"], ["local"]))
def test_accumulated_over_batches_of_many_sizes(four: Pool, files: dict[str, str], sync: str) -> None:
    """Micro-batches touch other rows; of one or two samples, some ranks have none."""
    graph = traced(files["words"]).graph
    strategy = synchronized(by_samples(graph, range(4), 6), graph, SYNCS[sync], SERVED)
    sizes = ((6, 6, 6), (6, 2), (1, 6, 9), (3,)) if ALL else ((6, 6, 6), (6, 2), (1,))
    assert_exact(four, files, "words", strategy, "adagrad", sizes, accumulate=3, clip_norm=0.3)
    assert_exact(four, files, "words", strategy, "adam", ((6, 6), (2, 1)), accumulate=2, lazy_sparse=True)


@pytest.mark.parametrize("devices", [(1,), (2,), (1, 1), (3,), (2, 2)])
def test_any_number_of_hosts(four: Pool, files: dict[str, str], devices: tuple[int, ...]) -> None:
    topology = hosts(*devices)
    graph = traced(files["words"]).graph
    strategy = by_samples(graph, range(topology.device_count), 6)
    for sync in ("servers", "local", "allgather"):
        assert_exact(four, files, "words", synchronized(strategy, graph, SYNCS[sync], SERVED), "adagrad", topology=topology)


def test_servers_that_read_nothing_and_readers_that_serve_nothing(four: Pool, files: dict[str, str]) -> None:
    """Two devices of the second host work; all hosts serve."""
    graph = traced(files["words"]).graph
    for sync in ("servers", "local", "many partitions"):
        strategy = synchronized(by_samples(graph, (1, 2), 6), graph, SYNCS[sync], parameter_server(3, "host"))
        assert_exact(four, files, "words", strategy, "momentum")
        assert_exact(four, files, "words", strategy, "adam", lazy_sparse=True)


def test_gradients_that_share_memory_are_not_summed_in_place(four: Pool, files: dict[str, str]) -> None:
    """Behind sums over one token each, the gradients of all their inputs are views of one tensor."""
    graph = traced(files["words"]).graph
    first, total = graph.operators[:2]
    strategy = by_samples(graph, range(3), 6)
    strategy = strategy.with_operator(first.name, OpConfig((1, 2, 3, 1), (2, 1, 1, 2, 0, 1)))
    strategy = strategy.with_operator(total.name, OpConfig((1, 3, 1), (0, 0, 1, 1, 2, 2), 2))
    assert [f.size for f in first.factors] == [6, 3, ROWS, 6] and [f.size for f in total.factors] == [6, 3, 6]
    assert_exact(four, files, "words", strategy, topology=hosts(1, 1, 1))


def random_case(four: Pool, files: Mapping[str, str], number: int) -> None:
    rng = random.Random(number)
    name = rng.choice(["words", "words", "tables"])
    topology = hosts(*rng.choice([(2,), (1, 1), (1, 2), (1, 1, 1), (2, 2), (1, 2, 1), (1, 1, 1, 1)]))
    graph = traced(files[name]).graph
    strategy = random_synchronized(graph, topology, rng)
    lazy = rng.random() < 0.3 and not any(strategy.sync(name).offload for name in graph.sparse)  # which trainers refuse together
    options: dict[str, Any] = {"lazy_sparse": lazy, "clip_norm": rng.choice([None, None, 0.1])}
    sizes = ((6,), (6,))
    if rng.random() < 0.3:
        options["accumulate"], sizes = 2, ((6, 6), (6,))
    optimizer = rng.choice(sorted(OPTIMIZERS))
    assert_exact(four, files, name, strategy, optimizer, sizes, topology, **options)


@pytest.mark.slow
@pytest.mark.parametrize("number", every(80, range(400)))
def test_any_strategy(four: Pool, files: dict[str, str], number: int) -> None:
    """Repeated by its number alone."""
    random_case(four, files, number)
