"""What ``benchmarks.bipartite`` compares with: threads of one machine that update shared values without locks (Hogwild: Niu et al., NIPS
2011), and data parallelism with sparse gradients. Both train ``zoo:full_sparse`` in plain PyTorch, with Adagrad, and sparse gradients of
its tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from soap.elastic.worker import Batches
from soap.emulation.placement import VirtualClock, set_share
from soap.runtime.system import clock
from soap.zoo import build
from soap.zoo.full_sparse import FullSparse

LEARNING_RATE = 0.01
WARM_UP = 2
"""Steps that do not count."""


def sparse_loss(module: FullSparse, inputs: Sequence[Tensor]) -> Tensor:
    """The model's loss; its tables get sparse gradients."""
    ids, values, clicks = inputs
    found = []
    for number, layer in enumerate(module.layers):
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        sums = F.embedding_bag(ids[:, number], weight, mode="sum", per_sample_weights=values[:, number], sparse=True)
        found.append(F.relu(sums + bias))
    return F.binary_cross_entropy_with_logits(module.top(torch.cat(found, 1)).squeeze(1), clicks)


def module_of(spec: str) -> FullSparse:
    """The zoo's model, with its initial values."""
    found = build(spec).module
    assert isinstance(found, FullSparse)
    return found


def hogwild(spec: str, batches: Batches, share: float, threads: int, batch: int, seconds: float) -> float:
    """Samples per second of so many threads, each on a device with this share of a core, that share the values of one model. Each keeps
    its optimizer's state for itself, as processes do in PyTorch's example of it."""
    whole = module_of(spec)
    counts, until = [0] * threads, time.perf_counter() + seconds
    begin = [0.0] * threads
    end = [0.0] * threads

    def train(number: int) -> None:
        own = module_of(spec)
        for mine, shared in zip(own.parameters(), whole.parameters(), strict=True):
            mine.data = shared.data
        optimizer = torch.optim.Adagrad(own.parameters(), lr=LEARNING_RATE)
        device, draw = VirtualClock(share), np.random.default_rng(number)
        step = -WARM_UP
        while step < 1 or time.perf_counter() < until:
            if step == 0:
                begin[number] = time.perf_counter()
            _step(own, optimizer, batches.batch(draw.integers(len(batches), size=batch)))
            device.catch_up()
            step += 1
        counts[number], end[number] = step, time.perf_counter()

    own = [threading.Thread(target=train, args=(number,)) for number in range(threads)]
    for thread in own:
        thread.start()
    for thread in own:
        thread.join()
    return sum(batch * count / (b - a) for count, a, b in zip(counts, begin, end, strict=True))


def _step(module: FullSparse, optimizer: torch.optim.Optimizer, inputs: Sequence[Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(sparse_loss(module, inputs))
    optimizer.step()


def data_parallel(spec: str, batches: Batches, share: float, rank: tuple[int, int, str], batch: int, seconds: float) -> float:
    """Samples per second of all ranks: each has a batch of its own; gradients are summed as ``DistributedDataParallel`` sums them over
    gloo, dense ones in one bucket, sparse ones by themselves. Unlike there no sum begins before the backward pass has ended: an emulated
    device could not be slowed down evenly otherwise. ``rank``: number, how many, and where they meet."""
    number, world, address = rank
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=world)
    module, draw = module_of(spec), np.random.default_rng(number)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=LEARNING_RATE)
    tables = [layer.get_parameter("weight") for layer in module.layers]
    others = [own for own in module.parameters() if not any(own is table for table in tables)]
    set_share(share)
    try:
        steps, begin = -WARM_UP, 0.0
        while True:
            if steps == 0:
                begin = time.perf_counter()
            optimizer.zero_grad()
            torch.autograd.backward(sparse_loss(module, batches.batch(draw.integers(len(batches), size=batch))))
            clock.catch_up()
            _sum(tables, others, world)
            clock.resume()
            optimizer.step()
            steps += 1
            ends = torch.tensor([int(steps > 0 and time.perf_counter() - begin > seconds)])
            clock.catch_up()
            dist.all_reduce(ends)
            clock.resume()
            if ends.item():
                return world * batch * steps / (time.perf_counter() - begin)
    finally:
        set_share(None)
        dist.destroy_process_group()


def _sum(tables: Sequence[Tensor], others: Sequence[Tensor], world: int) -> None:
    """Means over all ranks, in place."""
    bucket = torch.cat([own.grad.reshape(-1) for own in others if own.grad is not None])
    dist.all_reduce(bucket)
    place = 0
    for own in others:
        assert own.grad is not None
        own.grad.copy_(bucket[place : place + own.numel()].view_as(own) / world)
        place += own.numel()
    for table in tables:
        assert table.grad is not None
        whole = table.grad.coalesce()
        dist.all_reduce(whole)
        table.grad = whole / world
