"""What a batch asks of a sparse layer: for each sample, ids and their values; in other words, a sparse matrix by rows.

Owners compute with their cell of the layer's weights sums of rows forward, and the gradient of these rows backward. Bias, activation and a
bag's mean belong behind the sum over all cells (``layout.combine``, ``means``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.runtime.sync.row_update import RowGradient

SMALL = 2**31
"""Ids and offsets below it travel as int32."""
_WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Lookups:
    """A ragged batch: sample b has the ids ``ids[offsets[b]:offsets[b + 1]]``.

    ``ids``: (entries,), int32 or int64; an id may come twice, and then counts twice. ``offsets``: (samples + 1,) of the same type, from 0
    to the number of entries. ``values``: (entries,), by which the ids' rows are multiplied; None where all are 1.
    """

    ids: Tensor
    offsets: Tensor
    values: Tensor | None = None

    @staticmethod
    def ragged(ids: Tensor, starts: Tensor, values: Tensor | None = None) -> Lookups:
        """From torch's form of a bag: ``starts`` (samples,) without the end of the last one."""
        return Lookups(ids, torch.cat([starts, starts.new_tensor([len(ids)])]), values)

    @staticmethod
    def padded(ids: Tensor, values: Tensor | None = None) -> Lookups:
        """From equally many ids a sample: ``ids``, ``values`` of shape (samples, ids)."""
        samples, each = ids.shape
        offsets = torch.arange(samples + 1, dtype=ids.dtype) * each
        return Lookups(ids.reshape(-1), offsets, None if values is None else values.reshape(-1))

    @property
    def samples(self) -> int:
        """How many samples there are, those without ids included."""
        return len(self.offsets) - 1

    @property
    def entries(self) -> int:
        """How many ids there are in all samples together."""
        return len(self.ids)

    def counts(self) -> Tensor:
        """(samples,), int64: how many ids each sample has."""
        return (self.offsets[1:] - self.offsets[:-1]).long()

    def owners(self) -> Tensor:
        """(entries,), int64: of which sample each entry is."""
        return torch.repeat_interleave(torch.arange(self.samples), self.counts(), output_size=self.entries)

    def checked(self, rows: int) -> Lookups:
        """Itself, if all ids are below ``rows`` and offsets fit. ElasticError in one line otherwise; what peers send is checked so."""
        if self.ids.dim() != 1 or self.ids.dtype not in _WHOLE or self.offsets.dtype is not self.ids.dtype:
            raise ElasticError(
                f"ids are {_told(self.ids)} and offsets {_told(self.offsets)}; expected one dimension and one of int32, int64 for both"
            )
        if self.offsets.dim() != 1 or not len(self.offsets) or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.entries:
            raise ElasticError(f"offsets {_told(self.offsets)} do not lead from 0 to {self.entries}; expected samples + 1 of them")
        if self.samples and int((self.offsets[1:] - self.offsets[:-1]).min()) < 0:
            raise ElasticError("offsets fall; expected each sample's entries behind those of the sample before")
        if self.values is not None and (self.values.shape != self.ids.shape or not self.values.is_floating_point()):
            raise ElasticError(f"values are {_told(self.values)}; expected a floating-point number for each of {self.entries} ids")
        if self.entries:
            least, most = int(self.ids.min()), int(self.ids.max())
            if least < 0 or most >= rows:
                raise ElasticError(
                    f"id {least if least < 0 else most} is out of range; expected ids from 0 to {rows - 1}: make the layer larger, or "
                    "take ids modulo its size"
                )
        return self

    def without_ones(self) -> Lookups:
        """The same without values if all of them are 1, which need not travel then."""
        return Lookups(self.ids, self.offsets) if self.values is not None and bool((self.values == 1).all()) else self

    def narrowed(self, rows: int) -> Lookups:
        """The same with ids and offsets of the smallest type that holds those of a layer with so many rows: int32 below 2^31."""
        small = rows <= SMALL and self.entries < SMALL
        dtype = torch.int32 if small else torch.int64
        return Lookups(self.ids.to(dtype), self.offsets.to(dtype), self.values)

    def tensors(self) -> tuple[Tensor, ...]:
        """What travels: ids, offsets, and values if there are any."""
        return (self.ids, self.offsets) if self.values is None else (self.ids, self.offsets, self.values)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Lookups:
        """What has travelled, not yet checked. ElasticError if there are neither two nor three tensors."""
        if len(tensors) not in (2, 3):
            raise ElasticError(f"look-ups of {len(tensors)} arrays; expected ids, offsets and perhaps values")
        return Lookups(*tensors)


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


CHUNK_BYTES = 2**22
"""Backward, contributions of entries are made for so many bytes at once: not for all entries, which would take far more memory than the
gradient itself."""


def sums_of_rows(weight: Tensor, lookups: Lookups) -> Tensor:
    """(samples, outputs): by sample, the sum of the rows of ``weight`` that it names, times their values. Look-ups must be checked."""
    if not lookups.entries:
        return weight.new_zeros((lookups.samples, weight.shape[1]))
    values = None if lookups.values is None else lookups.values.to(weight.dtype)
    return F.embedding_bag(lookups.ids, weight.detach(), lookups.offsets, mode="sum", per_sample_weights=values, include_last_offset=True)


def gradient_of_rows(lookups: Lookups, grad_out: Tensor) -> RowGradient:
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
