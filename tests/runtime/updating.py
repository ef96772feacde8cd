"""What ranks do in tests of optimizers, and the same training by plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch import optim as T
from torch.optim import lr_scheduler as S

from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.model.graph import OperatorGraph
from soap.runtime.check import check
from soap.runtime.trainer import Trainer
from soap.runtime.updates.optimizers import Recipe
from soap.strategy.config import OpConfig, Strategy
from tests.runtime.checkpointing import batch
from tests.runtime.traced import traced


class Tiny(nn.Module):
    """A tied embedding, biases, norms, a convolution, and a matrix that is read in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.both = nn.Parameter(torch.randn(16, 8) / 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        query, value = self.both.chunk(2)
        x = x + F.linear(x, query).tanh() * F.linear(x, value) * self.scale
        return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), labels.flatten())


class Matrices(nn.Module):
    """Nothing but matrices, one of which is read in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.both = nn.Parameter(torch.randn(16, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        query, value = self.both.chunk(2)
        return (F.linear(x, query).tanh() * F.linear(x, value)).square().mean()


MODULES: Mapping[str, tuple[type[nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "tiny": (Tiny, lambda: (torch.randint(12, (8, 4)), torch.randint(12, (8, 4)))),
    "matrices": (Matrices, lambda: (torch.randn(8, 8),)),
}


def built(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The same module and example each time."""
    torch.manual_seed(0)
    make, example = MODULES[name]
    return make().train(), example()


def save_module(name: str, folder: Path) -> str:
    """Export one of the modules; its path."""
    module, example = built(name)
    path = folder / f"{name}.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, example), path)
    return str(path)


def decay_of(name: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
    """No decay of norms and biases, and a slower embedding."""
    return {"weight_decay": 0.0 if len(shape) <= 1 else 0.1, **({"lr": 0.003} if "embedding" in name else {})}


def sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up, then cosine."""
    return S.SequentialLR(optimizer, [S.LinearLR(optimizer, 0.1, total_iters=2), S.CosineAnnealingLR(optimizer, 4)], [2])


class Together(T.SGD):
    """Couples all parameters by the norm of their gradients."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


RECIPES: Mapping[str, Recipe] = {
    "momentum": Recipe(lambda p: T.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "nesterov": Recipe(lambda p: T.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True)),
    "dampened": Recipe(lambda p: T.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True)),
    "fused sgd": Recipe(lambda p: T.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "amsgrad": Recipe(lambda p: T.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01)),
    "fused adam": Recipe(lambda p: T.Adam(p, lr=0.01, fused=True, maximize=True)),
    "adamw": Recipe(lambda p: T.AdamW(p, lr=0.02, betas=(0.8, 0.99)), decay_of),
    "rmsprop": Recipe(lambda p: T.RMSprop(p, lr=0.01, momentum=0.5, centered=True, foreach=False)),
    "adagrad": Recipe(lambda p: T.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1)),
    "adadelta": Recipe(lambda p: T.Adadelta(p, lr=1.0, rho=0.8)),
    "nadam": Recipe(lambda p: T.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1)),
    "radam": Recipe(lambda p: T.RAdam(p, lr=0.05)),
    "adamax": Recipe(lambda p: T.Adamax(p, lr=0.01, maximize=True)),
    "asgd": Recipe(lambda p: T.ASGD(p, lr=0.1, t0=2)),
    "rprop": Recipe(lambda p: T.Rprop(p, lr=0.01)),
    "tensor lr": Recipe(lambda p: T.Adam(p, lr=torch.tensor(0.01), foreach=False)),
    "several": Recipe(
        {"*.bias": lambda p: T.SGD(p, lr=0.1, momentum=0.9), "norm*": T.Adamax, "*": lambda p: T.AdamW(p, lr=0.02)}, decay_of
    ),
    "cosine": Recipe(lambda p: T.AdamW(p, lr=0.02), decay_of, lambda o: S.CosineAnnealingLR(o, T_max=4)),
    "one cycle": Recipe(lambda p: T.AdamW(p, lr=0.02), decay_of, lambda o: S.OneCycleLR(o, max_lr=0.03, total_steps=8)),
    "steps": Recipe(lambda p: T.SGD(p, lr=0.1, momentum=0.9), None, lambda o: S.MultiStepLR(o, [1, 2, 4], gamma=0.5)),
    "cyclic": Recipe(lambda p: T.SGD(p, lr=0.1, momentum=0.9), None, lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=2)),
    "plateau": Recipe(lambda p: T.SGD(p, lr=0.3), None, lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.5)),
    "sequence": Recipe(lambda p: T.Adam(p, lr=0.02), None, sequence),
}
"""All by float64, in any cut."""
WHOLE: Mapping[str, Recipe] = {
    "adafactor": Recipe(lambda p: T.Adafactor(p, lr=0.05, weight_decay=0.01)),
    "muon": Recipe({"norm*": T.AdamW, "*bias": T.AdamW, "conv*": T.AdamW, "scale": T.AdamW, "*": lambda p: T.Muon(p, lr=0.02)}),
    "together": Recipe(lambda p: Together(p, lr=0.1, momentum=0.9)),
}
"""Those that need whole tensors, or all of them."""
ALL: Mapping[str, Recipe] = {**RECIPES, **WHOLE}


