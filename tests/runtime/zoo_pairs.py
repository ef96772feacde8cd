"""Pairs of a small zoo model and a random strategy, trained by ranks and compared with plain PyTorch on the module itself.

A pair is a function of its model's name and its number alone. All pairs start from the same weights and see the same batch, so that one
training in one process, of which this project computes nothing, serves all pairs of a model and dtype.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from soap import zoo
from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.runtime.check import SMALL
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL, random_config, random_strategy
from soap.strategy.config import Strategy
from soap.tracing.load import DTYPES
from tests.runtime.cases import error
from tests.runtime.plans import random_order
from tests.runtime.traced import sgd, traced

STEPS = {"float64": 2, "float32": 1}
"""In a second step, updated parameters and buffers are read. In float32 it would start from weights that differ by rounding, which a deep
model amplifies: after one step, plain PyTorch's own gradients of ``inception_v3`` are 1.1e-4 off those in float64."""
CHANGED = 0.3
"""Share of the operators of a classical strategy that are configured anew."""

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """``model``: a zoo name. Every fifth pair computes in float32, every third starts from a classical strategy, every fourth runs its
    tiles in a random order."""

    model: str
    number: int
    of: int

    @property
    def spec(self) -> str:
        return f"zoo:{self.model}:tiny"

    @property
    def ranks(self) -> int:
        """Two to four; neighbours have as many, because it takes time to form a world."""
        return 2 + 3 * self.number // self.of

    @property
    def dtype(self) -> str:
        return "float32" if self.number % 5 == 4 else "float64"

    def strategy(self, graph: OperatorGraph, topology: Topology) -> tuple[Strategy, random.Random]:
        """The strategy, and the source of randomness that made it."""
        rng = random.Random(f"{self.model}/{self.number}")
        if self.number % 3:
            return random_strategy(graph, topology, rng), rng
        strategy = rng.choice(sorted(CLASSICAL.items()))[1](graph, topology)
        for op in graph.operators:
            if rng.random() < CHANGED:
                strategy = strategy.with_operator(op.name, random_config(op, topology.device_count, rng))
        return strategy, rng


@dataclass(frozen=True)
class Expected:
    """What one process finds: after each step the loss and the gradients, after the last the state dict."""

    losses: Sequence[float]
    gradients: Sequence[State]
    state: State


@dataclass(frozen=True)
class Worst:
    """The tensor that is furthest off, by ``error`` relative to its largest element or to a small share of the largest of its kind."""

    error: float
    what: str


@functools.cache
def expected(spec: str, dtype: str) -> Expected:
    model = zoo.build(spec, dtype=DTYPES[dtype])
    named = dict(model.module.named_parameters())
    optimizer = sgd(list(named.values()))
    losses, gradients = [], []
    for _ in range(STEPS[dtype]):
        optimizer.zero_grad()
        loss = model.module(*model.args, **model.kwargs)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        optimizer.step()
    return Expected(losses, gradients, {name: t.detach().clone() for name, t in model.module.state_dict().items()})


def train_pair(pair: Pair) -> tuple[list[float], Worst | None]:
    """On every rank: the losses; on rank 0 what is furthest from one process."""
    model = traced(pair.spec, pair.dtype)
    strategy, rng = pair.strategy(model.graph, topology := local_topology(pair.ranks))
    plan = build_plan(model.graph, strategy, topology)
    order = random_order(plan, rng) if pair.number % 4 == 3 else None
    with Trainer(model, plan, order, optimizer=sgd) as trainer:
        losses, gradients = [], []
        for _ in range(STEPS[pair.dtype]):
            losses.append(trainer.step(*model.example_inputs))
            gradients.append(trainer.gradients())
        state = trainer.state_dict()
        if trainer.rank != 0:
            return losses, None
    return losses, _worst(Expected(losses, gradients, state), expected(pair.spec, pair.dtype), SMALL[DTYPES[pair.dtype]])


def _worst(found: Expected, wanted: Expected, small: float) -> Worst:
    differences = []
    for step in range(len(wanted.losses)):
        loss = error(torch.tensor(found.losses[step]), torch.tensor(wanted.losses[step]), 0.0)
        differences.append(Worst(loss, f"loss of step {step}"))
        differences += _differences(f"gradient in step {step}", found.gradients[step], wanted.gradients[step], small)
    differences += _differences("state", found.state, wanted.state, small)
    return max(differences, key=lambda difference: difference.error)


def _differences(kind: str, found: State, wanted: State, small: float) -> list[Worst]:
    if found.keys() != wanted.keys():
        return [Worst(float("inf"), f"{kind}: names {sorted(found.keys() ^ wanted.keys())} on one side only")]
    largest = max((float(tensor.abs().max()) for tensor in wanted.values() if tensor.numel()), default=0.0)
    return [Worst(error(found[name], tensor, small * largest), f"{kind}: {name}") for name, tensor in wanted.items()]
