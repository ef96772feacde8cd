"""State that Python keeps from call to call: ``soap.export`` refuses by name what a program would have wrong from the second step on, and
nothing else."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from soap.errors import ModelError
from tests.tracing.exporting import Exports, around, mean_square

X = torch.linspace(-1, 1, 32).reshape(8, 4)
TOTAL = 0
SEEN: dict[str, int] = {}


class Does(nn.Module):
    """A linear layer, and what a function makes of the module and that layer's output."""

    shared = 0

    def __init__(self, function: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.layer(x))


def annealed(self: Any, z: Tensor) -> Any:
    weight = min(1.0, self.calls / 4)
    self.calls += 1
    return z * (1 + weight)


def late(self: Any, z: Tensor) -> Any:
    self.calls += 1
    return z * 2 if self.calls > 1000 else z


def every_seventh(self: Any, z: Tensor) -> Any:
    self.state.step = self.state.step + 1
    return z * 2 if self.state.step % 7 == 0 else z


def cached(self: Any, z: Tensor) -> Any:
    y = z if self.last is None else z + self.last
    self.last = z.detach()
    return y


def compared_with_the_last(self: Any, z: Tensor) -> Any:
    """The second step on one batch is like the first, but not on another."""
    y = z if self.last is None else torch.cat([z, z - self.last], 1)
    self.last = z.detach()
    return y


def queued(self: Any, z: Tensor) -> Any:
    self.queue.append(z.detach())
    return z * 0.5 if len(self.queue) > 6 else z


def counted_in_a_dictionary(self: Any, z: Tensor) -> Any:
    self.seen["calls"] = self.seen.get("calls", 0) + 1
    return z * self.seen["calls"] ** 0.01


def rotated(self: Any, z: Tensor) -> Any:
    self.order.insert(0, self.order.pop())
    return z[:, self.order]


def counted_in_an_array(self: Any, z: Tensor) -> Any:
    self.array[0] += 1
    return z * (2.0 if self.array[0] > 5 else 1.0)


def drawn_from_its_own(self: Any, z: Tensor) -> Any:
    return z * (2.0 if self.draw.random() < 1e-9 else 1.0)


def next_of(self: Any, z: Tensor) -> Any:
    return z * next(self.factors)


def counted_in_the_class(self: Any, z: Tensor) -> Any:
    type(self).shared += 1
    return z * 2 if Does.shared > 50 else z


def counted_in_the_module(self: Any, z: Tensor) -> Any:
    global TOTAL
    TOTAL += 1
    return z * 2 if TOTAL > 50 else z


def noted_in_the_module(self: Any, z: Tensor) -> Any:
    SEEN[str(len(SEEN))] = 1
    return z * 2 if len(SEEN) > 50 else z


def with_a_default(self: Any, z: Tensor, known: list[int] = []) -> Any:  # noqa: B006
    known.append(1)
    return z * 2 if len(known) > 50 else z


