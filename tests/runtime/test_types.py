"""Models in float64, bfloat16 and float16 that torch.export recorded in float32, on one to four ranks: one process is the judge."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.cluster.presets import local_topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.plan.delivery import box_bytes, partial_bytes, reduced_tensor
from soap.plan.planning import build_plan
from soap.runtime.check import step_alone
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.extent import often
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, sgd, traced

TOLERANCES = {"float64": 1e-12, "bfloat16": 5e-2}


class Counted(nn.Module):
    """A balance loss: how often each class was chosen, made from ``torch.zeros`` and ``torch.ones``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(3).scatter_add(0, chosen, torch.ones(8))
        return (self.layer(x).softmax(-1).mean(0) * counts).sum()


class Masked(nn.Module):
    """Causal attention with biases by distance, weights by position, and one-hot targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        q, k, v = self.layer(x).unsqueeze(1).expand(-1, 5, -1).mul(torch.arange(5)[:, None] / 8 + 0.5).chunk(3, -1)
        mask = torch.triu(torch.full((5, 5), float("-inf")), diagonal=1) - torch.linspace(0, 1, 5)[:, None]
        y = self.head((q @ k.transpose(1, 2) * 0.5 + mask + torch.eye(5)).softmax(-1) @ v).mean(1)
        target = F.one_hot(chosen, 3).to(x.dtype) * torch.where(chosen > 1, 0.3, 0.7)[:, None]
        return (y - target).square().mean() + torch.scalar_tensor(0.1)


class Net(nn.Module):
    """Convolution, batch norm, and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x))).mean((2, 3))
        return F.cross_entropy(self.head(x).float(), labels)


class Alike(nn.Module):
    """Channels, and features, that are alike, seen through what tells them apart: the parts of the sums over them are far larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(4, 16, 3, 2), nn.Linear(16, 32), nn.Linear(32, 4)
        with torch.no_grad():
            self.first.weight.sub_(self.first.weight.mean(1, keepdim=True))
            self.second.weight.sub_(self.second.weight.mean(1, keepdim=True))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x[:, :1] * 4 + 0.1 * x)).mean((2, 3))
        return F.cross_entropy(self.head(torch.tanh(self.second(x + 4))), labels)


def plans(graph: OperatorGraph, randoms: int = 1) -> dict[str, Strategy]:
    """On one, two and four of four devices."""
    named = (("data_parallel", 1), ("megatron", 2), ("data_parallel", 4))
    found = {f"{name} {n}": CLASSICAL[name](graph, local_topology(n)) for name, n in named}
    return found | {f"random {i}": random_strategy(graph, local_topology(4), random.Random(i)) for i in range(randoms)}


def assert_checked(four: Pool, path: Path, dtype: str | None, tolerance: float) -> None:
    for name, strategy in plans(traced(str(path), dtype).graph).items():
        found = four.run(checked, str(path), dtype, strategy, local_topology(4))[0]
        assert found.passed and found.worst.error < tolerance, (dtype, name, found.worst)


@pytest.mark.parametrize("case", often(list(product((Counted, Masked), TOLERANCES)), [(Masked, "bfloat16")]))
def test_constants_follow_the_type(four: Pool, tmp_path: Path, case: tuple[Callable[[], nn.Module], str]) -> None:
    make, dtype = case
    torch.manual_seed(0)
    path = tmp_path / "m.pt2"
    export_model(make(), (torch.randn(8, 4), torch.randint(3, (8,))), path=path)
    assert_checked(four, path, dtype, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_batch_norm_of_a_model_in_a_lower_type(four: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.pt2"
    export_model(Net().to(dtype), (torch.randn(8, 3, 8, 8, dtype=dtype), torch.randint(4, (8,))), path=path)
    assert_checked(four, path, None, 5e-2)


def summed(path: str, dtype: str, strategy: Strategy) -> tuple[float, float, int, int]:
    """How far the ranks' gradients are from float64, and one process's (rank 0 knows); bytes that this rank has summed, and the plan's."""
    model = traced(path, dtype)
    with Trainer(model, (strategy, local_topology(4)), optimizer=sgd) as trainer:
        before, counted = trainer.state_dict(), trainer.traffic.reduced_bytes
        trainer.step(*model.example_inputs)
        counted = trainer.traffic.reduced_bytes - counted
        mine, plan = trainer.gradients(), trainer.plan
        own = [r for r in plan.reductions if trainer.rank in r.devices and len(r.devices) > 1]
        planned = sum(partial_bytes(plan, r, r.box) + box_bytes(plan, reduced_tensor(plan, r), r.box) for r in own)  # there and back
        if trainer.rank > 0:
            return 0.0, 0.0, counted, planned
        alone, truth = (step_alone(trainer, 0, model.example_inputs, before, wide=wide) for wide in (False, True))
        assert alone is not None and truth is not None
        exact = flat(truth.gradients, truth.gradients)
        far = [float((flat(found, truth.gradients) - exact).norm() / exact.norm()) for found in (mine, alone.gradients)]
        return far[0], far[1], counted, planned


