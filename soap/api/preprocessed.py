"""What preprocessed data say of a model's sparse parameters: how many rows batches touch, counted over all of the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from soap.errors import ModelError
from soap.model.graph import OperatorGraph
from soap.model.sparse_access import HALVINGS, halvings

if TYPE_CHECKING:
    from soap.tracing.execute import TracedModel

BLOCK_SAMPLES = 2**18
"""Samples that are counted at once, in whole batches."""


def measure_rows_of(model: TracedModel, folder: str | Path) -> OperatorGraph:
    """The model's graph with rows counted on all whole batches of what ``soap-preprocess`` wrote. Where each table is looked up by one
    column of the data, as in DLRM, columns are counted without running anything. ModelError if the data do not fit the model."""
    from soap.data import Preprocessed
    from soap.tracing.execute import TracedModel
    from soap.tracing.row_counting import columns_read, measure_rows

    given: object = model
    if not isinstance(given, TracedModel):
        raise ModelError(f"rows are counted by running a model's look-ups; expected what soap.load returns, not {type(model).__name__}")
    data = Preprocessed(folder)
    if not model.graph.sparse:
        return model.graph
    shapes = [list(model.graph.tensors[name].shape) for name in model.input_names]
    batch = shapes[0][0]
    first = next(data.batches(batch), None)
    if first is None:
        raise ModelError(f"{str(folder)!r} has {data.rows} rows; expected at least one batch of {batch}")
    if [list(tensor.shape) for tensor in first] != shapes:
        found = [list(tensor.shape) for tensor in first]
        raise ModelError(f"{str(folder)!r} has batches of shapes {found}; the model's inputs have {shapes}: expected the same columns")
    columns = columns_read(model, first, position=1)
    if columns is None:
        return replace(model.graph, sparse=measure_rows(model, data.batches(batch)))
    sparse = {}
    for name, access in model.graph.sparse.items():
        values = data.categories[:, columns[name]]
        most = int(values.max())
        if most >= access.rows:
            raise ModelError(f"{str(folder)!r} looks up row {most} of {name!r}; expected 0 to {access.rows - 1}")
        touched = count_touched(values, batch, len(halvings(access.indices)))
        sparse[name] = replace(access, touched=touched, measured=True, given=False)
    return replace(model.graph, sparse=sparse)


def count_touched(values: NDArray[Any], batch: int, levels: int) -> tuple[int, ...]:
    """How many different values a batch has on average over all whole batches, rounded up; then its half, its quarter, …"""
    batches = len(values) // batch
    piece = (np.arange(batch, dtype=np.int64) << HALVINGS) // batch
    totals = [0] * levels
    step = max(1, BLOCK_SAMPLES // batch)
    for begin in range(0, batches, step):
        count = min(step, batches - begin)
        block = np.ascontiguousarray(values[begin * batch : (begin + count) * batch]).reshape(count, batch)
        order = np.argsort(block, axis=1, kind="stable")  # equal values next to each other, in the order of the batch
        ranked = np.take_along_axis(block, order, axis=1)
        again = ranked[:, 1:] == ranked[:, :-1]
        pieces = piece[order]
        for level in range(levels):
            own = pieces >> (HALVINGS - level)
            repeated = again & (own[:, 1:] == own[:, :-1])
            totals[level] += count * batch - int(np.count_nonzero(repeated))
    return tuple(-(-total // (batches << level)) for level, total in enumerate(totals))
