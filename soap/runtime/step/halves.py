"""Segments whose backward pass is in two: input gradients first, weight gradients in an action of their own (``strategy.division``).

Autograd makes the gradients of the leaves that it is asked for, and goes through no node that leads to none of them. What it has saved
stays for the second half, and so do the gradients of the segment's outputs; the outputs themselves do not, unless it has saved them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from soap.tracing.given import given


class Halves:
    """Of one step. ``parameters``: the leaves of parameters; all others are values."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = frozenset(map(id, parameters))
        self._left: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def inputs(self, number: int, gradients: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Make the gradients of a segment's inputs. ``gradients``: of its outputs, in their order."""
        first, second = (given(list(gradients), outputs) for _ in range(2))
        leaves = list(_leaves(first))
        values = [leaf for leaf in leaves if id(leaf) not in self._parameters]
        weights = [leaf for leaf in leaves if id(leaf) in self._parameters]
        if weights:
            self._left[number] = second, weights
        if values:
            torch.autograd.backward(first, retain_graph=bool(weights), inputs=values)

    def weights(self, number: int) -> None:
        """Make the gradients of its parameters, and free what was kept for them. Nothing, if no gradient has reached it."""
        if number in self._left:
            root, leaves = self._left.pop(number)
            torch.autograd.backward(root, inputs=leaves)


def _leaves(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves from which a tensor was computed, and that take gradients, each once."""
    todo = [root.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for other, _ in node.next_functions:
            if other not in seen:
                seen.add(other)
                todo.append(other)
