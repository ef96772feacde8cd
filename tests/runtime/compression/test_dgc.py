"""Momentum correction, factor masking, local clipping, weight decay and warm-up."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import nn

from benchmarks.oracles.compression import Emulation, Training
from soap.errors import SoapError
from soap.runtime.compression.dgc import Momentum, WarmUp, clip_locally, local_limit, norm_of
from soap.strategy.compression import Compression, Rgc

RANKS = 3
ALL = Rgc(1.0, "exact")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(module: nn.Module, part: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(module(part[0]), part[1])


def batch(step: int, samples: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Uneven parts: 3, 2 and 2 samples."""
    generator = torch.Generator().manual_seed(step)
    inputs, wanted = torch.randn(samples, 5, dtype=torch.float64, generator=generator), torch.randint(3, (samples,), generator=generator)
    return list(zip(inputs.tensor_split(RANKS), wanted.tensor_split(RANKS), strict=True))


def emulated(compression: Compression | None, training: Training, steps: int = 6) -> tuple[list[float], list[torch.Tensor]]:
    module = small()
    emulation = Emulation(module, loss, {name: compression for name, _ in module.named_parameters()}, RANKS, training)
    losses = [emulation.step(batch(step)) for step in range(steps)]
    return losses, [tensor.detach() for tensor in module.parameters()]


def alone(steps: int = 6, **options: float) -> tuple[list[float], list[torch.Tensor]]:
    """Torch's own SGD on whole batches. ``clip``: of the gradient's norm."""
    module, clip = small(), options.pop("clip", None)
    optimizer = torch.optim.SGD(module.parameters(), **options)  # type: ignore[arg-type]
    losses = []
    for step in range(steps):
        parts = batch(step)
        optimizer.zero_grad()
        value = loss(module, [torch.cat(both) for both in zip(*parts, strict=True)])
        value.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, [tensor.detach() for tensor in module.parameters()]


