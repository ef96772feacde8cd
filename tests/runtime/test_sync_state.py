"""What a method of synchronization keeps from step to step goes through checkpoints, to the same plan and to others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from soap.errors import CheckpointError
from soap.plan.syncs.all_reduce import BucketedSum as PlannedSum
from soap.runtime.comm.redistribute import Pending
from soap.runtime.sync.seam import SyncContext
from soap.runtime.sync.sums import BucketedSum
from soap.runtime.trainer import Trainer
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.sync_contracts import METHODS, Contract
from soap.tracing.execute import TracedModel
from tests.runtime.exact_modules import Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OF_SIX, OPTIMIZERS, batch_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.traced import traced

FEEDBACK = Contract(
    name="feedback",
    word="feedback",
    owner="readers",
    payload="feedback",
    residence="kept",
    parameters="all",
    exact=False,
    state=("residual",),
)
TWO, FOUR = hosts(1, 1), hosts(2, 2)


class Feedback(BucketedSum):
    """Sums are rounded to bfloat16; what that loses is added to the next step's."""

    def __init__(self, context: SyncContext, syncs: Mapping[int, object]) -> None:
        super().__init__(context, syncs)  # type: ignore[arg-type]
        self.residuals = {number: torch.zeros_like(buffer) for number, buffer in self.buffers.items()}

    def start_sum(self, number: int, devices: tuple[int, ...]) -> Pending:
        buffer = self.buffers[number]

        def rounded() -> None:
            buffer.add_(self.residuals[number])
            self.residuals[number].copy_(buffer)
            buffer.copy_(buffer.bfloat16())
            self.residuals[number].sub_(buffer)

        return super().start_sum(number, devices).then(rounded)

    def _residuals(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, residual in self.residuals.items():
            shards = [self.store.tensors[shard] for shard in self.syncs[number].shards]
            parts = residual.split([shard.numel() for shard in shards])
            for shard, like, part in zip(self.syncs[number].shards, shards, parts, strict=True):
                yield shard, part.view(like.shape)

    def state(self) -> dict[int, dict[str, torch.Tensor]]:
        return {shard: {"residual": residual.clone()} for shard, residual in self._residuals()}

    def restore(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        for shard, residual in self._residuals():
            residual.copy_(state[shard]["residual"])


@contextmanager
def registered() -> Iterator[None]:
    """Inside there is the method."""
    modules = {name: ModuleType(name) for name in ("soap.plan.syncs.feedback", "soap.runtime.sync.feedback")}
    for module, method in zip(modules.values(), (PlannedSum(FEEDBACK), Feedback), strict=True):
        module.METHOD = method  # type: ignore[attr-defined]
    sys.modules.update(modules)
    METHODS.append(FEEDBACK)
    try:
        yield
    finally:
        METHODS.remove(FEEDBACK)
        for name in modules:
            del sys.modules[name]


def cut_strategy(model: TracedModel, ranks: int) -> Strategy:
    """By samples on two ranks; on four, layers are cut by their outputs as well, so that shards and buffers are others."""
    strategy = by_samples(model.graph, range(ranks), 6)
    for op in model.graph.operators:
        cut = next((k for k, factor in enumerate(op.factors) if op.parameters and factor.size == 5), None)
        if cut is not None and ranks == 4:
            first = next(k for k, factor in enumerate(op.factors) if factor.size == 6)
            degrees = tuple(2 if k in (first, cut) else 1 for k in range(len(op.factors)))
            strategy = strategy.with_operator(op.name, OpConfig(degrees, (0, 1, 2, 3)))
    return strategy


def strategy_of(model: TracedModel, ranks: int) -> Strategy:
    feedback = SyncConfig(payload="feedback")
    return cut_strategy(model, ranks).with_changes(parameters={tensor.name: feedback for tensor in model.graph.parameters})


def go_on(
    path: str, ranks: int, steps: Sequence[int], source: str | None, target: str | None, forget: bool = False
) -> tuple[Trained, float]:
    """Steps from a checkpoint to another; the largest residual behind them. ``forget``: what was kept is left out."""
    with registered():
        model = traced(path)
        topology = TWO if ranks == 2 else FOUR
        with Trainer(model, (strategy_of(model, ranks), topology), optimizer=OPTIMIZERS["momentum"]) as trainer:
            if source is not None:
                trainer.load(source)
            gradients = trainer.sizes.gradients
            if forget:
                gradients.restore({shard: {"residual": torch.zeros_like(own["residual"])} for shard, own in gradients.state().items()})
            losses = [trainer.step(*batch_of(6, step)) for step in steps]
            if target is not None:
                trainer.save(target)
            largest = max(float(own["residual"].abs().max()) for own in gradients.state().values())
            return Trained(losses, trainer.state_dict()), largest


@pytest.fixture(scope="module")
def path() -> str:
    return OF_SIX["words"]


def test_what_is_kept_goes_on(four: Pool, path: str, tmp_path: Path) -> None:
    """On the same plan to the bit, also by way of another one; on another plan as well as sums agree. Without it training differs."""
    first, second = str(tmp_path / "two"), str(tmp_path / "four")
    straight, largest = four.run(go_on, path, 2, [0, 1, 2, 3], None, None, ranks=2)[0]
    four.run(go_on, path, 2, [0, 1], None, first, ranks=2)
    four.run(go_on, path, 4, [], first, second, ranks=4)
    assert largest > 1e-6
    for source in (first, second):
        resumed, _ = four.run(go_on, path, 2, [2, 3], source, None, ranks=2)[0]
        assert resumed.losses == straight.losses[2:]
        assert all(torch.equal(tensor, straight.state[name]) for name, tensor in resumed.state.items())
    end = Trained(straight.losses[2:], straight.state)
    elsewhere, _ = four.run(go_on, path, 4, [2, 3], first, None, ranks=4)[0]
    assert worst(elsewhere, end) < 1e-9
    forgotten, _ = four.run(go_on, path, 2, [2, 3], first, None, True, ranks=2)[0]
    assert worst(forgotten, end) > 1e-6


def plain(path: str, source: str | None, target: str) -> str:
    """What a trainer whose methods keep nothing says of a checkpoint, and leaves in another."""
    model = traced(path)
    with Trainer(model, (by_samples(model.graph, range(2), 6), TWO), optimizer=OPTIMIZERS["momentum"]) as trainer:
        if source is not None:
            try:
                trainer.load(source)
            except CheckpointError as error:
                return str(error)
        trainer.step(*batch_of(6))
        return str(trainer.save(target))


def test_other_methods_leave_what_they_do_not_keep(four: Pool, path: str, tmp_path: Path) -> None:
    four.run(go_on, path, 2, [0], None, str(tmp_path / "kept"), ranks=2)
    saved = four.run(plain, path, str(tmp_path / "kept"), str(tmp_path / "plain"), ranks=2)[0]
    assert "sync" not in Path(saved, "soap.json").read_text()


def test_one_line_for_a_checkpoint_that_lacks_what_it_says_is_kept(four: Pool, path: str, tmp_path: Path) -> None:
    four.run(go_on, path, 2, [0], None, str(tmp_path / "kept"), ranks=2)
    (manifest,) = tmp_path.glob("kept/*/soap.json")
    document = json.loads(manifest.read_text())
    del document["tensors"]["sync.state.head.weight.residual"]
    manifest.write_text(json.dumps(document))
    said = four.run(plain, path, str(tmp_path / "kept"), str(tmp_path / "plain"), ranks=2)
    assert all("lacks the synchronization state 'residual' of 'head.weight'" in text and "\n" not in text for text in said), said
