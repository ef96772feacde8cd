"""Whether weights are those of a model, and giving them to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from soap.errors import ModelError
from soap.tracing.execute import TracedModel
from soap.tracing.naming import canonical_names
from soap.tracing.without_values import REMEDY


class Kind(NamedTuple):
    """A tensor's shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights(Protocol):
    """Values of a model's parameters and buffers. ``said``: what commands call it. ``kinds``: by name. ``is_mapped``: tensors are parts of
    files, which are read where they are; else each is made when it is asked for.

    ModelError in one line, when it is opened, for what cannot be read."""

    said: str
    kinds: Mapping[str, Kind]
    is_mapped: bool

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that must not be changed: it may be a file's memory."""


TOLD = 5


def give(model: TracedModel, weights: Weights) -> TracedModel:
    """The model with these values. Parameters stay in their files until they are used; buffers are copied. ModelError in one line unless
    ``matched`` finds them, and each constant has a value."""
    model, places = with_frozen(model, weights), matched(model, weights)
    parameters = {name: weights.tensor(places[name]).requires_grad_(before.requires_grad) for name, before in model.parameters.items()}
    known = {name: before for name, before in model.buffers.items() if name in places}
    buffers = {name: weights.tensor(places[name]).to(before.dtype, copy=True) for name, before in known.items()}
    model.parameters, model.buffers = {**model.parameters, **parameters}, {**model.buffers, **buffers}
    _require_others(model)
    return model


def with_frozen(model: TracedModel, weights: Weights) -> TracedModel:
    """The model with these values of what training does not change, and its own of all else; the model itself if it has them already.

    ModelError in one line unless ``matched`` finds the model's parameters, or if the program is another one with these values."""
    places = matched(model, weights)
    other = model.with_state({name: weights.tensor(places[name]) for name in model.unchanged if name in places})
    if other is not model and (other.graph.operators, other.graph.tensors) != (model.graph.operators, model.graph.tensors):
        raise ModelError(
            f"weights {weights.said!r} have other buffers than {model.graph.name!r} was exported with, by which its operators are others "
            "(a mask is causal, or no longer): give the module these weights, and export it again"
        )
    other.parameters = model.parameters
    return other


def lacking_buffers(model: TracedModel, weights: Weights) -> str:
    """A line about buffers that the weights do not have; empty if they have all, or none."""
    places = matched(model, weights)
    names = [name for name in (*model.buffers, *model.unchanged) if name not in places and name not in model.transient]
    if not names or not any(name in places for name in (*model.buffers, *model.unchanged)):
        return ""
    return f"weights {weights.said!r} lack {_some(names)}, which keep the values that {model.graph.name!r} was exported with"


def remarks(model: TracedModel, weights: Weights) -> list[str]:
    """Lines about weights that the model can be given: buffers that they lack, and tensors that it does not take."""
    names = _names(model)
    way = _way(names, weights)
    taken = {way[name] for known in names.values() for name in known if name in way}
    others = [name for name in weights.kinds if name not in taken]
    said = f"weights {weights.said!r} also have {_some(others)}; {model.graph.name!r} takes only its parameters and persistent buffers"
    return [*filter(None, [lacking_buffers(model, weights)]), *([said] if others else [])]


class OneByOne(Mapping[str, torch.Tensor]):
    """A model's state by name, of which each tensor is made when it is asked for: what weights that are no files give to ranks. Only the
    last one stays. Buffers that the weights have not are the model's."""

    def __init__(self, model: TracedModel, weights: Weights) -> None:
        self._weights, self._places = weights, matched(model, weights)
        self._others = {name: own for name, own in model.buffers.items() if name not in self._places}
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._others:
            return self._others[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._weights.tensor(self._places[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._places, *self._others))

    def __len__(self) -> int:
        return len(self._places) + len(self._others)


def matched(model: TracedModel, weights: Weights) -> dict[str, str]:
    """A model's parameters, buffers and other state -> their names in the weights. ModelError in one line unless each parameter is there,
    and what is there has the model's shape.

    Names are the model's own, or have a prefix of one or two words more or less (``model.``). A parameter of several names may have any of
    these. What the model does not have is not read, as heads for other tasks (``remarks`` tells it).
    """
    names = _names(model)
    own = {**model.parameters, **model.buffers, **model.unchanged}
    places = _found(names, _way(names, weights))
    if lacking := [name for name in model.parameters if name not in places]:
        raise ModelError(f"weights {weights.said!r} lack {_some(lacking)}; expected those of {model.graph.name!r}: check the names")
    kinds = {name: weights.kinds[place] for name, place in places.items()}
    wrong = [f"{name} {[*kind.shape]} instead of {[*own[name].shape]}" for name, kind in kinds.items() if kind.shape != own[name].shape]
    if wrong:
        raise ModelError(f"weights {weights.said!r} have other shapes: {_some(wrong)}; expected those of {model.graph.name!r}")
    kept = [name for name, kind in kinds.items() if _numbers(kind.dtype) != _numbers(own[name].dtype)]
    if kept:
        raise ModelError(f"weights {weights.said!r} have another kind of numbers in {_some(kept)}; expected the model's")
    return places


def _numbers(dtype: torch.dtype) -> tuple[bool, bool]:
    """The kind of numbers: real, complex or whole ones."""
    return dtype.is_floating_point, dtype.is_complex


def make_room(model: TracedModel) -> None:
    """Give parameters without values memory that nobody has touched: values come later, for what a rank keeps."""
    room = {name: torch.empty_like(own, device="cpu") for name, own in model.parameters.items() if own.is_meta}
    model.parameters = {**model.parameters, **room}
    _require_others(model)


def _require_others(model: TracedModel) -> None:
    """ModelError in one line if values are missing that no file of weights has."""
    lacking = [name for known in (model.buffers, model.constants) for name, tensor in known.items() if tensor.is_meta]
    if lacking:
        raise ModelError(f"model {model.graph.name!r} was exported without the values of {_some(lacking)}; {REMEDY}")


def _names(model: TracedModel) -> dict[str, list[str]]:
    """State of the model that is saved -> all of its names."""
    names = {name: [name] for name in (*model.parameters, *model.buffers, *model.unchanged) if name not in model.transient}
    for alias, name in model.graph.aliases.items():
        names.get(name, []).append(alias)
    tied: dict[str, list[str]] = {}
    for name, first in canonical_names(model.unchanged).items():
        tied.setdefault(first, []).append(name)
    return names | {name: [name, *same] for same in tied.values() for name in same}


def _way(names: Mapping[str, Sequence[str]], weights: Weights) -> dict[str, str]:
    """Name as the model writes it -> name in the weights, by the way of writing names that finds most."""
    theirs = {name: name for name in weights.kinds}
    ours = [other for known in names.values() for other in known]
    ways = [theirs]
    ways += [{name.removeprefix(prefix): name for name in theirs if name.startswith(prefix)} for prefix in _prefixes(theirs)]
    ways += [{prefix + name: name for name in theirs} for prefix in _prefixes(ours)]
    return max(ways, key=lambda way: len(_found(names, way)))


def _found(names: Mapping[str, Sequence[str]], way: Mapping[str, str]) -> dict[str, str]:
    first = ((name, next((way[other] for other in known if other in way), None)) for name, known in names.items())
    return {name: place for name, place in first if place is not None}


def _prefixes(names: Iterable[str]) -> list[str]:
    """The beginnings of one and of two words: ``model.`` and ``model.base.``."""
    words = [name.split(".") for name in names]
    return sorted({".".join(own[:count]) + "." for own in words for count in (1, 2) if len(own) > count})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:TOLD]) + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
