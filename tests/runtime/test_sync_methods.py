"""What every method of synchronizing parameters has to pass. A method without a case fails.

A case says which parameters of small models are synchronized so, on which hosts, and what one process has to do to get the same numbers: an
exact method's is a plain loop, a lossy one's does the same loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from soap.cluster.topology import Topology
from soap.plan.plan import Plan
from soap.plan.syncs.asking import asking_rounds
from soap.plan.syncs.seam import method_of
from soap.runtime.comm.redistribute import Traffic
from soap.runtime.step import step as steps_of_ranks
from soap.runtime.step.early_start import SyncSchedule
from soap.runtime.step.step import sync_schedule
from soap.runtime.sync.seam import rank_sync
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import ALL_REDUCE, SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE, SPARSE_ALL_GATHER, compressed, parameter_server
from soap.strategy.sync_contracts import METHODS, Contract, named
from soap.tracing.execute import TracedModel
from soap.tracing.export import export_model
from tests.extent import often
from tests.kept_models import ModelFiles
from tests.runtime.compressed_training import LOSSY, train_compressed
from tests.runtime.exact_modules import Batch, Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import FILES, OPTIMIZERS, Optimizer, batch_of, module_of, train_alone
from tests.runtime.sparse_plans import by_samples, hosts, synchronized
from tests.runtime.traced import traced
from tests.strategies import GPU, cluster

TOLERANCE = 1e-9
TWO_BY_TWO, OTHER = hosts(2, 2), hosts(2, 1)
"""Where most cases train, and where training goes on by plain all-reduce."""
ROWS, COLUMNS = 16, 4

Oracle = Callable[[nn.Module, Sequence[Sequence[Batch]], Optimizer], Trained]


@dataclass(frozen=True)
class Case:
    """``sparse``, ``dense``: how parameters of these kinds are synchronized. ``oracle``: the same training in one process."""

    sparse: SyncConfig = ALL_REDUCE
    dense: SyncConfig = ALL_REDUCE
    topology: Topology = TWO_BY_TWO
    oracle: Oracle = train_alone

    def strategy(self, model: TracedModel, samples: int) -> Strategy:
        devices = range(self.topology.device_count)
        return synchronized(by_samples(model.graph, devices, samples), model.graph, self.sparse, self.dense)


CASES: dict[str, Case] = {
    "all_reduce": Case(),
    "sparse_all_gather": Case(sparse=SPARSE_ALL_GATHER),
    "compressed": Case(dense=compressed(LOSSY), oracle=train_compressed),
    "parameter_server": Case(dense=parameter_server(2, "host")),
    "sharded_state": Case(dense=SHARDED_STATE),
    "sharded": Case(dense=SHARDED),
    "sharded_state within hosts": Case(dense=replace(SHARDED_STATE, within="host")),
    "sharded within hosts": Case(dense=SHARDED_IN_HOSTS),
    "sharded_state on GPUs": Case(dense=SHARDED_STATE, topology=cluster([2, 2], GPU)),
    "sharded on GPUs": Case(dense=SHARDED, topology=cluster([2, 2], GPU)),
    "sharded within hosts on GPUs": Case(dense=SHARDED_IN_HOSTS, topology=cluster([2, 2], GPU)),
    "row_server": Case(sparse=parameter_server(2, "host", rows=True)),
}


SAVED = {"compressed", "parameter_server", "sharded on GPUs", "sharded within hosts", "row_server"}
"""Plans for GPUs have even parts. ``test_checkpoint`` and ``test_owned_parts`` save the others."""
EARLY = {"all_reduce", "compressed", "parameter_server", "sharded_state", "sharded within hosts"}


def contract_of(case: str) -> Contract:
    """Of the method that a case is of."""
    return named(case.partition(" ")[0])


class Spread(nn.Module):
    """A table and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, COLUMNS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(self.table(tokens).sum(1)).square().mean()
        return loss


def spread_tokens() -> torch.Tensor:
    """Two samples for each of four devices: no row twice, and each device's in all quarters of the table."""
    return torch.tensor([[device + 8 * half, device + 4 + 8 * half] for device in range(4) for half in range(2)])


