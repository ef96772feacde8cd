"""Traced calls: an exported program as a flat list of ATen calls in plain, functional form.

Rules read the list, and tiles execute it. ``read_calls`` brings an ``ExportedProgram`` into this form: in-place calls become functional
ones, several outputs of one call get names of their own, splits become slices, training batch norm becomes statistics and application,
asserts and no-op casts disappear (``forms``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from soap.model.regions import Interval
from soap.plan.tiling import Tile

Target = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor value by name, where a call's arguments hold one."""

    name: str


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A buffer that the call may update, by state-dict name."""

    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """Shape and dtype of a tensor value. ``routed``: of routed rows (``tracing.routing``), the value with the numbers of their experts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    routed: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``target(*args, **kwargs)`` with ``Ref`` for tensors. ``path``: its module. ``origin``: kind of the decomposed call."""

    name: str
    target: Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[str, ...]
    path: str = ""
    origin: str = ""
    operands: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names of the tensor operands in order of appearance, repeated if repeated."""

    def __post_init__(self) -> None:
        names = tuple(ref.name for ref in walk((self.args, dict(self.kwargs))) if isinstance(ref, Ref))
        object.__setattr__(self, "operands", names)

    @property
    def kind(self) -> str:
        """Short name of what is called: ``linear``, ``batch_norm``; ``library.name`` for operators that are neither ATen's nor our own."""
        return kind_of(self.target)


@cache
def kind_of(target: Any) -> str:
    """See ``Call.kind``. Another library's operator with the name of an ATen operator is a different kind."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    library, name = str(schema.name).split("::")
    return name if library in ("aten", "soap") else f"{library}.{name}"


@dataclass
class Program:
    """A traced program: values by name, the calls that make them, and where the other values come from."""

    calls: list[Call]
    values: dict[str, Value]
    inputs: list[str]
    parameters: dict[str, str]
    """Value name -> canonical state-dict name. Several values may name one (tied) parameter."""
    constants: dict[str, torch.Tensor]
    """Value name -> tensor known at import (lifted constants, buffers that nothing changes)."""
    buffers: dict[str, torch.Tensor]
    """State-dict name -> initial value of the buffers that calls update."""
    loss: str
    state: dict[str, str] = field(default_factory=dict)
    """Value name -> state-dict name of the buffers that calls read and change: their values when the step begins."""
    kept: tuple[str, ...] = ()
    """Values that a step computes beside the loss though no call reads them: what keeps the state (``rules.norm``)."""
    end_step: list[Call] = field(default_factory=list)
    """Calls that update buffers independently of any tensor (step counters)."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Name of a call without a rule -> the operator in it, or itself, that has no rule and cannot be decomposed."""


