"""What ranks do in tests of checkpoints, and the models that they train."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.runtime.checkpoint.checkpoint import read_state_dict
from soap.runtime.checkpoint.manifest import complete
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy
from tests.graph_builder import mlp
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split
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


class Sliced(nn.Module):
    """A frozen table of which a part is read, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4), requires_grad=False)
        self.layer, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.table[2:6]).square().mean()


def save_model(name: str, folder: Path) -> str:
    """Export one of the models; its path."""
    torch.manual_seed(0)
    tokens = torch.randint(24, (8, 6))
    modules: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "tied": (TiedLanguage(), (tokens, tokens.roll(1, 1))),
        "sliced": (Sliced(), (torch.randn(8, 4),)),
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


def save_again_and_again(plan: Plan, folder: str, keep: int, saves: int = 10**9) -> None:
    """Go on from the latest checkpoint, if there is one, and save after every step."""
    model = HandModel(plan.graph)
    with Trainer(model, plan, optimizer=lambda p: make_optimizer("adam", p), dtype=torch.float64) as trainer:
        if complete(Path(folder)):
            trainer.load(folder)
        for _ in range(saves):
            trainer.step(*model.inputs(trainer.steps))
            trainer.save(folder, keep=keep)


def kill_at_every_file_event(plan: Plan, folder: str) -> list[list[int]]:
    """Children of this process go on from a checkpoint and save, and kill themselves at their first, second, … change of their folder.

    For each: the steps of the latest checkpoint after it, and after another child that was left to go on. The last child came through.
    """
    make_optimizer("adam", [torch.zeros(1)])  # loads what every child would load
    start = Path(folder, "start")
    assert _in_child(lambda: save_again_and_again(plan, str(start), 1, 2)) == 0
    shutil.copytree(start / "step-00000002", start / ".step-00000002.0123456789abcdef.tmp")  # left by an earlier kill
    found: list[list[int]] = []
    for number in range(1, 100):
        own = Path(shutil.copytree(start, Path(folder, str(number))))
        status = _in_child(lambda: (_die_at(number, str(own)), save_again_and_again(plan, str(own), 1, 1)))  # noqa: B023 - at once
        found.append([_latest_as_trained_at_once(plan, own)])
        if status == 0:
            return found
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        assert _in_child(lambda: save_again_and_again(plan, str(own), 1, 1)) == 0  # noqa: B023
        found[-1].append(_latest_as_trained_at_once(plan, own))
        assert len(list(own.iterdir())) == 1  # nothing is left of the kill
    raise AssertionError("no save came through")


def _latest_as_trained_at_once(plan: Plan, folder: Path) -> int:
    """The step of the latest checkpoint, which holds what training without a break gives."""
    step, state = complete(folder)[-1].step, read_state_dict(folder)
    file = folder.parent / f"{step}.pt"
    if not file.exists():
        assert _in_child(lambda: torch.save(alone(plan, step), file)) == 0
    expected: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items()), (folder, step)
    return step


def _in_child(action: Callable[[], object]) -> int:
    """The status of a child that has done something. Process groups are opened there: this process stays without threads."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _die_at(number: int, folder: str) -> None:
    """SIGKILL to this process just before its so-manyth change of the folder."""
    left = [number]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        inside = folder in str(args[0]) if args else False
        writing = event == "open" and args[1] not in ("r", "rb")
        # Trees are removed by names relative to their folders.
        if event in ("os.rmdir", "os.remove") or (inside and (event in ("os.rename", "os.mkdir") or writing)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def alone_plan(graph: OperatorGraph | None = None) -> Plan:
    return plan_of(graph or mlp(), split((0,)), device_count=1)


def trainer_of(plan: Plan, kind: str = "adam", make: Callable[[list[torch.Tensor]], Any] | None = None, seed: int = 0) -> Trainer:
    return Trainer(HandModel(plan.graph), plan, optimizer=make or (lambda p: make_optimizer(kind, p)), dtype=torch.float64, seed=seed)


def save_three_steps(folder: Path) -> Path:
    """A checkpoint of the third step."""
    plan, model = alone_plan(), HandModel(mlp())
    with trainer_of(plan) as trainer:
        for step in range(3):
            trainer.step(*model.inputs(step))
        return trainer.save(folder)
