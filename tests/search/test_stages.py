from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.schedules.named import parse
from soap.schedules.play import in_flight
from soap.search.stages import Chain, Partition, partition
from tests.extent import MANY

Net = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""By layer: work, bytes of parameters, bytes of activations, and bytes over the cut behind it (one fewer)."""

NETS: dict[str, Net] = {
    "equal": ([6] * 8, [1] * 8, [1] * 8, [1] * 7),
    "growing": ([1, 2, 3, 4, 5, 6, 7, 8], [1] * 8, [8, 7, 6, 5, 4, 3, 2, 1], [3, 1, 4, 1, 5, 9, 2]),
    "pyramid": ([2, 4, 8, 16, 8, 4, 2], [4, 4, 2, 2, 2, 4, 4], [9, 8, 4, 2, 4, 8, 9], [16, 8, 4, 4, 8, 16]),
    "convnet": ([30, 60, 50, 40, 20, 5, 2, 1], [1, 2, 4, 8, 16, 60, 30, 8], [64, 64, 32, 16, 8, 4, 2, 1], [64, 32, 16, 8, 4, 2, 1]),
    "transformer": ([3, 10, 10, 10, 10, 10, 10, 9], [20, 6, 6, 6, 6, 6, 6, 20], [2, 7, 7, 7, 7, 7, 7, 12], [4] * 7),
    "dear cuts": ([5, 5, 5, 5, 5, 5], [1] * 6, [1] * 6, [90, 3, 90, 3, 90]),
    "one heavy layer": ([1, 1, 1, 100, 1, 1, 1], [1, 1, 1, 50, 1, 1, 1], [1] * 7, [2] * 6),
    "free layers": ([0, 7, 0, 0, 5, 0, 9, 0], [0, 3, 0, 0, 2, 0, 4, 0], [1] * 8, [1, 0, 6, 0, 2, 8, 0]),
    "two layers": ([4, 9], [3, 3], [2, 2], [5]),
    "embedding": ([1, 8, 8, 8, 8, 8, 20], [200, 9, 9, 9, 9, 9, 200], [1, 5, 5, 5, 5, 5, 30], [6] * 6),
}
SPEEDS = (1, 2, 3)
"""What a unit of work takes on each kind of group, in sixths of the fastest's."""
LIMITS = (10**9, 10**9, 10**9)


def chain_of(net: Net, limits: Sequence[int] = LIMITS, speeds: Sequence[int] = SPEEDS) -> Chain:
    """Kinds of groups differ in speed and memory, and messages between unlike kinds take twice as long."""
    work, kept, activations, cuts = (np.array(values, np.int64) for values in net)
    between = 2 - np.eye(len(speeds), dtype=np.int64)
    each = np.ones((len(speeds), 1), np.int64)
    return Chain(
        layer_ns=np.array(speeds, np.int64)[:, None] * work,
        message_ns=between[:, :, None] * cuts,
        kept_bytes=each * kept,
        activation_bytes=each * activations,
        limit_bytes=np.array(limits, np.int64),
    )


def all_partitions(chain: Chain, groups: Sequence[int], in_flight: Sequence[int], any_order: bool) -> Iterator[Partition]:
    """Everything that fits, one by one."""
    orders = set(permutations(groups)) if any_order else {tuple(groups)}
    for kinds in orders:
        for cuts in combinations(range(1, chain.layer_count), len(groups) - 1):
            firsts = (0, *cuts)
            parts, fits = [], True
            for stage, (kind, first, end) in enumerate(zip(kinds, firsts, (*cuts, chain.layer_count), strict=True)):
                parts.append(sum(int(chain.layer_ns[kind, layer]) for layer in range(first, end)))
                kept = sum(int(chain.kept_bytes[kind, layer]) for layer in range(first, end))
                each = sum(int(chain.activation_bytes[kind, layer]) for layer in range(first, end))
                fits &= kept + in_flight[stage] * each <= int(chain.limit_bytes[kind])
            messages = [int(chain.message_ns[a, b, cut - 1]) for a, b, cut in zip(kinds, kinds[1:], cuts, strict=False)]
            if fits:
                yield Partition(firsts, kinds, max(parts + messages), sum(parts + messages))


