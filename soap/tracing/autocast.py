"""Mixed precision as part of a program: the casts that ``torch.autocast`` would make become calls of their own. Each call is run under
``torch.autocast`` on tensors without values, by the list of types of the devices that will train. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from soap.errors import ModelError
from soap.tracing.calls import Call, Ref, Value, renamed, substitute
from soap.tracing.rules.notation import Local
from soap.tracing.types import LOWER_TYPES

NO_PRIMITIVE = "could not create a primitive"
"""In the message of oneDNN for an operation that the processor's instructions do not allow."""

ListOf = Literal["cpu", "cuda"]
"""Kind of device whose list of types autocast follows."""


WHOLLY_WIDE = frozenset({"cross_entropy_loss"})
"""Calls of which a GPU's list has the second half alone in float32, on rounded results of the first. They are computed in float32 from
the beginning, as on processors, which keeps less as well: one tensor for the backward pass, not one of each type."""


class Autocast:
    """A target that casts inside: it runs under ``torch.autocast``, and its outputs have the types that were planned with."""

    def __init__(self, target: Any, dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
        self.wrapped = target
        self.dtype, self.dtypes = dtype, tuple(dtypes)
        self._schema, self.tags = target._schema, target.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target."""
        device = next((a.device.type for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)), "cpu")
        with self._able(), torch.autocast(device, dtype=self.dtype):
            return self._typed(self.wrapped(*args, **kwargs))

    def within(self, run: Callable[[Local], Any]) -> Callable[[Local], Any]:
        """A rule's own way to compute parts of the call, cast as the call is."""

        def run_and_cast(local: Local) -> Any:
            with self._able(), torch.autocast(local.tensors[0].device.type, dtype=self.dtype):
                return self._typed(run(local))

        return run_and_cast

    @contextmanager
    def _able(self) -> Iterator[None]:
        """Say plainly that the processor lacks instructions for this."""
        try:
            yield
        except RuntimeError as error:
            if NO_PRIMITIVE not in str(error):
                raise
            raise ModelError(
                f"this processor cannot compute {self._schema.name} under autocast to {str(self.dtype).removeprefix('torch.')}, with or "
                "without SOAP: its oneDNN library lacks that; train without autocast, in the other lower type, or on another processor"
            ) from error

    def _typed(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return result.to(self.dtypes[0])
        return type(result)(tensor.to(dtype) for tensor, dtype in zip(result, self.dtypes, strict=True))


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes casts to another floating-point type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[torch.Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype is not None and dtype.is_floating_point:
            self.found.append((args[0], dtype))
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Recast:
    """A call under autocast: casts of its operands with their values, the call on these, and its outputs' types."""

    casts: list[tuple[Call, Value]]
    call: Call
    dtypes: list[torch.dtype]


class Caster:
    """Finds out what autocast does with calls. ``dtype``: the narrower of the two types. ``kind``: of the devices whose list counts."""

    def __init__(self, dtype: torch.dtype, kind: ListOf = "cpu") -> None:
        if dtype not in LOWER_TYPES:
            raise ModelError(f"autocast to {str(dtype).removeprefix('torch.')}: expected bfloat16 or float16")
        self.dtype, self.kind = dtype, kind

    def rewrite(self, call: Call, values: Mapping[str, Value], unique: Callable[[str], str]) -> Recast:
        """The casts and the call to write in place of a call. ``unique`` makes the name of a cast."""
        names = list(dict.fromkeys(call.operands))
        found, made = _casts(call, names, values, self.dtype, self.kind)
        own = _own_casts(call, names, values) if found else []
        added = [cast for cast in found if cast not in own]
        if any(name is None for name, _ in added) and call.kind in WHOLLY_WIDE:
            added = [(name, torch.float32) for name in names if values[name].dtype in LOWER_TYPES]
        elif any(name is None for name, _ in added):
            return Recast([], replace(call, target=Autocast(call.target, self.dtype, made)), made)
        cast_names: dict[str, str] = {}
        casts: list[tuple[Call, Value]] = []
        for name, dtype in dict.fromkeys(added):
            assert name is not None
            new = cast_names[name] = unique(f"{name}:{str(dtype).removeprefix('torch.')}")
            cast = Call(new, torch.ops.aten.to.dtype, (Ref(name), dtype), {}, (new,), call.path)
            casts.append((cast, replace(values[name], name=new, dtype=dtype)))
        return Recast(casts, renamed(call, cast_names), made)


def _casts(
    call: Call, names: Sequence[str], values: Mapping[str, Value], dtype: torch.dtype | None, kind: ListOf = "cpu"
) -> tuple[list[tuple[str | None, torch.dtype]], list[torch.dtype]]:
    """Run a call without values, under autocast to ``dtype`` if given: (operand or None, new type) of each cast; and outputs' types."""
    with FakeTensorMode(), torch.no_grad(), _autocast(kind, dtype):
        given = {name: torch.empty(values[name].shape, dtype=values[name].dtype, device=kind) for name in names}

        def fill(leaf: Any) -> Any:
            return given[leaf.name] if isinstance(leaf, Ref) else torch.device(kind) if isinstance(leaf, torch.device) else leaf

        args, kwargs = substitute(list(call.args), fill), substitute(dict(call.kwargs), fill)
        operand = {id(tensor): name for name, tensor in given.items()}
        with _Casts() as casts:
            try:
                made = call.target(*args, **kwargs)
            except RuntimeError:  # a few calls ask for a GPU even so, behind their casts
                if kind == "cpu":
                    raise
                made = None
    found = [(operand.get(id(tensor)), to) for tensor, to in casts.found]
    if made is None:
        cast = {name: replace(values[name], dtype=to) for name, to in found if name is not None}
        return found, _casts(call, names, {**values, **cast}, None)[1]
    return found, [leaf.dtype for leaf in torch.utils._pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _autocast(kind: ListOf, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast for tensors on such devices; none if ``dtype`` is None. ``torch.autocast`` refuses where there is no such device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, dtype is not None)
    torch.set_autocast_dtype(kind, dtype or before[1])
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_autocast_cache_enabled(before[2])


def _own_casts(call: Call, names: Sequence[str], values: Mapping[str, Value]) -> list[tuple[str | None, torch.dtype]]:
    """The casts that a call makes without autocast, if its operands' types go together only under autocast; else none."""
    try:
        return _casts(call, names, values, None)[0]
    except RuntimeError:
        return []


def concerns(call: Call) -> bool:
    """Whether autocast may change the types of a call. A call without operands has the type that it names; grouped products are not on
    autocast's lists (and without values they accept bfloat16 alone)."""
    return bool(call.operands) and isinstance(call.target, torch._ops.OpOverload) and call.kind != "_grouped_mm"
