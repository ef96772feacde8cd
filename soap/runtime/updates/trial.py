"""Finding by trial what an optimizer's update of an element depends on: the element's own gradients (*elementwise*: right on any part of a
parameter), its whole tensor (Muon), or other tensors. docs/internals/runtime.md (*Optimizers*) says what is tried, and what that misses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import isfinite
from typing import Any

import torch

from soap.errors import RuntimeFailure, SoapError
from soap.runtime.sync.row_update import spares_rows
from soap.runtime.updates.optimizers import Layout, Shapes, recorded_name

ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")
)
"""Optimizers that are known to be elementwise whatever their options. Subclasses, and instances with hooks, are tried."""
MEASURED: frozenset[type] = frozenset((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
"""Optimizers whose updates ``upkeep_timing`` measures, and AdamW, which computes like Adam."""
STEPS = 24
"""Steps of a trial: enough for work that is done every ten steps, such as updating a preconditioner."""
LARGE_STEPS = 6
LARGE = (136, 130)
"""Shape of a large tensor: many optimizers factor their statistics only from 128 by 128 elements on."""
LEAST_DENSE_STATES = 2
"""``soap.profiles.roofline`` takes an optimizer with fewer states to be SGD or Adagrad."""
TOLERANCE = 1e-9
"""Largest allowed difference, relative to the largest change: kernels round differently at the end of a vector."""


class Scope(IntEnum):
    """What the update of an element depends on."""

    ELEMENT = 0
    TENSOR = 1
    MODEL = 2


@dataclass(frozen=True)
class Tried:
    """The result of a trial. ``scopes``: trainable parameter -> scope of its update. ``states``: the most tensors of a parameter's size
    that are kept for one. ``spares_rows``: a zero gradient changes nothing. ``measured``: ``soap-profile`` measures its updates."""

    name: str
    scopes: Mapping[str, Scope]
    states: int
    spares_rows: bool
    measured: bool = True

    @property
    def whole(self) -> tuple[str, ...]:
        """Parameters that must not be cut."""
        return tuple(name for name, scope in self.scopes.items() if scope is not Scope.ELEMENT)

    @property
    def coupled(self) -> tuple[str, ...]:
        """Parameters whose updates depend on others."""
        return tuple(name for name, scope in self.scopes.items() if scope is Scope.MODEL)


def try_optimizer(layout: Layout, parameters: Shapes, device: torch.device | None = None) -> Tried:
    """Try an optimizer on the kinds of parameters of these shapes. RuntimeFailure in one line if it cannot be made, cannot make a step,
    needs more than gradients for it, or updates differently each time."""
    return _Trial(layout, parameters, device or torch.device("cpu")).found()


@dataclass(frozen=True)
class _Kind:
    """Parameters of one group with the same number of dimensions. ``name``: the first of them."""

    name: str
    dims: int
    names: tuple[str, ...]


class _Trial:
    def __init__(self, layout: Layout, parameters: Shapes, device: torch.device) -> None:
        self.layout, self.device, self.parameters = layout, device, parameters
        kinds: dict[tuple[int, int, int], list[str]] = {}
        for number, member in enumerate(layout.members):
            for place, group in enumerate(member.groups):
                for name in group.names:
                    kinds.setdefault((number, place, len(parameters[name])), []).append(name)
        self.kinds = [_Kind(names[0], dims, tuple(names)) for (_, _, dims), names in kinds.items()]

    def found(self) -> Tried:
        if not self.kinds:
            return Tried("none", {}, 0, True)
        optimizer = self._first_made()
        self._check_steps(optimizer)
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for number, tensor in enumerate(tensors):
            tensor.grad = torch.full_like(tensor, 0.1 + number)
        self._step(optimizer)
        states = max((_states_of(optimizer, tensor) for tensor in tensors), default=0)
        spares = all(spares_rows(optimizer, group) for group in optimizer.param_groups)
        scopes = {} if updates_elementwise(optimizer) else self._scopes(recorded_name(optimizer))
        by_name = {name: scopes.get(kind.name, Scope.ELEMENT) for kind in self.kinds for name in kind.names}
        measured = type(optimizer) in MEASURED
        return Tried(recorded_name(optimizer), {name: by_name[name] for name in self.parameters}, states, spares, measured)

    def _scopes(self, optimizer: str) -> dict[str, Scope]:
        """Name of a kind -> scope of its update."""
        small = {kind.name: _small(kind.dims) for kind in self.kinds}
        together = self._run({}, {k.name for k in self.kinds}, STEPS)
        found = {}
        for kind in self.kinds:
            name, start = kind.name, self._start(kind, small[kind.name])
            alone = self._alone(kind, small[kind.name], STEPS)
            if _differ(self._alone(kind, small[kind.name], STEPS), alone, start):
                raise RuntimeFailure(
                    f"optimizer {optimizer} updates {name!r} differently each time: expected equal updates from equal gradients on all "
                    "ranks; use an optimizer that draws no random numbers"
                )
            if _differ(together[name][0], alone, start) or self._depends_on_a_twin(kind, alone):
                found[name] = Scope.MODEL
            elif self._depends_on_its_tensor(kind, small[name], STEPS) or self._depends_on_its_tensor(kind, _large(kind.dims), LARGE_STEPS):
                found[name] = Scope.TENSOR
            else:
                found[name] = Scope.ELEMENT
        return found

    def _alone(self, kind: _Kind, shape: tuple[int, ...], steps: int) -> torch.Tensor:
        return self._run({kind.name: [self._start(kind, shape)]}, {kind.name}, steps)[kind.name][0]

    def _depends_on_a_twin(self, kind: _Kind, alone: torch.Tensor) -> bool:
        """Whether another tensor of the same kind, with other gradients, changes the update."""
        tensors = [self._start(kind, _small(kind.dims)), 2 * self._start(kind, _small(kind.dims))]
        both = self._run({kind.name: tensors}, {kind.name}, STEPS)[kind.name]
        return _differ(both[0], alone, self._start(kind, _small(kind.dims)))

    def _depends_on_its_tensor(self, kind: _Kind, shape: tuple[int, ...], steps: int) -> bool:
        """Whether parts of a tensor, each with its own optimizer, are updated differently from the whole."""
        start = self._start(kind, shape)
        whole = self._alone(kind, shape, steps)
        for dim, size in enumerate(shape):
            if size < 2:
                continue
            bounds = (0, max(1, size // 3), size)
            made = []
            for a, b in pairwise(bounds):
                part = start.narrow(dim, a, b - a)
                cut = lambda gradient, dim=dim, a=a, b=b: gradient.narrow(dim, a, b - a)  # noqa: E731
                made.append(self._run({kind.name: [part]}, {kind.name}, steps, shape, cut)[kind.name][0])
            if _differ(torch.cat(made, dim), whole, start):
                return True
        return False

    def _run(
        self,
        tensors: Mapping[str, Sequence[torch.Tensor]],
        updated: set[str],
        steps: int,
        shape: tuple[int, ...] | None = None,
        cut: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient,
    ) -> dict[str, list[torch.Tensor]]:
        """The tensors after some steps of a new optimizer, which has a tensor of each kind and gets gradients for the kinds in ``updated``.
        ``shape``: of the gradients before they are ``cut``; None: the tensors' own."""
        own = {k.name: list(tensors.get(k.name, [self._start(k, _small(k.dims))])) for k in self.kinds}
        own = {name: [t.detach().clone().contiguous().requires_grad_() for t in some] for name, some in own.items()}
        optimizer = self._made(own)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), (int, float)) and group["lr"] == 0:  # 0 would change nothing; a schedule may raise it
                group["lr"] = 1e-3
        for step in range(steps):
            for kind in self.kinds:
                if kind.name in updated:
                    for number, tensor in enumerate(own[kind.name]):
                        tensor.grad = cut(self._gradient(kind, shape or tuple(tensor.shape), step, number)).contiguous()
            self._step(optimizer)
        return {name: [tensor.detach() for tensor in some] for name, some in own.items()}

    def _start(self, kind: _Kind, shape: tuple[int, ...]) -> torch.Tensor:
        return _drawn(shape, kind.name).to(self.device)

    def _gradient(self, kind: _Kind, shape: tuple[int, ...], step: int, number: int) -> torch.Tensor:
        """Gradients of different sizes over the steps; in some, half of the elements are zero."""
        drawn = 10.0 ** (step % 5 - 2) * _drawn(shape, f"{kind.name} {step} {number}")
        return (drawn.clamp(min=0.0) if step % 4 == 3 else drawn).to(self.device)

    def _made(self, tensors: Mapping[str, Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        made = self.layout.optimizer(tensors)
        if not isinstance(made, torch.optim.Optimizer):
            raise RuntimeFailure(f"the optimizer's factory gave a {type(made).__name__}; expected a torch.optim.Optimizer")
        return made

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            optimizer.step()
        except Exception as error:  # whatever a user's optimizer does
            raise RuntimeFailure(
                f"optimizer {recorded_name(optimizer)} cannot make a step: {_told(error)}; change its options, or use another one"
            ) from None

    def _first_made(self) -> torch.optim.Optimizer:
        """The optimizer of one tensor of each kind, without gradients. RuntimeFailure in one line if the factory fails."""
        try:
            return self._tried(self.kinds)
        except SoapError:
            raise
        except Exception as error:  # whatever a user's factory does
            kind, cause = self._refused() or (self.kinds[0], error)
            raise RuntimeFailure(
                f"no optimizer can be made for parameter {kind.name!r} of shape {list(self.parameters[kind.name])}, tried as "
                f"{list(_small(kind.dims))}: {_told(cause)}; change its options, or give such parameters another optimizer by patterns of "
                "names"
            ) from None

    def _tried(self, kinds: Sequence[_Kind]) -> torch.optim.Optimizer:
        return self._made({kind.name: [self._start(kind, _small(kind.dims)).requires_grad_()] for kind in kinds})

    def _refused(self) -> tuple[_Kind, Exception] | None:
        """The first kind of parameter for which no optimizer can be made, and the error; None if each kind by itself works."""
        for kind in self.kinds:
            try:
                self._tried([kind])
            except Exception as error:
                return kind, error
        return None

    def _check_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """RuntimeFailure if a step needs a closure that computes the loss again, as LBFGS does."""
        for member in getattr(optimizer, "members", (optimizer,)):
            closure = inspect.signature(type(member).step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise RuntimeFailure(
                    f"optimizer {type(member).__name__} computes the loss several times in a step (its step needs a closure), which ranks "
                    "cannot do for it; use one whose step takes gradients as they are, such as torch.optim.AdamW"
                )


def optimizer_states(tried: Tried, *, sparse: bool) -> int:
    """The number of states, tensors of a parameter's size, that predictions count. For models with ``sparse`` parameters, an optimizer that
    changes rows without gradient counts at least as many as Adam: from that, cost models know that it does (``updates_rows_alone``)."""
    return tried.states if tried.spares_rows or not sparse else max(tried.states, LEAST_DENSE_STATES)


def updates_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known to update each element by itself, and to count steps by tensor."""
    members: Sequence[Any] = getattr(optimizer, "members", (optimizer,))
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return all(type(one) in ELEMENTWISE and not any(getattr(one, hook, None) for hook in hooks) for one in (*members,))


def _states_of(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> int:
    """The number of states with the tensor's shape. A scalar counts none: its states need not grow with a parameter."""
    kept = optimizer.state.get(tensor, {}).values() if tensor.dim() else ()
    return sum(isinstance(own, torch.Tensor) and own.shape == tensor.shape for own in kept)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def _small(dims: int) -> tuple[int, ...]:
    return {0: (), 1: (6,)}.get(dims, (4, 6, *(2,) * (dims - 2)))


def _large(dims: int) -> tuple[int, ...]:
    return {0: (), 1: (300,)}.get(dims, (*(2,) * (dims - 2), *LARGE))


def _drawn(shape: tuple[int, ...], text: str) -> torch.Tensor:
    """Random numbers that depend on shape and text alone, not on the process."""
    seed = sum((place + 1) * byte for place, byte in enumerate(text.encode()))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _differ(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> bool:
    """Whether two results differ by more than rounding."""
    if torch.equal(one, other):
        return False
    change, difference = float((other - start).abs().max()), float((one - other).abs().max())
    return not (isfinite(change) and isfinite(difference) and difference <= TOLERANCE * change)
