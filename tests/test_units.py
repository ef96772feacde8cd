"""Quantities: what is read, what is refused with which line, and what people see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap import units
from soap.errors import TopologyError
from tests import cluster_text
from tests.extent import MANY


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bandwidth, "100 Gbit/s", 12.5e9),
        (units.parse_bandwidth, "100Gbps", 12.5e9),
        (units.parse_bandwidth, "900 GB/s", 900e9),
        (units.parse_bandwidth, "1 GiB/s", 2.0**30),
        (units.parse_bandwidth, "15.75 GB/s", 15.75e9),
        (units.parse_seconds, "2 us", 2e-6),
        (units.parse_seconds, "25 us", 25e-6),
        (units.parse_seconds, "2 \u00b5s", 2e-6),
        (units.parse_seconds, "2 \u03bcs", 2e-6),
        (units.parse_seconds, " 250ms ", 0.25),
        (units.parse_seconds, "1.5 s", 1.5),
        (units.parse_seconds, "0 ns", 0.0),
        (units.parse_bytes, "16 GiB", 16 * 2**30),
        (units.parse_bytes, "16 GB", 16 * 10**9),
        (units.parse_bytes, "0.5 KiB", 512),
        (units.parse_bytes, "1_000 B", 1000),
        (units.parse_flops, "9.3 TFLOP/s", 9.3e12),
        (units.parse_flops, "32 GFLOPS", 32e9),
        (units.parse_flops, "1e3 MFLOP/s", 1e9),
    ],
)
def test_quantities_are_read_exactly(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "line"),
    [
        (units.parse_bytes, 16, "x: 16 has no unit; expected a size such as '16 GiB': add the unit"),
        (units.parse_bytes, "16", "x: '16' has no unit; expected a size such as '16 GiB': add the unit"),
        (units.parse_bytes, None, "x: None is no quantity; expected a size such as '16 GiB': write a number and a unit"),
        (units.parse_bytes, True, "x: True is no quantity; expected a size such as '16 GiB': write a number and a unit"),
        (units.parse_bytes, "many GiB", "x: 'many GiB' is no quantity; expected a size such as '16 GiB': write a number and a unit"),
        (units.parse_bytes, "4 gb", "x: '4 gb' has unit 'gb'; expected a size such as '16 GiB': write 'GB'"),
        (
            units.parse_seconds,
            "2 GB",
            "x: '2 GB' has unit 'GB'; expected a time such as '2 us': use one of s, ms, us, ns, \u00b5s, \u03bcs",
        ),
        (
            units.parse_seconds,
            "-1 s",
            "x: '-1 s' is out of range; expected a time such as '2 us': write a number from 0 to 1e+24 base units",
        ),
        (
            units.parse_bandwidth,
            "100 Gb/s",
            "x: '100 Gb/s' has unit 'Gb/s'; expected a bandwidth such as '100 Gbit/s' or '900 GB/s': "
            "write 'Gbit/s' for bits or 'GB/s' for bytes",
        ),
        (
            units.parse_bandwidth,
            "100 gbit/s",
            "x: '100 gbit/s' has unit 'gbit/s'; expected a bandwidth such as '100 Gbit/s' or '900 GB/s': write 'Gbit/s'",
        ),
    ],
)
def test_refusals_name_value_expectation_and_remedy(parse, text, line):
    with pytest.raises(TopologyError) as refused:
        parse(text, "x")
    assert str(refused.value) == line


@pytest.mark.parametrize("text", ["1e999 B", "1e9999 B", "9" * 5000 + " B", "nan B", "inf B", "1e-99999999 B"])
def test_absurd_numbers_are_refused_quickly_and_in_one_short_line(text):
    with pytest.raises(TopologyError) as refused:
        units.parse_bytes(text)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(1023), "1023 B"),
        (units.format_bytes(1024), "1.00 KiB"),
        (units.format_bytes(1.5 * 2**30), "1.50 GiB"),
        (units.format_bytes(1023.9 * 2**20), "1.00 GiB"),
        (units.format_bytes(123 * 2**20), "123 MiB"),
        (units.format_seconds(0), "0 ns"),
        (units.format_seconds(2.5e-6), "2.50 us"),
        (units.format_seconds(0.0123), "12.3 ms"),
        (units.format_seconds(0.9999), "1.00 s"),
        (units.format_seconds(119.4), "119 s"),
        (units.format_seconds(125), "2 min 05 s"),
        (units.format_seconds(4000), "1 h 06 min"),
        (units.format_rate(12.5e9), "12.5 GB/s"),
        (units.format_rate(9.3e12, "FLOP"), "9.30 TFLOP/s"),
        (units.format_rate(3), "3 B/s"),
        (units.format_count(999), "999"),
        (units.format_count(12_500_000), "12.5 M"),
        (units.format_count(1.2e9, "FLOP"), "1.20 GFLOP"),
    ],
)
def test_formats_for_people(shown, text):
    assert shown == text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (cluster_text.exact_bytes(16 * 2**30), "16 GiB"),
        (cluster_text.exact_bytes(16 * 10**9), "16 GB"),
        (cluster_text.exact_bytes(1000001), "1000001 B"),
        (cluster_text.exact_bandwidth(12.5e9), "12.5 GB/s"),
        (cluster_text.exact_seconds(25e-6), "25 us"),
        (cluster_text.exact_seconds(0.0), "0 s"),
        (cluster_text.exact_flops(989.5e12), "989.5 TFLOP/s"),
    ],
)
def test_exact_texts_are_short_where_they_can_be(shown, text):
    assert shown == text


@MANY
@given(st.floats(min_value=1e-12, max_value=1e20), st.integers(0, 2**60))
def test_exact_texts_read_back_to_the_same_number(number, size_bytes):
    assert units.parse_bandwidth(cluster_text.exact_bandwidth(number)) == number
    assert units.parse_seconds(cluster_text.exact_seconds(number)) == number
    assert units.parse_flops(cluster_text.exact_flops(number)) == number
    assert units.parse_bytes(cluster_text.exact_bytes(size_bytes)) == size_bytes
