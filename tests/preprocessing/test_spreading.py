"""How the tasks of a step are spread over nodes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from soap.preprocessing.engine import spread_over
from soap.preprocessing.work import INDEX, MERGE, Task


def _load(tasks: list[Task]) -> int:
    return sum(task.size for task in tasks)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=7), st.integers(1, 3))
def test_the_longest_node_is_at_most_a_third_over_the_best(sizes: list[int], nodes: int) -> None:
    found = spread_over([[Task(MERGE, i, size=size)] for i, size in enumerate(sizes)], nodes)
    assert sorted(task.number for own in found for task in own) == [*range(len(sizes))]
    ways = itertools.product(range(nodes), repeat=len(sizes))
    best = min(max(sum(s for s, own in zip(sizes, way, strict=True) if own == node) for node in range(nodes)) for way in ways)
    assert 3 * nodes * max(map(_load, found)) <= (4 * nodes - 1) * best


def test_a_units_tasks_stay_together_and_in_order() -> None:
    units = [[Task(INDEX, 3 * unit + i, unit, size=1 + unit) for i in range(3)] for unit in range(5)]
    first, second = spread_over(units, 2)
    assert [task.unit for task in first] == [0] * 3 + [1] * 3 + [4] * 3
    assert [task.unit for task in second] == [2] * 3 + [3] * 3
    assert [task.number for task in first] == sorted(task.number for task in first)
    assert {task.node for task in second} == {1}
