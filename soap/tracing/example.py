"""A training model with the arguments and the loss that it is exported with, as eager PyTorch runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from soap.errors import ModelError
from soap.tracing.containers import adapted, plain_arguments, plainly
from soap.tracing.loss_output import loss_position

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Example:
    """``loss``: makes the scalar from the module's output; None if the module does."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None

    @cached_property
    def module(self) -> nn.Module:
        """The model with all its state by the program's names, including the state of a loss that is a module."""
        return self.model if self.loss is None else adapted(self.model, self.loss)

    @cached_property
    def _plain(self) -> tuple[Any, Any]:
        return plain_arguments(self.args, self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the arguments."""
        return [leaf for leaf in torch.utils._pytree.tree_leaves(self._plain[0]) if isinstance(leaf, torch.Tensor)]

    def _arguments(self, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each tensor changed."""
        plain, rebuild = self._plain
        changed: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map_only(torch.Tensor, change, plain)
        return changed if rebuild is None else rebuild(changed)

    def output(self) -> Any:
        """The model's output for copies of the arguments."""
        args, kwargs = self._arguments(_copied)
        return self.model(*args, **kwargs)

    def of_other_values(self) -> Example:
        """This example with other arguments that the model takes as well, unless it looks at what only these had in common."""
        args, kwargs = self._arguments(_others)
        return replace(self, args=args, kwargs=kwargs)

    def loss_of(self, output: Any, exported: ExportedProgram) -> torch.Tensor:
        """The scalar loss in what the model returns."""
        leaves = [self.loss(output)] if self.loss is not None else torch.utils._pytree.tree_leaves(plainly(output, "the output")[0])
        found = leaves[0 if self.loss is not None else loss_position(exported)]
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ModelError(f"the loss is a {type(found).__name__}; expected a scalar tensor")
        return found.reshape(())

    def widened(self) -> Example | None:
        """The same in float64, with copies of all values and hooks on parameters; None if hooks take gradients as soon as they come."""
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self.module.parameters()):
            return None
        model, loss = copy.deepcopy((self.model, self.loss if isinstance(self.loss, nn.Module) else None))
        wide = replace(self, model=model.double(), loss=self.loss if loss is None else loss.double())
        for own, other in zip(self.module.parameters(), wide.module.parameters(), strict=True):
            for hook in (getattr(own, "_backward_hooks", None) or {}).values():
                other.register_hook(hook)  # type: ignore[no-untyped-call]
        args, kwargs = self._arguments(_wide)
        return replace(wide, args=args, kwargs=kwargs)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _others(tensor: torch.Tensor) -> torch.Tensor:
    """Smaller numbers; whole ones in another order, as good indices, except in one dimension: lengths and borders have an order."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.detach() * 0.75
    return tensor.flip(-1) if tensor.dim() > 1 and tensor.dtype is not torch.bool else tensor.clone()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
