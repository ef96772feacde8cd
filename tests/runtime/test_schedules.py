"""Schedules go on from what a checkpoint keeps of them, as if they had never ended; and nothing else of a file gets into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as S

from soap.errors import CheckpointError, RuntimeFailure
from soap.runtime.updates.optimizers import Schedule, joined, require_same

MAKERS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda o: S.ConstantLR(o, 0.5, 4),
    "step": lambda o: S.StepLR(o, 2),
    "several steps": lambda o: S.MultiStepLR(o, [1, 4, 4]),
    "exponential": lambda o: S.ExponentialLR(o, 0.9),
    "linear": lambda o: S.LinearLR(o, 0.1, 1.0, 5),
    "polynomial": lambda o: S.PolynomialLR(o, 7, 2.0),
    "cosine": lambda o: S.CosineAnnealingLR(o, 5, 1e-3),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2, 2),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2"),
    "one cycle": lambda o: S.OneCycleLR(o, [0.1, 0.2], total_steps=9),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "function": lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9)], optimizer=o),
    "sequence": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 2), S.MultiStepLR(o, [2, 3])], [2]),
}
LOSSES = [3.0, 2.0, 2.0, 2.0, 2.5, 2.5, 1.0]


def optimizer() -> torch.optim.Optimizer:
    tensors = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for tensor in tensors:
        tensor.grad = torch.ones(2)
    return torch.optim.SGD([{"params": [tensors[0]]}, {"params": [tensors[1]], "lr": 0.3}], lr=0.2, momentum=0.9)


def options(own: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in own.param_groups]


@pytest.mark.parametrize("name", MAKERS)
def test_goes_on_as_if_it_had_never_ended(name: str) -> None:
    straight = optimizer()
    schedule = Schedule.of(MAKERS[name], straight)
    expected = []
    for number, loss in enumerate(LOSSES):
        if number == 3:
            record = json.loads(json.dumps(schedule.record()))
            kept = options(straight)
        straight.step()
        schedule.step(loss)
        expected.append(options(straight))
    resumed = optimizer()
    second = Schedule.of(MAKERS[name], resumed)
    for group, own in zip(resumed.param_groups, kept, strict=True):
        group.update(own)  # as the optimizer's own part of the checkpoint does
    second.restore(record)
    for number in range(3, len(LOSSES)):
        resumed.step()
        second.step(LOSSES[number])
        assert options(resumed) == expected[number]


def test_what_a_file_adds_is_left_out_and_what_is_damaged_is_refused() -> None:
    own = optimizer()
    schedule = Schedule.of(MAKERS["step"], own)
    record: dict[str, Any] = {"name": "StepLR", "state": {**schedule.record()["state"], "step": 3, "optimizer": 5}}  # type: ignore[index]
    schedule.restore(record)
    own.step()
    schedule.step(1.0)
    for bad in ({"soap:kind": "os.system", "of": []}, {"soap:kind": "Counter", "of": 3}, {"soap:kind": "tuple"}):
        with pytest.raises(CheckpointError, match=r"^the checkpoint's schedule is damaged: it has a '"):
            schedule.restore({"name": "StepLR", "state": {"gamma": bad}})
    with pytest.raises(CheckpointError, match=r"is of 1 parameter groups, the optimizer here has 2; make groups by names"):
        schedule.restore({"name": "StepLR", "state": {"base_lrs": [0.1]}})


def test_what_cannot_be_kept_is_named() -> None:
    class Odd(S.StepLR):
        pass

    own = Odd(optimizer(), 2)
    own.odd = object()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"^schedule Odd has a object in its state; expected numbers, texts, lists"):
        Schedule(own, "Odd").record()


def test_one_that_is_at_its_end_is_one_line() -> None:
    own = optimizer()
    schedule = Schedule.of(lambda o: S.OneCycleLR(o, 0.1, total_steps=2), own)
    with pytest.raises(RuntimeFailure, match=r"^schedule OneCycleLR cannot make a step: ValueError: Tried to step 3 times"):
        for _ in range(4):
            own.step()
            schedule.step(1.0)


def test_one_that_cannot_be_made_is_one_line() -> None:
    with pytest.raises(RuntimeFailure, match=r"^no schedule can be made of optimizer SGD: TypeError: .*T_max.*; change its options$"):
        Schedule.of(S.CosineAnnealingLR, optimizer())  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure, match=r"^schedule gave a int; expected a torch.optim.lr_scheduler.LRScheduler"):
        Schedule.of(lambda o: 3, optimizer())  # type: ignore[arg-type, return-value]


def test_ranks_and_checkpoints_must_agree() -> None:
    one: dict[str, Any] = {"name": "StepLR", "state": {"gamma": 0.1}}
    assert joined([None, one, dict(one)]) == one and joined([None]) is None
    with pytest.raises(CheckpointError, match=r"^the schedule's state differs between ranks"):
        joined([one, {"name": "StepLR", "state": {"gamma": 0.2}}])
    require_same([None, "StepLR"], one, "c")
    require_same([None, None], None, "c")
    with pytest.raises(CheckpointError, match=r"^checkpoint 'c' was saved with schedule StepLR, this run has none; use the same schedule$"):
        require_same([None], one, "c")
    with pytest.raises(CheckpointError, match=r"^checkpoint 'c' was saved without a schedule, this run has StepLR"):
        require_same(["StepLR"], None, "c")


def test_none() -> None:
    assert Schedule.of(None, optimizer()).record() is None
    Schedule.of(None, None).step(1.0)
