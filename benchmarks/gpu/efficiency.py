"""Shares of peak rates that kernels reach, from what was measured on an H200: the figures of ``soap/profiles/data/efficiency.json``.

    python -m benchmarks.gpu.efficiency

prints them. A test holds the file against them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SHIPPED = ROOT / "soap/profiles/data/profile-nvidia-h200.json"
PEAKS = {"float32": 67e12, "tf32": 494.7e12, "bfloat16": 989.5e12, "float16": 989.5e12, "float8_e4m3fn": 1979e12}
"""Operations per second, dense: NVIDIA's H200 data sheet."""
PEAK_BANDWIDTH = 4.8e12
BANDWIDTH = PEAK_BANDWIDTH * 0.84
SMALLEST_NS = 2400
"""What any kernel takes: the smallest product in a CUDA graph."""
LARGE_FLOPS = 4e9


def products() -> dict[str, float]:
    """The median of the large ones by type, without what any kernel takes."""
    return {dtype: _rounded(median(_shares(row for row in _rows("matmul", dtype) if row["flops"] > LARGE_FLOPS))) for dtype in PEAKS}


def large_products() -> dict[str, float]:
    """What 4096 x 4096 x 4096 reaches as a whole: ``compute_rates`` measures that."""
    found = {}
    for dtype in ("float32", "tf32", "bfloat16", "float16"):
        (row,) = [row for row in _rows("matmul", dtype) if row["shape"] == [4096] * 3]
        found[dtype] = _rounded(row["flops"] / row["forward_ns"] * 1e9 / PEAKS[dtype])
    return found


def attention() -> dict[str, float]:
    """Causal attention of 1024 steps with heads of width 64."""
    return {dtype: _rounded(next(_shares([_attention_row(dtype)]))) for dtype in ("float32", "bfloat16")}


def attention_backward() -> dict[str, float]:
    """The same, of twice the forward pass's operations."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        row = _attention_row(dtype)
        found[dtype] = _rounded(2 * row["flops"] / (row["backward_ns"] - SMALLEST_NS) * 1e9 / PEAKS[dtype])
    return found


def unaligned_products() -> dict[str, float]:
    """gpt's output layer, 50257 wide, forward and backward."""
    entries = json.loads((RESULTS / "profile-gpt-bfloat16.json").read_text())["profiles"][0]["entries"]
    (head,) = [entry for entry in entries if entry["lengths"] == [50257, 768, 8, 1024] and entry["kind"] == "linear"]
    flops = sum(kernel[1] for kernel in (*head["forward_work"], *head["backward_work"]))
    return {"bfloat16": _rounded(flops / (head["forward_ns"][0] + head["backward_ns"][0]) * 1e9 / PEAKS["bfloat16"])}


def kind_memory(way: str = "forward") -> dict[str, dict[str, float]]:
    """Kinds that are far from the bandwidth although it binds them: the median share, ``forward`` or ``backward``. Convolutions are laid
    out anew by cuDNN (NCHW), batch norm is several calls."""
    bfloat16 = RESULTS / "profile-resnet50-bfloat16.json"
    found: dict[str, dict[str, float]] = {}
    for kind, types in (("conv2d", ("tf32", "bfloat16")), ("batch_norm_apply", ("float32", "bfloat16"))):
        paths = zip(types, (SHIPPED, bfloat16), strict=True)
        found[kind] = {dtype: _rounded(median(_memory_of_profile(path, kind, dtype, way))) for dtype, path in paths}
    return found


def _attention_row(dtype: str) -> Mapping[str, Any]:
    (row,) = [row for row in _rows("attention", dtype) if row["shape"] == [8, 12, 1024, 64]]
    return row


def _memory_of_profile(path: Path, kind: str, dtype: str, way: str) -> Iterator[float]:
    for entry in json.loads(path.read_text())["profiles"][0]["entries"]:
        flops, moved = (sum(kernel[place] for kernel in entry[f"{way}_work"]) for place in (1, 2))
        if entry["kind"] == kind and flops / PEAKS[dtype] <= 0.8 * moved / BANDWIDTH:
            yield moved / (entry[f"{way}_ns"][0] - SMALLEST_NS) * 1e9 / PEAK_BANDWIDTH


def convolutions() -> dict[str, float]:
    """resnet50's that are bound by arithmetic, forward: the median."""
    bfloat16 = RESULTS / "profile-resnet50-bfloat16.json"
    return {dtype: _rounded(median(_of_profile(path, "conv2d", dtype))) for dtype, path in (("tf32", SHIPPED), ("bfloat16", bfloat16))}


def recurrent() -> dict[str, float]:
    """rnnlm's LSTMs, forward: the median. Neither arithmetic nor memory binds them, but one step's wait for the step before."""
    return {"tf32": _rounded(median(_of_profile(SHIPPED, "lstm", "tf32")))}


def _rows(kind: str, dtype: str) -> list[Mapping[str, Any]]:
    values = json.loads((RESULTS / "products.json").read_text())["values"]
    return [row for row in values if (row["kind"], row["dtype"]) == (kind, dtype)]


def _shares(rows: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    for row in rows:
        yield row["flops"] / (row["forward_ns"] - SMALLEST_NS) * 1e9 / PEAKS[row["dtype"]]


def _of_profile(path: Path, kind: str, dtype: str) -> Iterator[float]:
    for entry in json.loads(path.read_text())["profiles"][0]["entries"]:
        flops, moved = (sum(kernel[place] for kernel in entry["forward_work"]) for place in (1, 2))
        if entry["kind"] == kind and (kind == "lstm" or flops / PEAKS[dtype] > 0.8 * moved / BANDWIDTH):
            yield flops / (entry["forward_ns"][0] - SMALLEST_NS) * 1e9 / PEAKS[dtype]


def _rounded(share: float) -> float:
    return round(share, 3)


def all_figures() -> dict[str, dict[str, Any]]:
    """By their names in the file."""
    return {
        "product": products(),
        "large_product": large_products(),
        "convolution": convolutions(),
        "attention": attention(),
        "attention_backward": attention_backward(),
        "recurrent": recurrent(),
        "unaligned_product": unaligned_products(),
        "kind_memory": kind_memory(),
        "kind_memory_backward": kind_memory("backward"),
    }


if __name__ == "__main__":
    print(json.dumps(all_figures(), indent=2))
    sys.exit(0)
