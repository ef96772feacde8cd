"""What the benchmarks of virtual workers and of unequal hosts are made of, and what their pages say of made-up cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from benchmarks import two_speeds, wsp
from benchmarks.wsp_replay import WORKERS, Minibatch, Replay, Rule
from soap import api
from soap.cli.stale_run import rate_of
from soap.cluster.emulated import device_cores
from soap.emulation.hosts import host_limits
from soap.measure.this_machine import cpu_cores

RULE = Rule(0.1, 0.5)


@dataclass(frozen=True)
class Numbers:
    """A sample for each minibatch."""

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        return [torch.tensor([1.0 + indices[0] % 5])]


class Square(nn.Module):
    """Loss (x w)² / 2, whose gradient is x² w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.w) ** 2).sum() / 2


def replayed(minibatches: Sequence[Minibatch], wave: int, rule: Rule = RULE) -> list[float]:
    return Replay(Square(), rule, Numbers(), wave).losses(minibatches)  # type: ignore[arg-type]


def x_of(own: int, worker: int) -> float:
    return 1.0 + (own * WORKERS + worker) % 5


def test_synchronous_minibatches_are_sgd_with_momentum() -> None:
    """Both workers' halves of each step; momentum is linear in gradients."""
    minibatches = [Minibatch(w, n, n, n + 1, n, n) for n in range(6) for w in range(WORKERS)]
    w = nn.Parameter(torch.ones(1))
    optimizer, expected = torch.optim.SGD([w], RULE.rate, RULE.momentum, nesterov=True), []
    for step in range(6):
        losses = [(x_of(step, worker) * w) ** 2 / 2 for worker in range(WORKERS)]
        expected += [float(own.detach()) for own in losses]
        optimizer.zero_grad()
        (torch.cat(losses).sum() / WORKERS).backward()
        optimizer.step()
    assert replayed(minibatches, 1) == pytest.approx(expected, rel=1e-5)


def test_a_minibatch_has_its_version_and_its_own_finished_ones() -> None:
    """Waves of two. The second worker's third minibatch has the first wave of both, which it pulls; the first worker's has but the first
    minibatch of its own."""
    first = [Minibatch(0, 0, 0, 4, 0, 0), Minibatch(0, 1, 1, 5, 0, 0), Minibatch(0, 2, 4.5, 9, 0, 1)]
    second = [Minibatch(1, 0, 0, 2, 0, 0), Minibatch(1, 1, 1, 3, 0, 0), Minibatch(1, 2, 6, 8, 1, 2)]
    found = replayed([*second, *first], 2, Rule(0.1))

    def update(worker: int, number: int) -> float:  # of w = 1, with which both first minibatches of either begin
        return -0.1 / WORKERS * x_of(number, worker) ** 2

    values = {(0, 2): 1 + update(0, 0), (1, 2): 1 + sum(update(w, n) for w in range(2) for n in range(2))}
    ends = sorted([*first, *second], key=lambda own: own.end_ns)
    expected = [(x_of(own.number, own.worker) * values.get((own.worker, own.number), 1.0)) ** 2 / 2 for own in ends]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_hosts_are_two_to_one(devices: int) -> None:
    """Figures of a device are in proportion to what it has of a core, as those of devices that are alike are."""
    topology, scale = two_speeds.two_speeds(devices, "1Gbit/s"), wsp.SHAPES[f"2x{devices}"][1]
    limits = host_limits(topology, scale, 2)
    shares = [own.cores / len(own.ranks) / scale for own in limits]
    assert shares == [2.0, 1.0] and sum(own.cores for own in limits) == 0.75
    base = two_speeds.alike(devices, "1Gbit/s")
    own = api.load_cluster(base).devices[0].type.flops_per_second["float32"] / device_cores(cpu_cores(), 2 * devices)
    found = [device.type.flops_per_second["float32"] for device in topology.devices]
    assert found == pytest.approx([share * own for share in shares for _ in range(devices)])


def test_rates_count_while_pipelines_are_full() -> None:
    """From the end of the first minibatch on, as many as are in flight or a multiple, until nothing begins any more; otherwise all."""
    ended_s = [2.0, 3.0, 4.0, 5.0, 5.2, 5.4]
    assert rate_of(ended_s, 8, 3) == pytest.approx(8 * 3 / 3.0)
    assert rate_of(ended_s, 8, 2) == pytest.approx(8 * 4 / 3.2)
    assert rate_of(ended_s, 8, 1) == pytest.approx(8 * 5 / 3.4)
    assert rate_of(ended_s, 8, 4) == pytest.approx(8 * 5 / 3.4), "two ends alone while it is full"
    assert rate_of(ended_s[:1], 8, 1) is None and rate_of([2.0, 2.0], 8, 1) is None
