"""What every method of compression has to pass. A method without settings in ``cases.METHODS`` fails."""

from __future__ import annotations

import copy
from itertools import product
from math import inf, nan, prod

import pytest
import torch

from benchmarks.oracles.compression import Peers
from soap.errors import SoapError
from soap.plan.compression.seam import layout_of
from soap.runtime.compression.peer import exchanged
from soap.runtime.compression.seam import State, compressor_of, sizes_of
from soap.strategy.compression import COMPRESSIONS, Compression, PowerSgd
from tests.extent import every
from tests.runtime.compression.cases import METHODS, SETTINGS, SHAPES, TYPES, gradient, gradients, residuals

KINDS = ("zeros", "ties", "equal")
RANKS = 3
settings = pytest.mark.parametrize("compression", SETTINGS, ids=repr)


def test_every_method_has_settings() -> None:
    assert METHODS.keys() == COMPRESSIONS.keys()
    assert all(type(own) is COMPRESSIONS[name] for name, group in METHODS.items() for own in group)


@pytest.mark.parametrize(("compression", "shape"), every(5, list(product(SETTINGS, SHAPES))), ids=str)
def test_all_ranks_get_the_same_bits_in_every_step(compression: Compression, shape: tuple[int, ...]) -> None:
    for dtype, kind in [*((dtype, "normal") for dtype in TYPES), *((torch.float32, kind) for kind in KINDS)]:
        peers = Peers(compression, shape, dtype, RANKS)
        for step in range(6):
            totals = peers.synchronize(gradients(shape, dtype, RANKS, step, kind))
            assert all(total.shape == shape and total.dtype == dtype and total.isfinite().all() for total in totals)
            assert all(torch.equal(total, totals[0]) for total in totals)


@pytest.mark.parametrize(("compression", "shape"), every(3, list(product(SETTINGS, SHAPES))), ids=str)
def test_messages_have_the_size_that_the_layout_gives(compression: Compression, shape: tuple[int, ...]) -> None:
    for ranks in (1, 2, 4, 8):
        for dtype in TYPES:
            layout = layout_of(compression, shape, dtype.itemsize, ranks)
            made = [compressor_of(compression, shape, dtype, rank, ranks) for rank in range(ranks)]
            states = [compressor.fresh() for compressor in made]
            messages = [c.compress(s, g) for c, s, g in zip(made, states, gradients(shape, dtype, ranks, 0), strict=True)]
            received: list[torch.Tensor] = []
            for number, exchange in enumerate(layout.exchanges):
                each = ranks if exchange.kind == "all_to_all" else 1
                if exchange.kind == "ragged":
                    assert [message.nbytes for message in messages] == sizes_of(received[0])
                    assert max(exchange.message_bytes, *sizes_of(received[0])) <= exchange.most_bytes
                else:
                    assert {message.nbytes for message in messages} == {each * exchange.message_bytes}
                if exchange.kind == "all_to_all":
                    assert {message.shape[0] for message in messages} == {ranks}
                received = exchanged(exchange.kind, messages)
                if number + 1 < len(layout.exchanges):
                    messages = [c.answer(s, r) for c, s, r in zip(made, states, received, strict=True)]
            if [exchange.kind for exchange in layout.exchanges] == ["all_gather"]:
                assert all(c.real_bytes(m) <= layout.exchanges[0].message_bytes for c, m in zip(made, messages, strict=True))


@settings
def test_what_is_sent_and_kept_is_what_there_was(compression: Compression) -> None:
    """Over all ranks, for methods that keep what they do not send. Their own tests say how exactly it holds on each rank."""
    if not compression.summed_state or (compression.name == "rgc+asq" and not getattr(compression, "error_feedback", True)):
        return
    decay = getattr(compression, "decay", 1.0)
    for shape in SHAPES:
        peers = Peers(compression, shape, torch.float64, RANKS)
        for step in range(7):
            before, given = residuals(peers), gradients(shape, torch.float64, RANKS, step)
            total = peers.synchronize(given)[0].flatten()
            had = sum(decay * kept + own.flatten() for kept, own in zip(before, given, strict=True))
            assert torch.allclose(total + sum(residuals(peers)), torch.as_tensor(had), rtol=1e-11, atol=1e-11)


@settings
def test_what_is_not_finite_is_refused_in_one_line_and_changes_nothing(compression: Compression) -> None:
    for dtype, bad in zip(TYPES, (nan, inf, -inf, nan), strict=True):
        compressor = compressor_of(compression, (30, 40), dtype, 0, 2)
        state = compressor.fresh()
        compressor.compress(state, gradient((30, 40), dtype, 1))
        before = copy.deepcopy(state)
        spoiled = gradient((30, 40), dtype, 2)
        spoiled[29, 39] = bad
        with pytest.raises(SoapError, match="expected finite numbers") as raised:
            compressor.compress(state, spoiled)
        assert "\n" not in str(raised.value)
        assert same(state, before)


