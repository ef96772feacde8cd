"""How parameters are updated: which optimizer has which parameters, with which options, whatever way a plan cuts them.

The optimizers of the command line are here too; ``soap-profile`` measures the updates of these.

Schedules of learning rates and other options, stepped once per update, and their state in checkpoints.

The state is saved as plain JSON, so that loading unpickles nothing. Values that JSON does not have (tuples, counters, mappings with number
keys) are saved with their kind.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from soap.errors import CheckpointError, RuntimeFailure


class Several(torch.optim.Optimizer):
    """An optimizer that shares the parameter groups and the state of all its ``members``."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for member in members for group in member.param_groups], {})
        self.members = tuple(members)
        for member in members:
            self.state.update(member.state)
        self._share([len(member.param_groups) for member in members])

    @property
    def name(self) -> str:
        """The members' class names, joined by ``+``."""
        return "+".join(type(member).__name__ for member in self.members)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of each member. ``closure`` is not supported: gradients exist already."""
        assert closure is None
        for member in self.members:
            member.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give members their part of the loaded state."""
        super().__setstate__(state)
        counts = [len(member.param_groups) for member in self.members]
        self._share(counts)
        for member in self.members:
            member.__setstate__({"state": self.state, "param_groups": member.param_groups})

    def _share(self, counts: Sequence[int]) -> None:
        first = 0
        for member, count in zip(self.members, counts, strict=True):
            member.param_groups = self.param_groups[first : first + count]
            member.state = self.state
            first += count


OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Makes an optimizer from the tensors of one rank's shards; with ``GroupOptions``, from torch's parameter groups of them."""
Optimizers = OptimizerFactory | Mapping[str, OptimizerFactory]
"""One factory for all parameters, or pattern of names (``fnmatch``) -> factory; the first pattern that matches counts."""
GroupOptions = Callable[[str, tuple[int, ...]], Mapping[str, Any]]
"""(parameter's canonical name, whole shape) -> the options that differ for it, such as ``{"weight_decay": 0.0}``."""
ScheduleFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
"""Makes a schedule from an optimizer."""
Shapes = Mapping[str, tuple[int, ...]]
"""Whole shapes of all trainable parameters by canonical name, in the graph's order."""


def plain_sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer if none is given: SGD with learning rate 0.01."""
    return torch.optim.SGD(parameters, lr=0.01)


def adam(tensors: Sequence[torch.Tensor], lr: float, **options: Any) -> torch.optim.Adam:
    """Adam that is fused: one pass over each tensor. On CPUs torch's default makes several passes, which take four times as long (fourteen
    times if gradients have always been zero, as for rows that are never looked up) and allocate two tensors of the largest one's size. On
    GPUs its default takes three times as long for many small tensors (4.2 ms for 512 of 64 KiB on an H200, 1.3 ms fused)."""
    return torch.optim.Adam(tensors, lr=lr, **_in_one_pass(tensors, options))


def adamw(tensors: Sequence[torch.Tensor], lr: float, **options: Any) -> torch.optim.AdamW:
    """AdamW that is fused, see ``adam``."""
    return torch.optim.AdamW(tensors, lr=lr, **_in_one_pass(tensors, options))


def sgd(tensors: Sequence[torch.Tensor], lr: float, **options: Any) -> torch.optim.SGD:
    """Torch's SGD."""
    return torch.optim.SGD(tensors, lr=lr, **options)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {"sgd": sgd, "adam": adam, "adamw": adamw}
"""Name -> function that makes the optimizer from tensors or parameter groups, a learning rate, and torch's further options."""


