"""In which order devices run the passes of micro-batches. Pure data.

A *chunk* is a set of operators. An *action* is the forward (``F``) or backward (``B``) pass of one chunk for one micro-batch. All devices
follow one list of actions, each for its own tiles; inside an action tiles run in the order of the model, backward in the reverse. The lists
of several device groups, each with chunks of its own, are one list as soon as actions come behind those that they wait for
(``soap.plan.scheduling``).

An operator that is not cut runs forward with the first micro-batch, and backward with the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from soap.errors import StrategyError
from soap.model.micro_batches import MicroBatches

_BOTH: tuple[Literal["F"], Literal["B"]] = ("F", "B")


class PassAction(NamedTuple):
    """The pass of one chunk for one micro-batch."""

    kind: Literal["F", "B"]
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PassOrder:
    """``chunks``: by operator, its chunk. ``actions``: every action once. StrategyError if an action is missing, or comes before one for
    which it waits."""

    cut: MicroBatches
    chunks: tuple[int, ...]
    actions: tuple[PassAction, ...]

    def __post_init__(self) -> None:
        wanted = {PassAction(kind, chunk, m) for kind in _BOTH for chunk in {*self.chunks} for m in range(self.cut.count)}
        if len(self.actions) != len(wanted) or wanted != {*self.actions}:
            odd = sorted(map(str, wanted ^ {*self.actions})) or ["one occurs twice"]
            raise StrategyError(f"schedule of {len(self.actions)} actions; expected each of {len(wanted)} once: {', '.join(odd[:3])}")
        for before, after, why in self._needs():
            if self.ranks[before] >= self.ranks[after]:
                raise StrategyError(f"schedule runs {after} before {before}; expected the reverse: {why}")

    @cached_property
    def ranks(self) -> Mapping[PassAction, int]:
        """Action -> its place in the list."""
        return {action: place for place, action in enumerate(self.actions)}

    def rank(self, kind: Literal["F", "B"], position: int, part: int) -> int:
        """The place of the action to which a pass of a part of an operator belongs. ``part``: 0 if the operator is not cut."""
        if self.cut.parts(position) == 1:
            part = 0 if kind == "F" else self.cut.count - 1
        return self.ranks[PassAction(kind, self.chunks[position], part)]

    def _needs(self) -> Iterator[tuple[PassAction, PassAction, str]]:
        """(action, action that waits for it, why)."""
        cut, last = self.cut, self.cut.count - 1
        for chunk in {*self.chunks}:
            for m in range(cut.count):
                yield PassAction("F", chunk, m), PassAction("B", chunk, m), "a backward pass follows its forward pass"
                for kind in _BOTH if m else ():
                    yield PassAction(kind, chunk, m - 1), PassAction(kind, chunk, m), "micro-batches pass a chunk in their order"
        for (maker, reader), barrier in self._edges().items():
            why = f"chunk {reader} reads chunk {maker}"
            for m in range(cut.count if maker != reader else 0):
                yield PassAction("F", maker, m), PassAction("F", reader, m), why
                yield PassAction("B", reader, m), PassAction("B", maker, m), why
            if barrier:
                why = f"operator {barrier!r} needs all micro-batches at once, so let all of them pass it together (GPipe)"
                yield PassAction("F", maker, last), PassAction("F", reader, 0), why
                yield PassAction("B", reader, last), PassAction("B", maker, 0), why

    def _edges(self) -> dict[tuple[int, int], str]:
        """(chunk, chunk that reads it) -> the first operator that is a barrier between them; "" if none is."""
        graph, found = self.cut.graph, dict[tuple[int, int], str]()
        for reader, op in enumerate(graph.operators):
            for operand in op.inputs:
                if operand.tensor in graph.producers:
                    maker, output = graph.producers[operand.tensor]
                    pair = self.chunks[maker], self.chunks[reader]
                    barrier = "" if self.cut.keeps_apart(maker, output, reader, operand) else op.name
                    found[pair] = found.get(pair, "") or barrier
        return found

