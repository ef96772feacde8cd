"""Sharded optimizer states: what waits and what travels changes no bit. ``test_owned_parts`` trains by them and by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.plan.syncs import bucketing, large_parts
from soap.runtime.comm.packing import pack
from soap.runtime.comm.parcels import Pieces, exchange_pieces
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.sync import sharded_state
from soap.runtime.trainer import Trainer
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.sync import SHARDED, SHARDED_IN_HOSTS, SHARDED_STATE
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.kept_models import ModelFiles
from tests.runtime.exact_modules import EXAMPLES, Batch, Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OPTIMIZERS, WHOLE, train_alone
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.traced import traced

TOLERANCE = 1e-9
TWO, FOUR = hosts(1, 1), hosts(2, 2)


class Odd(nn.Module):
    """Parameters of which some have fewer rows than there are ranks, and a number; one layer is frozen, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.row, self.number = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.row
        x = self.layer(self.frozen(self.layer(x))) * self.number
        return nn.functional.cross_entropy(self.head(x), labels)


def odd_batch(samples: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + samples)
    return torch.randn(samples, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (samples,), generator=generator)


MODELS = ("odd", "shared", "weighted")


def module_of(name: str) -> nn.Module:
    torch.manual_seed(5)
    return (Odd() if name == "odd" else EXAMPLES[name].make()).double().train()


def batch_of(name: str, samples: int, step: int) -> Batch:
    return odd_batch(samples, step) if name == "odd" else EXAMPLES[name].batch(samples, step)


FILES = ModelFiles(
    "sharded", lambda name, path: export_model(module_of(name), batch_of(name, 6, 0), path=path, dynamic_batch=True)
)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return FILES


def sharded(graph: OperatorGraph, strategy: Strategy) -> Strategy:
    """With all trainable parameters owned in parts."""
    return strategy.with_changes(parameters={tensor.name: SHARDED_STATE for tensor in graph.parameters if tensor.requires_grad})


def in_columns(graph: OperatorGraph, strategy: Strategy, devices: Sequence[int]) -> Strategy:
    """Every linear operator in two halves of its samples and two of its outputs: two devices read each half of a weight."""
    for op in graph.operators:
        columns = [k for k, factor in enumerate(op.factors) if factor.kind.value == "parameter" and factor.size % 2 == 0]
        samples = [k for k, factor in enumerate(op.factors) if factor.kind.value == "sample"]
        if op.parameters and columns and samples:
            degrees = tuple(2 if k in (columns[0], samples[0]) else 1 for k in range(len(op.factors)))
            strategy = strategy.with_operator(op.name, OpConfig(degrees, tuple(devices)))
    return strategy


def train(
    path: str,
    strategy: Strategy,
    topology: Topology,
    steps: Sequence[Sequence[Batch]],
    optimizer: str,
    most_bytes: int | None,
    options: Mapping[str, Any],
) -> Trained:
    """What a rank does. ``most_bytes``: how much may wait to be added up, how large a bucket is, and from what size on parts travel as they
    lie."""
    with ExitStack() as patches:
        limits = [(sharded_state, "SENT_BYTES"), (bucketing, "FIRST_BUCKET_BYTES"), (bucketing, "BUCKET_BYTES")]
        limits.append((large_parts, "LARGE_BYTES"))
        for module, name in limits if most_bytes is not None else ():
            patches.enter_context(patch.object(module, name, most_bytes))
        trainer = patches.enter_context(Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS[optimizer], **options))
        losses = [trainer.step(*(t for part in parts for t in part)) for parts in steps]
        return Trained(losses, trainer.state_dict())


def assert_trains(
    four: Pool,
    files: Mapping[str, str],
    name: str,
    strategy: Strategy,
    topology: Topology,
    optimizer: str = "adam",
    sizes: Sequence[Sequence[int]] = ((6, 6), (6, 6), (6, 6)),
    most_bytes: int | None = None,
    **options: Any,
) -> Trained:
    """Ranks have after training what one process has. Returns rank 0's. ``sizes``: samples of each step's micro-batches."""
    steps = [[batch_of(name, size, 10 * i + k) for k, size in enumerate(parts)] for i, parts in enumerate(sizes)]
    options = {"accumulate": len(sizes[0]), **options}
    results = four.run(train, files[name], strategy, topology, steps, optimizer, most_bytes, options, ranks=topology.device_count)
    assert all(result.losses == results[0].losses for result in results)
    expected = train_alone(module_of(name), steps, OPTIMIZERS[optimizer], clip_norm=options.get("clip_norm"))
    assert worst(results[0], expected) < TOLERANCE, worst(results[0], expected)
    found: Trained = results[0]
    return found


def test_what_waits_to_be_added_up_changes_nothing(four: Pool, files: dict[str, str]) -> None:
    """If buckets are single parameters that travel as they lie, and one exchange alone may be under way, each waits for the one before;
    equal runs give equal bits."""
    graph = traced(files["odd"]).graph
    strategy = sharded(graph, by_samples(graph, range(4), 6))
    one, same, other = (assert_trains(four, files, "odd", strategy, FOUR, most_bytes=most) for most in (None, None, 1))
    for found in (same, other):
        assert found.losses == one.losses
        assert all(torch.equal(tensor, found.state[name]) for name, tensor in one.state.items())