SPREAD = ModelFiles("sync methods", lambda name, path: export_model(Spread(), (spread_tokens(),), path=path))


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return {"words": FILES["words"], "spread": SPREAD["spread"]}


def batches(steps: Sequence[int], accumulate: int = 1) -> list[list[Batch]]:
    return [[batch_of(6, 10 * step + part) for part in range(accumulate)] for step in steps]


def trainer_of(path: str, case: Case, optimizer: str, **options: Any) -> Trainer:
    model = traced(path)
    plan = case.strategy(model, 6), case.topology
    return Trainer(model, plan, optimizer=OPTIMIZERS[optimizer], device_kind="cpu", **options)


def run(trainer: Trainer, steps: Sequence[Sequence[Batch]]) -> list[float]:
    return [trainer.step(*(tensor for part in parts for tensor in part)) for parts in steps]


def trained(path: str, method: str, optimizer: str, steps: Sequence[Sequence[Batch]]) -> Trained:
    with trainer_of(path, CASES[method], optimizer, accumulate=len(steps[0])) as trainer:
        losses = run(trainer, steps)
        return Trained(losses, trainer.state_dict())


def everywhere(four: Pool, case: Case, function: Callable[..., Any], *args: object) -> list[Any]:
    return four.run(function, *args, ranks=case.topology.device_count)


def test_every_method_has_a_case() -> None:
    assert {contract.name for contract in METHODS} == {contract_of(case).name for case in CASES}


@pytest.mark.parametrize("method", CASES)
def test_the_case_is_of_the_method(files: dict[str, str], method: str) -> None:
    """It synchronizes what the method can, and no other method but the default does."""
    case, contract = CASES[method], contract_of(method)
    for name, samples in (("words", 6), ("spread", 8)):
        model = traced(files[name])
        plan = build_plan(model.graph, case.strategy(model, samples), case.topology)
        assert {sync.method for sync in plan.syncs} == {METHODS[0].name, contract.name}
    assert case.oracle is train_alone or not contract.exact
    assert rank_sync(contract).__module__ and method_of(contract).contract is contract


@pytest.mark.parametrize("optimizer", often(["momentum", "adam"], ["adam"]))
@pytest.mark.parametrize("method", CASES)
def test_ranks_train_like_one_process(four: Pool, files: dict[str, str], method: str, optimizer: str) -> None:
    """Three steps of two micro-batches; batches are uneven, six samples on four ranks."""
    case, steps = CASES[method], batches(range(3), accumulate=2)
    results = everywhere(four, case, trained, files["words"], method, optimizer, steps)
    assert all(result.losses == results[0].losses for result in results)
    expected = case.oracle(module_of("words"), steps, OPTIMIZERS[optimizer])
    assert worst(results[0], expected) < TOLERANCE, worst(results[0], expected)


def traffic(path: str, method: str) -> Traffic:
    model, case = traced(path), CASES[method]
    with Trainer(model, (case.strategy(model, 8), case.topology), device_kind="cpu") as trainer:
        for _ in range(2):
            trainer.step(spread_tokens())
        return trainer.traffic


