"""State that Python holds (what can be reached from a module but is no parameter or buffer, and by what code), and running a module so
that all state is as before.

Attributes, containers, objects, random generators, closures, default arguments, class attributes, and the globals that the methods of its
modules name. What libraries (torch, NumPy, the standard library) keep for themselves is left out.
"""

from __future__ import annotations

import dis
import itertools
import pickle
import random
import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from types import CodeType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

PLAIN = (type(None), bool, int, float, complex, str, bytes)
TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are dictionaries, which a program knows."""
MODES = (".training", ".requires_grad")
"""Ends of paths of what decides whether a module or a parameter is trained. Torch reads it, whatever a user's code does."""
MOST = 200_000
"""Objects that are looked at."""
LARGE_BYTES = 2**26
"""Larger tensors outside of the state are not copied: that they changed shows in their version."""
CLOSE = 1e-5
"""Relative difference of tensors of floating-point numbers that two calls of equal operands may make."""
_WRAPPERS: dict[type, str] = {staticmethod: "__func__", classmethod: "__func__", property: "fget", cached_property: "func"}
_OBJECTS = (SimpleNamespace, Namespace, UserDict, UserList)
_ITERATORS: tuple[type, ...] = (itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0))), enumerate, zip)


class Memory:
    """A snapshot of what ``roots`` (name -> object) held. ``values``: by path (``self.queue[3]``). ``codes``: of functions among it."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.codes: dict[CodeType, None] = {}
        self._held: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        self._state: set[int] = set()
        self._classes: set[type] = set()
        waiting = deque(roots.items())
        while waiting and len(self._seen) < MOST:
            path, value = waiting.popleft()
            if isinstance(value, PLAIN):
                self.values[path] = value
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                with suppress(Exception):  # an object that does not let itself be looked at
                    waiting.extend(self._parts(path, value))

    def restore(self) -> None:
        """Put back what has changed. Generators and iterators of Python stay where they are."""
        for put_back in self._held:
            put_back()

    def moved(self, later: Memory) -> list[str]:
        """Names of what is not equal in both, each once: ``self.queue`` for one of its items."""
        own, other = self.values, later.values
        paths = [path for path in {**own, **other} if path not in own or path not in other or not _is_same(own[path], other[path])]
        return list(dict.fromkeys(path.partition("[")[0] for path in paths if not (self._only_counts(path, other))))

    def _only_counts(self, path: str, later: Mapping[str, Any]) -> bool:
        """Whether it is a number that is counted up (``self.calls += 1``), which no code reads otherwise."""
        owner, _, name = path.rpartition(".")
        numbers = all(isinstance(known.get(path), (int, float)) for known in (self.values, later)) and not path.endswith(MODES)
        return numbers and bool(owner) and name.isidentifier() and not any(_reads(code, name) for code in self.codes)

    def _parts(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Contents of an object, after noting how to put it back."""
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, dict):
            yield from self._dictionary(path, value)
        elif isinstance(value, (list, deque, set)):
            yield from self._sequence(path, value)
        elif isinstance(value, (tuple, frozenset)):
            yield from _items(path, list(value))
        elif isinstance(value, FunctionType):
            yield from self._function(path, value)
        elif isinstance(value, MethodType):
            yield from ((path, value.__self__), (path, value.__func__))
        elif isinstance(value, partial):
            yield from ((path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, GeneratorType):
            yield f"{path}.gi_frame", dict(value.gi_frame.f_locals) if value.gi_frame is not None else None
        elif isinstance(value, _ITERATORS):
            self.values[path] = repr(value) if isinstance(value, itertools.count) else _pickled(value)
        elif not self._numbers(path, value):
            yield from self._object(path, value)

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        if isinstance(value, nn.Parameter) or id(value) in self._state or not has_values(value):
            return
        if value.numel() * value.dtype.itemsize > LARGE_BYTES or value.layout is not torch.strided:
            self.values[path] = (tuple(value.shape), value.dtype, value._version)
            return
        copied = self.values[path] = value.detach().clone()
        self._held.append(lambda: put(value, copied))

    def _numbers(self, path: str, value: Any) -> bool:
        """Note arrays and generators of random numbers; whether it is one."""
        numpy = sys.modules.get("numpy")
        if isinstance(value, random.Random):
            drawn = value.getstate()
            self.values[path] = pickle.dumps(drawn)
            self._held.append(lambda: value.setstate(drawn))
        elif isinstance(value, torch.Generator):
            made = value.get_state()
            self.values[path] = made
            self._held.append(partial(value.set_state, made))
        elif numpy is not None and isinstance(value, numpy.ndarray):
            copied = self.values[path] = value.copy() if value.nbytes <= LARGE_BYTES else value
            self._held.append(lambda: None if _is_same(value, copied) else value.__setitem__(..., copied))
        elif numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            bits: Any = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
            state = bits.state
            self.values[path] = pickle.dumps(state)
            self._held.append(lambda: setattr(bits, "state", state))
        else:
            return False
        return True

    def _dictionary(self, path: str, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        content = dict(dict.items(value))  # a class of its own may make its items when they are asked for
        self._held.append(lambda: _refill(value, content))
        if all(isinstance(item, PLAIN) for item in content.values()):
            self.values[path] = content
            return
        self.values[path] = list(content)
        yield from ((f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[…]", item) for key, item in content.items())

    def _sequence(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        content = _listed(value)
        self._held.append(lambda: _refill_sequence(value, content))
        if all(isinstance(item, PLAIN) for item in content):
            self.values[path] = content if isinstance(value, (list, deque)) else set(content)
            return
        self.values[path] = len(content)
        yield from _items(path, content) if not isinstance(value, set) else ()

    def _function(self, path: str, value: FunctionType) -> Iterator[tuple[str, Any]]:
        if _is_foreign(value.__module__):
            return
        self._held.append(lambda: _refill(value.__dict__, own))
        own = dict(value.__dict__)
        yield from ((f"{path}.{name}", item) for name, item in own.items())
        yield from ((f"{path}.<{name}>", item) for name, item in _given(value))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                continue
            self._held.append(partial(setattr, cell, "cell_contents", content))
            yield f"{path}.<{name}>", content
        names = dict.fromkeys(name for code in _nested(value.__code__) for name in code.co_names)
        self.codes.update(dict.fromkeys(_nested(value.__code__)))
        known = value.__globals__
        for name in names:
            if name in known:
                if isinstance(known[name], PLAIN):
                    self._held.append(partial(known.__setitem__, name, known[name]))
                yield f"{value.__module__}.{name}", known[name]

    def _object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        is_module = isinstance(value, nn.Module)
        if not is_module and not isinstance(value, _OBJECTS) and _is_foreign(kind.__module__):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            content = dict(own)
            self._held.append(lambda: _refill(own, content))
            for name, item in content.items():
                if is_module and name in TABLES:
                    self._table(path, item)
                    yield from ((f"{path}.{key}", part) for key, part in item.items() if name == "_modules")
                else:
                    yield f"{path}.{name}", item
        for name in (name for base in kind.__mro__ for name in _slots(base)):
            if hasattr(value, name):
                self._held.append(partial(object.__setattr__, value, name, getattr(value, name)))
                yield f"{path}.{name}", getattr(value, name)
        for base in kind.__mro__:
            yield from self._class(base)

    def _table(self, path: str, table: dict[str, Any]) -> None:
        content = dict(table)
        for name, own in content.items():
            if isinstance(own, nn.Parameter) and own.is_leaf:
                self.values[f"{path}.{name}.requires_grad"] = own.requires_grad
                self._held.append(partial(setattr, own, "requires_grad", own.requires_grad))
        self._seen[id(table)] = table
        self._state.update(id(tensor) for tensor in content.values() if isinstance(tensor, torch.Tensor))
        self._held.append(lambda: _refill(table, content))

    def _class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Attributes of a class that are data, and its functions."""
        if _is_foreign(kind.__module__) or kind in self._classes:
            return
        self._classes.add(kind)
        for name, item in list(vars(kind).items()):
            wrapped = [getattr(item, part) for known, part in _WRAPPERS.items() if isinstance(item, known)]
            yield from ((f"{kind.__name__}.{name}", one) for one in (item, *wrapped) if isinstance(one, FunctionType))
            if not name.startswith("__") and not callable(item) and not hasattr(type(item), "__get__"):
                self._held.append(partial(_put_attribute, kind, name, item))
                yield f"{kind.__name__}.{name}", item


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of any type have equal elements, of which those that are no numbers are equal, too."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided or one.is_quantized:
        return False
    bits = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor its value again; its version stays if it has it."""
    if not same_bits(tensor, value):
        with torch.no_grad():
            tensor.detach().copy_(value)


def _put_attribute(kind: type, name: str, value: Any) -> None:
    if vars(kind).get(name) is not value:
        setattr(kind, name, value)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor with numbers in it."""
    return tensor.device.type != "meta" and not isinstance(tensor, torch._subclasses.FakeTensor)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        exact = not (one.is_floating_point() or one.is_complex()) or one.dtype.itemsize == 1
        return same_bits(one, other) if exact else torch.allclose(one, other, rtol=CLOSE, atol=0.0, equal_nan=True)
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal) or repr(one) == repr(other)


def _refill(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    now = list(dict.items(table))
    if len(now) != len(content) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, content.items(), strict=True)):
        kind: Any = OrderedDict if isinstance(table, OrderedDict) else dict
        kind.clear(table)
        for key, item in content.items():
            kind.__setitem__(table, key, item)


def _refill_sequence(value: Any, content: list[Any]) -> None:
    now = _listed(value)
    if len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True)):
        return
    kind = _kind(value)
    kind.clear(value)
    (kind.update if kind is set else kind.extend)(value, content)


def _kind(value: Any) -> Any:
    return next(kind for kind in (list, deque, set) if isinstance(value, kind))


def _listed(value: Any) -> list[Any]:
    return list(_kind(value).__iter__(value))


def _items(path: str, content: list[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"{path}[{i}]", item) for i, item in enumerate(content))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ()) if not _is_foreign(kind.__module__) else ()
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def _given(function: FunctionType) -> list[tuple[str, Any]]:
    """The default arguments of a function."""
    code, defaults = function.__code__, function.__defaults__ or ()
    places = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return [*zip(places, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]


def _nested(code: CodeType) -> list[CodeType]:
    return [code, *(inner for one in code.co_consts if isinstance(one, CodeType) for inner in _nested(one))]


def _reads(code: CodeType, name: str) -> bool:
    """Whether code reads an attribute of this name for more than to count it up (``COPY``, ``LOAD_ATTR``, …, ``STORE_ATTR``)."""
    if name in code.co_consts:  # getattr
        return True
    if name not in code.co_names:
        return False
    steps = list(dis.get_instructions(code))
    loads = [i for i, step in enumerate(steps) if step.argval == name and step.opname.startswith("LOAD_")]
    return any(i == 0 or steps[i - 1].opname != "COPY" for i in loads)


def _pickled(value: Any) -> Any:
    try:
        return pickle.dumps(value.__reduce__()[1:])
    except Exception:  # of items that cannot be pickled, or a version of Python that has none
        return repr(type(value))


def _is_foreign(module: str | None) -> bool:
    top = (module or "builtins").partition(".")[0]
    return top in ("torch", "numpy", "torchgen", "functorch") or (top in sys.stdlib_module_names and top != "__main__")


@contextmanager
def untouched(module: nn.Module, changed: Collection[str] = (), beside: Mapping[str, Any] | None = None) -> Iterator[Callable[[], None]]:
    """Inside, the module has no gradients. Afterwards it is as it was, whatever a step has done to it. Gives a function that puts back
    buffers alone, and parameters that the step changes itself.

    ``changed``: names of such parameters. Those with hooks on accumulated gradients count as changed too: such a hook may be an optimizer.
    Only these, and buffers, are copied. ``beside``: what else to put back (``Memory``). What hooks change elsewhere is not restored.
    """
    memory = Memory({"module": module, **(beside or {})})
    tables = [(one._buffers, dict(one._buffers)) for one in module.modules()]
    parameters = dict(module.named_parameters())
    copied = [p for name, p in parameters.items() if name in changed or getattr(p, "_post_accumulate_grad_hooks", None)]
    kept = [(t, t.detach().clone()) for t in (*module.buffers(), *copied) if has_values(t)]
    gradients = [(p, p.grad) for p in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None

    def put_state_back() -> None:
        for own, table in tables:
            own.update(table)
        for tensor, value in kept:  # compare values: batch norm changes its statistics without a new version
            put(tensor, value)

    try:
        yield put_state_back
    finally:
        memory.restore()
        put_state_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def same_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore torch's, Python's and NumPy's generators afterwards, as if nothing had been drawn. ``devices``: GPUs that draw."""
    numpy = sys.modules.get("numpy")
    own, foreign = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(foreign)
