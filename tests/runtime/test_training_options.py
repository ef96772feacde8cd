"""How training is told what to do: one value, or its fields by name."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from soap.errors import RuntimeFailure
from soap.runner.config import RunnerConfig
from soap.runtime.trainer import Trainer
from soap.runtime.training_options import TrainingKeywords, TrainingOptions
from tests.graph_builder import mlp
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split


def test_names_and_fields_are_the_same_with_the_same_types() -> None:
    assert get_type_hints(TrainingKeywords) == get_type_hints(TrainingOptions)
    assert list(TrainingKeywords.__annotations__) == [field.name for field in fields(TrainingOptions)]


def test_names_change_what_they_name_and_nothing_else() -> None:
    options = TrainingOptions(seed=3, clip_norm=2.0, compiled=True)
    assert options.with_changes(clip_norm=None) == TrainingOptions(seed=3, compiled=True)
    assert options.with_changes() == options


@pytest.mark.parametrize("wrong", [{"accumulate": 0}, {"clip_norm": 0.0}, {"clip_norm": float("nan")}])
def test_what_cannot_be_is_refused_when_it_is_said(wrong: dict[str, float]) -> None:
    with pytest.raises(RuntimeFailure, match="expected at least 1 micro-batch and a norm above 0"):
        TrainingOptions(**wrong)  # type: ignore[arg-type]


def test_a_trainer_takes_options_and_names_and_the_names_count() -> None:
    graph = mlp()
    model, plan = HandModel(graph), plan_of(graph, split((0,)), device_count=1)
    options = TrainingOptions(dtype=torch.float64, seed=5, clip_norm=3.0)
    with Trainer(model, plan, None, options, clip_norm=1.5) as trainer:
        assert (trainer.seed, trainer.dtype, trainer.clip_norm, trainer.accumulate) == (5, torch.float64, 1.5, 1)


def test_a_trainer_refuses_names_that_there_are_not() -> None:
    graph = mlp()
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipnorm'"):
        Trainer(HandModel(graph), plan_of(graph, split((0,)), device_count=1), clipnorm=1.0)  # type: ignore[call-arg]


def test_a_runner_hands_on_what_its_trainer_takes() -> None:
    """All fields that both have, but how long ranks wait: for the one that searches."""
    config = RunnerConfig(seed=4, clip_norm=0.5, backend="gloo", groups=lambda name, shape: {}, schedule=None, on_step=print)
    common = {field.name for field in fields(TrainingOptions)} & {field.name for field in fields(RunnerConfig)} - {"timeout_s"}
    assert common == {"optimizer", "groups", "schedule", "clip_norm", "seed", "backend", "on_step"}
    assert {name: getattr(config.training, name) for name in common} == {name: getattr(config, name) for name in common}