def _in_one_pass(tensors: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    flat = [t for own in tensors for t in (own["params"] if isinstance(own, dict) else [own])]
    known = all(tensor.device.type in ("cpu", "cuda") and tensor.is_floating_point() for tensor in flat)  # not complex numbers
    asked = any(options.get(key) for key in ("fused", "foreach", "capturable", "differentiable"))
    return {**options, "fused": True} if known and not asked and options.get("fused") is not False else dict(options)


@dataclass(frozen=True)
class Recipe:
    """The user's choice of optimizers, options and schedule. ``schedule``: steps once after each update."""

    optimizer: Optimizers = plain_sgd
    groups: GroupOptions | None = None
    schedule: ScheduleFactory | None = None

    def layout(self, parameters: Shapes) -> Layout:
        """Which optimizer and group each parameter belongs to. It depends on names and whole shapes alone, so it is the same on all ranks
        and for all plans. RuntimeFailure if a parameter has no optimizer, or ``groups`` returns no options."""
        choices = self.optimizer.items() if isinstance(self.optimizer, Mapping) else [("*", self.optimizer)]
        names: dict[str, list[str]] = {pattern: [] for pattern, _ in choices}
        for name in parameters:
            pattern = next((pattern for pattern in names if fnmatchcase(name, pattern)), None)
            if pattern is None:
                raise RuntimeFailure(
                    f"no optimizer for parameter {name!r}: none of the patterns {', '.join(names)} names it; add '*' at the end"
                )
            names[pattern].append(name)
        chosen = [(make, self._grouped(names[pattern], parameters)) for pattern, make in choices]
        return Layout(tuple(Member(make, own) for make, own in chosen if own or len(chosen) == 1), self.schedule)

    def _grouped(self, names: Sequence[str], parameters: Shapes) -> tuple[Group, ...]:
        if self.groups is None:
            return (Group({}, tuple(names)),) if names else ()
        found: list[tuple[dict[str, Any], list[str]]] = []
        for name in names:
            options = self.groups(name, parameters[name])
            if not isinstance(options, Mapping) or "params" in options:
                raise RuntimeFailure(
                    f"groups({name!r}, …) gave {options!r}: expected options of a parameter group, such as {{'weight_decay': 0.0}}"
                )
            for other, members in found:
                if other == options:
                    members.append(name)
                    break
            else:
                found.append((dict(options), [name]))
        return tuple(Group(options, tuple(members)) for options, members in found)


@dataclass(frozen=True)
class Group:
    """Names of parameters with equal options."""

    options: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """An optimizer's factory and its groups."""

    make: OptimizerFactory
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Layout:
    """All optimizers of a training, with the names of their parameters."""

    members: tuple[Member, ...]
    schedule: ScheduleFactory | None = None

    def optimizer(self, tensors: Mapping[str, Sequence[torch.Tensor]]) -> torch.optim.Optimizer | None:
        """The optimizer of a rank's tensors (parameter's name -> tensors), with groups that are empty here; None without any tensor."""
        if not any(tensors.values()):
            return None
        made = [member.make(self._arguments(member, tensors)) for member in self.members]
        return made[0] if len(made) == 1 else Several(made)

    def group_count(self, member: Member) -> int:
        """The number of parameter groups of a member: one for each of its groups, or 1 if none has options."""
        return 1 if all(not group.options for group in member.groups) else len(member.groups)

    def _arguments(self, member: Member, tensors: Mapping[str, Sequence[torch.Tensor]]) -> list[Any]:
        by_group = [[tensor for name in group.names for tensor in tensors.get(name, ())] for group in member.groups]
        if all(not group.options for group in member.groups) and (flat := [tensor for own in by_group for tensor in own]):
            return flat
        return [{**group.options, "params": own} for group, own in zip(member.groups, by_group, strict=True)]


def recorded_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer in messages and checkpoints."""
    return optimizer.name if isinstance(optimizer, Several) else type(optimizer).__name__


_KIND = "soap:kind"
"""Key that marks a value that JSON does not have."""
Record = Mapping[str, Any]
"""``name`` of a schedule's class and its ``state``."""


class Schedule:
    """A schedule of a rank's optimizer, or an empty one. ``name``: of its class, or None. ``takes_loss``: whether it asks for a metric."""

    def __init__(self, own: torch.optim.lr_scheduler.LRScheduler | None, name: str | None) -> None:
        self._own, self.name = own, name
        required = () if own is None else list(inspect.signature(type(own).step).parameters.values())[1:]
        self.takes_loss = any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in required)

    @staticmethod
    def of(make: ScheduleFactory | None, optimizer: torch.optim.Optimizer | None) -> Schedule:
        """The schedule that the factory makes; an empty one on a rank that has nothing to train. RuntimeFailure in one line if it fails."""
        if make is None or optimizer is None:
            return Schedule(None, None)
        try:
            own = make(optimizer)
        except Exception as error:  # whatever a user's factory does
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RuntimeFailure(f"no schedule can be made of optimizer {recorded_name(optimizer)}: {told}; change its options") from None
        if not hasattr(own, "state_dict") or not hasattr(own, "step"):
            raise RuntimeFailure(f"schedule gave a {type(own).__name__}; expected a torch.optim.lr_scheduler.LRScheduler")
        return Schedule(own, type(own).__name__)

    def step(self, loss: float) -> None:
        """Step after an update. ``loss``: given to schedules that take a metric. RuntimeFailure in one line if the schedule fails."""
        if self._own is None:
            return
        try:
            self._own.step(*((loss,) if self.takes_loss else ()))
        except Exception as error:  # for example, the schedule is at its end
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RuntimeFailure(f"schedule {self.name} cannot make a step: {told}; change its options, or train for fewer steps") from None

    def record(self) -> Record | None:
        """What a checkpoint saves; None without a schedule. CheckpointError if some of the state cannot be saved."""
        return None if self._own is None else {"name": self.name, "state": _plain(self._own.state_dict(), type(self._own).__name__)}

    def restore(self, found: Record) -> None:
        """Go on from a record of a schedule of the same class."""
        if self._own is None:
            return
        state = _restored(found["state"])
        known = self._own.state_dict()  # other keys of the file must not become attributes
        theirs, ours = (len(own.get("base_lrs", ())) for own in (state, known))
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint's schedule {found['name']} is of {theirs} parameter groups, the optimizer here has {ours}; make groups by "
                "names (groups=), which are the same on all ranks"
            )
        self._own.load_state_dict({key: value for key, value in state.items() if key in known})


