"""Methods of compression as data: reading them, their messages' sizes, and the policy by layer."""

from __future__ import annotations

from math import prod

import pytest

from soap.errors import StrategyError
from soap.plan.compression.policy import Layer, chosen
from soap.plan.compression.seam import Exchange, kept_count, layout_of
from soap.strategy.compression import COMPRESSIONS, Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq, parse

SHAPE = (1000, 2000)
ELEMENTS = 2_000_000


def test_methods_are_read_by_name_and_number() -> None:
    assert parse("rgc") == Rgc(0.001)
    assert parse("rgc:0.01") == Rgc(0.01)
    assert parse("rgc+asq:1") == RgcAsq(1.0)
    assert parse("chunked:0.5") == Chunked(0.5)
    assert parse("powersgd:4") == PowerSgd(4)
    assert (parse("bf16"), parse("int8")) == (Bf16(), Int8())
    for kind in COMPRESSIONS.values():
        assert parse(kind().word) == kind()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rgd", "compression 'rgd' is unknown; expected one of rgc, rgc+asq, chunked, powersgd, bf16, int8"),
        ("rgc:x", "expected a density behind the colon, such as 'rgc:0.001'"),
        ("rgc:", "expected a density behind the colon"),
        ("rgc:0", "rgc: density 0.0; expected a share"),
        ("rgc:1.5", "rgc: density 1.5; expected a share"),
        ("rgc:nan", "rgc: density nan; expected a share"),
        ("powersgd:1.5", "expected a rank behind the colon, such as 'powersgd:2'"),
        ("powersgd:0", "powersgd: rank 0; expected a whole number from 1 to 1048576"),
        ("bf16:2", "bf16 has no setting; expected 'bf16'"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(StrategyError) as raised:
        parse(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_settings_out_of_range_are_refused() -> None:
    for make, said in (
        (lambda: RgcAsq(selection="sampled"), "selection 'sampled'; expected one of policy, exact, trimmed, search"),
        (lambda: Rgc(selection="best"), "selection 'best'; expected one of"),  # type: ignore[arg-type]
        (lambda: Chunked(codes="3bit"), "codes '3bit'; expected one of 2bit, bf16"),  # type: ignore[arg-type]
        (lambda: Chunked(decay=1.1), "decay 1.1; expected a number from 0 to 1"),
    ):
        with pytest.raises(StrategyError) as raised:
            make()
        assert said in str(raised.value)


@pytest.mark.parametrize("peers", [2, 4, 8])
def test_bytes_of_messages(peers: int) -> None:
    """The formulas of RedSync (two words for each element, one with alternating signs) and of the others, with their headers."""
    kept = ELEMENTS // 1000
    part = ELEMENTS // peers
    blocks = -(-part // 256)
    cases: list[tuple[Compression, list[tuple[str, int]]]] = [
        (Rgc(0.001, "exact"), [("all_gather", 8 + 8 * kept)]),
        (Rgc(0.001, "search"), [("all_gather", 8 + 2 * 8 * kept)]),
        (RgcAsq(0.001, "trimmed"), [("all_gather", 16 + 4 * kept)]),
        (RgcAsq(0.001, "search"), [("all_gather", 16 + 2 * 4 * kept)]),
        (Chunked(64 / 4096), [("all_gather", 489 * (64 * 12 // 8 + 4 + 64 * 2 // 8))]),
        (Chunked(64 / 4096, "bf16"), [("all_gather", 489 * (64 * 12 // 8 + 64 * 2))]),
        (PowerSgd(2), [("sum", 1000 * 2 * 4), ("sum", 2000 * 2 * 4)]),
        (Bf16(), [("all_to_all", 2 * part), ("all_gather", 2 * part)]),
        (Int8(), [("all_to_all", blocks * 260), ("all_gather", blocks * 260)]),
    ]
    for compression, expected in cases:
        layout = layout_of(compression, SHAPE, 4, peers)
        assert [(exchange.kind, exchange.message_bytes) for exchange in layout.exchanges] == expected
        sent = sum(size * (peers - 1) if kind != "sum" else size * 2 * (peers - 1) // peers for kind, size in expected)
        assert layout.sent_bytes == sent


def test_ratio_to_a_dense_sum_is_p_d_and_half_of_it() -> None:
    """What equations (1) and (2) give for large messages: at 128 nodes and a thousandth 12.8% with two words an element."""
    peers, elements = 128, 10**8
    dense = Exchange("sum", 4 * elements).sent_bytes(peers)
    for compression, ratio in ((Rgc(0.001, "exact"), 0.128), (RgcAsq(0.001, "exact"), 0.064)):
        assert layout_of(compression, (elements,), 4, peers).sent_bytes / dense == pytest.approx(ratio, rel=1e-3)


def test_what_is_real_of_a_padded_message() -> None:
    layout = layout_of(Rgc(0.001, "search"), SHAPE, 4, 4)
    assert layout.real_bytes(2500) == 8 + 8 * 2500
    assert layout_of(RgcAsq(0.001, "search"), SHAPE, 4, 4).real_bytes(2500) == 16 + 4 * 2500
    assert layout_of(Bf16(), SHAPE, 4, 4).real_bytes(0) == layout_of(Bf16(), SHAPE, 4, 4).exchanges[0].message_bytes


def test_narrow_gradients_are_kept_and_sent_in_float32() -> None:
    assert layout_of(Rgc(0.001, "exact"), SHAPE, 2, 2).sent_bytes == layout_of(Rgc(0.001, "exact"), SHAPE, 4, 2).sent_bytes
    assert layout_of(Rgc(0.001, "exact"), SHAPE, 8, 2).exchanges[0].message_bytes == 8 + 12 * 2000


def test_k_is_at_least_one_and_at_most_all() -> None:
    assert [kept_count(size, 0.001) for size in (0, 1, 499, 1500, 64_000_000)] == [0, 1, 1, 2, 64_000]
    assert [kept_count(size, 1.0) for size in (0, 1, 7)] == [0, 1, 7]


def test_a_selection_of_the_policy_has_no_size_yet() -> None:
    with pytest.raises(StrategyError, match="policy chooses one for each layer"):
        layout_of(Rgc(), SHAPE, 4, 2)


def test_the_papers_policy() -> None:
    convolution, small = Layer("convolution", (512, 512, 3, 3), 4), Layer("convolution", (64, 3, 7, 7), 4)
    hidden, output, bias = Layer("hidden", (6000, 1500), 4), Layer("output", (10_000, 1500), 4), Layer("hidden", (100_000,), 4)
    assert prod(small.shape) * 4 < 128 * 1024
    for layer, by_rgc, by_asq in (
        (convolution, Rgc(0.01, "trimmed"), RgcAsq(0.01, "trimmed")),
        (hidden, Rgc(0.01, "sampled"), RgcAsq(0.01, "search")),
        (output, Rgc(0.01, "sampled"), Rgc(0.01, "sampled")),
        (small, None, None),
        (bias, None, None),
    ):
        assert chosen(Rgc(0.01), layer) == by_rgc
        assert chosen(RgcAsq(0.01), layer) == by_asq
    assert chosen(Rgc(0.01, "exact"), hidden) == Rgc(0.01, "exact")
    assert chosen(RgcAsq(0.01, "exact", True), output) == Rgc(0.01, "exact")
    assert chosen(Rgc(0.01, "exact"), small, least_bytes=0) == Rgc(0.01, "exact")
    assert (chosen(Bf16(), bias), chosen(Int8(), small)) == (Bf16(), Int8())
    assert (chosen(Chunked(), hidden), chosen(Chunked(), bias)) == (Chunked(), None)
    assert chosen(PowerSgd(4), hidden) == PowerSgd(4)
    assert chosen(PowerSgd(4), Layer("hidden", (100_000, 2), 4)) is None  # its two matrices are no smaller
