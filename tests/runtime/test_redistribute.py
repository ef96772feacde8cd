from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soap.errors import RuntimeFailure
from soap.regions import Box, intersect, lengths, relative, subtract
from soap.runtime.redistribute import Communicator, assemble, cut
from soap.runtime.world import choose_backend, choose_device, open_world
from tests.runtime.pool import Pool
from tests.strategies import boxes


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), st.lists(boxes(n), max_size=3))))
@settings(max_examples=50, deadline=None)
def test_assembled_pieces_are_the_whole_and_so_are_gradients(case: tuple[Box, list[Box]]) -> None:
    box, holes = case
    pieces = [box]
    for hole in holes:  # cut each piece along the hole's borders
        pieces = [part for piece in pieces for part in (*subtract(piece, hole), intersect(piece, hole)) if part is not None]
    whole = torch.randn(lengths(box), dtype=torch.float64)
    parts = [whole[relative(piece, box)].clone().requires_grad_() for piece in pieces]
    together = assemble(box, pieces, parts)
    assert torch.equal(together, whole)
    weights = torch.randn(lengths(box), dtype=torch.float64)
    gradients = torch.autograd.grad((together * weights).sum(), parts)
    for piece, gradient in zip(pieces, gradients, strict=True):
        assert torch.equal(gradient, weights[relative(piece, box)])


def test_single_piece_is_not_copied() -> None:
    tensor = torch.zeros(2, 3)
    assert assemble(((0, 2), (0, 3)), [((0, 2), (0, 3))], [tensor]) is tensor
    assert cut(tensor, ((4, 6), (0, 3)), ((4, 6), (0, 3))) is tensor
    assert cut(tensor, ((4, 6), (0, 3)), ((5, 6), (1, 3))).data_ptr() == tensor[1:, 1:].data_ptr()


def exchange(dtype: torch.dtype) -> list[float]:
    """Around the ring, then a sum over two of the three, then from rank 2 to all."""
    world = open_world(3)
    comm = Communicator(world.device, [(0, 2), (0, 2), (0, 1, 2)], world.timeout)
    values = torch.tensor([[world.rank, 1], [0, world.rank]]).to(dtype)
    buffer = torch.empty(2, dtype=dtype)
    pending = comm.receive(buffer, (world.rank + 2) % 3, 7)
    comm.send(values[:, 1], (world.rank + 1) % 3, 7)
    received = pending.wait().tolist()
    assert pending.wait() is buffer
    comm.finish_sends()
    total = torch.ones(1)
    if world.rank != 1:
        comm.all_reduce(total, (0, 2)).wait()
    told = torch.tensor(float(world.rank))
    comm.broadcast(told, 2).wait()
    comm.barrier()
    comm.close()
    return [*map(float, received), float(total), float(told)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_messages_arrive(pool: Pool, dtype: torch.dtype) -> None:
    kept = (lambda rank: float(bool(rank))) if dtype is torch.bool else float
    assert pool.run(exchange, dtype) == [[1, kept(2), 2, 2], [1, kept(0), 1, 2], [1, kept(1), 2, 2]]


def test_backends() -> None:
    assert choose_backend("auto", "cpu", 4) == "gloo"
    assert choose_backend("gloo", "cpu", 4) == "gloo"
    assert choose_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(RuntimeFailure, match=r"^backend 'mpi': expected one of auto, gloo, nccl$"):
        choose_backend("mpi", "cpu", 1)
    with pytest.raises(RuntimeFailure, match=r"^backend 'nccl' needs one GPU per rank: 2 ranks, 0 GPUs here; use --backend gloo$"):
        choose_backend("nccl", "cpu", 2)


@pytest.mark.parametrize(("gpus", "ranks", "expected"), [(0, 1, None), (1, 2, "gloo"), (2, 2, "nccl")])
def test_backend_on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, expected: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if expected is None:
        with pytest.raises(RuntimeFailure, match=r"^the cluster's devices are GPUs but this machine has none"):
            choose_backend("auto", "cuda", ranks)
    else:
        assert choose_backend("auto", "cuda", ranks) == expected
        assert choose_device("cuda", ranks - 1) == torch.device("cuda", (ranks - 1) % gpus)
