"""Messages come out as they went in, damaged ones in one line, and have as many bytes as the formulas say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from soap.elastic.faults import ElasticError
from soap.elastic.layout import Lookups, cut, divide, route
from soap.elastic.messages import Kind, Message, decode, encode, overhead_bytes, size_bytes
from soap.elastic.store import Store
from tests.elastic.drawn import drawn
from tests.extent import MANY

DTYPES = st.sampled_from([np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "u1")])
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
WIDE = st.integers(-(2**63), 2**63 - 1)
MESSAGES = st.builds(
    Message,
    st.sampled_from(Kind),
    st.integers(0, 2**31 - 1),
    WIDE,
    WIDE,
    st.lists(ARRAYS, max_size=4).map(tuple),
)


def whole(message: Message) -> bytes:
    return b"".join(encode(message))


@MANY
@given(MESSAGES)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    data = whole(message)
    found = decode(bytearray(data))
    assert len(data) == size_bytes(message) == size_bytes(found)
    assert (found.kind, found.partition, found.lease, found.version) == (message.kind, message.partition, message.lease, message.version)
    assert [(a.dtype, a.shape, a.tobytes()) for a in found.arrays] == [(a.dtype, a.shape, a.tobytes()) for a in message.arrays]
    assert whole(found) == data
    assert [tensor.numpy().tobytes() for tensor in decode(data).tensors()] == [array.tobytes() for array in message.arrays]


@MANY
@given(MESSAGES, st.data())
def test_damaged_messages_are_refused_in_one_line(message: Message, data: st.DataObject) -> None:
    """Or are other messages: what is changed among the numbers cannot be seen here. Files have checksums for that."""
    found = bytearray(whole(message))
    cut_at = data.draw(st.integers(0, len(found) - 1), "cut at")
    with pytest.raises(ElasticError) as refused:
        decode(found[:cut_at])
    assert "\n" not in str(refused.value)
    changed = bytearray(found)
    for place in data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=4), "changed"):
        changed[place] = data.draw(st.integers(0, 255), "byte")
    try:
        assert size_bytes(decode(changed)) == len(changed)
    except ElasticError as error:
        assert "\n" not in str(error)


def test_numbers_are_not_copied() -> None:
    values = torch.zeros(3, 2)
    message = Message.of(Kind.VALUES, 0, [values])
    buffers = encode(message)
    values[0, 0] = 7
    data = bytearray(b"".join(buffers))
    (read,) = decode(data).tensors()
    assert read.tolist()[0] == [7, 0]
    data[-4:] = np.float32(3).tobytes()
    assert read[2, 1] == 3


def test_other_types_are_refused() -> None:
    with pytest.raises(ElasticError, match=r"float16.* cannot be sent; expected at most 64 of int32, int64, float32, float64, uint8"):
        encode(Message.of(Kind.VALUES, 0, [torch.zeros(2).half()]))
    with pytest.raises(ElasticError, match="a tensor cannot be sent"):
        Message.of(Kind.VALUES, 0, [torch.zeros(2).bfloat16()])


SAMPLES, NNZ, ROWS, OUT = 32, 10, 1000, 8


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ones", [False, True])
def test_bytes_on_the_wire_are_those_of_the_formulas(tmp_path, parts: int, axis: int, ones: bool) -> None:
    """float32, per direction. S: what a batch's entries take, b bytes each: 4 of the id and 4 of the value, which does not travel where all
    are 1. A worker sends S (axis 0) or P·S (axis 1) and receives 4·P·B·out or 4·B·out; an owner sends 4·B·out or 4·B·out/P. Gradients of
    sums go back with the ids and in as many bytes. Beside that each message has a header, and 4 bytes a sample for where its ids begin."""
    b, cells = 4 if ones else 8, cut("table", (ROWS, OUT), parts, axis)
    ids = torch.randint(ROWS, (SAMPLES, NNZ), generator=torch.Generator().manual_seed(0))
    batch = Lookups.padded(ids, torch.ones(SAMPLES, NNZ) if ones else drawn([SAMPLES, NNZ], 1, dtype=torch.float32))
    store = Store(tmp_path, cells, [torch.zeros(cell.cell) for cell in cells], lambda t: torch.optim.SGD(t, lr=0.1))
    wire: dict[str, int] = {"asked": 0, "sums": 0, "pushed": 0, "acknowledged": 0}
    extra = dict(wire)

    def travel(what: str, message: Message) -> Message:
        data = bytearray(whole(message))
        wire[what] += len(data)
        extra[what] += overhead_bytes(message)
        return decode(data)

    lookups, grads = route(cells, batch), divide(cells, torch.ones(SAMPLES, OUT))
    for number, part in enumerate(lookups):
        asked = travel("asked", Message.of(Kind.LOOK_UP, number, part.tensors()))
        sums = travel("sums", store.answer(asked))
        assert sums.kind is Kind.SUMS and sums.arrays[0].nbytes == 4 * SAMPLES * OUT // (1 if axis == 0 else parts)
        pushed = travel("pushed", Message.of(Kind.PUSH_OUTPUTS, number, (grads[number], *part.tensors()), lease=3))
        assert travel("acknowledged", store.answer(pushed)).version == 1
    store.close()
    numbers = {what: wire[what] - extra[what] for what in wire}
    s = b * NNZ * SAMPLES
    offsets = parts * 4 * (SAMPLES + 1)
    sent, outputs = (s, 4 * parts * SAMPLES * OUT) if axis == 0 else (parts * s, 4 * SAMPLES * OUT)
    assert numbers == {"asked": sent + offsets, "sums": outputs, "pushed": sent + offsets + outputs, "acknowledged": 0}
    assert max(extra.values()) <= parts * 144, "headers: 32 bytes, and 8 + 8 a dimension for each array, padded to 8"
