"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch

from soap.tracing.rules.complex import with_imag, with_real
from tests.tracing.drawing import Draw, Drawn, call, draws


@draws("view_as_complex", "view_as_real")
def views(d: Draw, name: str) -> Drawn:
    shape = d.shape(0, 3)
    if name == "aten.view_as_real":
        return call(name, d.complex(*shape))
    if d.yes():
        return call(name, d.floats(*shape, 2))
    return Drawn(torch.ops.aten.view_as_complex.default, (d.floats(*shape, 2),))


@draws("real", "imag", "conj_physical")
def parts(d: Draw, name: str) -> Drawn:
    return call(name, d.complex(*d.shape(0, 3)))


@draws("complex", "polar", "soap.with_real", "soap.with_imag")
def together(d: Draw, name: str) -> Drawn:
    shape = d.shape(1, 3)
    if name in ("aten.complex", "aten.polar"):
        return call(name, d.positive(*shape), d.floats(*d.narrower(shape)))
    return Drawn({"soap.with_real": with_real, "soap.with_imag": with_imag}[name], (d.complex(*shape), d.floats(*shape)))


_FROM_REAL = ("rfft", "ihfft")
_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


@draws(*(f"fft_{kind}" for kind in _KINDS))
def transforms(d: Draw, name: str) -> Drawn:
    shape = tuple(n + 1 for n in d.shape(1, 3))
    options: dict[str, Any] = {"norm": d.some(None, "ortho", "forward", "backward")}
    if d.yes():
        options["dim"] = d.dim(shape)
    if d.yes(0.4):
        options["n"] = d.size(2, 8)
    return call(name, _operand(d, name, shape), **options)


@draws(*(f"fft_{kind}{of}" for kind in _KINDS for of in "2n"))
def of_several(d: Draw, name: str) -> Drawn:
    shape = tuple(n + 1 for n in d.shape(2, 4))
    options: dict[str, Any] = {"norm": d.some(None, "ortho")}
    if d.yes():
        options["dim"] = d.random.sample(range(len(shape)), 2)
    if d.yes(0.4):
        options["s"] = [d.size(2, 6), d.size(2, 6)]
    return call(name, _operand(d, name, shape), **options)


def _operand(d: Draw, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Real numbers where only these are taken; either where complex ones need not be."""
    kind = name.removeprefix("aten.fft_").rstrip("2n")
    return d.floats(*shape) if kind in _FROM_REAL or (kind in ("fft", "ifft") and d.yes(0.3)) else d.complex(*shape)


@draws("_fft_c2c", "_fft_r2c", "_fft_c2r")
def kernels(d: Draw, name: str) -> Drawn:
    shape = tuple(n + 1 for n in d.shape(2, 4))
    dims, norm = d.dims(shape), d.some(0, 1, 2)
    if name == "aten._fft_r2c":
        return call(name, d.floats(*shape), dims, norm, d.yes())
    return call(name, d.complex(*shape), dims, norm, d.yes() if name == "aten._fft_c2c" else 2 * (shape[dims[-1]] - 1))


@draws("fft_fftshift", "fft_ifftshift")
def shifted(d: Draw, name: str) -> Drawn:
    shape = d.shape(2, 3)
    return call(name, d.complex(*shape) if d.yes() else d.floats(*shape), d.some(d.dim(shape), d.dims(shape)))


@draws("stft")
def short_time(d: Draw, name: str) -> Drawn:
    length = d.size(4, 8)
    shape = (*((d.size(),) if d.yes(0.8) else ()), length * 2 + d.size(0, 9))
    x = d.floats(*shape) if d.yes(0.7) else d.complex(*shape)
    options: dict[str, Any] = {"hop_length": d.some(1, 2, 3, length), "normalized": d.yes(), "return_complex": True}
    if d.yes(0.7):
        options |= {"window": d.positive(length - 2), "win_length": length - 2}
    if d.yes(0.2):
        options |= {"return_complex": False}
    if not x.is_complex():
        options["onesided"] = d.yes()
    return call(name, x, length, which=d.some("default", "center"), **options)


@draws("istft")
def short_time_back(d: Draw, name: str) -> Drawn:
    length, frames = 2 * d.size(2, 4), d.size(3, 5)
    x = d.complex(*((d.size(),) if d.yes(0.8) else ()), length // 2 + 1, frames)
    options: dict[str, Any] = {"window": d.positive(length)} if d.yes() else {}
    return call(name, x, length, d.some(1, length // 2), **options)