def planned_bytes(plan: Plan) -> list[int]:
    """By device what it sends and receives for synchronization in a step; of sums their size. A collective's parts go round a ring."""
    found = Counter[int]()
    rounds = list(asking_rounds(plan))
    for sync in plan.syncs:
        for step in method_of(sync.contract).steps(plan, sync):
            found.update(dict.fromkeys(step.among, step.summed_bytes))
            rounds += step.rounds
            if step.collective is not None:
                size, groups = step.collective.size_bytes, step.collective.groups
                found.update({device: 2 * (size - size // len(group)) for group in groups for device in group})
    for source, target, size in (flow for flows, _ in rounds for flow in flows):
        found.update({source: size})
        found.update({target: size})
    return [found[device] for device in range(plan.device_count)]


@pytest.mark.parametrize("method", CASES)
def test_bytes_counted_are_the_plans(four: Pool, files: dict[str, str], method: str) -> None:
    """On a batch of which the plan knows exactly how many rows each part of it touches."""
    case, graph = CASES[method], traced(files["spread"]).graph
    strategy = case.strategy(traced(files["spread"]), 8)
    (name,) = graph.sparse
    access = replace(graph.sparse[name], touched=(16, 8, 4))
    assert access.indices == 16
    plan = build_plan(replace(graph, sparse={name: access}), strategy, case.topology)
    counted = []
    for own in everywhere(four, case, traffic, files["spread"], method):
        moved = own.pulled_bytes + own.pushed_bytes + own.handed_bytes + own.gathered_bytes + own.index_bytes
        moved += own.compressed_bytes
        counted.append(own.synchronized_bytes + moved)
    assert counted == [2 * planned for planned in planned_bytes(plan)]
    assert all(counted)


def saved_and_on(path: str, method: str, folder: str) -> tuple[Trained, Trained, dict[int, Any], dict[int, Any]]:
    """Two steps, a checkpoint, two more; and two more by a trainer that has loaded it. What the method keeps before and after."""
    case = CASES[method]
    with trainer_of(path, case, "adam") as trainer:
        run(trainer, batches([0, 1]))
        trainer.save(folder)
        kept = trainer.sizes.gradients.state()
        straight = Trained(run(trainer, batches([2, 3])), trainer.state_dict())
    with trainer_of(path, case, "adam", seed=3) as trainer:
        trainer.load(folder)
        found = trainer.sizes.gradients.state()
        return straight, Trained(run(trainer, batches([2, 3])), trainer.state_dict()), kept, found


def on_by(path: str, method: str | None, source: str, target: str | None, steps: Sequence[int]) -> Trained:
    """Go on by a method's case, or by the default on other hosts."""
    with trainer_of(path, Case(topology=OTHER) if method is None else CASES[method], "adam") as trainer:
        trainer.load(source)
        losses = run(trainer, batches(steps))
        if target is not None:
            trainer.save(target)
        return Trained(losses, trainer.state_dict())


@pytest.mark.parametrize("method", often([*CASES], SAVED))
def test_checkpoints_go_on_as_if_nothing_had_happened(four: Pool, files: dict[str, str], tmp_path: Path, method: str) -> None:
    case, path, folders = CASES[method], files["words"], [str(tmp_path / name) for name in "ab"]
    results = everywhere(four, case, saved_and_on, path, method, folders[0])
    for straight, resumed, kept, found in results:
        assert straight.losses == resumed.losses
        assert all(torch.equal(straight.state[name], tensor) for name, tensor in resumed.state.items())
        assert [(shard, {*own}) for shard, own in kept.items()] == [(shard, {*own}) for shard, own in found.items()]
        assert all({*own} == {*contract_of(method).state} for own in kept.values())
        assert all(torch.equal(tensor, found[shard][name]) for shard, own in kept.items() for name, tensor in own.items())
    other = four.run(on_by, path, None, folders[0], folders[1], [2], ranks=OTHER.device_count)[0]
    back = everywhere(four, case, on_by, path, method, folders[1], None, [3])[0]
    if contract_of(method).exact:  # by another method or on other ranks a lossy one loses something else
        on = Trained([*other.losses, *back.losses], back.state)
        assert worst(on, results[0][0]) < TOLERANCE


def early_or_late(path: str, method: str, early: bool) -> tuple[Trained, int]:
    """A training, and how many exchanges may start within segments."""
    schedules: list[SyncSchedule] = []

    def noted(*args: Any, **options: Any) -> SyncSchedule:
        schedules.append(sync_schedule(*args, **{**options, "early": early}))
        return schedules[-1]

    with patch.object(steps_of_ranks, "sync_schedule", noted):
        result = trained(path, method, "momentum", batches(range(2), accumulate=2))
    return result, sum(len(keys) for schedule in schedules for keys in schedule.follow.values())


@pytest.mark.parametrize("method", often([*CASES], EARLY))
def test_exchanges_that_start_early_change_nothing(four: Pool, files: dict[str, str], method: str) -> None:
    case = CASES[method]
    early, late = (everywhere(four, case, early_or_late, files["words"], method, way) for way in (True, False))
    for (one, some), (other, none) in zip(early, late, strict=True):
        assert some > 0 and none == 0
        assert one.losses == other.losses
        assert all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())