def assert_same(one: tuple[list[float], list[torch.Tensor]], other: tuple[list[float], list[torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("compression", [None, ALL], ids=["dense", "all of it"])
def test_everything_sent_without_masking_is_momentum_sgd(nesterov: bool, decay: float, compression: Compression | None) -> None:
    training = Training(0.1, Momentum(0.9, nesterov, masking=False), decay)
    assert_same(emulated(compression, training), alone(lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=decay))


@pytest.mark.parametrize("nesterov", [False, True])
def test_everything_sent_with_masking_is_plain_sgd(nesterov: bool) -> None:
    """With Nesterov's momentum at m + 1 times the learning rate."""
    training = Training(0.1, Momentum(0.9, nesterov))
    assert_same(emulated(ALL, training), alone(lr=0.19 if nesterov else 0.1))


def test_plain_sgd_with_weight_decay() -> None:
    for compression in (None, ALL):
        assert_same(emulated(compression, Training(0.1, weight_decay=0.05)), alone(lr=0.1, weight_decay=0.05))


@pytest.mark.parametrize("nesterov", [False, True])
def test_on_one_rank_correction_is_momentum_bit_for_bit(nesterov: bool) -> None:
    rule, kept = Momentum(0.9, nesterov, masking=False), torch.zeros(50)
    weight = nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
    for step in range(5):
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(step))
        weight.grad, before = gradient.clone(), weight.detach().clone()
        optimizer.step()
        own = rule.corrected(kept, gradient)
        expected = optimizer.state[weight]["momentum_buffer"]
        assert torch.equal(before - own, weight.detach()) or torch.allclose(before - own, weight.detach(), rtol=1e-6, atol=1e-6)
        if not nesterov:
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_elements_sent_late_count_as_if_sent_in_time(nesterov: bool) -> None:
    """Without masking: after as many steps what was sent and is kept is the sum of what momentum would have applied."""
    rule, dense = Momentum(0.9, nesterov, masking=False), Momentum(0.9, nesterov, masking=False)
    kept, other = torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
    residual, sent, applied = torch.zeros_like(kept), torch.zeros_like(kept), torch.zeros_like(kept)
    for step in range(10):
        gradient = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        residual += rule.corrected(kept, gradient)
        applied += dense.corrected(other, gradient)
        top = residual.abs().topk(5).indices
        sent[top] += residual[top]
        residual[top] = 0
    assert torch.allclose(sent + residual, applied, rtol=1e-12, atol=1e-12)


def test_masking_takes_momentum_where_elements_were_sent() -> None:
    module = small()
    emulation = Emulation(module, loss, {"0.weight": Rgc(0.1, "exact")}, RANKS, Training(0.1, Momentum(0.9)))
    for step in range(3):
        emulation.step(batch(step))
        for rank in range(RANKS):
            sent = emulation.peers["0.weight"].ranks[rank].sent
            assert sent is not None
            momentum = emulation.peers["0.weight"].states[rank].summed["momentum"]
            assert len(sent.positions) == 4
            assert not momentum[sent.positions].any()
            assert int(momentum.count_nonzero()) == 40 - 4


def test_local_clipping_is_at_the_norm_of_a_share() -> None:
    """N independent gradients of the limit's norm add up to about the norm; N equal ones to N^(1/2) times it."""
    assert local_limit(6.0, 4) == 3.0
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(16)]
    clipped = [clip_locally([part[:300], part[300:]], 2.0, 16) for part in parts]
    for own, part in zip(clipped, parts, strict=True):
        assert float(norm_of(own)) == pytest.approx(0.5, rel=1e-6)
        assert torch.allclose(torch.cat(own) / part, (torch.cat(own) / part)[0])
    assert float(norm_of([sum(torch.cat(own) for own in clipped)])) == pytest.approx(2.0, rel=0.1)  # type: ignore[list-item]
    assert float(norm_of([16 * torch.cat(clipped[0])])) == pytest.approx(2.0 * sqrt(16), rel=1e-6)
    small_ones = [torch.full((4,), 0.01), torch.zeros(3)]
    assert all(torch.equal(a, b) for a, b in zip(clip_locally(small_ones, 2.0, 16), small_ones, strict=True))
    assert not norm_of(clip_locally([torch.zeros(3)], 2.0, 4))


def test_dense_training_clips_the_sum() -> None:
    assert_same(emulated(None, Training(0.5, clip_norm=0.05)), alone(lr=0.5, clip=0.05))


def test_clipping_comes_before_the_residual() -> None:
    module = small()
    emulation = Emulation(module, loss, {"0.weight": Rgc(0.1, "exact")}, RANKS, Training(0.1, clip_norm=1e-3))
    emulation.step(batch(0))
    for rank in range(RANKS):
        state, sent = emulation.peers["0.weight"].states[rank], emulation.peers["0.weight"].ranks[rank].sent
        assert sent is not None
        assert float(norm_of([state.residual, sent.values])) <= local_limit(1e-3, RANKS)


def test_weight_decay_stays_out_of_the_residual() -> None:
    with_decay, without = (
        Emulation(small(), loss, {"0.weight": Rgc(0.1, "exact")}, RANKS, Training(0.1, Momentum(0.9), decay)) for decay in (0.5, 0.0)
    )
    for emulation in (with_decay, without):
        emulation.step(batch(0))
    for a, b in zip(with_decay.peers["0.weight"].states, without.peers["0.weight"].states, strict=True):
        assert torch.equal(a.residual, b.residual)
    weights = [emulation.parameters["0.weight"].detach() for emulation in (with_decay, without)]
    expected = weights[1] - 0.1 * 0.5 * dict(small().named_parameters())["0.weight"].detach()
    assert torch.allclose(weights[0], expected, rtol=1e-12, atol=1e-14)


def test_densities_of_a_warm_up() -> None:
    """DGC's list, after RedSync's dense steps."""
    warm_up = WarmUp(2, 3)
    found = [warm_up.density(step, 0.001) for step in range(20)]
    assert found == [None] * 2 + [0.25] * 3 + [0.0625] * 3 + [0.015625] * 3 + [0.00390625] * 3 + [0.001] * 6
    assert [WarmUp().density(step, 0.001) for step in range(2)] == [0.001, 0.001]
    assert WarmUp(0, 1).density(0, 0.5) == 0.5
    assert WarmUp(1).density(1, 1.0) == 1.0


def test_a_dense_warm_up_is_momentum_sgd_and_hands_its_momentum_on() -> None:
    training = Training(0.1, Momentum(0.9), warm_up=WarmUp(dense_steps=6))
    assert_same(emulated(Rgc(0.01, "exact"), training), alone(lr=0.1, momentum=0.9))
    module = small()
    emulation = Emulation(module, loss, {"0.weight": Rgc(0.1, "exact")}, RANKS, Training(0.1, Momentum(0.9), warm_up=WarmUp(2)))
    for step in range(2):
        emulation.step(batch(step))
    before = [state.summed["momentum"].clone() for state in emulation.peers["0.weight"].states]
    assert all(own.any() for own in before)
    assert not any(state.residual.any() for state in emulation.peers["0.weight"].states)
    emulation.step(batch(2))
    assert all(state.residual.any() for state in emulation.peers["0.weight"].states)


def test_a_falling_density_keeps_one_residual() -> None:
    module = small()
    emulation = Emulation(module, loss, {"0.weight": Rgc(0.025, "exact")}, RANKS, Training(0.1, warm_up=WarmUp(0, 1)))
    counts = []
    for step in range(6):
        emulation.step(batch(step))
        counts.append(len(emulation.peers["0.weight"].states[0].step["positions"]))
    assert counts == [10, 2, 1, 1, 1, 1]  # of 40 elements: 25%, 6.25%, 2.5%


def test_adam_gets_the_sums() -> None:
    module, other = small(), small()
    make = lambda tensors: torch.optim.Adam(tensors, lr=0.01)  # noqa: E731
    emulation = Emulation(module, loss, {name: ALL for name, _ in module.named_parameters()}, RANKS, Training(optimizer=make))
    optimizer = make(list(other.parameters()))
    for step in range(4):
        emulation.step(batch(step))
        optimizer.zero_grad()
        loss(other, [torch.cat(both) for both in zip(*batch(step), strict=True)]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_bad_settings_are_refused_in_one_line() -> None:
    for make, said in (
        (lambda: Momentum(1.0), "momentum 1.0; expected a number from 0 to below 1"),
        (lambda: WarmUp(-1), "warm-up of -1 dense steps"),
        (lambda: Training(momentum=Momentum(), optimizer=torch.optim.Adam), "beside an optimizer"),
        (lambda: Emulation(small(), loss, {"1.weight": ALL}, 2, Training()), "compression for '1.weight', which the module does not train"),
        (lambda: Emulation(small(), loss, {}, 2, Training()).step(batch(0)), "3 parts of a batch; expected one for each of 2 ranks"),
    ):
        with pytest.raises(SoapError) as raised:
            make()  # type: ignore[no-untyped-call]
        assert said in str(raised.value)
