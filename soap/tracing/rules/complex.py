"""Complex numbers: their parts, putting them together, and conjugation.

Torch may only mark a tensor as conjugated or negated, which its memory does not show. Arithmetic respects the marks. Code that looks at
memory (a view as real numbers, sending) has to write the numbers out first.
"""

from __future__ import annotations

import torch

from soap.model.graph import WHOLE
from soap.tracing.calls import as_complex, as_real
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import pointwise, rule


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
