"""What nodes send for a batch, by the messages of a real lease: Twitter's formulas, with our bytes."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import soap
from soap.elastic import worker as owners
from soap.elastic.messages import Kind, Message
from soap.elastic.worker import Source, Worker
from soap.zoo import build
from soap.zoo.full_sparse import FullSparse, FullSparseConfig
from tests.elastic import test_owners
from tests.elastic.test_owners import SECRET, cut_along, samples
from tests.extent import rows_often

WIDE = FullSparseConfig(layers=2, rows=50, width=8, features=3, hidden=6, alpha=0.3, batch=8)
"""The tiny model with a column for each of eight owners."""
BATCH, TABLES, ENTRIES = 8, 2, 3
"""Samples; tables; entries of a sample in each table."""
ITEM, ID = 8, 4
"""Bytes of a number, and of an id."""


@pytest.mark.parametrize(("servers", "axis"), rows_often([*product((1, 2, 4, 8), (0, 1))], [(1, 1), (2, 0), (8, 0), (8, 1)]))
def test_egress_is_that_of_the_formulas(servers: int, axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S = b nnz. b: 24 bytes for an entry, whose id (4) and value (8) travel with the question and again with the push. Beside S of a
    worker (P S by columns) there are gradients of sums from it, and sums from the owners: B out numbers of each owner by rows, of all
    together by columns. What is beside that is headers, offsets and the dense variables; no message of a table has anything else. Fully
    connected, where each worker is one of the owners, it sends a P-th less."""
    soap.export(FullSparse(WIDE), build("zoo:full_sparse:tiny").args, path=tmp_path / "wide.pt2", verify=False)
    source = Source(str(tmp_path / "wide.pt2"), "float64")
    model = source.load()
    shapes = {name: tuple(value.shape) for name, value in model.parameters.items()}
    tables = {name: shape for name, shape in shapes.items() if name in model.graph.sparse}
    out = sum(shape[1] for shape in tables.values())
    layout = cut_along(axis, tables, {name: shape for name, shape in shapes.items() if name not in tables}, servers, servers)
    assert len(tables) == TABLES and min(map(min, tables.values())) >= servers
    sent, received = list[tuple[int, Message]](), list[tuple[int, Message]]()
    real_send, real_answer = owners.Owners._sent_to, owners.Owners._answer_of

    def sending(self: owners.Owners, place: owners.Place, message: Message) -> bool:
        sent.append((place.server, message))
        return real_send(self, place, message)

    def answered(self: owners.Owners, place: owners.Place) -> Message | None:
        answer = real_answer(self, place)
        assert answer is not None
        received.append((place.server, answer))
        return answer

    monkeypatch.setattr(owners.Owners, "_sent_to", sending)
    monkeypatch.setattr(owners.Owners, "_answer_of", answered)
    monkeypatch.setattr(test_owners, "SOURCE", source)
    with test_owners.serving(layout, tmp_path) as running:
        worker = Worker(source, samples(BATCH), layout, running.address, SECRET)
        worker.work(0, range(BATCH))
        worker.close()
    entries, sums, answers = Counter[int](), Counter[int](), Counter[int]()
    for server, message in sent:
        if message.kind in (Kind.LOOK_UP, Kind.PUSH_OUTPUTS):
            arrays = [*message.arrays]
            if message.kind is Kind.PUSH_OUTPUTS:
                sums[server] += arrays.pop(0).nbytes
            ids, offsets, values = arrays
            assert (ids.dtype, values.dtype, len(offsets)) == (np.int32, np.float64, BATCH + 1)
            entries[server] += ids.nbytes + values.nbytes
    for server, message in received:
        assert message.kind in (Kind.SUMS, Kind.VALUES, Kind.VERSION)
        if message.kind is Kind.SUMS:
            answers[server] += message.arrays[0].nbytes
    whole_bytes = 2 * (ID + ITEM) * BATCH * TABLES * ENTRIES
    assert sum(entries.values()) == (whole_bytes if axis == 0 else servers * whole_bytes)
    assert sum(sums.values()) == ITEM * BATCH * out * (servers if axis == 0 else 1)
    each = ITEM * BATCH * out if axis == 0 else ITEM * BATCH * out // servers
    assert answers == sums == dict.fromkeys(range(servers), each)
    if axis == 0:
        workers = [sum(entries.values()) - entries[own] + sum(sums.values()) - sums[own] for own in range(servers)]
        others = [(servers - 1) * answers[own] for own in range(servers)]
        mean = sum(workers + others) / servers
        assert mean == whole_bytes * (servers - 1) / servers + 2 * ITEM * (servers - 1) * BATCH * out
