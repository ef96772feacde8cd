"""The values of one step on one rank that outlive their segment. Each is dropped after its last use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from soap.plan.running.activity import ValueKey

NOTHING: Mapping[ValueKey, int] = MappingProxyType({})
"""No readers."""


class ValueStore:
    """Leaves: detached tensors that segments start from. Autograd leaves gradients on those that require one.

    ``readers``: how often the forward pass reads each value. After the last reader it is dropped, unless it waits for a gradient or for
    ``second_readers``: how often second runs read it. ``dropped``: holdings that wait for neither, because they are made again.
    ``takers``: how often its gradient is then taken (default 1). After the last taker, value and gradient are dropped.
    """

    def __init__(
        self,
        readers: Mapping[ValueKey, int],
        takers: Mapping[ValueKey, int],
        second_readers: Mapping[ValueKey, int] = NOTHING,
        dropped: Collection[int] = (),
    ) -> None:
        self._readers, self._takers = dict(readers), dict(takers)
        self._second_readers, self._dropped = dict(second_readers), dropped
        self._leaves: dict[ValueKey, torch.Tensor] = {}

    def __contains__(self, key: ValueKey) -> bool:
        return key in self._leaves

    def __len__(self) -> int:
        return len(self._leaves)

    def __getitem__(self, key: ValueKey) -> torch.Tensor:
        return self._leaves[key]

    def __setitem__(self, key: ValueKey, leaf: torch.Tensor) -> None:
        self._leaves[key] = leaf

    def has_readers(self, key: ValueKey) -> bool:
        """Whether anything on this rank reads a value."""
        return key in self._readers

    def leave(self, key: ValueKey) -> bool:
        """Note that a reader has read the value, whether it is stored here or not. True if it was the last reader."""
        left = self._readers[key] = self._readers[key] - 1
        if left:
            return False
        if key[0] == "holding" and key[1] in self._dropped:
            self._leaves.pop(key, None)
        elif key not in self._second_readers:
            self._drop_unless_it_waits(key)
        return True

    def reads_again(self, key: ValueKey) -> bool:
        """Whether a second run reads a value that is not here: so it has to be made again for it."""
        return key in self._second_readers and key not in self._leaves

    def leave_again(self, key: ValueKey) -> bool:
        """``leave`` for a reader's second run."""
        left = self._second_readers[key] = self._second_readers[key] - 1
        if left:
            return False
        self._drop_unless_it_waits(key)
        return True

    def _drop_unless_it_waits(self, key: ValueKey) -> None:
        """Drop a value unless it waits for a gradient."""
        leaf = self._leaves.get(key)
        if leaf is not None and not leaf.requires_grad:
            del self._leaves[key]

    def gradient(self, key: ValueKey) -> torch.Tensor | None:
        """The gradient that autograd has left on a value; None stands for zeros."""
        leaf = self._leaves.get(key)
        return None if leaf is None else leaf.grad

    def taken(self, key: ValueKey) -> None:
        """Note that a taker has used the gradient; drop the value after the last one."""
        left = self._takers[key] = self._takers.get(key, 1) - 1
        if left == 0 and (leaf := self._leaves.pop(key, None)) is not None:
            leaf.grad = None  # an autograd graph that waits for its weight gradients still holds the leaf
