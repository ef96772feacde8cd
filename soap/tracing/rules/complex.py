"""Complex numbers: their parts, putting them together, and conjugation.

Torch may only mark a tensor as conjugated or negated, which its memory does not show. Arithmetic respects the marks. Code that looks at
memory (a view as real numbers, sending) has to write the numbers out first.
"""

from __future__ import annotations

from math import log2, prod

import torch

from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import as_complex, as_real
from soap.tracing.rules.notation import Local, Scope, Tiled, View, pointwise, rule


def with_real(base: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """``base`` with other real parts."""
    return torch.complex(real, torch.imag(base))


def with_imag(base: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
    """``base`` with other imaginary parts."""
    return torch.complex(torch.real(base), imag)


def _run_view_as_complex(local: Local) -> torch.Tensor:
    return as_complex(local.tensors[0])


def _run_view_as_real(local: Local) -> torch.Tensor:
    return as_real(local.tensors[0])


@rule("aten.view_as_complex")
def view_as_complex(view: View) -> Tiled:
    """Pairs of numbers, in the last dimension, become one each. A region whose pairs do not lie side by side is copied."""
    scope = Scope()
    maps = scope.like(view.output_shapes[0])
    return Tiled(tuple(scope.factors), ((*maps, WHOLE),), (maps,), light=True, linear=True, run=_run_view_as_complex)


@rule("aten.view_as_real")
def view_as_real(view: View) -> Tiled:
    """Real and imaginary parts in a new last dimension."""
    scope = Scope()
    maps = scope.like(view.shapes[0])
    return Tiled(tuple(scope.factors), (maps,), ((*maps, WHOLE),), light=True, linear=True, run=_run_view_as_real)


@rule("aten.real", "aten.imag", "aten.conj_physical")
def part(view: View) -> Tiled:
    """One part of each number; partial sums may be taken before or after."""
    return pointwise(view, linear=True)


@rule("aten.complex", "aten.polar", "soap.with_real", "soap.with_imag")
def put_together(view: View) -> Tiled:
    """From real and imaginary parts, or magnitudes and angles."""
    return pointwise(view)


BUTTERFLY = 1.5
"""Operations per complex number and halving: one product and two sums make two numbers (Cooley and Tukey 1965)."""


def _dims(view: View) -> set[int]:
    """The dimensions that a call transforms."""
    rank = len(view.shapes[0])
    dims = view.get("dim")
    if dims is None:  # the last ones that sizes are given for, else all
        sizes = view.get("s")
        dims = range(rank) if sizes is None else range(rank - len(sizes), rank)
    return {int(d) % rank for d in ([dims] if isinstance(dims, int) else dims)}


def _flops(numbers: int, length: int) -> int:
    """Operations of transforms of so many numbers in all, each of this length."""
    return int(BUTTERFLY * numbers * log2(max(2, length)))


@rule(
    "aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_hfft", "aten.fft_ihfft",
    "aten.fft_fft2", "aten.fft_ifft2", "aten.fft_rfft2", "aten.fft_irfft2", "aten.fft_hfft2", "aten.fft_ihfft2",
    "aten.fft_fftn", "aten.fft_ifftn", "aten.fft_rfftn", "aten.fft_irfftn", "aten.fft_hfftn", "aten.fft_ihfftn",
    "aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r",
)  # fmt: skip
def transform(view: View) -> Tiled:
    """A discrete Fourier transform along some dimensions, which may have another size in the result."""
    source, out = view.shapes[0], view.output_shapes[0]
    dims = _dims(view)
    scope = Scope()
    maps = tuple(WHOLE if i in dims else scope.factor(f"d{i}", size) for i, size in enumerate(source))
    numbers, length = max(prod(source), prod(out)), prod(max(source[i], out[i]) for i in dims)
    saved = 2 * view.itemsize * numbers  # padded to another size, and made Hermitian
    return Tiled(tuple(scope.factors), (maps,), (maps,), flops=_flops(numbers, length), saved_bytes=saved)


@rule("aten.fft_fftshift", "aten.fft_ifftshift")
def shifted(view: View) -> Tiled:
    """Halves of dimensions change places, so these are needed whole."""
    shape = view.shapes[0]
    dims = _dims(view)
    scope = Scope()
    maps = tuple(WHOLE if i in dims else scope.factor(f"d{i}", size) for i, size in enumerate(shape))
    return Tiled(tuple(scope.factors), (maps,), (maps,))


@rule("aten.stft")
def short_time(view: View) -> Tiled:
    """Transforms of overlapping frames: a frame reads a window of the signal. Padding at the ends (``center``) needs the whole signal."""
    signal, out = view.shapes[0], view.output_shapes[0]
    length = int(view.get("n_fft"))
    hop = int(view.get("hop_length") or length // 4)
    batched = len(signal) > 1
    scope = Scope()
    samples = (scope.factor("b", signal[0]),) if batched else ()
    frames, time = WHOLE, WHOLE
    if view.get("center") is not True and view.get("align_to_window") is not True:
        frames = scope.factor("t", out[1 + batched])
        time = DimMap(frames.factor, hop, 0, length) if frames.factor is not None else DimMap(None, 0, 0, length)
    spectrum = (*samples, WHOLE, frames, *(WHOLE,) * (len(out) - 2 - batched))
    window = [(WHOLE,)] * (len(view.shapes) - 1)
    numbers = prod(signal[:-1]) * length * out[1 + batched]
    saved = 2 * view.itemsize * (numbers + prod(signal) + length)  # the frames, before and after the window
    return Tiled(
        tuple(scope.factors), ((*samples, time), *window), (spectrum,), flops=_flops(numbers, length), saved_bytes=saved
    )


@rule("aten.istft")
def short_time_back(view: View) -> Tiled:
    """Frames that are added up where they overlap: the whole of each signal is needed."""
    spectrum, out = view.shapes[0], view.output_shapes[0]
    batched = len(spectrum) > 2 if view.values[view.call.operands[0]].dtype.is_complex else len(spectrum) > 3
    scope = Scope()
    samples = (scope.factor("b", spectrum[0]),) if batched else ()
    length = int(view.get("n_fft"))
    numbers = prod(spectrum[:batched]) * length * spectrum[1 + batched]
    window = [(WHOLE,)] * (len(view.shapes) - 1)
    saved = 8 * view.itemsize * (2 * numbers + prod(out) + length * spectrum[1 + batched])
    return Tiled(
        tuple(scope.factors),
        ((*samples, *(WHOLE,) * (len(spectrum) - batched)), *window),
        ((*samples, *(WHOLE,) * (len(out) - batched)),),
        flops=_flops(numbers, length),
        saved_bytes=saved,
    )