def moved(path: str, strategy: Strategy, topology: Topology, large_bytes: int) -> tuple[int, int, int, Trained]:
    """(messages, bytes of them, bytes that were copied to be sent) of two steps with two micro-batches each, and what comes of it.
    ``large_bytes``: from what size on parts travel as they lie."""
    messages = size = 0
    copied = set[int]()

    def noted(comm: Communicator, leaving: Pieces, *others: Any) -> tuple[Pending, Pending]:
        nonlocal messages, size
        messages += sum(len(own) for own in leaving)
        size += sum(piece.nbytes for own in leaving for piece in own)
        return exchange_pieces(comm, leaving, *others)

    def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        copied.add(sum(tensor.nbytes for tensor in tensors))
        return pack(tensors)

    with ExitStack() as patches:
        patches.enter_context(patch.object(large_parts, "LARGE_BYTES", large_bytes))
        trainer = patches.enter_context(Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"], accumulate=2))
        patches.enter_context(patch.object(sharded_state, "exchange_pieces", noted))
        patches.enter_context(patch.object(sharded_state, "pack", packed))
        losses = [trainer.step(*batch_of("odd", 6, step), *batch_of("odd", 6, step + 2)) for step in range(2)]
        return messages, size, sum(copied), Trained(losses, trainer.state_dict())


@pytest.mark.parametrize("owners", [SHARDED_STATE, SHARDED, SHARDED_IN_HOSTS], ids=["zero", "fsdp", "hsdp"])
def test_large_parts_travel_as_they_lie(four: Pool, files: dict[str, str], owners: SyncConfig) -> None:
    """The same bytes, in a message for each part, without copies; and the same bits come of it."""
    graph = traced(files["odd"]).graph
    strategy = by_samples(graph, range(4), 6).with_changes(parameters={tensor.name: owners for tensor in graph.parameters})
    large, small = (four.run(moved, files["odd"], strategy, FOUR, size) for size in (1, 2**40))
    assert large[0][3].losses == small[0][3].losses
    assert all(torch.equal(tensor, small[0][3].state[name]) for name, tensor in large[0][3].state.items())
    for (messages, size, copied, _), (fewer, same, packed, _) in zip(large, small, strict=True):
        assert messages > fewer and size == same > 0
        assert copied == 0 and (packed > 0) is (owners is SHARDED_STATE)  # sharded values lie together anyway


def kept(path: str, strategy: Strategy, topology: Topology) -> tuple[int, int]:
    """Bytes of this rank's optimizer states, and whether the model's memory is the trainer's."""
    model = load_model(path)
    with Trainer(model, (strategy, topology), optimizer=OPTIMIZERS["adam"], take_over=True) as trainer:
        trainer.step(*batch_of("odd", 6, 0))
        assert trainer.optimizer is not None
        states = [value for own in trainer.optimizer.state.values() for key, value in own.items() if key != "step"]
        shared = {leaf.data_ptr() for leaf in trainer.shards.leaves.values()} >= {
            tensor.data_ptr() for tensor in model.parameters.values() if tensor.requires_grad
        }
        return sum(state.nbytes for state in states), shared


def test_each_rank_keeps_the_states_of_its_parts(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    found = four.run(kept, files["odd"], sharded(graph, by_samples(graph, range(4), 6)), FOUR)
    whole = 2 * sum(tensor.bytes for tensor in graph.parameters if tensor.requires_grad)
    assert sum(size for size, _ in found) == whole
    assert max(size for size, _ in found) <= whole / 4 + 2 * 8 * 8  # at most the largest row more than the mean
    assert all(shared for _, shared in found)


def refused(path: str, strategy: Strategy, topology: Topology) -> str:
    try:
        Trainer(traced(path), (strategy, topology), optimizer=WHOLE["adafactor"]).close()
    except RuntimeFailure as error:
        return str(error)
    return ""


def test_an_optimizer_that_needs_whole_parameters_is_refused(four: Pool, files: dict[str, str]) -> None:
    graph = traced(files["odd"]).graph
    lines = four.run(refused, files["odd"], sharded(graph, by_samples(graph, range(2), 6)), TWO, ranks=2)
    assert len({*lines}) == 1 and "its readers own parts of it (zero, fsdp, hsdp); synchronize it by allreduce, or use" in lines[0]


def gone_on(path: str, strategy: Strategy, topology: Topology, source: str | None, target: str | None, steps: Sequence[int]) -> Trained:
    """Train some steps, from a checkpoint and to one."""
    with Trainer(traced(path), (strategy, topology), optimizer=OPTIMIZERS["adam"]) as trainer:
        if source is not None:
            trainer.load(source)
        losses = [trainer.step(*batch_of("odd", 6, step)) for step in steps]
        if target is not None:
            trainer.save(target)
        return Trained(losses, trainer.state_dict())


def assert_go_on_alike(four: Pool, path: str, ways: Sequence[tuple[Strategy, Topology]], folder: Path) -> None:
    """Model "odd" trains a step in each of these ways, from the last one's checkpoint, like one process."""
    losses, source, last = [], None, None
    for number, (strategy, topology) in enumerate(ways):
        target = str(folder / str(number))
        last = four.run(gone_on, path, strategy, topology, source, target, [number], ranks=topology.device_count)[0]
        losses += last.losses
        source = target
    expected = train_alone(module_of("odd"), [[batch_of("odd", 6, step)] for step in range(len(ways))], OPTIMIZERS["adam"])
    assert last is not None and worst(Trained(losses, last.state), expected) < TOLERANCE
