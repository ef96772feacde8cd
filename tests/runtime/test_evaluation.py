"""The loss of batches that are not trained on: that of the module itself, in evaluation mode; training does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from soap.cluster.presets import local_topology
from soap.errors import RuntimeFailure
from soap.runtime.inputs import PartBatch
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from soap.strategy.sync import SHARDED, parameter_server
from soap.tracing.export import export_model
from tests.runtime.pool import Pool
from tests.runtime.traced import adam, traced

FOUR = local_topology(4)


class Classifier(nn.Module):
    """``kind``: what it has beside two linear layers."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.other: nn.Module = {"drop": nn.Dropout(0.5), "norm": nn.BatchNorm1d(8), "": nn.Identity()}[kind]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(self.other(self.first(x)).relu()), y)


def batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8, 6, dtype=torch.float64, generator=generator), torch.randint(5, (8,), generator=generator)]


def exported(kind: str, folder: Path) -> str:
    path = folder / f"{kind}.pt2"
    export_model(Classifier(kind).double().train(), tuple(batch(0)), path=path)
    return str(path)


def run(path: str, strategy: Strategy, evaluates: bool, by_rank: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, of an evaluation behind each, and the last state."""
    losses, found = [], []
    with Trainer(traced(path), (strategy, FOUR), optimizer=adam, accumulate=2) as trainer:
        for step in range(3):
            losses.append(trainer.step(*batch(2 * step), *batch(2 * step + 1)))
            if evaluates:
                given = [batch(9), batch(step)]
                parts = [PartBatch.cut(own, trainer.samples()) for own in given]
                found.append(trainer.evaluate(*(parts if by_rank else [tensor for own in given for tensor in own])))
        return losses, found, trainer.state_dict()


@pytest.mark.parametrize(("name", "by_rank"), [("data_parallel", True), ("megatron", False), ("sharded", False), ("servers", True)])
def test_losses_are_those_of_the_module_and_training_does_not_see_it(four: Pool, tmp_path: Path, name: str, by_rank: bool) -> None:
    path = exported("", tmp_path)
    graph = traced(path).graph
    strategy = CLASSICAL[name if name == "megatron" else "data_parallel"](graph, FOUR)
    sync = {"sharded": SHARDED, "servers": parameter_server(2)}.get(name)
    for tensor in graph.parameters if sync is not None else ():
        strategy = strategy.with_parameter(tensor.name, sync)
    results, plain = four.run(run, path, strategy, True, by_rank), four.run(run, path, strategy, False, by_rank)
    assert all(own[:2] == results[0][:2] for own in results)
    (losses, found, state), (expected, _, trained) = results[0], plain[0]
    assert losses == pytest.approx(expected, rel=1e-12)
    assert all(torch.allclose(own, trained[key], rtol=1e-12, atol=1e-14) for key, own in state.items())
    module = Classifier().double().eval()
    module.load_state_dict(state)
    with torch.no_grad():
        assert found[2] == pytest.approx((float(module(*batch(9))) + float(module(*batch(2)))) / 2, rel=1e-9)
    assert found[0] != found[2]


def refused(path: str) -> str:
    model = traced(path)
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, FOUR), FOUR)) as trainer, pytest.raises(RuntimeFailure) as caught:
        trainer.evaluate(*batch(0))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["drop", "norm"])
def test_what_differs_outside_of_training_is_refused(four: Pool, tmp_path: Path, kind: str) -> None:
    for said in four.run(refused, exported(kind, tmp_path)):
        assert "was exported in training mode, and '" in said and "is not the same outside of it; expected" in said
        assert "\n" not in said


class Norm(nn.Module):
    """Dropout and batch norm, also where nothing follows that makes the same calls in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.norms, self.drop = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(5)]), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norms[0](self.first(x)).relu())
        return nn.functional.cross_entropy(self.norms[1](self.second(hidden)), y)


def two_modes(folder: Path) -> list[str]:
    paths = [str(folder / name) for name in ("train.pt2", "eval.pt2")]
    export_model(Norm().double().train(), tuple(batch(0)), path=paths[0])
    export_model(Norm().double().eval(), tuple(batch(0)), path=paths[1])
    return paths


def by_another(paths: list[str], strategy: Strategy, by_rank: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses of four steps, of two evaluations after the third one, and the state then."""
    with Trainer(traced(paths[0]), (strategy, FOUR), optimizer=adam) as trainer:
        losses = [trainer.step(*batch(step)) for step in range(3)]
        state, own = trainer.whole_state(), trainer.evaluation(traced(paths[1]))
        found = [own.loss(*([PartBatch.cut(given, own.samples())] if by_rank else given)) for given in (batch(7), batch(8))]
        return [*losses, trainer.step(*batch(3))], found, state


def trained_alone(path: str, strategy: Strategy) -> list[float]:
    with Trainer(traced(path), (strategy, FOUR), optimizer=adam) as trainer:
        return [trainer.step(*batch(step)) for step in range(4)]


LONG = [pytest.param("sharded", False, marks=pytest.mark.long), pytest.param("fsdp", True, marks=pytest.mark.long)]


@pytest.mark.parametrize(("name", "by_rank"), [("data_parallel", True), ("megatron", False), *LONG])
def test_another_program_evaluates_what_trains(four: Pool, tmp_path: Path, name: str, by_rank: bool) -> None:
    paths = two_modes(tmp_path)
    graph = traced(paths[0]).graph
    strategy = CLASSICAL[name if name in CLASSICAL else "data_parallel"](graph, FOUR)
    for tensor in graph.parameters if name == "sharded" else ():
        strategy = strategy.with_parameter(tensor.name, SHARDED)
    results, plain = four.run(by_another, paths, strategy, by_rank), four.run(trained_alone, paths[0], strategy)
    assert all(own[:2] == results[0][:2] for own in results)
    losses, found, state = results[0]
    assert losses == plain[0]  # training does not notice
    module = Norm().double().eval()
    module.load_state_dict(state)
    with torch.no_grad():
        assert found == pytest.approx([float(module(*batch(step))) for step in (7, 8)], rel=1e-9)


def other_parameters(paths: list[str]) -> str:
    model = traced(paths[0])
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, FOUR), FOUR)) as trainer, pytest.raises(RuntimeFailure) as caught:
        trainer.evaluation(traced(paths[1]))
    return str(caught.value)


def test_a_program_of_other_parameters_is_refused(four: Pool, tmp_path: Path) -> None:
    paths = [two_modes(tmp_path)[0], exported("", tmp_path)]
    wrong = "norms.0.bias in the one that trains alone, norms.0.weight in the one that trains alone"
    for said in four.run(other_parameters, paths):
        assert wrong in said and "; expected the parameters of 'train'" in said and "\n" not in said
    for said in four.run(other_parameters, [paths[0], paths[0]]):
        assert "one that was exported in evaluation mode" in said