def flat(found: Mapping[str, torch.Tensor], names: Iterable[str]) -> torch.Tensor:
    return torch.cat([found[name].double().flatten() for name in sorted(names)])


@pytest.mark.parametrize("degree", often([2, 4], [2]))
def test_parts_of_sums_travel_in_float32_as_planned(four: Pool, tmp_path: Path, degree: int) -> None:
    torch.manual_seed(0)
    path = str(tmp_path / "m.pt2")
    export_model(Alike(), (torch.randn(8, 4, 16, 16), torch.randint(4, (8,))), path=path)
    graph = traced(path, "bfloat16").graph
    configs = {}
    for op in graph.operators:
        split = next((i for i, f in enumerate(op.factors) if f.summed and op.kind in ("conv2d", "linear")), None)
        degrees = tuple(degree if i == split else 1 for i in range(len(op.factors)))
        configs[op.name] = OpConfig(degrees, tuple(range(1 if split is None else degree)))
    assert sum(max(config.degrees, default=1) == degree for config in configs.values()) == 3
    results = four.run(summed, path, "bfloat16", Strategy(configs))
    mine, alone, *_ = results[0]
    assert 0 < alone < 0.05 and mine < 1.5 * alone
    for rank, (_, _, counted, planned) in enumerate(results):
        assert counted == planned and (planned > 0) == (rank < degree)


class Columns(nn.Module):
    """A product that is split by columns and one that is split by rows, as in Megatron's tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))).float().square().sum()


def in_halves(module: Columns, x: torch.Tensor, dtype: torch.dtype) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of two halves by hand, of which the second product's are made and added up in a type, and rounded then."""
    module.zero_grad()
    halves = zip(module.first.weight.chunk(2), module.second.weight.chunk(2, 1), strict=True)
    one, other = (F.linear(torch.tanh(F.linear(x, first)).to(dtype), second.to(dtype)) for first, second in halves)
    loss = torch.tanh((one + other).to(x.dtype)).float().square().sum()
    loss.backward()
    return float(loss.detach()), [own.grad for own in (module.first.weight, module.second.weight) if own.grad is not None]


def stepped(path: str, sum_dtype: str, strategy: Strategy) -> tuple[float, list[torch.Tensor], int, int]:
    """Loss and gradients of a step (rank 0 has these); bytes of activations and numbers that this rank has summed, and the plan's."""
    model = traced(path, None, (("sum_dtype", sum_dtype),))
    with Trainer(model, (strategy, local_topology(4)), optimizer=sgd) as trainer:
        before, loss = trainer.traffic.reduced_bytes, trainer.step(*model.example_inputs)
        counted, plan = trainer.traffic.reduced_bytes - before, trainer.plan
        own = [r for r in plan.reductions if trainer.rank in r.devices and len(r.devices) > 1]
        there, back = (sum(partial_bytes(plan, r, r.box) for r in own), sum(box_bytes(plan, reduced_tensor(plan, r), r.box) for r in own))
        gradients = trainer.gradients()
        return loss, [gradients[name] for name in ("first.weight", "second.weight") if name in gradients], counted, there + back


