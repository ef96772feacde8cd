"""Complex numbers inside: transforms, complex weights, rotations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.kinds.registry import Built, Lossy, kind, labels, weight


@kind()
def spectral_loss() -> Built:
    """Magnitudes of a Fourier transform."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        return (torch.fft.rfft(m.net(x)).abs() - y).pow(2).mean()

    return Built(Lossy(run, net=nn.Linear(6, 8)), (torch.randn(8, 6), torch.randn(8, 5)))


@kind()
def several_resolutions() -> Built:
    """A vocoder's loss: short-time spectra of two window lengths."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        told = torch.tanh(m.net(x)).squeeze(1)
        total = 0.0
        for size in (8, 12):
            a, b = (torch.stft(s, size, size // 2, window=torch.hann_window(size), return_complex=True).abs() for s in (told, y))
            total = total + (a - b).norm() / b.norm() + F.l1_loss((a + 1e-5).log(), (b + 1e-5).log())
        return total

    return Built(Lossy(run, net=nn.Conv1d(2, 1, 3, padding=1)), (torch.randn(4, 2, 24), torch.randn(4, 24)))


@kind()
def fourier_mixing() -> Built:
    """FNet: the real part of a transform along features and positions in place of attention."""

    def run(m: Lossy, ids: Tensor, y: Tensor) -> Tensor:
        x = m.words(ids)
        x = m.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return F.cross_entropy(m.head(x + torch.relu(m.mix(x))).flatten(0, 1), y.flatten())

    parts = {"words": nn.Embedding(9, 6), "norm": nn.LayerNorm(6), "mix": nn.Linear(6, 6), "head": nn.Linear(6, 9)}
    return Built(Lossy(run, **parts), (labels(9, 4, 5), labels(9, 4, 5)))


@kind()
def complex_layers() -> Built:
    """A net of complex weights made from real halves; the loss of phases and magnitudes."""

    def run(m: Lossy, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        z = torch.complex(a, b) @ torch.complex(m.real, m.imag) + torch.complex(m.shift[0], m.shift[1])
        z = torch.complex(torch.tanh(z.real), torch.tanh(z.imag))
        z = z * z.conj().roll(1, -1)
        return F.mse_loss(z.abs(), y) + 0.1 * (1 - torch.cos(z.angle() - y)).mean()

    module = Lossy(run, real=weight(5, 4), imag=weight(5, 4), shift=weight(2, 4))
    return Built(module, (torch.randn(8, 5), torch.randn(8, 5), torch.rand(8, 4)))


@kind()
def long_convolution() -> Built:
    """A convolution as long as the sequence, by transforms of twice its length (Hyena, S4's kernel mode)."""

    def run(m: Lossy, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[1]
        kernel = m.kernel * torch.exp(-m.rate.exp() * torch.arange(n)[:, None])
        mixed = torch.fft.irfft(torch.fft.rfft(x, 2 * n, dim=1) * torch.fft.rfft(kernel, 2 * n, dim=0), 2 * n, dim=1)[:, :n]
        return F.mse_loss(m.out(mixed * torch.sigmoid(m.gate(x))), y)

    parts = {"kernel": weight(6, 4), "rate": weight(4), "gate": nn.Linear(4, 4), "out": nn.Linear(4, 2)}
    return Built(Lossy(run, **parts), (torch.randn(5, 6, 4), torch.randn(5, 6, 2)))
