"""Which share of a GPU's peak rates its kernels reach, by kind of operator and type of number; and what an update costs there.

The shares stand in ``soap/profiles/data/efficiency.json`` beside the measurements that they come from. They hold for GPUs whose sheet has
a rate for TF32. Older ones reach in products what others measured on a V100 and on a TITAN Xp, by size; ``PEAK_SHARE`` of the peak in all
else is assumed, and the share of the bandwidth that others measured on a V100.

Attention in 16-bit types has a table by length, width of heads and mask for each generation of GPUs.

Of a device whose rates were measured (products of 4096 x 4096, a large copy) a share counts relative to what such products reach.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from math import log
from typing import Any

from soap.cluster.topology import DeviceType
from soap.model.dtypes import TF32
from soap.model.graph import RECURRENT_KINDS
from soap.profiles.work import ATTENTION, Kernel, Scores

PEAK_SHARE = 0.75
"""Share of a data sheet's peak rate that operators reach, as PyTorch's own estimator assumes (``torch.utils._runtime_estimation``)."""

BACKWARD_PRODUCTS = 4 / 5
"""Of the products that tables of flash attention count in a backward pass, those that ``work`` counts: it leaves out the scores' second
computation."""


@dataclass(frozen=True, slots=True)
class Shares:
    """``arithmetic``: of the rate for the type. ``memory``: of the bandwidth."""

    arithmetic: float
    memory: float


def shares(device: DeviceType, kind: str, kernel: Kernel, *, backward: bool = False, flash2: bool = False) -> Shares:
    """What a kernel of an operator of this kind reaches on a device. ``flash2``: attention is that of FlashAttention-2 everywhere."""
    dtype, family = kernel.dtype_on(device.kind), _family(kind, backward)
    if not _knows(device):
        older = _older_product(device, dtype, kernel.flops) if family == "product" and device.kind == "cuda" else PEAK_SHARE
        return Shares(1.0 if device.is_measured else older, memory_share(device))
    product = _value("product").get(dtype, PEAK_SHARE)
    arithmetic = _value(family).get(dtype, product)
    if kernel.unaligned and family == "product":
        arithmetic = _value("unaligned_product").get(dtype, arithmetic)
    if kernel.scores is not None and dtype in ("bfloat16", "float16"):
        arithmetic = _flash_attention(device.flops(dtype), kernel.scores, backward, flash2)
    memory = _value("kind_memory_backward" if backward else "kind_memory").get(kind, {}).get(dtype, _value("memory"))
    if device.is_measured:
        return Shares(arithmetic / _value("large_product").get(dtype, product), memory / _value("memory"))
    return Shares(arithmetic, memory)


def _older_product(device: DeviceType, dtype: str, flops: float) -> float:
    """The share of the peak that a product reaches on a GPU without TF32: of tensor cores by the table of those, else by the one of the GPU
    whose peak in float32 is nearest."""
    rate, single = device.flops(dtype), device.flops("float32")
    tables: list[Mapping[str, Any]] = list(_value("older_product").values())
    if dtype == "float16" and rate >= TENSOR_CORES * single:
        table = next(own for own in tables if dtype in own)
        reached, peak = table[dtype], table["tensor_peak"]
    elif dtype in ("float32", "float16"):
        table = min(tables, key=lambda own: abs(log(own["peak"] / single)))
        reached, peak = table["float32"], table["peak"]
    else:
        return PEAK_SHARE
    return _between(dict(zip(table["gflop"], reached, strict=True)), max(flops / 1e9, 1e-9)) * 1e12 / float(peak)


TENSOR_CORES = 4
"""A rate for float16 that is so many times float32's is that of tensor cores; other units have at most twice float32's."""


def _flash_attention(rate: float, scores: Scores, backward: bool, flash2: bool) -> float:
    """The share of the peak, by the table of the GPU whose peak is nearest to a rate."""
    tables: list[Mapping[str, Any]] = list({**_value("flash_attention"), **(_value("flash_attention_2") if flash2 else {})}.values())
    table = min(tables, key=lambda own: abs(log(own["peak"] / rate)))
    widths = table[f"{'masked' if scores.masked else 'full'} {'backward' if backward else 'forward'}"]
    by_width = {int(width): _between(dict(zip(table["lengths"], own, strict=True)), scores.keys) for width, own in widths.items()}
    return _between(by_width, scores.width) * 1e12 / float(table["peak"]) * (BACKWARD_PRODUCTS if backward else 1.0)


def _between(known: Mapping[Any, float], wanted: float) -> float:
    """Linear in the logarithm between the nearest sizes that are known; beyond them, what the outermost has."""
    for (low, less), (high, more) in pairwise(known.items()):
        if wanted <= high:
            return less + (more - less) * log(max(wanted, low) / low) / log(high / low)
    return known[max(known)]


def update_seconds(device: DeviceType, optimizer_states: int) -> float | None:
    """What the update of one tensor takes beside its traffic, where one kernel updates many tensors; None on processors."""
    if device.kind != "cuda":
        return None
    known = _value("update_seconds")
    return float(known[min(optimizer_states, len(known) - 1)])


def memory_share(device: DeviceType) -> float:
    """Of the bandwidth, what calls that only read and write reach."""
    if device.is_measured or device.kind != "cuda":
        return 1.0
    return float(_value("memory" if _knows(device) else "older_memory"))


def figures(*, flash2: bool = False) -> Mapping[str, Any]:
    """All values, as plain JSON: what a cost model's hash depends on. ``flash2``: also those that count in its place."""
    return {name: entry["value"] for name, entry in _data().items() if flash2 or name != "flash_attention_2"}


def _knows(device: DeviceType) -> bool:
    return device.kind == "cuda" and TF32 in device.flops_per_second


def _family(kind: str, backward: bool) -> str:
    if kind == ATTENTION:
        return "attention_backward" if backward else "attention"
    if kind in RECURRENT_KINDS:
        return "recurrent"
    return "convolution" if kind.startswith("conv") else "product"


def _value(name: str) -> Any:
    return _data()[name]["value"]


@cache
def _data() -> Mapping[str, Any]:
    text = files("soap.profiles").joinpath("data", "efficiency.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
