"""One rank's steps: the type that everything is added up in, thresholds of another density, and gradients that are not finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.oracles.compression import Emulation, Peers, Training
from soap.errors import RuntimeFailure
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.peer import CompressedTraining, Peer
from soap.strategy.compression import Compression, PowerSgd, Rgc
from tests.runtime.compression.cases import METHODS, gradient

SHAPE = (40, 70)


@pytest.mark.parametrize("nesterov", [False, True])
def test_narrow_gradients_are_added_to_u_and_the_residual_at_full_precision(nesterov: bool) -> None:
    """sent + kept == kept before + u, bit for bit: u is in float32, and rounding it to bfloat16 on its way would lose bits of it."""
    training = CompressedTraining(Momentum(0.9, nesterov, masking=False))
    peer, rule, kept = Peer(Rgc(0.1, "exact"), SHAPE, torch.bfloat16, 0, 1, training), Momentum(0.9, nesterov), torch.zeros(2800)
    for step in range(5):
        own = gradient(SHAPE, torch.bfloat16, step)
        had = peer.state.residual + rule.corrected(kept, own.flatten().float())
        drive(peer, own)
        assert peer.sent is not None
        found = peer.state.residual.index_add(0, peer.sent.positions, peer.sent.values)
        assert torch.equal(found, had)
    assert torch.equal(peer.state.summed["momentum"], kept) and not torch.equal(kept, kept.bfloat16().float())


@pytest.mark.parametrize("compression", [Rgc(0.1, "exact"), PowerSgd(40)], ids=lambda own: own.name)
def test_narrow_gradients_of_many_ranks_are_summed_at_full_precision(compression: Compression) -> None:
    """In dense steps, and in PowerSGD's: 300 ones in bfloat16 would stop at 256."""
    peers = Peers(compression, (2, 2), torch.bfloat16, 300, CompressedTraining(warm_up=WarmUp(1)))
    for _ in range(2 if isinstance(compression, PowerSgd) else 1):
        [total, *_] = peers.synchronize([torch.ones(2, 2, dtype=torch.bfloat16)] * 300)
        assert total.dtype is torch.bfloat16 and total.tolist() == [[300.0, 300.0]] * 2


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_threshold_of_another_density_is_not_used_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a warm-up's density falls, nor behind a checkpoint of another density. Above the old one there are far too few or too
    many elements; of too many a GPU would send the first ones."""
    if place == "device":
        monkeypatch.setattr("soap.runtime.compression.seam.on_host", lambda _: False)
    falling = Peer(Rgc(0.001, "sampled"), (10_000,), torch.float32, 0, 1, CompressedTraining(warm_up=WarmUp(0, 2)))
    for step, density in enumerate([0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001, 0.001]):
        kept = falling.compressor(density).layout.kept  # type: ignore[attr-defined]
        drive(falling, gradient((10_000,), torch.float32, step))
        assert falling.state.numbers["sought"] == kept and count(falling) <= 2 * kept
        if step % 2 == 0 and step < 10:  # the first step at its density
            assert falling.state.numbers["age"] == 1 and count(falling) >= kept
    rising = Peer(Rgc(0.01, "sampled"), (10_000,), torch.float32, 0, 1)
    rising.state = falling.state
    drive(rising, gradient((10_000,), torch.float32, 20))
    assert 100 <= count(rising) <= 200 and rising.state.numbers["age"] == 1


@pytest.mark.parametrize("compression", [own[0] for own in METHODS.values()], ids=repr)
@pytest.mark.parametrize(("dense", "momentum"), [(0, None), (0, Momentum(0.9)), (1, Momentum(0.9, nesterov=True))])
def test_what_is_not_finite_changes_neither_u_nor_anything_else(compression: Compression, dense: int, momentum: Momentum | None) -> None:
    """In compressed steps, and in dense ones before them."""
    peer = Peer(compression, SHAPE, torch.float32, 0, 1, CompressedTraining(momentum, WarmUp(2 * dense)))
    drive(peer, gradient(SHAPE, torch.float32, 0))
    before = copy.deepcopy(peer.state)
    spoiled = gradient(SHAPE, torch.float32, 1)
    spoiled[3, 5] = float("nan")
    with pytest.raises(RuntimeFailure, match="expected finite numbers"):
        drive(peer, spoiled)
    assert peer.state.numbers == before.numbers
    for own, other in ((peer.state.summed, before.summed), (peer.state.common, before.common), (peer.state.own, before.own)):
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def test_one_process_does_what_ranks_do() -> None:
    """An emulated training has the ranks' own steps, so in bfloat16 its momentum is in float32, as theirs."""
    module = nn.Linear(8, 8).bfloat16()
    training = Training(0.1, Momentum(0.9), warm_up=WarmUp(1, 1))
    emulation = Emulation(module, lambda own, part: own(*part).float().square().mean(), {"weight": Rgc(0.1, "exact")}, 2, training)
    for step in range(3):
        emulation.step([(gradient((2, 8), torch.bfloat16, 2 * step + rank),) for rank in range(2)])
    for peer in emulation.peers["weight"].ranks:
        assert type(peer) is Peer and peer.steps == 3 and peer.state.summed["momentum"].dtype is torch.float32


def drive(peer: Peer, own: torch.Tensor) -> torch.Tensor:
    """A step of a single rank."""
    course = peer.course(own)
    kind, message = next(course)
    while True:
        try:
            kind, message = course.send(message if kind == "sum" else message[None] if kind == "all_gather" else message)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def count(peer: Peer) -> int:
    assert peer.sent is not None
    return int(peer.sent.real.sum())
