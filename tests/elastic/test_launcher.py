"""Training in a Ray cluster: like one process if one worker does all, and each lease counted once whoever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.launcher import Options, Outcome, Run, train
from soap.elastic.layout import TableCut
from soap.elastic.leases import Dealer, Lease
from soap.elastic.session import Session, module
from soap.elastic.store import Keeping
from soap.elastic.worker import InMemory, Report, Source
from tests.elastic.models import Additive, additive_samples, exported, in_float64, trained_alone
from tests.elastic.test_owners import samples

SGD = partial(torch.optim.SGD, lr=0.1)
SAMPLES, BATCH = 38, 4
SUMS: dict[str, Any] = {"reduce_dense": "sum", "reduce_sparse": "sum"}


@pytest.fixture
def additive(tmp_path: Path) -> tuple[Source, InMemory]:
    """A model whose final values do not depend on the order of leases, and its data."""
    torch.manual_seed(0)
    data = additive_samples(SAMPLES)
    path = exported(Additive(), [one[:BATCH] for one in data], tmp_path / "additive.pt2", dynamic=True)
    return Source(str(path), "float64"), InMemory(tuple(in_float64(data)))


def check(source: Source, data: InMemory, options: Options, outcome: Outcome) -> None:
    """The values are those of one process that has done each lease once."""
    dealer = Dealer(len(data), options.batch, options.epochs, options.seed)
    leases = [dealer.deal("") for _ in range(dealer.total)]
    _, values = trained_alone(source.spec, "float64", source.seed, [data.batch(one.indices) for one in leases], SGD)  # type: ignore[union-attr]
    assert outcome.parameters is not None and {*outcome.parameters} == {*values}
    for name, value in values.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Deadly(InMemory):
    """Kills the first worker that asks for sample 9, while it holds the lease."""

    mark: str = ""

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        if 9 in indices and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(indices)


@pytest.mark.long
def test_killed_worker_and_killed_server_lose_nothing(cluster: Session, additive: tuple[Source, InMemory], tmp_path: Path) -> None:
    """The worker with a lease in hand, the server while workers are at work."""
    source, data = additive
    tables = {"bag.weight": TableCut(0, (0, 1, 0))}
    options = Options(batch=BATCH, epochs=2, workers=2, servers=2, tables=tables, dense=(0, 1), bound=None, **SUMS)
    runs: list[Run] = []
    servers: list[int] = []

    def kill(number: int, report: Report) -> None:
        if len(runs[0].outcome.losses) == 13:
            servers.append(module().get(runs[0].servers[-1].process.remote()))
            os.kill(servers[0], signal.SIGKILL)

    keeping = Keeping(str(tmp_path / "run"), SGD, snapshot_every_pushes=4)
    deadly = Deadly(data.inputs, str(tmp_path / "mark"))
    outcome = train(source, deadly, keeping, options, parameters=True, told=kill, started=runs.append)
    assert len(servers) == 1 and (outcome.lost_workers, outcome.dealt_again, len(outcome.losses)) == (1, 1, 20)
    check(source, data, options, outcome)
    cluster.check_listeners()


@pytest.mark.long  # ``cli/test_stale_run`` trains alike, ``test_owners`` has leases that are done again, without Ray
def test_averaged_steps_with_a_killed_worker_train_like_one_process(cluster: Session, tmp_path: Path) -> None:
    """As one process that takes whole steps, with Adagrad: whoever does a lease, and whenever."""
    source, adagrad = Source("zoo:full_sparse:tiny", "float64"), partial(torch.optim.Adagrad, lr=0.05)
    options = Options(batch=4, epochs=2, workers=2, servers=2, averaged=True)
    data = Deadly(samples(22).inputs, str(tmp_path / "mark"))
    outcome = train(source, data, Keeping(str(tmp_path / "run"), adagrad), options, parameters=True)
    dealer, steps = Dealer(22, 4, 2), options.steps_of(22)
    leases = [dealer.deal("") for _ in range(dealer.total)]
    indices = [one.indices for one in leases if isinstance(one, Lease)]
    batches = [data.batch(np.concatenate([indices[lease] for lease in steps.members(step)])) for step in range(6)]
    losses, values = trained_alone(source.spec, "float64", source.seed, batches, adagrad)
    assert (outcome.lost_workers, outcome.dealt_again, outcome.samples) == (1, 1, 44) and outcome.missing == {0: 12}
    assert [outcome.step_losses[step] for step in range(6)] == pytest.approx(losses, rel=1e-9)
    assert outcome.parameters is not None and outcome.sent_bytes > 0 < outcome.received_bytes
    for name, value in values.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.long  # Ray takes seconds; shares of a step are drawn in ``test_steps``
def test_leases_count_by_their_share_of_a_step(cluster: Session, additive: tuple[Source, InMemory], tmp_path: Path) -> None:
    """Values of a loss that is linear do not depend on staleness: asynchronous leases by their shares are the synchronous steps."""
    source, data = additive
    options = Options(batch=BATCH, workers=3, servers=1, bound=None, reduce_sparse="sum", steps=3, shuffled=False)
    outcome = train(source, data, Keeping(str(tmp_path / "run"), SGD), options, parameters=True)
    whole = [data.batch(range(first, first + 3 * BATCH)) for first in range(0, 9 * BATCH, 3 * BATCH)]
    _, values = trained_alone(source.spec, "float64", source.seed, whole, SGD)
    begin = source.load().parameters
    assert outcome.parameters is not None and len(outcome.losses) == 9 and sum(outcome.missing.values()) == 9
    for name, times in (("weight", 1), ("bag.weight", 3)):
        torch.testing.assert_close(outcome.parameters[name] - begin[name], times * (values[name] - begin[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(("axis", "bound"), [(0, 0), (1, 1)])
def test_bounds_and_axes_train_alike(cluster: Session, additive: tuple[Source, InMemory], tmp_path: Path, axis: int, bound: int) -> None:
    source, data = additive
    tables = {"bag.weight": TableCut(axis, (0, 1))}
    options = Options(batch=BATCH, epochs=2, workers=3, servers=2, tables=tables, dense=(0, 1), bound=bound, **SUMS)
    outcome = train(source, data, Keeping(str(tmp_path / "run"), SGD), options, parameters=True)
    assert len(outcome.losses) == 20 and not outcome.lost_workers
    check(source, data, options, outcome)


@pytest.mark.long
def test_launcher_that_is_stopped_goes_on_from_its_folder(cluster: Session, additive: tuple[Source, InMemory], tmp_path: Path) -> None:
    source, data = additive
    options = Options(batch=BATCH, epochs=2, workers=2, servers=2, reduce_dense="sum", reduce_sparse="sum")
    keeping = Keeping(str(tmp_path / "run"), SGD)

    def stop(number: int, report: Report) -> None:
        if number == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(source, data, keeping, options, told=stop)
    outcome = train(source, data, keeping, options, parameters=True)
    check(source, data, options, outcome)
    with pytest.raises(ElasticError, match=r"is of a run with batch 4, not 5; expected the same, or an empty folder"):
        train(source, data, keeping, Options(batch=5, epochs=2))


@pytest.mark.long
def test_what_goes_wrong_in_an_actor_is_one_line(cluster: Session, additive: tuple[Source, InMemory], tmp_path: Path) -> None:
    source, data = additive
    data.inputs[0][9] = 30
    with pytest.raises(ElasticError, match=r"^lease \d+ failed: id 30 is out of range; expected ids from 0 to 29"):
        train(source, data, Keeping(str(tmp_path / "run"), SGD), Options(batch=BATCH))
    whole: Callable[..., torch.optim.Optimizer] = partial(torch.optim.LBFGS, lr=0.1)
    with pytest.raises(ElasticError, match=r"^a server cannot start: .*optimizer"):
        train(source, data, Keeping(str(tmp_path / "other"), whole), Options(batch=BATCH))
