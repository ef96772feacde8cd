"""Our plans beside ``DistributedDataParallel``, as ``benchmarks.default_command`` times them: both train the same, in the same rounds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.default_race import loss_of, peer_step, share_of
from benchmarks.small_models import Small, make_small
from tests.runtime.pool import Pool

ADAM = partial(torch.optim.Adam, lr=0.01)
STEPS = 3


class Half(nn.Module):
    """Has a layer that it does not use, and one whose weights are fixed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.fixed = (nn.Linear(4, 4) for _ in range(3))
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.used(x)).square().mean()


def half() -> Small:
    return Small(Half(), (torch.arange(32.0).reshape(8, 4) / 32,), {}, None)


def peer_losses(name: str | None) -> list[float]:
    small = share_of(half() if name is None else make_small(name), torch.device("cpu"))
    step = peer_step(small, ADAM, find_unused=name is None)
    return [step() for _ in range(STEPS)]


def losses_alone(small: Small) -> list[float]:
    optimizer = ADAM([own for own in small.module.parameters() if own.requires_grad])
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(small, small.module)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", [None, "ssm"])
def test_the_peer_trains_on_the_whole_batch(name: str | None, pool: Pool) -> None:
    by_rank = pool.run(peer_losses, name, ranks=2)
    alone = losses_alone(half() if name is None else make_small(name))
    assert by_rank[0] != by_rank[1]  # each has its own part
    assert [sum(own) / 2 for own in zip(*by_rank, strict=True)] == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0]
