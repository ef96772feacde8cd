from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import RuntimeFailure
from soap.model.regions import Box, intersect, lengths, relative, subtract
from soap.runtime.comm.packing import assemble, cut
from soap.runtime.comm.redistribute import SENT_TENSORS, Communicator
from soap.runtime.comm.world import choose_backend, choose_device, open_world
from soap.runtime.system.process import GLOO_LOOPS
from tests.runtime.pool import Pool
from tests.strategies import boxes


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), st.lists(boxes(n), max_size=3))))
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


def overlapping() -> list[list[float]]:
    """Sums over pairs that overlap, of which each rank makes its own alone; twice, since names must not be used again."""
    world, sums = open_world(3), []
    for _ in range(2):
        comm = Communicator(world.device, [(1, 2), (0, 2), (0, 1)], world.timeout)
        own = [devices for devices in comm.groups if len(devices) == 2]
        assert own == [devices for devices in ((0, 1), (0, 2), (1, 2)) if world.rank in devices]
        totals = [torch.tensor(float(world.rank)) for _ in own]
        sums.append([float(comm.all_reduce(total, devices).wait()) for total, devices in zip(totals, own, strict=True)])
        comm.close()
    assert sums[0] == sums[1]
    return sums[0]


def test_groups_overlap_and_are_made_by_their_members(pool: Pool) -> None:
    assert pool.run(overlapping) == [[1.0, 2.0], [1.0, 3.0], [2.0, 3.0]]


def handed(fails: bool) -> str:
    world = open_world(3)
    comm = Communicator(world.device, [], world.timeout)

    def make() -> Iterator[bytes]:
        assert world.rank == 0
        yield b"all"
        for rank in range(3):
            if fails and rank == 1:
                raise RuntimeFailure("no such plan")
            yield bytes([rank])

    try:
        alike, own = comm.hand_out(make)
        return f"{alike.decode()} {own.hex()}"
    except RuntimeFailure as error:
        return str(error)
    finally:
        comm.close()


def test_rank_0_hands_out_or_fails_for_all(pool: Pool) -> None:
    assert pool.run(handed, False) == ["all 00", "all 01", "all 02"]
    assert pool.run(handed, True) == ["no such plan"] * 3


def collectives(dtype: torch.dtype) -> list[list[float]]:
    """Uneven all-to-all, reduce-scatter of rows and reduce, on three ranks."""
    world = open_world(3)
    comm = Communicator(world.device, [], world.timeout)
    rank, everyone = world.rank, (0, 1, 2)
    # To each rank its number + 1 elements, but nothing from rank 1 to itself; a column comes first, so that it is not contiguous.
    table = torch.full((4, 4), rank, dtype=torch.int64).to(dtype)
    parcels = [[] if rank == to == 1 else [table[: to + 1, 1]] for to in everyone]
    sizes = [0 if rank == source == 1 else rank + 1 for source in everyone]
    received = torch.full((sum(sizes),), 9, dtype=torch.int64).to(dtype)
    comm.all_to_all(parcels, received, sizes, everyone).wait()
    result = [received.tolist()]
    if dtype is not torch.bool:
        whole = torch.arange(8, dtype=torch.int64).reshape(4, 2).to(dtype) * (rank + 1)
        result.append(comm.reduce_scatter([whole[:2], whole[2:], whole[4:]], everyone).wait().flatten().tolist())
        total = torch.tensor([1, rank]).to(dtype)
        comm.reduce(total, 2, everyone).wait()
        result.append(total.tolist() if rank == 2 else [])
    comm.finish_sends()
    comm.close()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_collectives(pool: Pool, dtype: torch.dtype) -> None:
    found = pool.run(collectives, dtype)
    kept = (lambda rank: float(bool(rank))) if dtype is torch.bool else float
    sources = [[0, 1, 2], [0, 0, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert [own[0] for own in found] == [[kept(rank) for rank in own] for own in sources]
    if dtype is not torch.bool:
        assert [own[1] for own in found] == [[0, 6, 12, 18], [24, 30, 36, 42], []]
        assert found[2][2] == [3, 3]


def test_many_messages_wait_for_the_oldest(pool: Pool) -> None:
    assert pool.run(send_many) == [[], [float(i) for i in range(3 * SENT_TENSORS)], []]


def send_many() -> list[float]:
    """More than may be on its way at once, from rank 0 to rank 1."""
    world = open_world(3)
    comm = Communicator(world.device, [], world.timeout)
    received = []
    for tag in range(3 * SENT_TENSORS):
        if world.rank == 0:
            comm.send(torch.tensor([float(tag)]), 1, tag)
        elif world.rank == 1:
            received.append(float(comm.receive(torch.empty(1), 0, tag).wait()))
    comm.finish_sends()
    comm.close()
    return received


def test_sums_that_nobody_reads_are_over_when_the_step_is(pool: Pool) -> None:
    assert pool.run(leave_sums) == [[6.0, 0.0]] * 3


def leave_sums() -> list[float]:
    world = open_world(3)
    comm = Communicator(world.device, [], world.timeout)
    total = torch.tensor(float(world.rank + 1))
    pending = comm.all_reduce(total, (0, 1, 2))
    comm.leave(pending)
    comm.finish_sends()
    found = [total.item(), float(pending.tensor.numel())]
    comm.close()
    return found


def test_backends() -> None:
    assert choose_backend("auto", "cpu", 4) == "gloo"
    assert choose_backend("gloo", "cpu", 4) == "gloo"
    assert choose_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(RuntimeFailure, match=r"^backend 'mpi': expected one of auto, gloo, nccl$"):
        choose_backend("mpi", "cpu", 1)
    with pytest.raises(RuntimeFailure, match=r"^backend 'nccl' needs one GPU per rank: 2 ranks, 0 GPUs here; use backend gloo$"):
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


def loop_policies() -> list[int]:
    comm = Communicator(torch.device("cpu"), [], timedelta(seconds=60))
    comm.open_groups([(1, 0)])
    tasks = [path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text().startswith(GLOO_LOOPS)]
    comm.barrier()
    return [os.sched_getscheduler(int(path.name)) for path in tasks]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other schedulers")
def test_loop_threads_of_gloo_displace_nobody(pool: Pool) -> None:
    for policies in pool.run(loop_policies, ranks=2):  # of two groups, and of those that other tests have left in these processes
        assert len(policies) >= 2 and set(policies) == {os.SCHED_BATCH}
