"""Training with sparse and dense parameters on servers: checkpoints, checks, traces, memory, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from soap.cluster.topology import Topology
from soap.errors import ModelError, RuntimeFailure
from soap.runtime.check import CheckResult, check
from soap.runtime.trace import Event
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model
from tests.extent import often, rows_often
from tests.runtime.exact_modules import Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import FILES, OPTIMIZERS, ROWS, WHOLE, batch_of, module_of, train_alone
from tests.runtime.sparse_plans import SYNCS, by_samples, hosts, synchronized
from tests.runtime.traced import traced

FOUR_HOSTS, TWO_HOSTS = hosts(1, 1, 1, 1), hosts(2, 1)
SERVED = parameter_server(2)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return FILES


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    path: str
    topology: Topology
    sparse: SyncConfig
    dense: SyncConfig | None = SERVED
    optimizer: str = "adam"
    lazy: bool = False

    @property
    def strategy(self) -> Strategy:
        graph = traced(self.path).graph
        return synchronized(by_samples(graph, range(self.topology.device_count), 6), graph, self.sparse, self.dense)

    def trainer(self, model: TracedModel | None = None, **options: bool) -> Trainer:
        model = model or traced(self.path)
        factory = {**OPTIMIZERS, **WHOLE}[self.optimizer]
        return Trainer(model, (self.strategy, self.topology), optimizer=factory, lazy_sparse=self.lazy, **options)  # type: ignore[arg-type]


def go_on(way: Way, steps: Sequence[int], source: str | None, target: str | None) -> Trained:
    with way.trainer() as trainer:
        if source is not None:
            trainer.load(source)
        losses = [trainer.step(*batch_of(6, step)) for step in steps]
        if target is not None:
            trainer.save(target)
        return Trained(losses, trainer.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "lazy"), rows_often([("adam", False), ("adam", True), ("adagrad", False), ("momentum", True)], [("adam", True)])
)
def test_eight_partitions_on_four_hosts_go_on_as_three_on_two(
    four: Pool, files: dict[str, str], tmp_path: Path, optimizer: str, lazy: bool
) -> None:
    ways = [
        (Way(files["words"], FOUR_HOSTS, parameter_server(8), SERVED, optimizer, lazy), 4),
        (Way(files["words"], TWO_HOSTS, parameter_server(3, "host"), None, optimizer, lazy), 3),
        (Way(files["words"], FOUR_HOSTS, SPARSE_ALL_GATHER, SERVED, optimizer, lazy), 4),
    ]
    source, losses, trained = None, [], None
    for number, (way, ranks) in enumerate(ways):
        target = str(tmp_path / str(number))
        trained = four.run(go_on, way, [2 * number, 2 * number + 1], source, target, ranks=ranks)[0]
        losses += trained.losses
        source = target
    steps = [[batch_of(6, step)] for step in range(6)]
    expected = train_alone(module_of("words"), steps, OPTIMIZERS[optimizer], lazy=["words.weight"] if lazy else ())
    assert trained is not None
    assert worst(Trained(losses, trained.state), expected) < 1e-9


def test_an_optimizer_that_needs_whole_tables_has_them(four: Pool, files: dict[str, str], tmp_path: Path) -> None:
    """Its rows are gathered, or lie on one server; what it keeps of rows and columns goes through checkpoints."""
    ways = [(SPARSE_ALL_GATHER, 4), (parameter_server(1), 3)]
    source, losses, trained = None, [], None
    for number, (sync, ranks) in enumerate(ways):
        topology = FOUR_HOSTS if ranks == 4 else TWO_HOSTS
        way = Way(files["words"], topology, sync, None, "adafactor")
        target = str(tmp_path / str(number))
        trained = four.run(go_on, way, [2 * number, 2 * number + 1], source, target, ranks=ranks)[0]
        losses += trained.losses
        source = target
    expected = train_alone(module_of("words"), [[batch_of(6, step)] for step in range(4)], WHOLE["adafactor"])
    assert trained is not None
    assert worst(Trained(losses, trained.state), expected) < 1e-9


def refused(way: Way) -> str:
    try:
        way.trainer().close()
    except RuntimeFailure as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sync", "lazy", "words"),
    [
        (parameter_server(3), False, ", but servers keep it in 3 partitions; keep it in one (parameter_server:1), or use"),
        (SPARSE_ALL_GATHER, True, ", so its rows cannot be updated alone; leave lazy_sparse out, or use an elementwise optimizer"),
        (SyncConfig(), True, ", so its rows cannot be updated alone; leave lazy_sparse out, or use an elementwise optimizer"),
    ],
)
def test_rows_are_refused_to_an_optimizer_that_needs_whole_tables(
    four: Pool, files: dict[str, str], sync: SyncConfig, lazy: bool, words: str
) -> None:
    found = four.run(refused, Way(files["words"], FOUR_HOSTS, sync, None, "adafactor", lazy))
    said = f"optimizer Adafactor updates 'words.weight' as a whole (its update is not elementwise){words}"
    assert all(said in text for text in found), found


def checked(way: Way, steps: int) -> CheckResult:
    with way.trainer() as trainer:
        return check(trainer, lambda step: batch_of(6, step), OPTIMIZERS[way.optimizer], steps)


@pytest.mark.parametrize("sync", ["allreduce", "allgather", "servers", "local"])
def test_checked_against_one_process(four: Pool, files: dict[str, str], sync: str) -> None:
    for lazy in (False, True):
        way = Way(files["words"], hosts(1, 2, 1), SYNCS[sync], lazy=lazy)
        results = four.run(checked, way, 3)
        assert all(result.passed for result in results), results[0].worst
        assert results[0].tolerance == 1e-9


def spoil_a_row(way: Way) -> CheckResult:
    """The first server gives one row of the gradient twice its weight."""
    with way.trainer() as trainer:
        gradients = trainer.sizes.gradients
        add_up = gradients.add_up

        def spoilt(shards: Sequence[int] | None = None) -> None:
            add_up(shards)
            if trainer.rank == 0 and shards is None:  # dense parameters are served before
                gradients.rows[min(gradients.rows)].values[0] *= 2

        gradients.add_up = spoilt  # type: ignore[method-assign,assignment]
        return check(trainer, lambda step: batch_of(6, step), OPTIMIZERS[way.optimizer])


def test_a_check_sees_a_wrong_row(four: Pool, files: dict[str, str]) -> None:
    result = four.run(spoil_a_row, Way(files["words"], FOUR_HOSTS, SERVED))[0]
    assert not result.passed and result.worst.name == "words.weight"


def traced_step(way: Way) -> tuple[list[Event], dict[str, torch.Tensor]]:
    with way.trainer() as trainer:
        trainer.step(*batch_of(6, 0))
        events = trainer.trace(*batch_of(6, 1))
        trainer.step(*batch_of(6, 2))
        return events, trainer.state_dict()


def test_a_trace_names_what_is_pulled_pushed_and_served(four: Pool, files: dict[str, str]) -> None:
    topology = hosts(1, 2, 1)
    for sync in ("servers", "local"):
        way = Way(files["words"], topology, SYNCS[sync], parameter_server(2, "host" if sync == "local" else "none"))
        results = four.run(traced_step, way)
        events = {(event.name, event.kind) for event in results[0][0]}
        assert all({(e.name, e.kind) for e in other} == events for other, _ in results)
        plan = build_plan(traced(files["words"]).graph, way.strategy, topology)
        for own in (sync for sync in plan.syncs if sync.contract.has_servers):
            name = f"{own.parameter}[{own.index}]"
            served = {f"serve {name}/{number}" for number in range(len(own.shards))}
            assert served == {n for n, kind in events if kind is TaskKind.UPDATE and n.startswith(f"serve {name}")}
            assert {f"pull {name}", f"push {name}"} <= {n for n, kind in events if kind is TaskKind.SYNC}
        expected = train_alone(module_of("words"), [[batch_of(6, step)] for step in range(3)], OPTIMIZERS[way.optimizer])
        assert worst(Trained([0.0], results[0][1]), Trained([0.0], expected.state)) < 1e-9


def test_a_trace_names_what_is_gathered(four: Pool, files: dict[str, str]) -> None:
    events, _ = four.run(traced_step, Way(files["words"], FOUR_HOSTS, SYNCS["allgather"], None))[0]
    assert ("gather words.weight[0]", TaskKind.SYNC) in {(event.name, event.kind) for event in events}


def kept(way: Way) -> tuple[dict[str, int], list[bool], bool]:
    """Elements of each parameter that a rank keeps, whether the model has lost its values, and whether the state is still known."""
    model = load_model(way.path, dtype="float64")
    before = {name: tensor.detach().clone() for name, tensor in model.parameters.items()}
    with way.trainer(model, take_over=True) as trainer:
        found: dict[str, int] = {}
        for tensor, number in ((t, n) for own in (trainer.shards.tensors, trainer.shards.leaves) for n, t in own.items()):
            shards = trainer.plan.shards
            name = shards[number].parameter if number < len(shards) else trainer.plan.syncs[number - len(shards)].parameter
            found[name] = max(found.get(name, 0), tensor.numel())
        state = trainer.state_dict()
        same = all(torch.equal(state[name], tensor) for name, tensor in before.items()) if trainer.rank == 0 else True
        trainer.step(*batch_of(6))
        return found, [model.parameters[name].is_meta for name in ("words.weight", "layer.weight")], same


def test_no_rank_has_a_table_that_servers_keep(four: Pool, files: dict[str, str]) -> None:
    """23 rows in 5 partitions on 4 servers: at most 5 rows in one tensor, none of all; of dense weights all have copies."""
    for found, lost, same in four.run(kept, Way(files["words"], FOUR_HOSTS, SYNCS["servers"], optimizer="sgd")):
        assert found["words.weight"] <= 5 * 6 and found["layer.weight"] == 36
        assert lost == [True, False] and same
    results = four.run(kept, Way(files["words"], FOUR_HOSTS, SYNCS["server"], optimizer="sgd"))
    assert [found.get("words.weight", 0) for found, _, _ in results] == [ROWS * 6, 0, 0, 0]
    assert [lost[0] for _, lost, _ in results] == [False, True, True, True]


def from_state(way: Way) -> Trained:
    with way.trainer() as trainer:
        trainer.load_state_dict(dict(module_of("words").state_dict()))
        return Trained([trainer.step(*batch_of(6))], trainer.state_dict())


def test_loaded_values_reach_servers_and_readers(four: Pool, files: dict[str, str]) -> None:
    expected = train_alone(module_of("words"), [[batch_of(6)]], OPTIMIZERS["sgd"])
    for sync in ("servers", "local"):
        way = Way(files["words"], hosts(1, 2, 1), SYNCS[sync], SYNCS[sync], "sgd")
        assert worst(four.run(from_state, way)[0], expected) < 1e-9


def said(way: Way) -> list[str]:
    """Every rank looks up rows that are not there, and a model without values is refused."""
    found = []
    with way.trainer() as trainer:
        tokens, weights, labels = batch_of(6)
        try:
            trainer.step(tokens + ROWS, weights, labels)
        except ModelError as error:
            found.append(str(error))
    model = load_model(way.path, dtype="float64")
    model.parameters = {name: tensor.to("meta") for name, tensor in model.parameters.items()}
    try:
        way.trainer(model)
    except RuntimeFailure as error:
        found.append(str(error))
    return found


def test_one_line_for_rows_that_are_not_there_and_models_without_values(four: Pool, files: dict[str, str]) -> None:
    first, second = four.run(said, Way(files["words"], FOUR_HOSTS, SERVED))[0]
    assert first.endswith("of a table of 23 rows; expected 0 to 22") and "\n" not in first
    assert second.startswith("parameter 'words.weight' has no values; expected a model that has them: load it again") and "\n" not in second


def zoo_checked(name: str, topology: Topology, sync: SyncConfig) -> CheckResult:
    model = traced(f"zoo:{name}:tiny")
    strategy = synchronized(CLASSICAL["data_parallel"](model.graph, topology), model.graph, sync)
    with Trainer(model, (strategy, topology), optimizer=OPTIMIZERS["adagrad"]) as trainer:
        assert any(sync.contract.by_rows for sync in trainer.plan.syncs)
        return check(trainer, lambda step: model.example_inputs, OPTIMIZERS["adagrad"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", often(["dlrm", "nmt"], []))
def test_tables_of_zoo_models(four: Pool, name: str) -> None:
    for sync in ("allgather", "local"):
        assert four.run(zoo_checked, name, hosts(1, 2, 1), SYNCS[sync])[0].passed
