"""Random small modules with complex parts: chains of transforms, contractions, parts, conjugates and writes in place, with parameters."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.tracing.random_programs import in_type

SAMPLES, WIDTH = 4, 6


class RandomPlane(nn.Module):
    """Of (samples, channels, width): real or complex, as the steps leave it. Steps are a function of the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.steps = [rng.choice(sorted(STEPS)) for _ in range(rng.randint(3, 7))]
        self.seeds = [rng.randrange(100) for _ in self.steps]
        self.last = rng.choice(sorted(LOSSES))
        self.real = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in self.steps)
        self.plane = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 2) for _ in self.steps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.real[0]
        for name, seed, real, plane in zip(self.steps, self.seeds, self.real, self.plane, strict=True):
            x = STEPS[name](x, real, plane, seed)
        return LOSSES[self.last](x, y)


def _complex(x: Tensor) -> Tensor:
    return x if x.is_complex() else torch.complex(x, x.sin())


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).sum(-1) if x.is_complex() else x


def _written(x: Tensor, real: Tensor, plane: Tensor, seed: int) -> Tensor:
    x = x.clone()
    x[:, seed % 2, 1:4] = x[:, 1 - seed % 2, :3] * 2 + (plane if x.is_complex() else real)[0, :3]
    return x


def _part_written(x: Tensor, real: Tensor, plane: Tensor, seed: int) -> Tensor:
    x = _complex(x).clone()
    target = x.imag if seed % 2 else x.conj()[:, :, ::2].real
    target.mul_(real[0, : target.shape[-1]])
    return x


def _pairs_written(x: Tensor, real: Tensor, plane: Tensor, seed: int) -> Tensor:
    pairs = _real(x).unflatten(-1, (WIDTH // 2, 2)).clone()
    torch.view_as_complex(pairs)[..., seed % 3] *= plane[0, 0]
    return pairs.flatten(-2)


def _turned(x: Tensor, real: Tensor, plane: Tensor, seed: int) -> Tensor:
    pairs = torch.view_as_complex(_real(x).unflatten(-1, (WIDTH // 2, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(real[0, :3].abs() + 1, real[1, :3])).flatten(-2)


Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]
STEPS: dict[str, Step] = {
    "weigh": lambda x, real, plane, seed: x @ (plane if x.is_complex() else real),
    "contract": lambda x, real, plane, seed: torch.einsum("bcw,wv->bcv", _complex(x), plane) / 2,
    "transform": lambda x, real, plane, seed: torch.fft.fft(x, dim=1 + seed % 2, norm="ortho"),
    "halved": lambda x, real, plane, seed: torch.fft.irfft(torch.fft.rfft(_real(x)) * plane[0, :4], n=WIDTH),
    "both": lambda x, real, plane, seed: torch.fft.ifft2(x, norm="ortho") + plane[0],
    "hermitian": lambda x, real, plane, seed: torch.fft.hfft(_complex(x), n=WIDTH, norm="ortho"),
    "back": lambda x, real, plane, seed: torch.fft.ihfft(_real(x), n=2 * WIDTH - 2, norm="ortho") * plane[0],
    "together": lambda x, real, plane, seed: torch.complex(_real(x) * real[0], _real(x)),
    "polar": lambda x, real, plane, seed: torch.polar(_real(x).abs() + 0.5, _real(x) @ real),
    "magnitude": lambda x, real, plane, seed: (x + 0.1).abs() + x.real,
    "phase": lambda x, real, plane, seed: (_complex(x) * 0.5 + 2).angle() * real[0],
    "conjugate": lambda x, real, plane, seed: x.conj() * (plane[seed % WIDTH] if x.is_complex() else real[0]),
    "adjoint": lambda x, real, plane, seed: (_complex(x).mH @ _complex(x)).mH[:, :3] / 3,
    "bounded": lambda x, real, plane, seed: torch.tanh(x.real) + (1j * torch.sigmoid(x.imag) if x.is_complex() else 0),
    "direction": lambda x, real, plane, seed: (_complex(x) + 0.2).sgn() + x,
    "sums": lambda x, real, plane, seed: x - x.mean(1 + seed % 2, keepdim=True) + x.cumsum(-1) * 0.1,
    "joined": lambda x, real, plane, seed: torch.cat([x[..., :2].flip(1), (x * 2)[..., 2:]], -1),
    "chosen": lambda x, real, plane, seed: torch.where(x.real > 0, x, 0.3 * x),
    "written": _written,
    "part written": _part_written,
    "pairs written": _pairs_written,
    "turned": _turned,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "magnitudes": lambda x, y: (x.abs() - y).square().mean(),
    "distances": lambda x, y: (torch.view_as_real(_complex(x)) - y[..., None]).square().mean(),
    "norm": lambda x, y: torch.linalg.vector_norm(x - y),
    "products": lambda x, y: (x * x.conj()).real.mean() + (x.imag if x.is_complex() else x).mean() * 0.1 + y.mean(),
}


def random_plane(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A module and its inputs."""
    torch.manual_seed(seed)
    module = RandomPlane(seed)
    inputs = (torch.randn(SAMPLES, 3, WIDTH, dtype=dtype), torch.rand(SAMPLES, 3, WIDTH, dtype=dtype))
    return in_type(module, dtype), inputs