class Updated(NamedTuple):
    """What a rank saw; ``state`` on rank 0 only."""

    losses: list[float]
    state: Mapping[str, torch.Tensor]
    saved: str


def cutting(graph: OperatorGraph, devices: int, *, samples_only: bool = False) -> Strategy:
    """Parameters cut over all devices where they can be, by rows and by columns in turn; or the samples."""
    configs = {}
    for number, op in enumerate(graph.operators):
        cut = [] if samples_only else [dim.factor for own in op.parameters for dim in own.dims if dim.factor is not None]
        cut = [factor for factor in dict.fromkeys(cut) if op.factors[factor].size >= devices]
        samples = [i for i, factor in enumerate(op.factors) if factor.kind.value == "sample" and factor.size >= devices]
        chosen = cut[number % len(cut)] if cut else samples[0] if samples else None
        degrees = tuple(devices if i == chosen else 1 for i in range(len(op.factors)))
        replicas = devices if chosen is None else 1
        configs[op.name] = OpConfig(degrees, tuple(range(devices)), replicas)
    return Strategy(configs)


def train_recipe(
    spec: str, strategy: Strategy, topology: Topology, recipe: str, steps: int, load: str | None = None, save: str | None = None,
    clip_norm: float | None = None,
) -> Updated:  # fmt: skip
    """Train in float64, from a checkpoint if there is one."""
    own = ALL[recipe]
    model = traced(spec, "float64")
    options: dict[str, Any] = {"groups": own.groups, "schedule": own.schedule, "clip_norm": clip_norm}
    with Trainer(model, (strategy, topology), optimizer=own.optimizer, **options) as trainer:
        if load is not None:
            trainer.load(load)
        losses = [trainer.step(*batch(model.example_inputs, trainer.steps)) for _ in range(steps)]
        saved = str(trainer.save(save)) if save is not None else ""
        return Updated(losses, trainer.state_dict(), saved)


def train_plain(name: str, recipe: str, steps: int, clip_norm: float | None = None) -> Updated:
    """The same by the eager module and torch alone."""
    module, example = built(name)
    module.double()
    example = tuple(t.double() if t.is_floating_point() else t for t in example)
    own = ALL[recipe]
    named = dict(module.named_parameters())
    optimizers = _plain_optimizers(own, named)
    schedules = [own.schedule(optimizer) for optimizer in optimizers] if own.schedule else []
    losses = []
    for step in range(steps):
        module.zero_grad()
        loss = module(*batch(example, step))
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        losses.append(float(loss.detach()))
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step(*((losses[-1],) if isinstance(schedule, S.ReduceLROnPlateau) else ()))
    return Updated(losses, module.state_dict(), "")


def _plain_optimizers(own: Recipe, named: Mapping[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """A group for each parameter."""
    from fnmatch import fnmatchcase

    choices = own.optimizer.items() if isinstance(own.optimizer, Mapping) else [("*", own.optimizer)]
    left, made = dict(named), []
    for pattern, make in choices:
        mine = {name: left.pop(name) for name in list(left) if fnmatchcase(name, pattern)}
        options = {name: own.groups(name, tuple(tensor.shape)) if own.groups else {} for name, tensor in mine.items()}
        made.append(make([{"params": [tensor], **options[name]} for name, tensor in mine.items()]))  # type: ignore[arg-type, list-item]
    return made


def refusal(spec: str, strategy: Strategy, topology: Topology, make: Callable[..., Any], **options: Any) -> str:
    """What a trainer says to this optimizer."""
    try:
        Trainer(traced(spec, "float64"), (strategy, topology), optimizer=make, **options).close()
    except SoapError as error:
        return str(error)
    return ""


def checked_recipe(spec: str, strategy: Strategy, topology: Topology, recipe: str, steps: int) -> float:
    """The largest difference from one process that takes the ranks' own gradients. RuntimeFailure if it is too large."""
    own, model = ALL[recipe], traced(spec, "float64")
    with Trainer(model, (strategy, topology), optimizer=own.optimizer, groups=own.groups, schedule=own.schedule) as trainer:
        found = check(trainer, lambda step: batch(model.example_inputs, step), own.optimizer, steps)
    found.require()
    return found.worst.error