def joined(records: list[Record | None]) -> Record | None:
    """The one record of all ranks, None if no rank has one. CheckpointError if they differ."""
    known = [record for record in records if record is not None]
    if any(repr(record) != repr(known[0]) for record in known):
        raise CheckpointError("the schedule's state differs between ranks; make groups by names (groups=), which are the same on all ranks")
    return known[0] if known else None


def require_same(names: list[str | None], found: Record | None, checkpoint: str) -> None:
    """CheckpointError unless the ranks have the same kind of schedule as the checkpoint. ``names``: by rank; None without a schedule."""
    own = next((name for name in names if name is not None), None)
    theirs = None if found is None else found["name"]
    if own != theirs:
        said = f"with schedule {theirs}" if theirs else "without a schedule"
        raise CheckpointError(f"checkpoint {checkpoint!r} was saved {said}, this run has {own or 'none'}; use the same schedule")


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {_KIND: "tensor", "of": value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(item, name) for item in value]
    if isinstance(value, (tuple, set)):
        return {_KIND: type(value).__name__, "of": [_plain(item, name) for item in value]}
    if isinstance(value, Mapping) and type(value) in (dict, Counter):
        if type(value) is dict and all(isinstance(key, str) and key != _KIND for key in value):
            return {key: _plain(item, name) for key, item in value.items()}
        pairs = [[_plain(key, name), _plain(item, name)] for key, item in value.items()]
        return {_KIND: type(value).__name__, "of": pairs}
    raise CheckpointError(
        f"schedule {name} has a {type(value).__name__} in its state; expected numbers, texts, lists and mappings of these"
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _restored(item) for key, item in value.items()}
    items = _restored(value.get("of"))
    makers: dict[str, Callable[[Any], Any]] = {"tensor": torch.tensor, "tuple": tuple, "set": set, "dict": dict}
    makers["Counter"] = lambda pairs: Counter(dict(pairs))
    make = makers.get(value[_KIND])
    try:
        assert make is not None
        return make(items)
    except (AssertionError, TypeError, ValueError):
        raise CheckpointError(
            f"the checkpoint's schedule is damaged: it has a {str(value[_KIND])[:40]!r}; take another checkpoint"
        ) from None
