"""What an owner computes with its cell of a sparse layer's weights: sums of rows forward, the gradient of these rows backward. Bias,
activation and a bag's mean belong behind the sum over all cells (``partitions.combine``, ``means``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from soap.elastic.lookups import Lookups
from soap.errors import ElasticError
from soap.runtime.sync.row_gradient import RowGradient

CHUNK_BYTES = 2**22
"""Backward, contributions of entries are made for so many bytes at once: not for all entries, which would take far more memory than the
gradient itself."""


def forward(weight: Tensor, lookups: Lookups) -> Tensor:
    """(samples, outputs): for each sample the sum of the rows of ``weight`` (rows, outputs) that it names, each times its value. Zeros for
    a sample without ids. The look-ups must have been checked."""
    if not lookups.entries:
        return weight.new_zeros((lookups.samples, weight.shape[1]))
    values = None if lookups.values is None else lookups.values.to(weight.dtype)
    return F.embedding_bag(lookups.ids, weight.detach(), lookups.offsets, mode="sum", per_sample_weights=values, include_last_offset=True)


def backward(lookups: Lookups, grad_out: Tensor) -> RowGradient:
    """The gradient of the rows that a batch reads, from the gradient of its sums (samples, outputs).

    Entries are added in their order, whatever the number of threads, so that equal input gives equal bits. ElasticError in one line if
    there is not one gradient for each sample.
    """
    if grad_out.dim() != 2 or len(grad_out) != lookups.samples:
        raise ElasticError(f"gradient of shape {list(grad_out.shape)} for {lookups.samples} samples; expected ({lookups.samples}, outputs)")
    rows, places = torch.unique(lookups.ids.long(), return_inverse=True)
    result = grad_out.new_zeros((len(rows), grad_out.shape[1]))
    samples = lookups.owners()
    values = None if lookups.values is None else lookups.values.to(grad_out.dtype)
    chunk = max(1, CHUNK_BYTES // max(1, grad_out.shape[1] * grad_out.element_size()))
    for start in range(0, lookups.entries, chunk):
        part = slice(start, start + chunk)
        given = grad_out.index_select(0, samples[part])
        if values is not None:
            given *= values[part, None]
        result.index_add_(0, places[part], given)
    return RowGradient(rows, result)


def means(sums: Tensor, lookups: Lookups) -> Tensor:
    """Means over each sample's ids, from sums over all cells; zeros for a sample without ids. ``lookups``: of the whole layer."""
    return sums / lookups.counts().clamp(min=1).to(sums.dtype)[:, None]
