from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.measure.iteration import peak_memory
from soap.model.regions import Box, lengths, relative
from soap.runtime.comm.packing import are_adjacent, land, pack
from tests.strategies import boxes


def test_rows_are_received_in_place_and_columns_are_not() -> None:
    room = torch.zeros(5, 4)
    buffer, finish = land([room[0:2], room[2:3], room[3:5]])
    assert finish is None and buffer.data_ptr() == room.data_ptr() and buffer.numel() == 20
    buffer, finish = land([room[1:3]])
    assert finish is None and buffer.data_ptr() == room[1].data_ptr()
    assert land([room[:, 0:2]])[1] is not None
    assert land([room[2:5], room[0:2]])[1] is not None
    assert land([room[0:1], room[2:5]])[1] is not None


def test_neighbours_in_memory_that_are_not_one_tensors() -> None:
    parts = torch.zeros(2), torch.zeros(2)
    assert not are_adjacent(parts) and not are_adjacent(parts[::-1])


def test_a_single_tensor_is_not_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert pack([tensor]).data_ptr() == tensor.data_ptr()
    assert pack([tensor[:, 1]]).is_contiguous()
    assert pack([tensor[:, 1], tensor[0]]).tolist() == [1, 4, 0, 1, 2]


def test_what_does_not_lie_in_one_piece_is_copied_once() -> None:
    """Parts of gradients are the largest that a rank packs: a copy of each beside the packed ones was more than was predicted."""
    whole = torch.arange(4096.0).reshape(64, 64)
    expected = torch.cat([whole[:, :32].reshape(-1), whole[:16].reshape(-1), whole[:, 1::2].reshape(-1)])
    with peak_memory(torch.device("cpu")) as peak:
        packed = pack([whole[:, :32], whole[:16], whole[:, 1::2]])
    assert torch.equal(packed, expected)
    assert peak.bytes == packed.nbytes
    marked = torch.view_as_complex(torch.randn(4, 3, 2)).conj()
    assert torch.equal(pack([marked[:, :2], marked]), torch.cat([marked[:, :2].reshape(-1), marked.reshape(-1)]))


@given(st.lists(boxes(2), min_size=1, max_size=4))
def test_what_is_packed_lands_in_its_places(regions: list[Box]) -> None:
    """Regions may overlap here: then later ones win, as the values agree."""
    source, whole = torch.arange(64.0).reshape(8, 8), ((0, 8), (0, 8))
    target = torch.zeros(8, 8)
    buffer, finish = land([target[relative(box, whole)] for box in regions])
    buffer.copy_(pack([source[relative(box, whole)] for box in regions]))
    if finish is not None:
        finish()
    for box in regions:
        assert target[relative(box, whole)].shape == lengths(box)
        assert torch.equal(target[relative(box, whole)], source[relative(box, whole)])
