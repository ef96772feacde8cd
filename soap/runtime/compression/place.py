"""Where a tensor is, as far as compression cares, and how numbers lie in messages."""

from __future__ import annotations

import torch


def on_host(tensor: torch.Tensor) -> bool:
    """Whether Python may look at values. Of a GPU it would have to wait for all that is queued; within a step nobody does."""
    return tensor.device.type == "cpu"


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Rows of numbers as rows of bytes. (Torch has no views of other types of what is empty.)"""
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0], rows.shape[1] * rows.element_size(), dtype=torch.uint8, device=rows.device)
    return rows.contiguous().view(torch.uint8)


def from_bytes(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of bytes, perhaps cut out of longer ones, as the numbers that they are."""
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0], rows.shape[1] // dtype.itemsize, dtype=dtype, device=rows.device)
    aligned = rows.storage_offset() % dtype.itemsize == 0 and rows.stride(0) % dtype.itemsize == 0 and rows.stride(1) == 1
    return (rows if aligned else rows.clone(memory_format=torch.contiguous_format)).view(dtype)