def test_sums_in_their_own_type_are_those_of_tensor_parallelism_by_hand(four: Pool, tmp_path: Path) -> None:
    """Bit for bit; and other ones than in float32, with half of the bytes on the way there."""
    torch.manual_seed(0)
    module, x, path = Columns().bfloat16(), torch.randn(8, 16, dtype=torch.bfloat16), str(tmp_path / "m.pt2")
    export_model(module, (x,), path=path)
    found = {}
    for sum_dtype, dtype in (("float32", torch.float32), ("own", torch.bfloat16)):
        graph = traced(path, None, (("sum_dtype", sum_dtype),)).graph
        split = {"first": OpConfig((1, 1, 2), (0, 1)), "second": OpConfig((1, 2, 1), (0, 1))}
        whole = {op.name: OpConfig((1,) * len(op.factors), (0, 1), 2) for op in graph.operators if op.name not in split}
        loss, gradients, counted, planned = four.run(stepped, path, sum_dtype, Strategy(split | whole))[0]
        by_hand, expected = in_halves(module, x, dtype)
        assert loss == by_hand and len(gradients) == 2 and all(map(torch.equal, gradients, expected))
        assert counted == planned
        found[sum_dtype] = loss, gradients, counted
    assert found["own"][0] != found["float32"][0]
    assert not torch.equal(found["own"][1][0], found["float32"][1][0])
    assert found["float32"][2] - found["own"][2] == 2 * x.numel()  # of 4 * x.numel() there; gradients go back in bfloat16


class Named(nn.Module):
    """Whole numbers that are summed in, and made of, the type of the activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        share = (ids > 3).sum(1, keepdim=True, dtype=x.dtype) / ids.shape[1]
        x = x * share[..., None] + ids.cumsum(1, dtype=x.dtype)[..., None] / 100
        return (self.head(x).mean(1) * ids.to(x.dtype).mean(1, keepdim=True)).square().mean()


def _named_batches() -> list[torch.Tensor]:
    return [torch.randint(20, (size, 6), generator=torch.Generator().manual_seed(size)) for size in (8, 5, 8)]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("named") / "m.pt2")
    export_model(Named(), (_named_batches()[0],), path=path, dynamic_batch=True)
    return path


def _trained_in(path: str, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, one = load_model(path), local_topology(1)
    with Trainer(model, (CLASSICAL["data_parallel"](model.graph, one), one), optimizer=sgd, dtype=dtype) as trainer:
        return [trainer.step(batch) for batch in _named_batches()], trainer.state_dict()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_trainers_type_replaces_those_that_programs_name(named: str, dtype: torch.dtype, tolerance: float) -> None:
    losses, state = _trained_in(named, dtype)
    module = Named().to(dtype)
    optimizer = sgd(list(module.parameters()))
    for batch, found in zip(_named_batches(), losses, strict=True):
        optimizer.zero_grad()
        loss = module(batch)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(float(loss.detach()), rel=tolerance)
    for name, tensor in module.state_dict().items():
        assert state[name].dtype is dtype
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance)


def test_a_plan_for_named_types_is_not_one_for_others(named: str) -> None:
    model = load_model(named)
    plan = build_plan(model.graph, CLASSICAL["data_parallel"](model.graph, local_topology(1)), local_topology(1))
    with pytest.raises(RuntimeFailure, match=r"dtype float64: .* expected a plan for the model of soap.load\(..., dtype='float64'\)"):
        Trainer(model, plan, optimizer=sgd, dtype=torch.float64)
