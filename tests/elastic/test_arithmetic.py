"""What owners compute, cell by cell, is what a dense layer computes: forward, gradients, updates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from soap.elastic import layout as module
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Lookups, Partition, combine, cut, cut_at, divide, gradient_of_rows, means, route, sums_of_rows
from soap.elastic.snapshots import Shard
from tests.elastic.drawn import batches, drawn, layers, matrix
from tests.extent import MANY

OPTIMIZERS = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.1),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda tensors: torch.optim.Adagrad(tensors, lr=0.2, initial_accumulator_value=1.0),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=0.1),
    "fused adam": lambda tensors: torch.optim.Adam(tensors, lr=0.1, fused=True),
}


@MANY
@given(st.data())
def test_cells_compute_what_a_dense_layer_computes(data: st.DataObject) -> None:
    """A bias is added once, and the activation comes behind the sum: split sums of a ReLU would be another layer."""
    cells, weight = data.draw(layers())
    lookups = data.draw(batches(weight.shape[0]))
    bias, upstream = drawn([weight.shape[1]], 1), drawn([lookups.samples, weight.shape[1]], 2)

    dense, dense_bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    expected = torch.relu(matrix(lookups, weight.shape[0]) @ dense + dense_bias)
    expected.backward(upstream)

    parts = route(cells, lookups)
    sums = combine(cells, [sums_of_rows(cell.of(weight).contiguous(), part) for cell, part in zip(cells, parts, strict=True)])
    sums.requires_grad_()
    own_bias = bias.clone().requires_grad_()
    found = torch.relu(sums + own_bias)
    found.backward(upstream)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(own_bias.grad, dense_bias.grad, rtol=0, atol=1e-12)

    assert sums.grad is not None and dense.grad is not None
    for cell, part, grad in zip(cells, parts, divide(cells, sums.grad), strict=True):
        gradient = gradient_of_rows(part, grad)
        assert torch.equal(gradient.rows, torch.unique(part.ids.long()))
        torch.testing.assert_close(gradient.dense(0, cell.cell[0]), cell.of(dense.grad), rtol=0, atol=1e-12)


@given(st.data())
def test_means_are_torchs(data: st.DataObject) -> None:
    cells, weight = data.draw(layers())
    lookups = data.draw(batches(weight.shape[0]))
    lookups = Lookups(lookups.ids, lookups.offsets)
    dense, upstream = weight.clone().requires_grad_(), drawn([lookups.samples, weight.shape[1]], 3)
    parts = route(cells, lookups)
    sums = [sums_of_rows(cell.of(weight).contiguous(), part) for cell, part in zip(cells, parts, strict=True)]
    found = means(combine(cells, sums), lookups)
    if lookups.entries:
        expected = F.embedding_bag(lookups.ids, dense, lookups.offsets, mode="mean", include_last_offset=True)
        expected.backward(upstream)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
        for cell, part, grad in zip(cells, parts, divide(cells, upstream / lookups.counts()[:, None].clamp(min=1)), strict=True):
            torch.testing.assert_close(gradient_of_rows(part, grad).dense(0, cell.cell[0]), cell.of(dense.grad), rtol=0, atol=1e-12)
    else:
        assert not found.any()


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(data=st.data())
def test_updates_of_cells_are_those_of_the_whole(name: str, data: st.DataObject) -> None:
    """Rows that no sample reads are changed as they are by a dense gradient of zeros (Adam, momentum)."""
    cells, weight = data.draw(layers(4))
    dense = weight.clone().requires_grad_()
    optimizer = OPTIMIZERS[name]([dense])
    shards = [Shard(cell, cell.of(weight), OPTIMIZERS[name]) for cell in cells]
    for lease in range(3):
        lookups = data.draw(batches(weight.shape[0]))
        upstream = drawn([lookups.samples, weight.shape[1]], lease)
        dense.grad = matrix(lookups, weight.shape[0]).T @ upstream
        optimizer.step()
        for shard, part, grad in zip(shards, route(cells, lookups), divide(cells, upstream), strict=True):
            assert shard.apply(shard.checked(gradient_of_rows(part, grad)), lease) == lease + 1
    for shard, cell in zip(shards, cells, strict=True):
        torch.testing.assert_close(shard.values, cell.of(dense.detach()), rtol=0, atol=1e-11)


def test_lazy_updates_leave_other_rows_alone() -> None:
    (cell,) = cut("table", (4, 2), 1)
    shard = Shard(cell, torch.ones(4, 2), OPTIMIZERS["momentum"], lazy=True)
    for lease, row in enumerate((1, 3)):
        shard.apply(gradient_of_rows(Lookups(torch.tensor([row]), torch.tensor([0, 1])), torch.ones(1, 2)), lease)
    assert shard.values[:, 0].tolist() == pytest.approx([1, 1 - 0.19, 1, 1 - 0.19])


def test_contributions_are_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = Lookups(torch.tensor([2, 0, 2, 1, 2]), torch.tensor([0, 2, 2, 5]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    grad = drawn([3, 2], 0, dtype=torch.float32)
    at_once = gradient_of_rows(lookups, grad)
    monkeypatch.setattr(module, "CHUNK_BYTES", 16)
    assert torch.equal(gradient_of_rows(lookups, grad).values, at_once.values)
    torch.testing.assert_close(at_once.values[2], grad[0] + 8 * grad[2])


def test_ids_values_and_shares_of_rows() -> None:
    cells = cut("table", (10, 4), 3)
    assert [(cell.start, cell.stop) for cell in cells] == [(0, 4), (4, 7), (7, 10)]
    parts = route(cells, Lookups.padded(torch.tensor([[9, 0, 4], [5, 4, 3]]), torch.ones(2, 3)))
    assert [part.ids.tolist() for part in parts] == [[0, 3], [0, 1, 0], [2]]
    assert [part.offsets.tolist() for part in parts] == [[0, 1, 2], [0, 1, 3], [0, 1, 1]]
    assert all(part.ids.dtype is part.offsets.dtype is torch.int32 and part.values is None for part in parts)
    large = cut("table", (2**33, 4), 2)
    assert [part.ids.dtype for part in route(large, Lookups.padded(torch.tensor([[2**32, 1]])))] == [torch.int64] * 2
    assert [part.ids.dtype for part in route(cut("table", (2**32, 4), 2), Lookups.padded(torch.tensor([[2**31, 1]])))] == [torch.int32] * 2


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wrong", [10, -1, 2**40])
def test_an_id_beyond_the_layer_is_refused_in_one_line(axis: int, wrong: int) -> None:
    with pytest.raises(ElasticError) as refused:
        route(cut("table", (10, 4), 2, axis), Lookups.padded(torch.tensor([[1, wrong]])))
    expected = f"id {wrong} is out of range; expected ids from 0 to 9: make the layer larger, or take ids modulo its size"
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("lookups", "said"),
    [
        (Lookups(torch.tensor([1.0]), torch.tensor([0, 1])), "ids are float32 of shape"),
        (Lookups(torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32)), "one of int32, int64 for both"),
        (Lookups(torch.tensor([1]), torch.tensor([0, 2])), "do not lead from 0 to 1"),
        (Lookups(torch.tensor([1]), torch.tensor(0)), "do not lead from 0 to 1"),
        (Lookups(torch.tensor([1]), torch.tensor([0, 2, 1])), "offsets fall"),
        (Lookups(torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0])), "a floating-point number for each of 1 ids"),
    ],
)
def test_other_look_ups_are_refused(lookups: Lookups, said: str) -> None:
    with pytest.raises(ElasticError, match=said):
        lookups.checked(10)


def test_cells_that_cannot_be_are_refused() -> None:
    with pytest.raises(ElasticError, match="5 partitions of 'table', which has 4 along axis 1; expected 1 to 4"):
        cut("table", (10, 4), 5, 1)
    with pytest.raises(ElasticError, match="has no axis 2"):
        Partition("p", "table", 2, 0, 1, (10, 4))
    with pytest.raises(ElasticError, match="lies outside"):
        Partition("p", "table", 0, 4, 11, (10, 4))
    with pytest.raises(ElasticError, match="numbers that rise from 0 to 10"):
        cut_at("table", (10, 4), [0, 6, 5, 10])
