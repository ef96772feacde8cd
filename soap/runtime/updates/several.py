"""Several optimizers as one, for example Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Several(torch.optim.Optimizer):
    """An optimizer that shares the parameter groups and the state of all its ``members``."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for member in members for group in member.param_groups], {})
        self.members = tuple(members)
        for member in members:
            self.state.update(member.state)
        self._share([len(member.param_groups) for member in members])

    @property
    def name(self) -> str:
        """The members' class names, joined by ``+``."""
        return "+".join(type(member).__name__ for member in self.members)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of each member. ``closure`` is not supported: gradients exist already."""
        assert closure is None
        for member in self.members:
            member.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give members their part of the loaded state."""
        super().__setstate__(state)
        counts = [len(member.param_groups) for member in self.members]
        self._share(counts)
        for member in self.members:
            member.__setstate__({"state": self.state, "param_groups": member.param_groups})

    def _share(self, counts: Sequence[int]) -> None:
        first = 0
        for member, count in zip(self.members, counts, strict=True):
            member.param_groups = self.param_groups[first : first + count]
            member.state = self.state
            first += count
