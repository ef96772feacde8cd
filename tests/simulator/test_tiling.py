"""Tiles: which regions they read and write, and in which order they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from soap.model.regions import intersect, volume
from soap.plan.tiling import iteration_points, tiles_of
from soap.strategy.config import OpConfig
from tests.extent import FEW
from tests.graph_builder import GraphBuilder
from tests.simulator.examples import chain, finish, on, stencil


def test_a_tile_has_the_regions_of_all_its_operands() -> None:
    graph = chain(4, 6, 8)
    tiles = tiles_of(graph, 0, on(3, 2, 1, 0, degrees=(2, 1, 2)))
    assert [tile.device for tile in tiles] == [3, 2, 1, 0]
    assert [tile.index for tile in tiles] == [0, 1, 2, 3]
    assert tiles[1].intervals == ((0, 2), (0, 6), (4, 8))
    assert tiles[1].inputs == (((0, 2), (0, 6)),)
    assert tiles[1].parameters == (((4, 8), (0, 6)),)
    assert tiles[1].outputs == (((0, 2), (4, 8)),)
    assert tiles[1].size == 2 * 6 * 4
    assert all(tile.operator == 0 and tile.replica == 0 for tile in tiles)


def test_replicas_repeat_the_grid_on_their_own_devices() -> None:
    tiles = tiles_of(chain(4, 6, 8), 0, on(0, 1, 2, 3, degrees=(2, 1, 1), replicas=2))
    assert [(tile.replica, tile.index, tile.device) for tile in tiles] == [(0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 3, 3)]
    assert tiles[0].outputs == tiles[2].outputs == (((0, 2), (0, 8)),)


def test_uneven_parts_give_the_first_tiles_more() -> None:
    tiles = tiles_of(chain(5, 2, 2), 0, on(0, 0, 0, degrees=(3, 1, 1)))
    assert [tile.intervals[0] for tile in tiles] == [(0, 2), (2, 4), (4, 5)]


def test_a_halo_is_clipped_at_the_border() -> None:
    g = GraphBuilder()
    graph = finish(g, stencil(g, g.input("x", 2, 8), -1, 2, "s"))
    tiles = tiles_of(graph, 0, on(0, 1, degrees=(1, 2)))
    assert [tile.inputs[0][1] for tile in tiles] == [(0, 5), (3, 8)]


def test_a_tile_outside_a_part_writes_nothing_of_it() -> None:
    g = GraphBuilder()
    graph = finish(g, *g.chunk(g.input("x", 2, 8), 1, 5))
    tiles = tiles_of(graph, 0, on(0, 1, degrees=(1, 2)))
    assert tiles[0].outputs == (((0, 2), (0, 4)), ((0, 2), (0, 0)))
    assert tiles[1].outputs == (((0, 2), (4, 5)), ((0, 2), (0, 3)))
    assert [volume(box) for box in tiles[0].outputs] == [8, 0]


def test_an_operator_without_factors_is_one_point() -> None:
    graph = chain(4, 6, 8)
    assert iteration_points(graph.operators[0]) == 4 * 6 * 8
    assert tiles_of(graph, 1, on(1, degrees=(1,)))[0].size == 4


@FEW
@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_tiles_partition_the_iteration_space_and_the_output(rows: int, width: int, data: st.DataObject) -> None:
    graph = chain(rows, 3, width)
    degrees = (data.draw(st.integers(1, rows)), 1, data.draw(st.integers(1, width)))
    tiles = tiles_of(graph, 0, OpConfig(degrees, (0,) * (degrees[0] * degrees[2])))
    assert sum(tile.size for tile in tiles) == iteration_points(graph.operators[0])
    assert sum(volume(tile.outputs[0]) for tile in tiles) == rows * width
    for i, a in enumerate(tiles):
        assert all(intersect(a.outputs[0], b.outputs[0]) is None for b in tiles[:i])
