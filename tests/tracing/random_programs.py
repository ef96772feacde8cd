"""Random small modules of what frameworks get wrong: complex parts, writes in place, constants that the forward pass makes, and all in
float32, float64 or bfloat16. ``draw_module`` makes one from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, STEPS, WIDTH = 4, 3, 4
"""Every value has this shape: samples, steps, features."""

Move = Callable[["Program", int, Tensor, Tensor], Tensor]
"""(module, number of the move, value, another value) -> value. Parameters of the move are ``module.p(number, …)``."""


class Program(nn.Module):
    """Moves in a row; each reads an earlier value, and another one beside it."""

    def __init__(self, moves: list[tuple[str, int, int]], complex_parameter: bool) -> None:
        super().__init__()
        self.moves, self.complex_parameter = moves, complex_parameter
        for i in range(len(moves)):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5))
            if complex_parameter and moves[i][0] in COMPLEX:
                self.register_parameter(f"c{i}", nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        values = [x]
        for i, (name, first, second) in enumerate(self.moves):
            value = MOVES[name](self, i, values[first % len(values)], values[second % len(values)])
            values.append(torch.tanh(value).to(x.dtype))
        told = self.head(values[-1] + values[len(values) // 2])
        return F.cross_entropy(told.mean(1).float(), y) + values[-1].gather(2, ids[..., None] % WIDTH).float().pow(2).mean()

    def weight(self, number: int) -> Tensor:
        return self.get_parameter(f"w{number}")

    def spectrum(self, number: int, like: Tensor) -> Tensor:
        """A complex factor for each frequency: a parameter, or made of real ones."""
        if self.complex_parameter:
            return self.get_parameter(f"c{number}").to(like.dtype)
        w = wide(self.weight(number))
        return torch.complex(w[0, : WIDTH // 2 + 1], w[1, : WIDTH // 2 + 1]).to(like.dtype)


def wide(x: Tensor) -> Tensor:
    """Complex numbers have parts of 32 or 64 bits."""
    return x.float() if x.dtype is torch.bfloat16 else x


COMPLEX: dict[str, Move] = {
    "filter": lambda m, i, x, z: torch.fft.irfft(m.spectrum(i, f := torch.fft.rfft(wide(x))) * f, n=WIDTH),
    "spectrum": lambda m, i, x, z: torch.fft.fft2(wide(x)).abs() / WIDTH,
    "mixing": lambda m, i, x, z: torch.fft.fft(torch.fft.fft(wide(x), dim=-1), dim=-2).real,
    "rotation": lambda m, i, x, z: _rotated(wide(x), wide(m.weight(i))),
    "parts": lambda m, i, x, z: (c := torch.complex(wide(x), wide(z))).real * c.imag + (c * c.conj()).real,
    "product": lambda m, i, x, z: (
        torch.einsum("btw,wv->btv", torch.complex(wide(x), wide(z)), torch.complex(w := wide(m.weight(i)), w.t())).imag
    ),
    "roots": lambda m, i, x, z: (torch.complex(wide(x), torch.ones_like(wide(x))).exp() / torch.complex(w := wide(z).abs() + 1, w)).real,
}


def _rotated(x: Tensor, w: Tensor) -> Tensor:
    """Rotary positions."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    angles = torch.outer(torch.arange(STEPS), w[0, :2]).to(x.dtype)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def _rows(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    h = x.clone()
    h[:, 1] = z[:, 0] * 2
    h[:, :, 1:3].mul_(0.5)
    return h


def _masked(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    h = x + 0
    h.masked_fill_(z > 0.3, 0.25)
    h[z < -0.5] = 1.0
    return h


def _through_views(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    h = x.clone(memory_format=torch.contiguous_format)
    h.transpose(1, 2)[:, 1:].add_(z.transpose(1, 2)[:, :-1], alpha=0.5)
    h.view(BATCH, -1)[:, ::2].neg_()
    return h


def _written(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    out = torch.zeros(BATCH, STEPS, WIDTH).to(x.dtype)
    for t in range(STEPS):
        out[:, t] = x[:, STEPS - 1 - t] @ m.weight(i)
    out[..., -1] += z[..., 0]
    return out


def _indexed(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    h = torch.empty_like(x).copy_(x)
    h.index_add_(1, torch.tensor([0, 2, 0]), z)
    return h.index_fill_(2, torch.tensor([1]), 0.5)


IN_PLACE: dict[str, Move] = {
    "rows": _rows,
    "masked": _masked,
    "views": _through_views,
    "written": _written,
    "indexed": _indexed,
    "chained": lambda m, i, x, z: (x @ m.weight(i)).add_(z).mul_(2.0).relu_(),
}


def _causal(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    mask = torch.full((STEPS, STEPS), float("-inf")).triu(1)
    return ((x @ m.weight(i)) @ z.transpose(1, 2) + mask).softmax(-1).to(x.dtype) @ x


def _counted(m: Program, i: int, x: Tensor, z: Tensor) -> Tensor:
    which = (x.detach()[..., 0] > 0).long().flatten()
    counts = torch.zeros(2).scatter_add(0, which, torch.ones(BATCH * STEPS))
    return z * (counts / BATCH)[which].view(BATCH, STEPS, 1)


CONSTANTS: dict[str, Move] = {
    "places": lambda m, i, x, z: x * (torch.arange(WIDTH) / 8) + torch.linspace(0, 1, STEPS)[:, None],
    "causal": _causal,
    "counted": _counted,
    "identity": lambda m, i, x, z: x @ (m.weight(i) + torch.eye(WIDTH).to(x.dtype)),
    "literals": lambda m, i, x, z: torch.where(x > torch.tensor(0.1), x, z * torch.tensor([1.0, 2.0, 0.5, 0.25]).to(x.dtype)),
    "hot": lambda m, i, x, z: x + F.one_hot(x.detach().argmax(-1), WIDTH).float() * 0.5,
}
USUAL: dict[str, Move] = {
    "linear": lambda m, i, x, z: F.gelu(F.linear(x, m.weight(i))),
    "norm": lambda m, i, x, z: F.layer_norm(x, (WIDTH,), m.weight(i)[0]) + z,
    "attention": lambda m, i, x, z: F.scaled_dot_product_attention(x @ m.weight(i), z, x),
    "cumulated": lambda m, i, x, z: x.cumsum(1) * z.mean(0, keepdim=True),
}
MOVES: dict[str, Move] = {**COMPLEX, **IN_PLACE, **CONSTANTS, **USUAL}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module in a floating-point type, complex parameters with parts of it, of at least 32 bits: ``module.to(bfloat16)`` would leave
    them as they are, ``module.to(float64)`` refuse them."""
    plane = torch.complex128 if dtype is torch.float64 else torch.complex64
    return module._apply(lambda t: t.to(plane if t.is_complex() else dtype))


def draw_module(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module in one of three types, with at least one move of each family, and a batch for it."""
    rng = random.Random(seed)
    names = [rng.choice(sorted(family)) for family in (COMPLEX, IN_PLACE, CONSTANTS)] + rng.choices(sorted(MOVES), k=rng.randint(0, 3))
    rng.shuffle(names)
    torch.manual_seed(seed)
    dtype = rng.choice(DTYPES)
    module = Program([(name, rng.randrange(9), rng.randrange(9)) for name in names], complex_parameter=rng.random() < 0.5)
    x = torch.randn(BATCH, STEPS, WIDTH).to(dtype)
    return in_type(module, dtype), (x, torch.randint(9, (BATCH, STEPS)), torch.randint(5, (BATCH,)))
