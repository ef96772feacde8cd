"""Rings over a mesh share no link, and are as many as there can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.simulator.communication.ring_orders import Capacities, disjoint_rings


def complete(count: int, links: int = 1) -> Capacities:
    return tuple(tuple(links * (a != b) for b in range(count)) for a in range(count))


def used(rings: tuple[tuple[int, ...], ...], count: int) -> list[list[int]]:
    found = [[0] * count for _ in range(count)]
    for ring in rings:
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            found[a][b] += 1
    return found


@pytest.mark.parametrize(
    ("count", "rings", "each"),
    [(3, 2, 1), (4, 6, 2), (5, 4, 1), (6, 10, 2), (7, 6, 1), (8, 7, 1), (9, 6, 1), (16, 8, 1)],
)
def test_a_complete_mesh_uses_all_its_links(count: int, rings: int, each: int) -> None:
    """With four and six nodes only by rings of half a link. Beyond eight there are those of equal steps."""
    found = disjoint_rings(complete(count))
    assert len(found) == rings
    assert all(sorted(ring) == list(range(count)) and ring[0] == 0 for ring in found)
    assert max(max(row) for row in used(found, count)) == each


def test_several_links_between_two_nodes_are_several() -> None:
    assert len(disjoint_rings(complete(3, 2))) == 4
    assert len(disjoint_rings(((0, 2, 1), (1, 0, 2), (2, 1, 0)))) == 3


def test_a_path_has_no_ring() -> None:
    assert disjoint_rings(((0, 1, 0), (1, 0, 1), (0, 1, 0))) == ()


@given(st.integers(3, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=n, max_size=n)))
def test_rings_never_share_a_link(rows: list[list[int]]) -> None:
    links = tuple(tuple(0 if a == b else one for b, one in enumerate(row)) for a, row in enumerate(rows))
    found = disjoint_rings(links)
    assert all(sorted(ring) == list(range(len(links))) for ring in found)
    taken = used(found, len(links))
    assert all(taken[a][b] <= 2 * links[a][b] for a in range(len(links)) for b in range(len(links)))
    assert len(found) <= 2 * min(map(sum, links)) and len(found) <= 2 * min(map(sum, zip(*links, strict=True)))
