"""What ranks do in tests of checkpoints, and the models that they train."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from soap.runtime.checkpoint import read_state_dict
from soap.runtime.checkpoint_folder import complete
from soap.runtime.trainer import Trainer
from soap.simulator.plan import Plan
from soap.strategy import Strategy
from soap.topology import Topology
from tests.runtime.handmade import HandModel
from tests.runtime.traced import traced


class TiedLanguage(nn.Module):
    """Dropout, tied weights, a frozen layer and a mask that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.3)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        x = self.frozen(x) * self.scale
        return F.cross_entropy(self.head(self.dropout(x)).flatten(0, 1), labels.flatten())


class Normalized(nn.Module):
    """Batch norm, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(F.relu(self.norm(self.conv(images))).mean((2, 3))), labels)


def save_model(name: str, folder: Path) -> str:
    """Export one of the models; its path."""
    torch.manual_seed(0)
    tokens = torch.randint(24, (8, 6))
    modules: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "tied": (TiedLanguage(), (tokens, tokens.roll(1, 1))),
        "norm": (Normalized(), (torch.randn(8, 3, 6, 6), torch.randint(5, (8,)))),
    }
    module, args = modules[name]
    path = folder / f"{name}.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.train(), args), path)
    return str(path)


def make_optimizer(kind: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)
    if kind == "plain":
        return torch.optim.SGD(parameters, lr=0.1)
    wide = [p for p in parameters if p.dim() > 1]
    narrow = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": g, **options} for g, options in ((wide, {"weight_decay": 0.1}), (narrow, {"lr": 0.003})) if g]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.99))


@dataclass
class Trained:
    """What a rank saw; ``state`` on rank 0 only."""

    losses: list[float]
    state: Mapping[str, torch.Tensor]
    saved: str
    options: Sequence[Mapping[str, Any]]
    seed: int


def batch(examples: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """A function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    return [example[torch.randperm(len(example), generator=generator)] for example in examples]


def train_traced(
    spec: str, strategy: Strategy, topology: Topology, kind: str, steps: int, seed: int, load: str | None, save: str | None
) -> Trained:
    """Load a checkpoint if asked to, train, and save one if asked to."""
    model = traced(spec, "float64")
    with Trainer(model, (strategy, topology), optimizer=lambda p: make_optimizer(kind, p), seed=seed) as trainer:
        return _train(trainer, model.example_inputs, steps, load, save)


def train_handmade(plan: Plan, kind: str, steps: int, load: str | None, save: str | None) -> Trained:
    model = HandModel(plan.graph)
    with Trainer(model, plan, optimizer=lambda p: make_optimizer(kind, p), dtype=torch.float64) as trainer:
        return _train(trainer, model.inputs(0), steps, load, save)


def _train(trainer: Trainer, examples: Sequence[torch.Tensor], steps: int, load: str | None, save: str | None) -> Trained:
    if load is not None:
        trainer.load(load)
    losses = [trainer.step(*batch(examples, trainer.steps)) for _ in range(steps)]
    saved = str(trainer.save(save)) if save is not None else ""
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return Trained(losses, trainer.state_dict(), saved, options, trainer.seed)


def alone(plan: Plan, steps: int) -> dict[str, torch.Tensor]:
    """The parameters after so many steps of ``save_again_and_again``, trained at once."""
    model = HandModel(plan.graph)
    with Trainer(model, plan, optimizer=lambda p: make_optimizer("adam", p), dtype=torch.float64) as trainer:
        for step in range(steps):
            trainer.step(*model.inputs(step))
        return trainer.state_dict()


def save_again_and_again(plan: Plan, folder: str, saves: int = 10**9) -> None:
    """Go on from the latest checkpoint, if there is one, and save after every step."""
    model = HandModel(plan.graph)
    with Trainer(model, plan, optimizer=lambda p: make_optimizer("adam", p), dtype=torch.float64) as trainer:
        if complete(Path(folder)):
            trainer.load(folder)
        for _ in range(saves):
            trainer.step(*model.inputs(trainer.steps))
            trainer.save(folder, keep=2)


def kill_at_every_file_event(plan: Plan, folder: str) -> list[int]:
    """Children of this process save, one after another, and kill themselves at their first, second, … change of the folder.

    The latest checkpoint's step after each child; the last one came through. Every child saves once, after it has gone on from the latest.
    """
    found: list[int] = []
    for number in range(1, 200):
        child = os.fork()
        if child == 0:
            _die_at(number, folder)
            save_again_and_again(plan, folder, 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        latest = complete(Path(folder))
        found.append(latest[-1].step if latest else 0)
        if found[-1]:
            expected = alone_in_child(plan, found[-1])
            state = read_state_dict(folder)
            assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items()), number
        if status == 0:
            return found
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("no save came through")


def alone_in_child(plan: Plan, steps: int) -> dict[str, torch.Tensor]:
    """``alone``, in a process that may open a process group: this one is to stay without threads, which do not survive a fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "wb") as stream:
            torch.save(alone(plan, steps), stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        content = io.BytesIO(stream.read())
    os.waitpid(child, 0)
    state: dict[str, torch.Tensor] = torch.load(content, weights_only=True)
    return state


def _die_at(number: int, folder: str) -> None:
    """SIGKILL to this process just before its so-manyth change of the folder."""
    left = [number]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        changing = event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove") or (event == "open" and args[1] != "r" and args[1] != "rb")
        if changing and folder in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
