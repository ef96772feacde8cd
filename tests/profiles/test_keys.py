"""What a measured computation is known by: equal layers share it, and whatever decides how long it takes is in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.presets import local_topology, preset
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile, tiles_of
from soap.profiles.keys import Environment, TileKey, TileKeys, call_kind, environment, environments, tile_kind
from soap.strategy.config import OpConfig
from tests.graph_builder import GraphBuilder, transformer


def tiles(graph: OperatorGraph, name: str, *degrees: int) -> list[Tile]:
    position = graph.index[name]
    count = 1
    for degree in degrees:
        count *= degree
    config = OpConfig(degrees or (1,) * len(graph.operators[position].factors), (0,) * count)
    return tiles_of(graph, position, config)


def key(graph: OperatorGraph, name: str, *degrees: int, tile: int = 0) -> TileKey:
    return TileKeys(graph).key(tiles(graph, name, *degrees)[tile])


def layers(*widths: int, bias: bool = True, dtype: str = "float32", batch: int = 8, frozen: bool = False) -> OperatorGraph:
    """[batch, 16] through one linear layer per width, named ``layer0`` and so on."""
    g = GraphBuilder(dtype=dtype)
    x = g.input("x", batch, 16)
    for i, width in enumerate(widths):
        weight = g.parameter(f"layer{i}.weight", width, g.shape(x)[-1], frozen=frozen)
        x = g.linear(x, width, weight=weight, bias=bias, name=f"layer{i}")
    return g.build(g.mean(x))


def test_equal_layers_share_a_key_whatever_their_names_and_models() -> None:
    graph = layers(16, 16, 16)
    assert key(graph, "layer1") == key(graph, "layer2") == key(layers(16, 16), "layer1")
    assert key(graph, "layer1", 2, 1, 2) == key(graph, "layer2", 2, 1, 2)
    keys = TileKeys(graph)
    every = [tile for name in ("layer1", "layer2") for tile in tiles(graph, name, 2, 1, 1)]
    assert len({keys.key(tile) for tile in every}) == 1


def test_what_needs_no_gradient_of_its_input_is_another_computation() -> None:
    graph = layers(16, 16)
    assert key(graph, "layer0") != key(graph, "layer1")  # the first layer's input is the model's


@pytest.mark.parametrize(
    "other",
    [layers(16, 32), layers(16, 16, bias=False), layers(16, 16, dtype="float64"), layers(16, 16, batch=4), layers(16, 16, frozen=True)],
    ids=["width", "bias", "dtype", "batch", "frozen"],
)
def test_what_matters_tells_keys_apart(other: OperatorGraph) -> None:
    assert key(layers(16, 16), "layer1") != key(other, "layer1")


@pytest.mark.parametrize("field", ["kind", "calls", "flops"])
def test_so_do_kind_fused_calls_and_operations(field: str) -> None:
    graph = layers(16, 16)
    values = {"kind": "addmm", "calls": ("linear", "relu"), "flops": 10**9}
    operators = tuple(replace(op, **{field: values[field]}) if op.name == "layer1" else op for op in graph.operators)
    assert key(replace(graph, operators=operators), "layer1") != key(graph, "layer1")


def test_calls_count_by_their_kind() -> None:
    graph = layers(16, 16)
    one, other = (
        replace(graph, operators=tuple(replace(op, calls=(f"linear{mark}", f"view{mark}")) for op in graph.operators))
        for mark in ("", "_7")
    )
    assert key(one, "layer1") == key(other, "layer1")
    assert [call_kind(name) for name in ("linear", "linear_12", "conv2d_3", "batch_norm_1:sums", "max_pool2d")] == [
        "linear", "linear", "conv2d", "batch_norm:sums", "max_pool2d",
    ]  # fmt: skip


def test_degrees_decide_lengths_and_a_family_is_for_all_of_them() -> None:
    graph = layers(16, 16)
    whole, halves, columns = (key(graph, "layer1", *degrees) for degrees in ((1, 1, 1), (2, 1, 1), (1, 1, 4)))
    assert (whole.lengths, halves.lengths, columns.lengths) == ((8, 16, 16), (4, 16, 16), (8, 16, 4))
    assert whole.family == halves.family == columns.family
    assert whole.entire and not halves.entire
    assert len({whole.text, halves.text, columns.text}) == 3
    assert key(layers(16, 16, batch=4), "layer1").regions == halves.regions  # as large, but run as plain calls


def test_uneven_tiles_and_halos_differ() -> None:
    g = GraphBuilder()
    graph = g.build(g.conv(g.input("x", 2, 3, 16), 4, name="conv"))
    ends, middle = (key(graph, "conv", 1, 1, 1, 4, tile=i) for i in (0, 1))
    assert ends.lengths == middle.lengths and ends.regions != middle.regions
    assert key(graph, "conv", 1, 1, 1, 3, tile=0).lengths != key(graph, "conv", 1, 1, 1, 3, tile=1).lengths


def test_an_operator_without_backward_pass_is_another() -> None:
    graph = layers(16, 16)
    shortened = OperatorGraph(graph.name, graph.operators, graph.tensors, "layer0")
    assert key(shortened, "layer1") != key(graph, "layer1")
    assert key(shortened, "layer0") == key(graph, "layer0")


def test_repeated_blocks_of_a_transformer_share_all_keys() -> None:
    graph = transformer()
    keys = TileKeys(graph)
    found = [keys.key(tiles(graph, op.name)[0]) for op in graph.operators]
    assert len(set(found)) < len(found)
    assert len({k.text for k in found}) == len(set(found))


def lookups(alpha: float | None = None) -> OperatorGraph:
    g = GraphBuilder()
    return g.build(g.mean(g.embedding(g.input("ids", 4, 8, dtype="int64"), 1000, 8, name="table")), alpha)


def test_on_rows_a_tile_is_another_computation_known_by_how_many_rows() -> None:
    graph = lookups(alpha=0.01)
    keys, (tile,) = TileKeys(graph), tiles(graph, "table")
    usual, sparse_lookup = keys.key(tile), keys.key(replace(tile, sparse_lookup=True))
    assert (usual.regions, sparse_lookup.regions) == ((4, 8, 1000, 8, 4, 8, 8), (4, 8, 10, 8, 4, 8, 8))
    assert usual.family != sparse_lookup.family and usual.lengths == sparse_lookup.lengths
    assert len({key.text for key in (usual, sparse_lookup)}) == 2
    assert [tile_kind(graph, replace(tile, sparse_lookup=way)) for way in (False, True)] == ["embedding", "embedding on rows"]
    other = lookups(alpha=0.03)
    assert TileKeys(other).key(tile) == usual
    assert TileKeys(other).key(replace(tile, sparse_lookup=True)) == replace(sparse_lookup, regions=(4, 8, 30, 8, 4, 8, 8))


def test_an_environment_is_a_device_a_torch_threads_and_neighbours() -> None:
    device = local_topology(1).devices[0].type
    alone, pair, crowd = (environment(device, n, 4, torch="2.13.0") for n in (1, 2, 8))
    assert (alone.threads, alone.neighbours) == (4, 0)
    assert (pair.threads, pair.neighbours) == (2, 1)
    assert (crowd.threads, crowd.neighbours) == (1, 3)  # no more than there are cores
    others = [replace(alone, **change) for change in ({"device": "x"}, {"torch": "3"}, {"threads": 1}, {"neighbours": 1}, {"version": 1})]
    assert len({place.hash for place in (alone, *others)}) == 6
    assert "4 threads, alone" in alone.text and "1 busy process beside it" in pair.text


def test_gpus_have_no_threads_and_no_neighbours() -> None:
    (place,) = environments(preset("h200-8"), torch="2.13.0").values()
    assert place == Environment("h200", "cuda", "2.13.0", 0, 0)


def test_parts_of_sums_of_a_lower_type_are_computations_of_their_own() -> None:
    """They are computed in float32: a layer of half as many features is not what half of a layer's features are."""
    for dtype, alike in (("float32", True), ("bfloat16", False)):
        half, whole = layers(32, 16, 16, dtype=dtype), layers(16, 16, 16, dtype=dtype)
        part, like = key(half, "layer1", 1, 2, 1), key(replace(whole, name="other"), "layer1")
        assert (part.lengths, part.regions) == (like.lengths, like.regions)
        assert (part.family == like.family) is alike
