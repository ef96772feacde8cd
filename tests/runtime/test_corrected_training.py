"""``soap-run --correct-momentum``: every parameter has momentum once, as in the emulation in one process, compressed or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.oracles.compression import Emulation, Training
from soap.cli.command import UsageError
from soap.cli.training import Job, train
from soap.cli.updating import Updating
from soap.errors import RuntimeFailure
from soap.model.regions import balanced
from soap.profiles.roofline import RooflineCosts
from soap.runtime.check import check
from soap.runtime.compression.dgc import Momentum, WarmUp, compressed_names, require_correctable
from soap.runtime.compression.peer import CompressedTraining
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskKind
from soap.strategy.compression import Rgc
from soap.strategy.sync import SPARSE_ALL_GATHER, compressed, parameter_server
from tests.extent import often
from tests.runtime.compressed_training import RANKS, SAMPLES
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OF_SIX, batch_of, module_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.test_compressed_sync import METHODS
from tests.runtime.test_sync_state import cut_strategy
from tests.runtime.traced import traced

FOUR, STEPS = hosts(2, 2), 8
PARTLY = ("layer.weight", "head.weight")


def words(step: int) -> list[torch.Tensor]:
    """As ``--data`` yields it."""
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch_of(SAMPLES, step)]


@pytest.fixture(scope="module")
def path() -> str:
    return OF_SIX["words"]


def job_of(
    path: str, names: tuple[str, ...], momentum: float | None, optimizer: str = "sgd", *, checked: bool = False, clip: float | None = None
) -> Job:
    model = traced(path)
    strategy = by_samples(model.graph, range(RANKS), SAMPLES)
    chosen = strategy.with_changes(parameters=dict.fromkeys(names, compressed(METHODS["exact"])))
    plan = build_plan(model.graph, chosen, FOUR)
    return Job(
        model=path,
        reading={},
        topology=FOUR,
        strategies={"strategy": (chosen, None)},  # type: ignore[dict-item]
        steps=STEPS,
        seed=0,
        optimizer=Updating((optimizer,), 0.1, momentum=momentum),
        checked=checked,
        clip_norm=clip,
        dtype="float64",
        correct_momentum=momentum,
        warm_up=(1, 1),
        compressed={"strategy": tuple(sorted(compressed_names(plan)))},
        data="tests.runtime.test_corrected_training:batches",
    )


def batches() -> list[list[torch.Tensor]]:
    return [list(batch_of(SAMPLES, step)) for step in range(STEPS)]


@pytest.mark.parametrize("decay", often([0.0, 0.2], [0.2]))
@pytest.mark.parametrize("names", often([PARTLY, (*PARTLY, "layer.bias", "head.bias"), ()], [PARTLY]))
def test_momentum_of_the_command_is_that_of_the_emulation(four: Pool, path: str, names: tuple[str, ...], decay: float) -> None:
    """Of parameters that are compressed, and of biases and the table, which are not; and of their weight decay. A check agrees."""
    optimizer = f"torch.optim.SGD:weight_decay={decay}"
    outcome = four.run(train, job_of(path, names, 0.9, optimizer, checked=bool(decay and names)), ranks=RANKS)[0]
    module = module_of("words")
    training = Training(0.1, Momentum(0.9), decay, warm_up=WarmUp(1, 1))
    alone = Emulation(module, lambda own, part: own(*part), dict.fromkeys(names, METHODS["exact"]), RANKS, training)
    expected = [alone.step([[t[a:b] for t in words(step)] for a, b in balanced(SAMPLES, RANKS)]) for step in range(STEPS)]
    assert outcome.measured["strategy"].losses == pytest.approx(expected, rel=1e-9)
    assert outcome.check is None or outcome.check.passed


@pytest.mark.parametrize("clip", often([0.05, 0.4, 1e6], [0.4]))
@pytest.mark.parametrize("momentum", often([None, 0.9], [0.9]))
def test_ranks_clip_their_own_gradients_as_the_emulation_does(four: Pool, path: str, clip: float, momentum: float | None) -> None:
    """Those of all parameters together, in dense steps of a warm-up as well; at 0.4 some ranks clip in some steps."""
    outcome = four.run(train, job_of(path, PARTLY, momentum, clip=clip), ranks=RANKS)[0]
    training = Training(0.1, None if momentum is None else Momentum(momentum), clip_norm=clip, warm_up=WarmUp(1, 1))
    alone = Emulation(module_of("words"), lambda own, part: own(*part), dict.fromkeys(PARTLY, METHODS["exact"]), RANKS, training)
    expected = [alone.step([[t[a:b] for t in words(step)] for a, b in balanced(SAMPLES, RANKS)]) for step in range(STEPS)]
    assert outcome.measured["strategy"].losses == pytest.approx(expected, rel=1e-9)


def clipped_apart(path: str) -> tuple[list[float], list[float], list[str]]:
    """Losses with micro-batches, and of traced steps; lines of what is refused."""
    model, lines = traced(path), []
    strategy = by_samples(model.graph, range(RANKS), SAMPLES).with_changes(parameters=dict.fromkeys(PARTLY, compressed(METHODS["exact"])))
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "clip_norm": 0.05}
    with Trainer(model, (strategy, FOUR), accumulate=2, **options) as trainer:  # type: ignore[arg-type]
        twice = [trainer.step(*words(step), *words(step)) for step in range(3)]
    with Trainer(model, (strategy, FOUR), **options) as trainer:  # type: ignore[arg-type]
        trainer.trace(*words(0))
        once = [trainer.step(*words(step)) for step in (1, 2)]
        with pytest.raises(RuntimeFailure) as found:
            check(trainer, words, options["optimizer"])  # type: ignore[arg-type]
        lines.append(str(found.value))
    served = strategy.with_changes(parameters={**strategy.parameters, "layer.bias": parameter_server(1)})
    rows = strategy.with_changes(parameters={**strategy.parameters, "words.weight": SPARSE_ALL_GATHER})
    cut = cut_strategy(model, 4).with_changes(parameters=strategy.parameters)
    for other in (served, rows, cut):
        with pytest.raises(RuntimeFailure) as found:
            Trainer(model, (other, FOUR), **options)  # type: ignore[arg-type]
        lines.append(str(found.value))
    return twice, once, lines


def test_clipping_waits_for_the_last_micro_batch(four: Pool, path: str) -> None:
    """Two equal micro-batches have the gradients of one, and a traced step is a step."""
    for twice, once, (checked, served, rows, cut) in four.run(clipped_apart, path, ranks=RANKS):
        assert twice[1:] == pytest.approx(once, rel=1e-9)
        assert checked.startswith("a check of clipped gradients, some of them compressed")
        assert served.startswith("clip_norm 0.05 with compressed gradients, where 'layer.bias' is not summed over all devices (")
        assert rows.startswith("clip_norm 0.05 with compressed gradients, where 'words.weight' is not summed over all devices (")
        assert "is not summed over all devices (" in cut and "2 of 4" in cut


def test_with_clipping_everything_is_sent_behind_the_backward_pass(path: str) -> None:
    """In plans and simulations: selections, and all-reduces of what is not compressed. Without it they begin before. (Other densities
    travel in other buckets.)"""
    graph = traced(path).graph
    ways = {name: compressed(Rgc(density, "exact")) for name, density in zip(PARTLY, (0.3, 0.2), strict=True)}
    strategy = by_samples(graph, range(RANKS), SAMPLES).with_changes(parameters=ways)
    for clip in (None, 1.0):
        found = Simulator(graph, FOUR, RooflineCosts(FOUR), 0, CompressedTraining(clip_norm=clip).planned).run(strategy)
        starts = found.schedule.start_ns
        backward = {device: 0 for device in range(RANKS)}
        for i, task in enumerate(found.tasks.tasks):
            if task.kind is TaskKind.BACKWARD:
                [device] = [d for d in task.resources if d < RANKS]
                backward[device] = max(backward[device], starts[i] + task.duration_ns)
        selections = [(task.resources[0], starts[i]) for i, task in enumerate(found.tasks.tasks) if task.name.startswith("select ")]
        sums = [starts[i] for i, task in enumerate(found.tasks.tasks) if task.kind is TaskKind.SYNC and "sync" in task.name]
        assert len(selections) == 2 * RANKS and len(sums) >= 3
        late = all(start >= backward[device] for device, start in selections) and all(start >= max(backward.values()) for start in sums)
        assert late == (clip is not None)


def decaying(path: str, steps: range, source: str | None, target: str | None) -> list[float]:
    model = traced(path)
    strategy = by_samples(model.graph, range(RANKS), SAMPLES).with_changes(parameters=dict.fromkeys(PARTLY, compressed(METHODS["exact"])))
    groups = lambda name, shape: {"momentum": 0.0 if name in PARTLY else 0.9, "weight_decay": 0.2}  # noqa: E731
    rule = CompressedTraining(Momentum(0.9))
    with Trainer(model, (strategy, FOUR), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), groups=groups, compressing=rule) as trainer:
        if source is not None:
            trainer.load(source)
        losses = [trainer.step(*words(step)) for step in steps]
        if target is not None:
            trainer.save(target)
        return losses


def test_momentum_of_weight_decay_is_in_checkpoints(four: Pool, path: str, tmp_path: Path) -> None:
    straight = four.run(decaying, path, range(6), None, None, ranks=RANKS)[0]
    first = four.run(decaying, path, range(3), None, str(tmp_path), ranks=RANKS)[0]
    assert first + four.run(decaying, path, range(3, 6), str(tmp_path), None, ranks=RANKS)[0] == straight


def test_a_parameter_with_two_rules_is_refused(path: str) -> None:
    """Of a layer in two parts, one is compressed, and the other one has a single reader."""
    model = traced(path)
    strategy = cut_strategy(model, 4).with_changes(parameters=dict.fromkeys(PARTLY, compressed(METHODS["exact"])))
    plan = build_plan(model.graph, strategy, FOUR)
    require_correctable(plan)
    pairs = [(sync, region) for sync in plan.syncs for region in sync.regions if region.parameter == "head.weight"]
    assert len(pairs) == 2
    sync, alone = pairs[1]
    rest = tuple(region for region in sync.regions if region is not alone)
    own = replace(sync, parameter=alone.parameter, regions=(alone,), compression=None, method="all_reduce")
    others = [each for each in plan.syncs if each is not sync] + [replace(sync, regions=rest)] * bool(rest)
    syncs = (*others, own)
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
