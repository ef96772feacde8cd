"""Repeated layers, by names: other trainers put whole layers into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from math import prod

from soap.exported_plans.configuration import Configuration
from soap.model.graph import OperatorGraph
from soap.model.likeness import layer_of, layers_of
from soap.strategy.megatron import operator_work


class Layers:
    """``names``: of the layers, such as ``blocks.0``, in the order of the graph. ``of``: by operator, its layer; None if it is in none."""

    def __init__(self, graph: OperatorGraph) -> None:
        own = layers_of(graph)
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

    @cached_property
    def before(self) -> tuple[str, ...]:
        """Modules before all layers that may be wrapped by themselves, in their order: nothing else reads their parameters."""
        return self._around[0]

    @cached_property
    def after(self) -> tuple[str, ...]:
        """Modules after all layers that may be wrapped by themselves."""
        return self._around[1]

    @cached_property
    def _around(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        places: dict[str, list[int]] = {name: [] for name in self._parameters if name not in self.names}
        for i, op in enumerate(self._graph.operators):
            for operand in op.parameters:
                module = self._module_of(operand.tensor)
                if op.name != module:  # tied, or read by what is around the module: whose forward pass may never run
                    places.pop(module, None)
                elif module in places:
                    places[module].append(i)
        inside = [i for i, layer in enumerate(self.of) if layer is not None]
        alone = [name for name in places if name and not any(other.startswith(f"{name}.") for other in self._parameters)]
        used = sorted((name for name in alone if places[name] and inside), key=lambda name: places[name])
        first = tuple(name for name in used if places[name][-1] < inside[0])
        return first, tuple(name for name in used if places[name][0] > inside[-1])

    @cached_property
    def _parameters(self) -> dict[str, list[str]]:
        """By layer, or module that is in none, the parameters in it."""
        found: dict[str, list[str]] = {name: [] for name in self.names}
        for tensor in self._graph.parameters:
            found.setdefault(self._module_of(tensor.name), []).append(tensor.name)
        return found

    def _module_of(self, parameter: str) -> str:
        """The layer that a parameter is in, or else the module that has it."""
        own = layer_of(parameter)
        layer = "" if own is None else f"{own[0]}{own[1]}"
        return layer if layer in self.names else parameter.rpartition(".")[0]

    def wrapped(self, modules: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """The parameters of each group of modules, and of the model itself, which has the rest."""
        groups = [tuple(name for module in group for name in self._parameters[module]) for group in modules]
        told = {name for group in groups for name in group}
        rest = tuple(tensor.name for tensor in self._graph.parameters if tensor.name not in told)
        return tuple(group for group in (*groups, rest) if group)

    @property
    def alone(self) -> tuple[tuple[str], ...]:
        """Each layer, and each module around them, as a group of its own."""
        return tuple((name,) for name in (*self.before, *self.names, *self.after))

    def kept(self, modules: Sequence[Sequence[str]], configuration: Configuration) -> frozenset[str]:
        """The parameters that stay after the forward pass where these groups of modules are wrapped: those of the last, and of the model
        itself, with which the backward pass begins; all, if values are not shared; none, if they are on each device anyway."""
        earlier = {name for group in modules[:-1] for module in group for name in self._parameters[module]}
        found = {tensor.name for tensor in self._graph.parameters}
        return frozenset(() if configuration.sharing == "none" else found if configuration.sharing == "zero1" else found - earlier)

    def most_elements(self) -> int:
        """Elements of the parameters of the largest layer."""
        sizes = {tensor.name: prod(tensor.shape) for tensor in self._graph.parameters}
        return max((sum(sizes[name] for name in self._parameters[layer]) for layer in self.names), default=sum(sizes.values()))

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
