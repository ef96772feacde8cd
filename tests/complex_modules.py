"""Small training models that compute with complex numbers, and batches for them: all of these can be trained plainly, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from soap.tracing.export import export_model
from tests.kept_models import ModelFiles

Batch = tuple[torch.Tensor, ...]
SAMPLES = 6


class Spectral(nn.Module):
    """A linear layer, its Fourier transform, and a loss of the magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.fft.rfft(self.lin(x)).abs() - y).pow(2).mean()


class Mixing(nn.Module):
    """FNet's layer: the real part of a transform over positions and features in place of attention (Lee-Thorp et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 9)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + torch.fft.fft2(x, dim=(1, 2)).real)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        x = x + torch.fft.fftn(x, dim=(1, 2)).real
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Operator(nn.Module):
    """A Fourier neural operator (Li et al. 2021): complex weights for the lowest frequencies, written into zeros, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.head = nn.Linear(2, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 1)
        self.modes = 3
        self.weight = nn.Parameter(torch.randn(4, 4, self.modes, dtype=torch.complex64) / 4)
        self.bias = nn.Parameter(torch.randn(4, 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.lift(x).transpose(1, 2)
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weight) + self.bias
        x = torch.tanh(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))
        return (self.head(x.transpose(1, 2)).squeeze(-1) - y).square().mean()


class ShortTime(nn.Module):
    """A short-time loss of magnitudes and logarithms, beside one in time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 3, 5, padding=2), nn.Tanh(), nn.Conv1d(3, 1, 5, padding=2))
        self.register_buffer("window", torch.hann_window(8))

    def _magnitudes(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stft(x, 8, 4, window=self.window, return_complex=True).abs()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.net(x.unsqueeze(1)).squeeze(1)
        mine, wanted = self._magnitudes(found), self._magnitudes(y)
        return (mine - wanted).abs().mean() + (mine.clamp(min=1e-3).log() - wanted.clamp(min=1e-3).log()).square().mean()


class Rotary(nn.Module):
    """Attention whose positions are rotations in the plane, by ``polar`` and views as complex numbers (Su et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.out, self.head = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 9)
        angles = torch.outer(torch.arange(7.0), 100.0 ** -torch.linspace(0, 1, 2))
        self.register_buffer("angles", angles)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turns = torch.polar(torch.ones_like(self.angles), self.angles)
        return torch.view_as_real(pairs * turns).flatten(-2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Plane(nn.Module):
    """Layers of complex weights on numbers put together by ``torch.complex``; a loss of magnitudes, phases and inner products."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Linear(5, 6), nn.Linear(5, 6)
        self.first = nn.Linear(6, 8, dtype=torch.complex64)
        self.second = nn.Linear(8, 4, bias=False, dtype=torch.complex64)
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.first(torch.complex(self.real(x), self.imag(x)))
        z = torch.complex(torch.relu(z.real), torch.tanh(z.imag))
        z = self.second(z) * self.scale.conj() + 0.5j
        products = torch.einsum("bi,bj->ij", z, z.conj()) / len(z)
        return (z.abs() - y).square().mean() + 0.1 * (products @ products.mH).real.diagonal().sum() + 0.1 * z.sgn().imag.mean()


class InPlace(nn.Module):
    """Complex inputs, parts that are written to in place, conjugated gradients, and a tied complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64) / 3)
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = z @ self.weight
        z.real.add_(self.shift)
        z.imag[:, 1:3] = self.shift[:2].sin()
        pairs = torch.view_as_real(z)
        pairs[:, 4, 0] *= 2
        z = (z.conj() @ self.weight.H).resolve_conj()
        out = torch.fft.hfft(z, n=6) + torch.fft.ihfft(y).abs().sum()
        return (out - y).square().mean()


@dataclass(frozen=True)
class Example:
    """A module and batches for it: (number of samples, step) -> tensors."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]


def _floats(*shapes: tuple[int, ...]) -> Callable[[int, int], Batch]:
    def batch(samples: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return tuple(torch.randn(samples, *shape, generator=generator) for shape in shapes)

    return batch


def _tokens(samples: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 9, (samples, 7), generator=generator) for _ in range(2))


def _complex(samples: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 5, dtype=torch.complex64, generator=generator), torch.randn(samples, 6, generator=generator)


EXAMPLES = {
    "spectral": Example(Spectral, _floats((6,), (5,))),
    "mixing": Example(Mixing, _tokens),
    "operator": Example(Operator, _floats((10, 2), (10,))),
    "short time": Example(ShortTime, _floats((32,), (32,))),
    "rotary": Example(Rotary, _tokens),
    "plane": Example(Plane, _floats((5,), (4,))),
    "in place": Example(InPlace, _complex),
}
WITH_COMPLEX_PARAMETERS = ("operator", "plane", "in place")


def module_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module with its weights; complex ones have both parts in the type."""
    torch.manual_seed(5)
    module = EXAMPLES[name].make().train()
    return module._apply(lambda tensor: converted(tensor, dtype))


def batches(name: str, steps: int, dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> list[Batch]:
    """One for each step."""
    return [tuple(converted(t, dtype) for t in EXAMPLES[name].batch(samples, step)) for step in range(steps)]


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the type, if it holds no whole numbers."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


FILES = ModelFiles("complex", lambda name, path: export_model(module_of(name), batches(name, 1)[0], path=path))

OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=0.01),
}


@dataclass
class Trained:
    """Losses and gradients of each step (as they are after clipping), and the state after the last."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


def train_plainly(module: nn.Module, steps: Sequence[Batch], optimizer: str = "sgd", clip_norm: float | None = None) -> Trained:
    """What anybody would write for one process. The module is changed."""
    trained = [p for p in module.parameters() if p.requires_grad]
    updates = OPTIMIZERS[optimizer](trained)  # type: ignore[arg-type]
    losses, gradients = [], []
    for batch in steps:
        updates.zero_grad()
        loss = module(*batch)
        loss.backward()
        for p in trained:  # which torch's own optimizers cannot read as pairs where they are only marked as conjugated
            p.grad = None if p.grad is None else p.grad.resolve_conj()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        updates.step()
        losses.append(float(loss.detach()))
    return Trained(losses, gradients, {name: tensor.clone() for name, tensor in module.state_dict().items()})


def worst(found: Trained, expected: Trained) -> float:
    """Largest difference of any loss, gradient, parameter or buffer, relative to 1 or the tensor's largest element."""
    assert found.state.keys() == expected.state.keys()
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(found.losses, expected.losses, strict=True)]
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        pairs += [(mine[name], theirs[name]) for name in theirs]
    pairs += [(found.state[name], expected.state[name]) for name in expected.state]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / max(1.0, float(b.abs().max()))) for a, b in pairs)