def assert_best(chain: Chain, groups: Sequence[int], in_flight: Sequence[int], any_order: bool) -> Partition | None:
    """The partition is one of the best of all by the slowest part and then by the sum. Returns it."""
    found = partition(chain, groups, in_flight, any_order=any_order)
    everything = list(all_partitions(chain, groups, in_flight, any_order))
    if found is None:
        assert not everything
    else:
        assert found in everything
        assert (found.slowest_ns, found.sum_ns) == min((other.slowest_ns, other.sum_ns) for other in everything)
    return found


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("groups", [(0,), (1, 0), (0, 1, 2), (2, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("any_order", [False, True], ids=["given", "any order"])
def test_is_the_exhaustive_minimum(name: str, groups: Sequence[int], any_order: bool) -> None:
    """Ten small nets on groups of unequal speed, all of which fit."""
    chain = chain_of(NETS[name])
    found = assert_best(chain, groups, (1,) * len(groups), any_order)
    assert (found is None) == (len(groups) > chain.layer_count)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("tightness", [1.0, 1.3, 2.0])
def test_is_the_exhaustive_minimum_where_memory_binds(name: str, schedule: str, tightness: float) -> None:
    """Limits about as large as an even share, the fastest kind having least."""
    groups = (0, 1, 1)
    table = parse(schedule).table(3, 4)
    _, kept, activations, _ = NETS[name]
    share = tightness * (sum(kept) + 3 * sum(activations)) / 3
    chain = chain_of(NETS[name], (int(share * 0.7), int(share * 1.4), 0))
    for any_order in (False, True):
        assert_best(chain, groups, in_flight(table), any_order)


def test_limits_exclude_some_but_not_all() -> None:
    """The cases above are not all alike: of those that memory binds, some fit, some do not, and some are slower for it."""
    free = {name: partition(chain_of(net), (0, 1, 1), (3, 2, 1)) for name, net in NETS.items()}
    outcomes = set()
    for name, net in NETS.items():
        for limit in (20, 60, 150):
            bound = partition(chain_of(net, (limit, limit, limit)), (0, 1, 1), (3, 2, 1))
            outcomes.add("none" if bound is None else "free" if bound == free[name] else "slower")
    assert outcomes == {"none", "free", "slower"}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, list[int], list[int]]:
    layers, kinds = draw(st.integers(1, 7)), draw(st.integers(1, 3))

    def drawn(*shape: int, most: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), np.int64).reshape(shape)

    chain = Chain(
        layer_ns=drawn(kinds, layers, most=20),
        message_ns=drawn(kinds, kinds, layers - 1, most=30),
        kept_bytes=drawn(kinds, layers, most=9),
        activation_bytes=drawn(kinds, layers, most=5),
        limit_bytes=drawn(kinds, most=60),
    )
    groups = draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=4))
    return chain, groups, draw(st.lists(st.integers(1, 4), min_size=len(groups), max_size=len(groups)))


@MANY
@given(problems(), st.booleans())
def test_is_the_exhaustive_minimum_of_anything(problem: tuple[Chain, list[int], list[int]], any_order: bool) -> None:
    assert_best(*problem, any_order)


def test_a_dear_cut_is_avoided() -> None:
    found = partition(chain_of(NETS["dear cuts"], speeds=(1,), limits=(10**9,)), (0, 0, 0), (1, 1, 1))
    assert found is not None and found.firsts == (0, 2, 4) and (found.slowest_ns, found.sum_ns) == (10, 36)


def test_the_faster_group_gets_more() -> None:
    net: Net = ([6] * 9, [0] * 9, [0] * 9, [0] * 8)
    found = partition(chain_of(net, speeds=(1, 2), limits=(1, 1)), (0, 1), (1, 1))
    assert found is not None and found.firsts == (0, 6) and found.slowest_ns == 36


def test_an_order_of_groups_is_chosen() -> None:
    """The large activations are in front, so that the group with much memory comes first."""
    net: Net = ([1] * 4, [0] * 4, [10, 10, 1, 1], [1] * 3)
    chain = chain_of(net, speeds=(1, 1), limits=(10, 100))
    assert partition(chain, (0, 1), (2, 1)) is None
    found = partition(chain, (0, 1), (2, 1), any_order=True)
    assert found is not None and found.kinds == (1, 0) and found.firsts == (0, 2)


def test_a_hundred_layers_on_sixteen_groups_of_two_kinds() -> None:
    """Not slower than the even split, which is one of the partitions."""
    rng = np.random.default_rng(0)
    net: Net = (rng.integers(1, 50, 100), [1] * 100, [1] * 100, rng.integers(1, 9, 99))
    chain = chain_of(net, speeds=(1, 2), limits=(10**9, 10**9))
    found = partition(chain, (0,) * 8 + (1,) * 8, [1] * 16, any_order=True)
    given_order = partition(chain, (0,) * 8 + (1,) * 8, [1] * 16)
    assert found is not None and given_order is not None and found.slowest_ns <= given_order.slowest_ns
    assert sorted(found.kinds) == [0] * 8 + [1] * 8
    assert found.slowest_ns * (8 + 4) >= int(chain.layer_ns[0].sum())  # the rate of all groups together


def test_refuses_arrays_that_do_not_fit_together() -> None:
    one = np.ones((1, 3), np.int64)
    with pytest.raises(ValueError, match=r"message_ns has shape \(1, 1, 3\); expected \(1, 1, 2\)"):
        Chain(layer_ns=one, message_ns=one[None], kept_bytes=one, activation_bytes=one, limit_bytes=one[0])
    chain = Chain(layer_ns=one, message_ns=one[None, :, :2], kept_bytes=one, activation_bytes=one, limit_bytes=one[0, :1])
    with pytest.raises(ValueError, match="1 numbers of micro-batches in flight; expected 2"):
        partition(chain, (0, 0), (1,))


def test_no_groups_or_more_than_layers_have_no_partition() -> None:
    chain = chain_of(NETS["two layers"])
    assert partition(chain, (), ()) is None and partition(chain, (0, 0, 0), (1, 1, 1)) is None