def walk(argument: Any) -> Iterator[Any]:
    """Leaves of nested lists, tuples and dicts, in order."""
    if isinstance(argument, (list, tuple)):
        for item in argument:
            yield from walk(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from walk(item)
    else:
        yield argument


def named_types(call: Call) -> list[torch.dtype]:
    """The floating-point and complex types that a call names."""
    leaves = (leaf for leaf in walk((call.args, dict(call.kwargs))) if isinstance(leaf, torch.dtype))
    return [leaf for leaf in leaves if leaf.is_floating_point or leaf.is_complex]


def substitute(argument: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with every leaf passed through ``change``."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(substitute(item, change) for item in argument)
    if isinstance(argument, dict):
        return {key: substitute(item, change) for key, item in argument.items()}
    return change(argument)


def renamed(call: Call, names: Mapping[str, str]) -> Call:
    """The call with operands renamed."""

    def change(leaf: Any) -> Any:
        return Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    return replace(call, args=substitute(call.args, change), kwargs=substitute(dict(call.kwargs), change))


def argument(call: Call, name: str, default: Any = None) -> Any:
    """A call's argument by its schema name, wherever it was passed; the schema's default if it was not."""
    if name in call.kwargs:
        return call.kwargs[name]
    place, standard = parameters_of(call.target).get(name, (None, None))
    if place is None:
        return default
    if place < len(call.args):
        return call.args[place]
    return default if standard is None else standard[0]


def with_argument(call: Call, name: str, value: Any) -> Call:
    """The call with another value for an argument, by name or in the place that its schema says."""
    place, _ = parameters_of(call.target).get(name, (len(call.args), None))
    if name not in call.kwargs and place < len(call.args):
        return replace(call, args=(*call.args[:place], value, *call.args[place + 1 :]))
    return replace(call, kwargs={**call.kwargs, name: value})


@cache
def parameters_of(target: Any) -> dict[str, tuple[int, tuple[Any] | None]]:
    """A target's parameters by name: place, and default value if there is one. (Asking the schema is slow.)"""
    arguments = getattr(getattr(target, "_schema", None), "arguments", ())
    return {a.name: (place, (a.default_value,) if a.has_default_value() else None) for place, a in enumerate(arguments)}


def on_whole(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The call's result for whole tensors as arguments."""
    own = _VIEWS.get(call.target)  # copies that made memory contiguous, or wrote numbers out, were dropped
    return call.target(*args, **kwargs) if own is None else own(*args)


def results_of(call: Call, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a call by the values of its operands."""

    def change(leaf: object) -> object:
        return values[leaf.name] if isinstance(leaf, Ref) else leaf

    result = on_whole(call, substitute(call.args, change), substitute(dict(call.kwargs), change))
    return [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]


def needed(calls: Sequence[Call], wanted: Collection[str]) -> list[Call]:
    """The calls that these values depend on."""
    values, kept = set(wanted), list[Call]()
    for call in reversed(calls):
        if not values.isdisjoint(call.outputs):
            kept.append(call)
            values.update(call.operands)
    return kept[::-1]


def as_complex(x: torch.Tensor) -> torch.Tensor:
    """Pairs of numbers in the last dimension as complex ones; a copy if they are not laid out like that in memory."""
    fits = x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return torch.view_as_complex(x if fits and not x.is_neg() else x.clone(memory_format=torch.contiguous_format))


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs in a new last dimension; a copy if they are only marked as conjugated or negated."""
    return torch.view_as_real(x.resolve_conj().resolve_neg())


_VIEWS: Mapping[Target, Target] = {
    torch.ops.aten.view.default: lambda x, shape: x.reshape(shape),
    torch.ops.aten.view_as_complex.default: as_complex,
    torch.ops.aten.view_as_real.default: as_real,
}


def is_random(call: Call) -> bool:
    """Whether the call draws random numbers."""
    if call.kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(argument(call, "train")) and float(argument(call, "dropout") or 0.0) > 0.0
    if call.kind == "scaled_dot_product_attention":
        return float(argument(call, "dropout_p") or 0.0) > 0.0
    if call.kind in ("dropout", "feature_dropout"):
        return bool(argument(call, "train")) and float(argument(call, "p")) > 0.0
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())


@dataclass
class TileContext:
    """What a tile's computation may depend on besides its operands; one per rank and training step.

    ``seed`` and ``step`` make random numbers (dropout) a function of the global element position, equal on every tiling. ``buffers``:
    this rank's full-size copies by state-dict name. Tiles note what they found in ``statistics``, by call: (channels, mean, unbiased
    variance). ``end_step`` updates the buffers from it, each channel once however many tiles have met it. ``update_buffers`` False
    leaves buffers alone. ``unread``: the answer of ``TracedModel.unread`` for the plan. ``tiles``: the plan's tiles, for the reference:
    local batch norm normalises by tile; None at all: by the whole batch. ``state``: the buffers' values at the end of the step, by
    name, as the forward pass has found them. ``drawn_by_torch``: ``reference_loss`` draws random numbers from torch's own generators,
    as eager PyTorch does, to be compared with it. ``counts``: if tiles of a mean over labels are given their own labels alone
    (``Operator.own_inputs``), by call the number that it divides by, in float64; None for other calls: they are given all labels, and
    count.
    """

    seed: int = 0
    step: int = 0
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    update_buffers: bool = True
    unread: frozenset[str] = frozenset()
    tiles: Sequence[Tile] = ()
    drawn_by_torch: bool = False
    statistics: dict[str, list[tuple[Interval, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: Callable[[str], torch.Tensor | None] | None = None

    def random_seed(self, call: str) -> int:
        """63 bits from (seed, step, call): random numbers do not depend on how the operator is split."""
        digest = hashlib.sha256(f"{self.seed}/{self.step}/{call}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def note_statistics(self, call: str, channels: Interval, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Keep what a tile found for some channels, unless another tile of this rank has found the same."""
        found = self.statistics.setdefault(call, [])
        if self.update_buffers and all(known != channels for known, _, _ in found):
            found.append((channels, mean, variance))

    def note_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the buffers' values at the end of the step, by name."""
        if self.update_buffers:
            self.state.update(values)
