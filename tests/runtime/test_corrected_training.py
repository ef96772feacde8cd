"""``soap-run --correct-momentum``: every parameter has momentum once, as in the emulation in one process, compressed or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soap.cli.command import UsageError
from soap.cli.training import Job, train
from soap.cli.updating import Updating
from soap.errors import RuntimeFailure
from soap.model.regions import balanced
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.oracle import Emulation, Training
from soap.runtime.updates.momentum import compressed_names, require_correctable
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy
from soap.strategy.sync import compressed
from soap.tracing.export import export_model
from tests.runtime.compressed_training import RANKS, SAMPLES
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import batch_of, module_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.test_compressed_sync import METHODS, loaded
from tests.runtime.test_sync_state import cut_strategy

FOUR, STEPS = hosts(2, 2), 8
PARTLY = ("layer.weight", "head.weight")


def words(step: int) -> list[torch.Tensor]:
    """As ``--data`` yields it."""
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch_of(SAMPLES, step)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("models") / "words.pt2"
    export_model(module_of("words"), batch_of(SAMPLES), path=found)
    return str(found)


def job_of(path: str, names: tuple[str, ...], momentum: float | None, strategy: Strategy | None = None) -> Job:
    model = loaded(path)
    chosen = (strategy or by_samples(model.graph, range(RANKS), SAMPLES)).with_changes(
        parameters=dict.fromkeys(names, compressed(METHODS["exact"]))
    )
    plan = build_plan(model.graph, chosen, FOUR)
    return Job(
        model=path,
        reading={},
        topology=FOUR,
        strategies={"strategy": (chosen, None)},  # type: ignore[dict-item]
        steps=STEPS,
        seed=0,
        optimizer=Updating(("sgd",), 0.1, momentum=momentum),
        dtype="float64",
        correct_momentum=momentum,
        warm_up=(1, 1),
        compressed={"strategy": tuple(sorted(compressed_names(plan)))},
        data="tests.runtime.test_corrected_training:batches",
    )


def batches() -> list[list[torch.Tensor]]:
    return [list(batch_of(SAMPLES, step)) for step in range(STEPS)]


@pytest.mark.parametrize("names", [PARTLY, (*PARTLY, "layer.bias", "head.bias"), ()])
def test_momentum_of_the_command_is_that_of_the_emulation(four: Pool, path: str, names: tuple[str, ...]) -> None:
    """Of parameters that are compressed, and of biases and the table, which are not."""
    outcome = four.run(train, job_of(path, names, 0.9), ranks=RANKS)[0]
    module = module_of("words")
    training = Training(0.1, Momentum(0.9), warm_up=WarmUp(1, 1))
    alone = Emulation(module, lambda own, part: own(*part), dict.fromkeys(names, METHODS["exact"]), RANKS, training)
    expected = [alone.step([[t[a:b] for t in words(step)] for a, b in balanced(SAMPLES, RANKS)]) for step in range(STEPS)]
    assert outcome.measured["strategy"].losses == pytest.approx(expected, rel=1e-9)


def test_a_parameter_with_two_rules_is_refused(path: str) -> None:
    """Of a layer in two parts, one is compressed, and the other one has a single reader."""
    model = loaded(path)
    strategy = cut_strategy(model, 4).with_changes(parameters=dict.fromkeys(PARTLY, compressed(METHODS["exact"])))
    plan = build_plan(model.graph, strategy, FOUR)
    require_correctable(plan)
    assert sum(sync.parameter == "head.weight" for sync in plan.syncs) == 2
    syncs = tuple(
        replace(sync, compression=None, method="all_reduce") if (sync.parameter, sync.index) == ("head.weight", 1) else sync
        for sync in plan.syncs
    )
    with pytest.raises(RuntimeFailure, match=r"^momentum correction of 'head.weight', of which one device alone keeps \["):
        require_correctable(replace(plan, syncs=syncs))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("adam", "--correct-momentum 0.9 beside --optimizer adam; expected sgd"),
        ("torch.optim.RMSprop", "beside --optimizer torch.optim.RMSprop; expected sgd"),
        ("torch.optim.SGD:momentum=0.5", "which sets momentum too; expected SGD without"),
        ("torch.optim.SGD:dampening=0.5", "which sets dampening too"),
    ],
)
def test_other_optimizers_are_refused_before_ranks_start(optimizer: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Updating((optimizer,), momentum=0.9).recipe()
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_weight_decay_and_momentum_share_groups() -> None:
    groups = Updating(("sgd",), weight_decay=0.1, momentum=0.9, corrected=("a",)).recipe().groups
    assert groups is not None
    assert groups("a", (2, 2)) == {"weight_decay": 0.1, "momentum": 0.0}
    assert groups("b", (2,)) == {"weight_decay": 0.0, "momentum": 0.9}
