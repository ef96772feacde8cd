"""Small models with tables of which a batch reads few rows, and their training in one process by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from soap.tracing.export import export_model
from tests.kept_models import ModelFiles
from tests.runtime.exact_modules import Batch, Trained

ROWS = 23


class Words(nn.Module):
    """One table with a padding row, looked up twice, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 6, padding_idx=2)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens[:, :3]).sum(1) + self.layer(self.words(tokens[:, 3:])).sum(1) * weights[:, :1]
        return F.cross_entropy(self.head(torch.tanh(x)), labels)


class Tables(nn.Module):
    """Tables that are looked up in all ways: rows, bags of three modes, subscripts, positions; and a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 6, padding_idx=2)
        self.weighted = nn.EmbeddingBag(ROWS, 6, mode="sum")
        self.mean = nn.EmbeddingBag(ROWS, 6, mode="mean", padding_idx=3)
        self.most = nn.EmbeddingBag(ROWS, 6, mode="max")
        self.subscripts = nn.Parameter(torch.randn(ROWS, 6))
        self.selected = nn.Parameter(torch.randn(ROWS, 2, 6))
        self.positions = nn.Parameter(torch.randn(ROWS, 6))
        self.numbers = nn.Parameter(torch.randn(ROWS))
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).sum(1) + self.weighted(tokens, per_sample_weights=weights)
        x = x + self.mean(tokens) + self.most(tokens)
        x = x + self.subscripts[tokens[:, 1] - ROWS] + self.selected.index_select(0, tokens[:, 2]).sum(1)
        x = x + self.positions.gather(0, tokens[:, :1].expand(-1, 6)) + self.numbers[tokens[:, 4]].unsqueeze(1)
        return F.cross_entropy(self.head(torch.tanh(x)), labels)


COLUMNS = {"subscripts": slice(1, 2), "selected": slice(2, 3), "positions": slice(0, 1), "numbers": slice(4, 5)}
"""The tokens that some tables are looked up by; others by all."""
MODULES: dict[str, Callable[[], nn.Module]] = {"words": Words, "tables": Tables}


def module_of(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODULES[name]().double().train()


def batch_of(samples: int, step: int = 0, rows: int = ROWS) -> Batch:
    """Tokens of which few are frequent, weights and labels."""
    generator = torch.Generator().manual_seed(100 * step + samples)
    tokens = (rows * torch.rand(samples, 7, generator=generator) ** 2.5).long()
    weights = torch.rand(samples, 7, generator=generator, dtype=torch.float64)
    return tokens, weights, torch.randint(0, 5, (samples,), generator=generator)


FILES = ModelFiles("sparse", lambda name, path: export_model(module_of(name), batch_of(6), path=path, dynamic_batch=True))
OF_SIX = ModelFiles("sparse, of six", lambda name, path: export_model(module_of(name), batch_of(6), path=path))
"""For batches of any size, and of six samples alone."""

Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "decay": lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}
WHOLE: dict[str, Optimizer] = {"adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.01)}
"""Not elementwise: right on whole tables alone."""


def train_alone(
    module: nn.Module, steps: Sequence[Sequence[Batch]], optimizer: Optimizer, *, clip_norm: float | None = None, lazy: Sequence[str] = ()
) -> Trained:
    """A plain loop; each step is a list of micro-batches. Rows of the ``lazy`` parameters that a step does not look up stay, with state."""
    named = dict(module.named_parameters())
    updated = optimizer(list(named.values()))
    losses = []
    for parts in steps:
        updated.zero_grad()
        total = 0.0
        for part in parts:
            loss = module(*part) / len(parts)
            loss.backward()
            total += float(loss.detach())
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(named.values()), clip_norm)
        before = {name: _rows(named[name], updated) for name in lazy}
        updated.step()
        for name, old in before.items():
            tokens = torch.cat([part[0][:, COLUMNS.get(name, slice(None))].flatten() for part in parts])
            _restore(named[name], updated, old, tokens)
        losses.append(total)
    return Trained(losses, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})


def _rows(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {key: value.clone() for key, value in optimizer.state.get(parameter, {}).items() if value.shape == parameter.shape}
    return {"": parameter.detach().clone(), **state}


def _restore(parameter: torch.Tensor, optimizer: torch.optim.Optimizer, before: dict[str, torch.Tensor], tokens: torch.Tensor) -> None:
    idle = torch.ones(len(parameter), dtype=torch.bool)
    idle[tokens] = False
    with torch.no_grad():
        parameter[idle] = before[""][idle]
        for key, value in optimizer.state[parameter].items():
            if value.shape == parameter.shape:
                value[idle] = before[key][idle] if key in before else 0.0
