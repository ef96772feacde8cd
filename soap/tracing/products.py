"""Products of a tile that are not computed again while the rest of it runs a second time (``recomputation.LIGHT``).

A tile runs with autograd both times, so that it makes the same calls. The first run notes what its products have made, and keeps it where
something is saved behind it that may follow from it, as by attention. In the second run these calls return that instead of computing it
again; or, where nothing follows but the outputs, which the tile has kept, memory of that shape that nobody reads. Autograd gets what it
saves of their operands, which were made anew. It is the way of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, for one
tile at a time and without its global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from soap.errors import RuntimeFailure

NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""What calls of ``recomputation.PRODUCTS`` come down to below autograd."""

CALLS = frozenset(getattr(torch.ops.aten, name) for name in NAMES if hasattr(torch.ops.aten, name))

Made = Sequence[Any]
"""For each product of a tile's run, in order, what it has made, or ``Blank``."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor whose values nobody reads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blank:
        """One like this tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def made(self) -> torch.Tensor:
        """The tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


def is_product(func: Any) -> bool:
    """Whether a call below autograd is a product."""
    return func.overloadpacket in CALLS


def first_run(run: Callable[[], Sequence[torch.Tensor]], *, whole: bool = False) -> tuple[list[torch.Tensor], Made | None]:
    """(outputs of a tile, without autograd's graph; what a second run needs of its products). ``whole``: None, all is computed again."""
    products = _Noting()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(products.saved, _never), nullcontext() if whole else products:
        outputs = [own.detach() for own in run()]
    return outputs, None if whole else products.needed()


def second_run(run: Callable[[], Sequence[torch.Tensor]], made: Made | None) -> Sequence[torch.Tensor]:
    """The tile's outputs again, with autograd's graph. Their values may be anything. ``made``: see ``first_run``."""
    with torch.enable_grad(), nullcontext() if made is None else _Returning(made):
        return run()


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what products make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[Any] = []
        self._needed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_product(func):
            self._made.append(_apart(result))
        return result

    def saved(self, _: torch.Tensor) -> None:
        """Note that autograd saves something, which may follow from all products so far. Nothing is saved of a first run."""
        self._needed = len(self._made)

    def needed(self) -> Made:
        """What each product has made."""
        blank = (tree_map_only(torch.Tensor, Blank.of, own) for own in self._made[self._needed :])
        return [*self._made[: self._needed], *blank]


class _Returning(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns what products have made before, in place of computing it."""

    def __init__(self, made: Made) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: Iterator[Any] = iter(made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_product(func):
            return func(*args, **(kwargs or {}))
        found = next(self._made, self)
        if found is self:
            raise RuntimeFailure(f"a second run calls {func} more often than the first one did: this is a defect, please report it")
        return _apart(tree_map_only(Blank, Blank.made, found))


def _apart(made: Any) -> Any:
    """The same values in tensors of their own, so that autograd may note each time where they come from."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, made)


def _never(_: Any) -> torch.Tensor:
    raise RuntimeFailure("a backward pass of a first run: this is a defect, please report it")
