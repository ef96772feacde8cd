"""How fast a GPU computes single operators, by kind, size and type of number: what efficiencies in cost models come from.

On a GPU products and attention are timed in a replayed CUDA graph, in which no launch is waited for. Other calls are eager ones (cuDNN's
convolutions cannot be captured as they are here, and a failed capture spoils those after it), so that their small sizes show the launch.
What is read lies in the GPU's memory and not in its cache: calls take turns on several operands. ``launch`` is what one small eager call
takes when nothing hides its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, prod
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soap.measure.compute_rates import float32_precision
from soap.tracing import compiled

CACHE_BYTES = 192 * 2**20
"""Operands of the calls together: several times the last cache of the largest GPU that is known here (60 MB)."""
MOST_COPIES = 64
REPLAYS = 7
BLOCK_NS = 3_000_000
"""A block of calls that is timed takes at least so long."""
LEAST_SIZE = 32
PART = "part of a sum"
"""Products of operands of 16 bits in float32."""

Call = Callable[[], Any]
SQUARES = (128, 256, 512, 1024, 2048, 4096, 8192)
OBLONG = (
    (8192, 768, 768), (8192, 3072, 768), (8192, 768, 3072), (8192, 50304, 768), (8192, 4096, 4096), (8192, 14336, 4096), (64, 4096, 4096),
    (512, 1024, 1024),
)  # fmt: skip
"""(m, n, k): projections, layers of perceptrons and output layers, by tokens."""
ATTENTIONS = ((8, 12, 1024, 64), (32, 12, 128, 64), (8, 16, 512, 64), (2, 32, 4096, 128), (1, 32, 8192, 128))
"""(samples, heads, steps, width of a head)."""
CONVOLUTIONS = (
    (3, 64, 224, 7, 2, 1), (64, 64, 56, 1, 1, 1), (64, 64, 56, 3, 1, 1), (256, 128, 56, 1, 1, 1), (128, 128, 28, 3, 1, 1),
    (256, 256, 14, 3, 1, 1), (1024, 2048, 14, 1, 2, 1), (512, 512, 7, 3, 1, 1), (96, 96, 56, 7, 1, 96),
)  # fmt: skip
"""(channels in, out, image, kernel, stride, groups) of 64 samples."""
ELEMENTS = (2**12, 2**16, 2**20, 2**24, 2**27)
ROW = 1024
CHAIN = 100
LSTMS = ((64, 40, 1024), (16, 24, 512))
"""(samples, steps, width)."""


def _cast(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (ROW,), x[0].detach(), x[0].detach())


def _batch_norm(x: Tensor) -> Tensor:
    """``ROW`` / 16 channels of 4 by 4 points."""
    return F.batch_norm(x.view(-1, ROW // 16, 4, 4), None, None, training=True)


def _cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))


MEMORY_BOUND: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "copy": (torch.clone, 2),
    "cast": (_cast, 2),
    "add": (lambda x: x + x.detach(), 2),
    "gelu": (F.gelu, 2),
    "dropout": (lambda x: F.dropout(x, 0.1), 2.25),
    "layer_norm": (_layer_norm, 2),
    "softmax": (lambda x: F.softmax(x, -1), 2),
    "batch_norm": (_batch_norm, 2),
    "cross_entropy": (_cross_entropy, 1),
    "sum": (torch.sum, 1),
}
"""Kind -> function of (rows, ``ROW``) elements, and how often it has to read or write as many bytes. ``cast``: 1.5 from float32, 3 from
bfloat16, 2 stands for both."""


@dataclass(frozen=True)
class Timed:
    """One operator. ``flops``, ``moved_bytes``: of the forward pass. ``backward_ns``: None where there is none, or it is not asked for."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    flops: float
    moved_bytes: int
    forward_ns: float
    backward_ns: float | None = None
    graphed: bool = False


