"""Repeated layers, by names: other trainers put whole layers into stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from soap.model.graph import OperatorGraph
from soap.strategy.megatron import operator_work

_LAYER = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)(?P<number>\d+)(?:\.|$)")


class Layers:
    """``names``: of the layers, such as ``blocks.0``, in the order of the graph. ``of``: by operator, its layer; None if it is in none."""

    def __init__(self, graph: OperatorGraph) -> None:
        found = [_layer(op.name) for op in graph.operators]
        repeated = {prefix for prefix, count in Counter(prefix for prefix, _ in set(filter(None, found))).items() if count > 1}
        own = [None if one is None or one[0] not in repeated else f"{one[0]}{one[1]}" for one in found]
        self.names: tuple[str, ...] = tuple(dict.fromkeys(name for name in own if name is not None))
        place = {name: number for number, name in enumerate(self.names)}
        self.of: tuple[int | None, ...] = tuple(None if name is None else place[name] for name in own)
        self._graph = graph

    def rounded(self, chunks: Sequence[int]) -> tuple[int, ...] | None:
        """By operator, its chunk, where each layer is whole in the chunk that has most of its work, no layer in one before its
        predecessor's, and what is before and behind all layers in the first and last chunk. None if a chunk then has no layer."""
        count, work = max(chunks) + 1, operator_work(self._graph)
        shares: list[Counter[int]] = [Counter() for _ in self.names]
        for layer, chunk, amount in zip(self.of, chunks, work, strict=True):
            if layer is not None:
                shares[layer][chunk] += amount
        of_layer = [_most(own) for own in shares]
        for layer in range(1, len(of_layer)):
            of_layer[layer] = max(of_layer[layer - 1 : layer + 1])
        if set(of_layer) != set(range(count)):
            return None
        seen, last, result = -1, max(i for i, layer in enumerate(self.of) if layer is not None), list[int]()
        for i, layer in enumerate(self.of):
            seen = max(seen, -1 if layer is None else layer)
            result.append(count - 1 if i > last else 0 if seen < 0 else of_layer[seen])
        return tuple(result)

    def in_chunk(self, chunks: Sequence[int], chunk: int) -> list[int]:
        """The layers of a chunk."""
        return sorted({layer for layer, own in zip(self.of, chunks, strict=True) if layer is not None and own == chunk})

    def modules(self, chunks: Sequence[int], chunk: int) -> list[str]:
        """Names of a chunk's layers, and of the modules with parameters that are in no layer."""
        graph, names = self._graph, list[str]()
        for op, layer, own in zip(graph.operators, self.of, chunks, strict=True):
            if own == chunk and (layer is not None or op.parameters):
                names.append(op.name if layer is None else self.names[layer])
        return list(dict.fromkeys(names))


def _most(shares: Counter[int]) -> int:
    """The chunk with most work, the first of several."""
    return max(shares, key=lambda chunk: (shares[chunk], -chunk))


def _layer(name: str) -> tuple[str, int] | None:
    found = _LAYER.match(name)
    return None if found is None else (found["prefix"], int(found["number"]))
