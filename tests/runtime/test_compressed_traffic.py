"""Bytes that leave a rank for a compressed parameter of M elements among N ranks, by the formulas of the methods, with header and padding
apart. They are counted where payloads are handed to the process group, in training steps on real ranks.

    rgc            (N - 1) (8 + 8 k'), k' = k, or 2 k where the selection may find up to 2 k: length, positions, values
    rgc+asq        (N - 1) (16 + 4 k'): length, mean, positions
    chunked        (N - 1) (M / 4096, rounded up) (12 bits a position, two levels, and 2 bits a value; or 16 bits a value)
    powersgd       2 (N - 1) / N of two matrices of rank r
    bf16           2 (N - 1) / N of 2 M
    int8           2 (N - 1) / N of M, of whole blocks of 256, with four bytes for each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from soap.model.graph import OperatorGraph
from soap.plan.compression.policy import settled
from soap.plan.compression.seam import Layout, joined, layout_of
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.trainer import Trainer
from soap.strategy.compression import Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq
from soap.strategy.sync import compressed
from soap.tracing.export import export_model
from soap.tracing.load import load_model
from tests.runtime.pool import Pool
from tests.runtime.sparse_plans import by_samples, hosts

ROWS, COLUMNS, STEPS, SAMPLES = 96, 64, 2, 8
ELEMENTS = ROWS * COLUMNS
KEPT = 123
"""k: 2% of the elements."""
METHODS: dict[str, Compression] = {
    "exact": Rgc(0.02, "exact"),
    "trimmed": Rgc(0.02, "trimmed"),
    "search": Rgc(0.02, "search"),
    "sampled": Rgc(0.02, "sampled"),
    "asq": RgcAsq(0.02, "trimmed"),
    "asq, search": RgcAsq(0.02, "search"),
    "chunked": Chunked(64 / 4096),
    "chunked, bf16": Chunked(64 / 4096, "bf16"),
    "powersgd": PowerSgd(2),
    "bf16": Bf16(),
    "int8": Int8(),
}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(inputs).tanh()).square().mean()  # type: ignore[no-any-return]


class Moved(NamedTuple):
    """Of one rank: bytes that left it, by step; what stands at the head of the messages that it gave to all; and the bytes of exchanges."""

    sent: list[int]
    lengths: list[int]
    exchanges: list[int]


@contextmanager
def counted() -> Iterator[Moved]:
    """What this rank hands to the process group meanwhile. Whoever counts begins each step by a zero in ``sent``."""
    found = Moved([], [], [])
    exchange, gather = Communicator._each_to_each, Communicator.all_gather

    def counting(self: Communicator, coming: Any, leaving: Sequence[torch.Tensor], devices: tuple[int, ...]) -> Any:
        if found.sent:
            found.exchanges.append(sum(row.nbytes for device, row in zip(devices, leaving, strict=True) if device != self.rank))
            found.sent[-1] += found.exchanges[-1]
        return exchange(self, coming, leaving, devices)

    def reading(self: Communicator, message: torch.Tensor, devices: tuple[int, ...]) -> Pending:
        if message.dtype is torch.uint8:
            found.lengths.append(int(message[:8].view(torch.int64)))
        return gather(self, message, devices)

    with patch.object(Communicator, "_each_to_each", counting), patch.object(Communicator, "all_gather", reading):
        yield found


def moved(path: str, ranks: int) -> dict[str, Moved]:
    """By method, in training steps in which ``hidden.weight`` alone is compressed."""
    model, found = load_model(path), {}
    plain = by_samples(model.graph, range(ranks), SAMPLES)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(SAMPLES, COLUMNS, generator=generator) for _ in range(STEPS)]
    for name, how in METHODS.items():
        strategy = plain.with_changes(parameters={"hidden.weight": compressed(how)})
        with counted() as own, Trainer(model, (strategy, hosts(*[1] * ranks))) as trainer:
            for batch in batches:
                own.sent.append(0)
                trainer.step(batch)
            both_ways = 0 if name == "powersgd" else 2 * sum(own.sent)  # sums are counted apart
            assert trainer.traffic.compressed_bytes == both_ways
        found[name] = own
    return found


def formulas(ranks: int) -> dict[str, int]:
    """Bytes a step, by method."""
    others, part, chunks = ranks - 1, -(-ELEMENTS // ranks), -(-ELEMENTS // 4096)
    blocks = -(-part // 256)
    positions = 64 * 12 // 8
    return {
        "exact": others * (8 + 8 * KEPT),
        "trimmed": others * (8 + 8 * KEPT),
        "search": others * (8 + 8 * 2 * KEPT),
        "sampled": others * (8 + 8 * 2 * KEPT),
        "asq": others * rounded(16 + 4 * KEPT),
        "asq, search": others * rounded(16 + 4 * 2 * KEPT),
        "chunked": others * chunks * (positions + 4 + 64 * 2 // 8),
        "chunked, bf16": others * chunks * (positions + 64 * 2),
        "powersgd": 2 * others * 4 * (-(-2 * ROWS // ranks) + -(-2 * COLUMNS // ranks)),
        "bf16": 2 * others * 2 * part,
        "int8": 2 * others * blocks * (256 + 4),
    }


def rounded(size: int) -> int:
    """Messages take a multiple of eight bytes."""
    return -(-size // 8) * 8


def require_formulas(results: Sequence[dict[str, Moved]]) -> None:
    ranks = len(results)
    for name, expected in formulas(ranks).items():
        assert [own[name].sent for own in results] == [[expected] * STEPS] * ranks, name
    for own in results:
        for name in ("exact", "trimmed", "asq"):
            assert own[name].lengths == [KEPT] * STEPS
        for name in ("search", "asq, search"):
            assert len(own[name].lengths) == STEPS and all(KEPT <= length <= 2 * KEPT for length in own[name].lengths)
        assert all(KEPT // 2 <= length <= 2 * KEPT for length in own["sampled"].lengths)
    real = [(8 + 8 * length) * (ranks - 1) for own in results for length in own["search"].lengths]  # without padding
    assert all(own <= formulas(ranks)["search"] for own in real) and min(real) >= formulas(ranks)["exact"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("models") / "layers.pt2"
    torch.manual_seed(0)
    export_model(TwoLayers(), (torch.zeros(SAMPLES, COLUMNS),), path=found)
    return str(found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_the_formulas(four: Pool, path: str, ranks: int) -> None:
    require_formulas(four.run(moved, path, ranks, ranks=ranks))


def moved_together(path: str, ranks: int) -> dict[str, tuple[list[int], int]]:
    """By method, (bytes that left this rank in each step, exchanges in all steps), where all three parameters are compressed."""
    model, found = load_model(path), {}
    strategy = by_samples(model.graph, range(ranks), SAMPLES)
    names, batch = [tensor.name for tensor in model.graph.parameters], torch.randn(SAMPLES, COLUMNS, generator=torch.Generator())
    for name, how in METHODS.items():
        together = strategy.with_changes(parameters=dict.fromkeys(names, compressed(how)))
        with counted() as own, Trainer(model, (together, hosts(*[1] * ranks))) as trainer:
            for _ in range(STEPS):
                own.sent.append(0)
                trainer.step(batch)
        found[name] = own.sent, len(own.exchanges)
    return found


def planned_together(graph: OperatorGraph, how: Compression, ranks: int) -> tuple[int, int]:
    """(bytes a step, exchanges a step): a sum is two, of parts that are padded to equal lengths. The output layer's values are not
    averaged: it shares no bucket then."""
    buckets: dict[Compression, list[Layout]] = {}
    for tensor in graph.parameters:
        own = settled(graph, tensor.name, how)
        buckets.setdefault(own, []).append(layout_of(own, tensor.shape, tensor.itemsize, ranks))
    size = count = 0
    for each in (each for layouts in buckets.values() for each in joined(layouts)):
        size += (ranks - 1) * (2 * 4 * -(-each.message_bytes // 4 // ranks) if each.kind == "sum" else each.message_bytes)
        count += 2 if each.kind == "sum" else 1
    return size, count


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_bucket_takes_the_exchanges_of_one_shard_and_the_bytes_of_all(four: Pool, path: str, ranks: int) -> None:
    graph, results = load_model(path).graph, four.run(moved_together, path, ranks, ranks=ranks)
    for name, how in METHODS.items():
        size, exchanges = planned_together(graph, how, ranks)
        assert [own[name] for own in results] == [([size] * STEPS, exchanges * STEPS)] * ranks, name


@pytest.mark.long
def test_bytes_of_eight_ranks(path: str) -> None:
    pool = Pool(8)
    try:
        require_formulas(pool.run(moved, path, 8))
    finally:
        pool.close()
