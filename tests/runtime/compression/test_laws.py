"""What each method promises of what it sends and what it keeps, on each rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log

import pytest
import torch

from benchmarks.oracles.compression import Peers
from soap.plan.compression.chunked import CHUNK
from soap.plan.compression.seam import kept_count, layout_of
from soap.runtime.compression.chunked import _packed_positions, _unpacked_positions
from soap.runtime.compression.powersgd import orthogonal
from soap.runtime.compression.seam import Selected, compressor_of
from soap.runtime.compression.sparse import SparseCompressor
from soap.strategy.compression import Bf16, Chunked, Int8, PowerSgd, Rgc, RgcAsq, Selection
from tests.extent import every, rows_often
from tests.runtime.compression.cases import SHAPES, gradient, gradients, residuals

SELECTIONS: tuple[Selection, ...] = ("exact", "trimmed", "search", "sampled")


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is done on processors, and what is done on GPUs, here on the processor as well."""
    if request.param == "device":
        monkeypatch.setattr("soap.runtime.compression.seam.on_host", lambda _: False)
    return str(request.param)


def real(sent: Selected | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values of what was sent, without padding."""
    assert sent is not None
    return sent.positions[sent.real], sent.values[sent.real]


def scattered(size: int, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(size, dtype=values.dtype).index_add_(0, positions, values)


GRADIENTS = list(product([torch.float32, torch.float64, torch.bfloat16], ["normal", "ties", "zeros", "equal"]))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("dtype", "kind"), rows_often(GRADIENTS, [*GRADIENTS[:4], *GRADIENTS[4::4]]), ids=str)
def test_rgc_conserves_every_bit(where: str, selection: Selection, kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        compressor = compressor_of(Rgc(0.02, selection), shape, dtype, 0, 1)
        state = compressor.fresh()
        for step in range(8):
            own = gradient(shape, dtype, step, kind)
            had = state.residual + own.flatten().to(compressor.kept_dtype)
            message = compressor.compress(state, own)
            positions, values = real(compressor.sent(state))
            total = scattered(len(had), positions, values)
            assert torch.equal(total + state.residual, had)
            assert not state.residual[positions].any()
            assert torch.equal(compressor.total(state, message[None]).flatten(), total.to(dtype))
            if selection != "sampled":
                least = compressor.layout.kept  # type: ignore[attr-defined]
                assert least <= len(positions) <= 2 * least


@pytest.mark.parametrize("selection", ["exact", "trimmed"])
def test_rgc_sends_the_largest_of_the_residual(where: str, selection: Selection) -> None:
    compressor = compressor_of(Rgc(0.01, selection), (50, 60), torch.float32, 0, 1)
    state = compressor.fresh()
    for step in range(5):
        own = gradient((50, 60), torch.float32, step)
        had = state.residual + own.flatten()
        compressor.compress(state, own)
        positions, _ = real(compressor.sent(state))
        assert positions.tolist() == sorted(torch.topk(had.abs(), 30).indices.tolist())


RAGGED = [Rgc(0.02, "search"), Rgc(0.02, "sampled"), RgcAsq(0.02, "search"), RgcAsq(0.02, "search", True)]


@pytest.mark.parametrize("how", every(3, RAGGED), ids=repr)
def test_ragged_messages_have_the_sums_of_padded_ones(where: str, how: Rgc | RgcAsq) -> None:
    """And leave the same residuals; only their real length travels."""
    for shape in SHAPES:
        padded, ragged = (Peers(own, shape, torch.float32, 3) for own in (how, replace(how, ragged=True)))
        for step in range(7):
            given = gradients(shape, torch.float32, 3, step)
            assert all(torch.equal(*pair) for pair in zip(padded.synchronize(given), ragged.synchronize(given), strict=True))
            assert all(torch.equal(*pair) for pair in zip(residuals(padded), residuals(ragged), strict=True))
            for peer in ragged.ranks:
                positions, _ = real(peer.sent)
                layout = peer.compressor().layout
                assert peer.state.step["short"].nbytes == layout.holding(len(positions)).row_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("selection", ["search", "sampled"])
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_lengths_are_those_expected(selection: Selection, kind: str) -> None:
    """On average, over many steps with a residual, as plans take it: k / ln 2."""
    lengths, kept, expected = [], 0, 0
    for seed in range(6):
        compressor = compressor_of(Rgc(0.002, selection), (50_000,), torch.float32, 0, 1)
        state, generator = compressor.fresh(), torch.Generator().manual_seed(seed)
        kept, expected = compressor.layout.kept, compressor.layout.likely  # type: ignore[attr-defined]
        for _ in range(20):
            own = torch.randn(50_000, generator=generator)
            if kind == "laplace":
                own = own.sign() * torch.empty(50_000).exponential_(generator=generator)
            compressor.compress(state, (1 + seed) * own)
            lengths.append(len(real(compressor.sent(state))[0]))
    assert expected == round(kept / log(2))
    assert sum(lengths) / len(lengths) == pytest.approx(expected, rel=0.1)


def test_a_threshold_is_searched_for_every_fifth_step() -> None:
    """Where equal gradients make it good for all of them; see also the tests of ``reused``."""
    compressor = compressor_of(Rgc(0.01, "sampled"), (10_000,), torch.float32, 0, 1)
    state = compressor.fresh()
    ages, thresholds = [], []
    for step in range(11):
        state.residual.zero_()
        compressor.compress(state, gradient((10_000,), torch.float32, step))
        ages.append(state.numbers["age"])
        thresholds.append(float(state.own["threshold"]))
    assert ages == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1]
    assert len(set(thresholds)) == 3
    compressor.compress(state, 100 * gradient((10_000,), torch.float32, 50))
    assert state.numbers["age"] == 1


def test_rgc_adds_ranks_up_in_their_order(where: str) -> None:
    """All ranks send the same position; in float32 the order of additions shows."""
    values = (1e8, 1.0, -1e8, 1.0)
    peers = Peers(Rgc(0.2, "exact"), (5,), torch.float32, 4)
    own = [torch.zeros(5).index_fill_(0, torch.tensor(2), value) for value in values]
    expected = torch.tensor(0.0)
    for value in values:
        expected = expected + torch.tensor(value)
    assert peers.synchronize(own)[0].tolist() == [0, 0, float(expected), 0, 0]


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("selection", ["exact", "trimmed", "search"])
def test_asq_takes_turns_and_never_mixes_signs(where: str, selection: Selection, error_feedback: bool) -> None:
    compressor = compressor_of(RgcAsq(0.02, selection, error_feedback), (60, 50), torch.float64, 0, 1)
    state = compressor.fresh()
    for step in range(6):
        own = gradient((60, 50), torch.float64, step)
        had = state.residual + own.flatten()
        message = compressor.compress(state, own)
        positions, _ = real(compressor.sent(state))
        chosen, sign = had[positions], -1 if step % 2 else 1
        assert (sign * chosen > 0).all()
        assert 60 <= len(chosen) <= 120
        assert (sign * chosen).min() >= (sign * had).scatter(0, positions, 0).max()
        total = compressor.total(state, message[None]).flatten()
        assert len(total[positions].unique()) == 1
        assert total.sum() == pytest.approx(float(chosen.sum()), rel=1e-12)
        rest = torch.ones_like(had, dtype=torch.bool).index_fill_(0, positions, False)
        assert torch.equal(state.residual[rest], had[rest])
        assert not total[rest].any()
        if error_feedback:
            assert torch.equal(state.residual[positions], chosen - total[positions])
        else:
            assert not state.residual[positions].any()


def test_asq_with_too_few_of_a_sign_sends_only_these(where: str) -> None:
    own = torch.full((1000,), -1.0)
    own[[3, 500]] = torch.tensor([2.0, 4.0])
    for selection in ("exact", "trimmed", "search"):
        compressor = compressor_of(RgcAsq(0.01, selection), (1000,), torch.float32, 0, 1)  # type: ignore[arg-type]
        state = compressor.fresh()
        total = compressor.total(state, compressor.compress(state, own)[None])
        assert torch.nonzero(total)[:, 0].tolist() == [3, 500]
        assert total[[3, 500]].tolist() == [3.0, 3.0]
        state = compressor.fresh()
        total = compressor.total(state, compressor.compress(state, -torch.ones(1000))[None])
        assert not total.any()
        assert (state.residual == -1).all()


def test_asq_has_the_same_turn_on_all_ranks() -> None:
    peers = Peers(RgcAsq(0.02, "search"), (40, 70), torch.float32, 3)
    for step in range(5):
        peers.synchronize(gradients((40, 70), torch.float32, 3, step))
        assert {state.numbers["turn"] for state in peers.states} == {(step + 1) % 2}


@pytest.mark.parametrize("codes", ["bf16", "2bit"])
def test_chunked_keeps_what_its_short_values_lose(codes: str) -> None:
    for shape in ((3 * CHUNK,), (2 * CHUNK + 5,), (37, 200), (3,)):
        for dtype in (torch.float32, torch.float64):
            compressor = compressor_of(Chunked(0.01, codes, 0.5), shape, dtype, 0, 1)  # type: ignore[arg-type]
            state = compressor.fresh()
            for step in range(4):
                own = gradient(shape, dtype, step)
                had = 0.5 * state.residual + own.flatten()
                total = compressor.total(state, compressor.compress(state, own)[None]).flatten()
                sent = compressor.sent(state)
                assert sent is not None
                assert torch.equal(scattered(len(had), sent.positions, sent.values), total)
                rest = torch.ones_like(had, dtype=torch.bool).index_fill_(0, sent.positions, False)
                assert torch.equal(state.residual[rest], had[rest])
                if codes == "bf16":
                    assert torch.equal(total + state.residual, had)
                else:
                    assert torch.allclose(total + state.residual, had, rtol=1e-6, atol=1e-6)
                    for begin in range(0, len(had), CHUNK):
                        assert len(total[begin : begin + CHUNK].abs().unique()) <= 3
                    assert (total * had >= 0).all()


def test_chunked_takes_the_largest_of_each_chunk() -> None:
    size, kept = 3 * CHUNK + 100, kept_count(CHUNK, 0.01)
    compressor = compressor_of(Chunked(0.01, "bf16"), (size,), torch.float32, 0, 1)
    state, own = compressor.fresh(), gradient((size,), torch.float32, 5)
    compressor.compress(state, own)
    sent = compressor.sent(state)
    assert sent is not None
    expected = [
        begin + place
        for begin in range(0, size, CHUNK)
        for place in sorted(torch.sort(own[begin : begin + CHUNK].abs(), descending=True, stable=True).indices[:kept].tolist())
    ]
    assert sent.positions.tolist() == expected


def test_positions_of_twelve_bits() -> None:
    for count in (1, 2, 5, CHUNK):
        places = torch.stack([torch.arange(CHUNK)[:count], torch.arange(CHUNK).flip(0)[:count]])
        packed = _packed_positions(places)
        assert packed.shape == (2, 3 * -(-count // 2))
        assert torch.equal(_unpacked_positions(packed, count), places)


def test_powersgd_sends_matrices_of_its_rank_whole() -> None:
    """And keeps on each rank just what the common left matrix misses of its own."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 2, dtype=torch.float64, generator=generator) for size in (30, 50))
    peers = Peers(PowerSgd(2), (30, 50), torch.float64, 3)
    parts = [left * torch.tensor([1.0 + rank, -2.0]) @ right.T for rank in range(3)]
    for _ in range(3):
        total = peers.synchronize(parts)[0]
    assert torch.allclose(total, parts[0] + parts[1] + parts[2], rtol=1e-9, atol=1e-9)
    assert all(torch.allclose(kept, torch.zeros_like(kept), atol=1e-9) for kept in residuals(peers))


def test_powersgd_keeps_what_it_does_not_send() -> None:
    peers = Peers(PowerSgd(2), (30, 50), torch.float64, 2)
    for step in range(4):
        before, given = residuals(peers), gradients((30, 50), torch.float64, 2, step)
        total = peers.synchronize(given)[0]
        assert torch.linalg.matrix_rank(total) <= 2
        sent = [kept + own.flatten() - after for kept, own, after in zip(before, given, residuals(peers), strict=True)]
        assert torch.allclose(sum(sent, torch.zeros(1500, dtype=torch.float64)).view(30, 50), total, atol=1e-10)


def test_powersgd_begins_anew_after_a_gradient_of_zero() -> None:
    peers = Peers(PowerSgd(2), (6, 5), torch.float32, 2)
    assert not peers.synchronize([torch.zeros(6, 5)] * 2)[0].any()
    assert peers.synchronize(gradients((6, 5), torch.float32, 2, 1))[0].any()


def test_orthogonal_columns() -> None:
    matrix = gradient((40, 5), torch.float64, 1)
    matrix[:, 3] = 2 * matrix[:, 0] - matrix[:, 1]
    found = orthogonal(matrix)
    expected = torch.eye(5, dtype=torch.float64)
    expected[3, 3] = 0
    assert torch.allclose(found.T @ found, expected, atol=1e-12)
    assert torch.allclose(found @ (found.T @ matrix), matrix, atol=1e-12)


def test_bf16_rounds_once_and_again() -> None:
    given = gradients((7, 30), torch.float32, 4, 0)
    total = Peers(Bf16(), (7, 30), torch.float32, 4).synchronize(given)[0]
    expected = torch.zeros(7, 30)
    for own in given:
        expected += own.bfloat16().float()
    assert torch.equal(total, expected.bfloat16().float())


def test_int8_is_within_half_a_scale() -> None:
    own = gradient((7, 300), torch.float32, 0)
    compressor = compressor_of(Int8(), (7, 300), torch.float32, 0, 1)
    state = compressor.fresh()
    total = compressor.total(state, compressor.answer(state, compressor.compress(state, own))[None])
    scales = torch.nn.functional.pad(own.flatten(), (0, 204)).view(-1, 256).abs().amax(1) / 127
    error = torch.nn.functional.pad((total - own).flatten(), (0, 204)).view(-1, 256).abs().amax(1)
    assert (error <= scales * (1 + 1e-5)).all()  # half of it, twice: for the gradient and for the sum
    assert torch.allclose(total.flatten() + state.residual, own.flatten(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_ragged_message_has_its_length_alone(dtype: torch.dtype) -> None:
    for compression in (Rgc(0.02, "search"), RgcAsq(0.02, "search")):
        compressor = compressor_of(compression, (60, 51), dtype, 0, 1)
        assert isinstance(compressor, SparseCompressor)
        state = compressor.fresh()
        message = compressor.compress(state, gradient((60, 51), dtype, 1))
        short, count = compressor.shortened(message), compressor.length(message)
        assert 61 <= count < 122
        assert compressor.real_bytes(message) <= short.nbytes < compressor.real_bytes(message) + 8 + dtype.itemsize
        assert torch.equal(compressor.padded(short), message)


def test_union_density_is_nearly_the_sum_of_densities() -> None:
    """Independent residuals hardly overlap (the paper: 1.55% for 16 ranks at 0.1%)."""
    ranks, size = 16, 100_000
    peers = Peers(Rgc(0.001, "exact"), (size,), torch.float32, ranks)
    total = peers.synchronize(gradients((size,), torch.float32, ranks, 0))[0]
    assert 0.015 <= int(total.count_nonzero()) / size <= 0.016


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_union_density_of_independent_and_of_equal_gradients(ranks: int) -> None:
    """1 - (1 - D)^p, a little less than p D, where ranks choose independently of each other; D where they choose the same."""
    size, density = 100_000, 0.01
    for given, expected in (
        (gradients((size,), torch.float32, ranks, 0), 1 - (1 - density) ** ranks),
        ([gradient((size,), torch.float32, 0)] * ranks, density),
    ):
        total = Peers(Rgc(density, "exact"), (size,), torch.float32, ranks).synchronize(given)[0]
        assert int(total.count_nonzero()) / size == pytest.approx(expected, rel=0.01)
        assert int(total.count_nonzero()) <= ranks * density * size


def test_positions_take_eight_bytes_above_two_to_the_31() -> None:
    small = layout_of(Rgc(0.001, "exact"), (2**31,), 4, 2)
    large = layout_of(Rgc(0.001, "exact"), (2**31 + 1,), 4, 2)
    kept = round(2**31 / 1000)
    assert small.real_bytes(kept) == 8 + 8 * kept
    assert large.real_bytes(kept) == 8 + 12 * kept


def test_messages_with_such_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.plan.compression.rgc.MOST_SHORT", 100)
    for dtype in (torch.float32, torch.float64):
        for compression in (Rgc(0.05, "search"), RgcAsq(0.05, "search")):
            peers = Peers(compression, (101,), dtype, 2)
            given = gradients((101,), dtype, 2, 0)
            total = peers.synchronize(given)[0]
            sent = [peer.sent for peer in peers.ranks]
            positions = {i for own in sent if own is not None for i in own.positions.tolist()}
            assert set(torch.nonzero(total)[:, 0].tolist()) == positions
            if isinstance(compression, Rgc):
                assert torch.equal(total + residuals(peers)[0] + residuals(peers)[1], given[0] + given[1])