def in_a_closure() -> Callable[[Any, Tensor], Any]:
    calls = 0

    def function(self: Any, z: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return z * 2 if calls > 50 else z

    return function


def factors() -> Iterator[float]:
    step = 0
    while True:
        yield 1.0 if step < 50 else 2.0
        step += 1


class Slotted:
    """An object of a user's class."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


STATES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a weight that grows": (lambda: Does(annealed, calls=0), "forward changed self.calls"),
    "a number of calls": (lambda: Does(late, calls=0), "forward changed self.calls"),
    "an object": (lambda: Does(every_seventh, state=SimpleNamespace(step=0)), "forward changed self.state.step"),
    "an object with slots": (lambda: Does(every_seventh, state=Slotted()), "forward changed self.state.step"),
    "an activation": (lambda: Does(cached, last=None), "forward changed self.last"),
    "an activation of another batch": (lambda: Does(compared_with_the_last, last=None), "forward changed self.last"),
    "a queue": (lambda: Does(queued, queue=deque(maxlen=8)), "forward changed self.queue"),
    "a dictionary": (lambda: Does(counted_in_a_dictionary, seen={}), "forward changed self.seen"),
    "an order": (lambda: Does(rotated, order=[0, 1, 2]), "forward changed self.order"),
    "an array": (lambda: Does(counted_in_an_array, array=np.zeros(1)), "forward changed self.array"),
    "a generator": (lambda: Does(drawn_from_its_own, draw=random.Random(3)), "forward changed self.draw"),
    "a generator of numpy's": (lambda: Does(drawn_from_its_own, draw=np.random.default_rng(3)), "forward changed self.draw"),
    "an iterator": (lambda: Does(next_of, factors=iter([1.0] * 40)), "forward changed self.factors"),
    "a generator function": (lambda: Does(next_of, factors=factors()), "forward changed self.factors"),
    "a class": (lambda: Does(counted_in_the_class), "forward changed Does.shared"),
    "a global": (lambda: Does(counted_in_the_module), r"forward changed \S+test_export_python_state.TOTAL"),
    "a global dictionary": (lambda: Does(noted_in_the_module), r"forward changed \S+test_export_python_state.SEEN"),
    "a default": (lambda: Does(with_a_default), "forward changed self.function.<known>"),
    "a closure": (lambda: Does(in_a_closure()), "forward changed self.function.<calls>"),
    "Python's numbers": (lambda: Does(lambda self, z: z * (2.0 if random.random() < 1e-9 else 1.0)), "forward draws from Python's random"),
    "numpy's numbers": (lambda: Does(lambda self, z: z * (2.0 if np.random.rand() < 1e-9 else 1.0)), "forward draws from numpy.random"),
}


@pytest.mark.parametrize("name", STATES)
def test_state_that_moves_is_refused_by_its_name(export: Exports, name: str) -> None:
    make, words = STATES[name]
    with pytest.raises(ModelError, match=words) as caught:
        export(make(), X)
    assert "changes from step to step" in str(caught.value) and "verify=False" in str(caught.value) and "\n" not in str(caught.value)


def frozen_later(self: Any, z: Tensor) -> Any:
    self.layer.bias.requires_grad_(False)
    return z


def in_evaluation_later(self: Any, z: Tensor) -> Any:
    y = self.norm(z)
    self.norm.eval()
    return y


def in_evaluation_meanwhile(self: Any, z: Tensor) -> Any:
    self.norm.eval()
    y = self.norm(z)
    self.norm.train()
    return y


@pytest.mark.parametrize(
    ("function", "name"), [(frozen_later, "self.layer.bias.requires_grad"), (in_evaluation_later, "self.norm.training")]
)
def test_modes_that_forward_changes_are_named(export: Exports, function: Callable[[Any, Tensor], Any], name: str) -> None:
    module = Does(function, norm=nn.BatchNorm1d(3))
    with pytest.raises(ModelError, match=rf"forward changed {name}.*; expected train\(\), eval\(\) and requires_grad_\(\) between steps"):
        export(module, X)
    assert module.norm.training and all(parameter.requires_grad for parameter in module.parameters())
    assert export(Does(in_evaluation_meanwhile, norm=nn.BatchNorm1d(3)), X).record.compared


def test_an_own_generator_of_torch_is_refused(export: Exports) -> None:
    own = Does(lambda self, z: z + torch.rand(3, generator=self.draw), draw=torch.Generator())
    with pytest.raises(ModelError, match=r"forward uses a torch.Generator of its own, or .* expected .* \(drop generator=\)"):
        export(own, X)


def test_a_loss_that_counts_is_refused(export: Exports) -> None:
    calls = {"number": 0}

    def loss(y: Tensor) -> Tensor:
        calls["number"] += 1
        return mean_square(y) * calls["number"]

    with pytest.raises(ModelError, match=r"forward changed loss\.<calls>"):
        export(around(nn.ReLU()), X, loss=loss)
    assert calls == {"number": 0}


# What cannot matter


def counted(self: Any, z: Tensor) -> Any:
    self.calls += 1
    return z


def made_when_needed(self: Any, z: Tensor) -> Any:
    if not hasattr(self, "table") or self.table.shape[0] < z.shape[1]:
        self.table = torch.arange(z.shape[1]) * 0.5
        self.length = z.shape[1]
    return z * self.table.cos()


def kept_by_size(self: Any, z: Tensor) -> Any:
    if z.shape[1] not in self.tables:
        self.tables[z.shape[1]] = torch.arange(z.shape[1]).cos()
    return z * self.tables[z.shape[1]]


def shown(self: Any, z: Tensor) -> Any:
    self.attention = z.softmax(1)
    self.shown = {"last": z.detach(), "name": "z"}
    return z


def dropped(self: Any, z: Tensor) -> Any:
    self.mask = torch.nn.functional.dropout(torch.ones_like(z), 0.5)
    return z * self.mask


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "a counter that nobody reads": lambda: Does(counted, calls=0),
    "a table": lambda: Does(made_when_needed),
    "tables by size": lambda: Does(kept_by_size, tables={}),
    "activations that nobody reads": lambda: Does(shown),
    "a mask that is drawn": lambda: Does(dropped),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_state_without_effect_is_exported(export: Exports, name: str) -> None:
    module = HARMLESS[name]()
    before = dict(module.__dict__)
    model = export(module, X)
    assert model.record is not None and model.record.compared
    assert module.__dict__.keys() == before.keys() and all(module.__dict__[n] is value for n, value in before.items())


def test_everything_is_as_it_was_afterwards(export: Exports) -> None:
    """Whether the export is refused or not: attributes, what they hold, and generators."""
    queue, seen, draw, names = deque([1.0], maxlen=3), {"a": [1]}, random.Random(3), set[str]()

    def all_at_once(self: Any, z: Tensor) -> Any:
        queue.append(2.0)
        seen["a"].append(2)
        seen["b"] = [3]
        self.names.add("x")
        self.array[0] += 1
        self.beside += 1
        self.new = draw.random()
        return z

    module = Does(all_at_once, queue=queue, seen=seen, draw=draw, names=names, array=np.zeros(1), beside=torch.zeros(1), calls=0)
    states = random.getstate(), draw.getstate(), pickled_numpy()
    before = copy.deepcopy({"queue": queue, "seen": seen, "names": names})
    with pytest.raises(ModelError, match="forward changed self"):
        export(module, X)
    assert {"queue": queue, "seen": seen, "names": names} == before
    own = module.__dict__
    assert own["queue"] is queue and own["seen"] is seen and "new" not in own
    assert own["array"][0] == 0 and own["beside"].item() == 0
    assert (random.getstate(), draw.getstate(), pickled_numpy()) == states


def pickled_numpy() -> bytes:
    state: Any = np.random.get_state()
    return bytes(state[1].tobytes()) + bytes([state[2] % 251])
