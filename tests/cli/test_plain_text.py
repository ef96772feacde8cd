from __future__ import annotations

from soap.cli.plain_text import aligned, devices, listed, milliseconds, speed_up, split
from soap.model.graph import Factor, FactorKind, Operator
from soap.strategy.config import OpConfig

LINEAR = Operator(
    name="fc",
    kind="linear",
    factors=(Factor("b", 8, FactorKind.SAMPLE), Factor("k", 4, FactorKind.REDUCTION, summed=True), Factor("n", 6, FactorKind.PARAMETER)),
    inputs=(),
    parameters=(),
    outputs=(),
)


def test_columns_are_aligned() -> None:
    assert aligned([("found", "1.000 ms", ""), ("data parallel", "12.500 ms", "12.50x")]) == (
        "  found           1.000 ms\n"
        "  data parallel  12.500 ms  12.50x"
    )  # fmt: skip
    assert listed([("a", "bb", "c"), ("aaa", "b")], indent="") == "a    bb  c\naaa  b"
    assert aligned([]) == listed([]) == ""


def test_times_have_one_unit() -> None:
    assert [milliseconds(t) for t in (1, 1_234_567, 123_456_789, 2_000_000_000)] == ["0.000 ms", "1.235 ms", "123.5 ms", "2000.0 ms"]
    assert speed_up(3_000, 2_000) == "1.50x"


def test_split_names_kinds_and_factors() -> None:
    assert split(LINEAR, OpConfig((1, 1, 1), (0,))) == "whole"
    assert split(LINEAR, OpConfig((2, 1, 2), (0, 1, 2, 3))) == "sample b:2, parameter n:2"
    assert split(LINEAR, OpConfig((1, 2, 1), (0, 1, 2, 3), replicas=2)) == "reduction k:2, replicas:2"


def test_devices_are_shown_as_ranges_in_tile_order() -> None:
    assert devices((0, 1, 2, 3)) == "0-3"
    assert devices((0, 2, 3, 3, 1)) == "0,2,3,3,1"
    assert devices((0, 4, 8, 12)) == "0-12:4"
    assert devices((5, 5, 5)) == "5*3"