def time_products(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Products of matrices and attention."""
    return _timed(_products(device, tiny))


def time_operators(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Convolutions, calls that only read and write, recurrent layers, and launches."""
    return _timed(_operators(device, tiny))


def _timed(kernels: Iterator[partial[Timed]]) -> list[dict[str, Any]]:
    """All of them; what a GPU or its libraries cannot do has an error instead of times."""
    found: list[dict[str, Any]] = []
    for one in kernels:
        try:
            found.append(asdict(one()))
        except (RuntimeError, NotImplementedError) as error:
            found.append({"kind": one.args[0], "asked": [str(arg) for arg in one.args[1:]], "error": str(error).splitlines()[0]})
    return found


def _products(device: str, tiny: bool) -> Iterator[partial[Timed]]:
    for dtype in ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn"):
        for shape in _shrunk((*[(n, n, n) for n in SQUARES], *OBLONG), tiny):
            yield partial(_float8_product if dtype.startswith("float8") else _product, "matmul", device, dtype, shape)
    for dtype in ("bfloat16", "float16"):
        for shape in _shrunk((*[(n, n, n) for n in SQUARES[::2]], *OBLONG), tiny):
            yield partial(_product, PART, device, dtype, shape)
    for dtype in ("float32", "bfloat16"):
        for shape in _shrunk(ATTENTIONS, tiny):
            yield partial(_attention, "attention", device, dtype, shape)


def _operators(device: str, tiny: bool) -> Iterator[partial[Timed]]:
    for kind, dtype in (("conv2d", "float32"), ("conv2d", "bfloat16"), ("conv2d channels_last", "bfloat16")):
        for channels, out, image, kernel, stride, groups in CONVOLUTIONS:
            samples, size = (2, max(7, image // 16)) if tiny else (64, image)
            yield partial(_convolution, kind, device, dtype, (samples, channels, out, size, kernel, stride, groups))
    for dtype in ("float32", "bfloat16"):
        for count in ELEMENTS[:2] if tiny else ELEMENTS:
            for kind in MEMORY_BOUND:
                yield partial(_memory_bound, kind, device, dtype, (count // ROW, ROW))
            yield partial(_embedding, "embedding", device, dtype, (count // ROW, ROW))
    for shape in _shrunk(LSTMS, tiny):
        yield partial(_lstm, "lstm", device, "float32", shape)
    for kind in ("launch", "launch recorded"):
        yield partial(_launch, kind, device)


def _product(kind: str, device: str, dtype: str, shape: tuple[int, int, int]) -> Timed:
    (m, n, k), own = shape, getattr(torch, "float32" if dtype == "tf32" else dtype)
    with float32_precision("high" if dtype == "tf32" else "highest"):
        left, right = _operands(device, own, (m, k), (k, n))
        multiply = compiled.multiply if kind == PART else torch.mm
        forward = _time(device, [partial(multiply, a, b) for a, b in zip(left, right, strict=True)], graphed=True)
    moved = (m * k + k * n) * own.itemsize + m * n * multiply(left[0], right[0]).itemsize
    return Timed(kind, dtype, shape, 2.0 * m * n * k, moved, forward, graphed=True)


def _float8_product(kind: str, device: str, dtype: str, shape: tuple[int, int, int]) -> Timed:
    (m, n, k), one = shape, torch.ones((), device=device)
    left, right = ([x.to(torch.float8_e4m3fn) for x in xs] for xs in _operands(device, torch.bfloat16, (m, k), (n, k)))
    product = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    forward = _time(device, [partial(product, a, b.t()) for a, b in zip(left, right, strict=True)], graphed=True)
    return Timed(kind, dtype, shape, 2.0 * m * n * k, m * k + k * n + 2 * m * n, forward, graphed=True)


def _attention(kind: str, device: str, dtype: str, shape: tuple[int, int, int, int]) -> Timed:
    samples, heads, steps, width = shape
    triples = list(zip(*_operands(device, getattr(torch, dtype), shape, shape, shape, gradients=True), strict=True))
    flops = 2 * 2.0 * samples * heads * steps * steps * width / 2  # half of it is masked
    moved = 4 * prod(shape) * triples[0][0].itemsize
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return _both(kind, device, dtype, shape, flops, moved, attend, triples, graphed=True)


def _convolution(kind: str, device: str, dtype: str, shape: tuple[int, int, int, int, int, int, int]) -> Timed:
    samples, channels, out, image, kernel, stride, groups = shape
    sizes = (samples, channels, image, image), (out, channels // groups, kernel, kernel)
    last = kind.endswith("channels_last")
    pairs = list(zip(*_operands(device, getattr(torch, dtype), *sizes, gradients=True, channels_last=last), strict=True))
    convolve = partial(F.conv2d, stride=stride, padding=kernel // 2, groups=groups)
    output = convolve(*pairs[0])
    moved = (prod(sizes[0]) + prod(sizes[1]) + output.numel()) * output.itemsize
    return _both(kind, device, dtype, shape, 2.0 * output.numel() * channels // groups * kernel**2, moved, convolve, pairs)


def _memory_bound(kind: str, device: str, dtype: str, shape: tuple[int, int]) -> Timed:
    (xs,) = _operands(device, getattr(torch, dtype), shape, gradients=True)
    function, passes = MEMORY_BOUND[kind]
    moved = passes * prod(shape) * xs[0].itemsize
    return _both(kind, device, dtype, shape, 0.0, int(moved), function, [(x,) for x in xs])


def _embedding(kind: str, device: str, dtype: str, shape: tuple[int, int]) -> Timed:
    (xs,) = _operands(device, getattr(torch, dtype), shape, gradients=True)
    indices = torch.randint(shape[0], (min(8192, shape[0]),), device=device)
    moved = 2 * len(indices) * ROW * xs[0].itemsize
    return _both(kind, device, dtype, shape, 0.0, moved, partial(F.embedding, indices), [(x,) for x in xs])


def _lstm(kind: str, device: str, dtype: str, shape: tuple[int, int, int]) -> Timed:
    samples, steps, width = shape
    layer = torch.nn.LSTM(width, width, batch_first=True, device=device)
    (xs,) = _operands(device, torch.float32, shape, gradients=True)
    moved = (2 * samples * steps * width + 8 * width * width) * 4
    leaves = [(x, *layer.parameters()) for x in xs]
    flops = 2.0 * samples * steps * 8 * width * width
    return _both(kind, device, dtype, shape, flops, moved, lambda x, *_: layer(x)[0], leaves)


def _launch(kind: str, device: str) -> Timed:
    """Small eager calls, each the next one's input: with and without autograd's record."""
    start = torch.ones(8, device=device, requires_grad=kind.endswith("recorded"))

    def chain() -> None:
        y = start
        for _ in range(CHAIN):
            y = y + 1.0

    return Timed(kind, "float32", (8,), 0.0, 0, _blocks(device, chain) / CHAIN)


def _both(
    kind: str, device: str, dtype: str, shape: tuple[int, ...], flops: float, moved: int, function: Callable[..., Tensor],
    leaves: Sequence[Sequence[Tensor]], graphed: bool = False,
) -> Timed:  # fmt: skip
    """Forward without autograd's record, and backward as what a pass with it takes more."""

    def trained(wanted: Sequence[Tensor]) -> Any:
        output = function(*wanted)
        return torch.autograd.grad(output, wanted, torch.ones_like(output) if output.dim() else None)

    with torch.no_grad():
        forward = _time(device, [partial(function, *wanted) for wanted in leaves], graphed)
    whole = _time(device, [partial(trained, wanted) for wanted in leaves], graphed)
    return Timed(kind, dtype, shape, flops, moved, forward, whole - forward, graphed)


def _time(device: str, calls: Sequence[Call], graphed: bool) -> float:
    """Nanoseconds of one call: the median of several blocks."""

    def turn() -> None:
        for call in calls:
            call()

    turn()
    if device != "cuda" or not graphed:
        return _blocks(device, turn) / len(calls)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as capture wants it
        turn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()
    return _blocks(device, graph.replay) / len(calls)


def _blocks(device: str, action: Call) -> float:
    """Nanoseconds of one run of ``action``; on a GPU between events, so that the processor's part counts only where it is slower."""
    action()
    once = _block(device, action, 1)
    count = max(1, min(1000, ceil(BLOCK_NS / max(once, 1.0))))
    return median(_block(device, action, count) for _ in range(REPLAYS)) / count


def _block(device: str, action: Call, count: int) -> float:
    if device != "cuda":
        start = perf_counter_ns()
        for _ in range(count):
            action()
        return float(perf_counter_ns() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        action()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e6


def _operands(
    device: str, dtype: torch.dtype, *shapes: tuple[int, ...], gradients: bool = False, channels_last: bool = False
) -> list[list[Tensor]]:
    """For each shape a list of tensors, as many as do not fit into a cache together."""
    one = sum(prod(shape) for shape in shapes) * dtype.itemsize
    copies = min(MOST_COPIES, ceil(CACHE_BYTES / one)) if device == "cuda" else 1
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def made(shape: tuple[int, ...]) -> Tensor:
        tensor = torch.randn(shape, device=device, dtype=dtype).mul_(0.1)
        return (tensor.to(memory_format=layout) if channels_last else tensor).requires_grad_(gradients)

    return [[made(shape) for _ in range(copies)] for shape in shapes]


def _shrunk(shapes: Sequence[tuple[int, ...]], tiny: bool) -> Sequence[tuple[int, ...]]:
    return [tuple(min(LEAST_SIZE, size) for size in shape) for shape in shapes[:2]] if tiny else shapes