@settings
def test_large_numbers_are_not_taken_for_infinite_ones(compression: Compression) -> None:
    """Their sum overflows, but none of them does."""
    compressor = compressor_of(compression, (2, 3), torch.float32, 0, 1)
    compressor.compress(compressor.fresh(), torch.full((2, 3), 1e38) if compression.name != "powersgd" else torch.full((2, 3), 1e18))


@settings
def test_gradients_of_another_shape_or_type_are_refused(compression: Compression) -> None:
    compressor = compressor_of(compression, (4, 3), torch.float32, 0, 2)
    for wrong in (torch.zeros(3, 4), torch.zeros(12), torch.zeros(4, 3, dtype=torch.float64)):
        with pytest.raises(SoapError, match="expected the parameter's own"):
            compressor.compress(compressor.fresh(), wrong)
    with pytest.raises(SoapError, match="cannot be compressed; expected float32"):
        compressor_of(compression, (4, 3), torch.complex64, 0, 2)


@settings
def test_strides_do_not_matter_and_gradients_are_left_alone(compression: Compression) -> None:
    straight = gradient((40, 70), torch.float32, 3)
    crooked = straight.T.contiguous().T
    given = crooked.clone()
    found = []
    for own in (straight, crooked):
        peers = Peers(compression, (40, 70), torch.float32, 1)
        found.append([peers.synchronize([own])[0] for _ in range(3)][-1])
    assert not crooked.is_contiguous()
    assert torch.equal(found[0], found[1])
    assert torch.equal(crooked, given)


@pytest.mark.parametrize(("compression", "shape"), every(3, list(product(SETTINGS, SHAPES))), ids=str)
def test_what_was_received_is_left_alone_and_may_lie_anywhere(compression: Compression, shape: tuple[int, ...]) -> None:
    """It may be a part of what came for several parameters, at any place; and in one process all ranks are given the same tensor."""
    layout = layout_of(compression, shape, 4, RANKS)
    found = []
    for offset in (0, 8, 24):
        made = [compressor_of(compression, shape, torch.float32, rank, RANKS) for rank in range(RANKS)]
        states = [compressor.fresh() for compressor in made]
        messages = [c.compress(s, g) for c, s, g in zip(made, states, gradients(shape, torch.float32, RANKS, 0), strict=True)]
        for number, exchange in enumerate(layout.exchanges):
            came = [moved(own, offset) for own in exchanged(exchange.kind, messages)]
            given = [own.clone() for own in came]
            last = number + 1 == len(layout.exchanges)
            messages = [(c.total if last else c.answer)(s, own) for c, s, own in zip(made, states, came, strict=True)]
            assert all(torch.equal(own, before) for own, before in zip(came, given, strict=True))
        found.append(messages)
    assert all(torch.equal(own, there) for others in found for own, there in zip(others, found[0], strict=True))


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same numbers in rows that have so many others in front, as where messages are joined."""
    rows = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + offset, dtype=tensor.dtype)[..., offset:]
    return rows.copy_(tensor)


@settings
def test_equal_runs_give_equal_bits(compression: Compression) -> None:
    runs = []
    for _ in range(2):
        peers = Peers(compression, (40, 70), torch.float32, RANKS)
        runs.append([peers.synchronize(gradients((40, 70), torch.float32, RANKS, step))[0] for step in range(8)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@settings
def test_a_copy_of_the_state_goes_on_as_the_state_does(compression: Compression) -> None:
    """At every position in what repeats (five steps of a threshold, two signs): what a checkpoint has to hold is in ``State``."""
    shape, dtype = (40, 70), torch.float32
    peers = Peers(compression, shape, dtype, RANKS)
    copies, given, totals = [], [gradients(shape, dtype, RANKS, step) for step in range(10)], []
    for own in given:
        copies.append([saved(state) for state in peers.states])
        totals.append(peers.synchronize(own)[0])
    for stop in every(2, range(1, 8)):
        other = Peers(compression, shape, dtype, RANKS)
        other.states = copies[stop]
        assert all(torch.equal(other.synchronize(own)[0], total) for own, total in zip(given[stop:], totals[stop:], strict=True))


def saved(state: State) -> State:
    """What a checkpoint has: all but ``step``."""
    own = copy.deepcopy(state)
    return State(own.summed, own.common, own.own, own.numbers)


@settings
def test_state_is_of_the_kinds_that_the_settings_name(compression: Compression) -> None:
    peers = Peers(compression, (40, 70), torch.float32, RANKS)
    for step in range(3):
        peers.synchronize(gradients((40, 70), torch.float32, RANKS, step))
    for state in peers.states:
        assert tuple(state.summed) == compression.summed_state
        assert [*state.common] == ["right"] * isinstance(compression, PowerSgd)
        assert all(tensor.shape == (prod((40, 70)),) for tensor in state.summed.values())
        assert all(torch.equal(tensor, peers.states[0].common[name]) for name, tensor in state.common.items())


def same(one: State, other: State) -> bool:
    pairs = [(one.summed, other.summed), (one.common, other.common), (one.own, other.own)]
    return one.numbers == other.numbers and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )
