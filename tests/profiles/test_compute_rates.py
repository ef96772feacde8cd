"""Measuring rates: who works at once, what is counted, and that nothing of it stays. Never how fast it is."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from soap.measure import compute_rates
from soap.measure.compute_rates import cpu_rates


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_rates, "SECONDS_PER_RATE", 0.0)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rates_are_there_and_threads_are_given_back(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compute_rates.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(compute_rates.MATMUL_SIZE, "cpu", 16)
    before = torch.get_num_threads(), threading.active_count()
    rates = cpu_rates(workers)
    assert (torch.get_num_threads(), threading.active_count()) == before
    assert sorted(rates.flops_per_second) == ["float32", "float64"]
    assert min(*rates.flops_per_second.values(), rates.memory_bytes_per_second, rates.kernel_seconds) > 0


def test_all_work_at_once_each_on_its_own() -> None:
    made: list[object] = []
    meeting = threading.Barrier(3, timeout=60)

    def make() -> compute_rates.Action:
        made.append(object())
        return meeting.wait  # would time out if one worked after the other

    assert compute_rates._together(3, make) > 0
    assert len(made) == 3


def test_waiting_is_not_counted() -> None:
    if time.get_clock_info("thread_time").resolution > compute_rates.FINE_CLOCK_SECONDS:
        pytest.skip("the system counts no processor time per thread")
    assert compute_rates._together(1, lambda: lambda: time.sleep(0.2)) < 0.2


def test_a_failure_reaches_the_caller_instead_of_a_deadlock() -> None:
    turns = iter([True, False])

    def make() -> compute_rates.Action:
        if next(turns):
            raise MemoryError("no room")
        return lambda: None

    with pytest.raises((MemoryError, threading.BrokenBarrierError)):
        compute_rates._together(2, make)


def test_a_call_is_timed_in_a_forward_and_backward_pass_over_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
    monkeypatch.setattr(torch.autograd, "grad", lambda output, inputs, _: asked.append((output, inputs)))
    compute_rates._tiny_calls("cpu")()()
    [(output, inputs)] = asked
    node, length = output.grad_fn, 0
    while node is not None and node.next_functions:
        length += 1
        node = next((before for before, _ in node.next_functions if before is not None and before.next_functions), None)
    assert length >= 3 * compute_rates.TINY_LAYERS
    assert [tensor.requires_grad for tensor in inputs] == [True, True]
