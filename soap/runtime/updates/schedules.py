"""Schedules of learning rates and other options, stepped once per update, and their state in checkpoints.

The state is saved as plain JSON, so that loading unpickles nothing. Values that JSON does not have (tuples, counters, mappings with number
keys) are saved with their kind.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from soap.errors import CheckpointError, RuntimeFailure
from soap.runtime.updates.optimizers import ScheduleFactory, recorded_name

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
    makers: Mapping[str, Callable[[Any], Any]] = {"tensor": torch.tensor, "tuple": tuple, "set": set, "dict": dict, "Counter": _counter}
    make = makers.get(value[_KIND])
    try:
        assert make is not None
        return make(items)
    except (AssertionError, TypeError, ValueError):
        raise CheckpointError(
            f"the checkpoint's schedule is damaged: it has a {str(value[_KIND])[:40]!r}; take another checkpoint"
        ) from None


def _counter(pairs: list[list[Any]]) -> Counter[Any]:
    return Counter(dict(pairs))
