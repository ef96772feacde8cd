"""The options that say how parameters are updated: ``--optimizer``, ``--lr``, ``--weight-decay``, ``--schedule``.

``torch.optim.AdamW:lr=0.001,betas=(0.9,0.95),amsgrad=true``: a dotted name with options, as the command line has it. Values are
numbers, ``true``, ``false``, ``none``, tuples and lists of values, and words. Nothing is evaluated.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from soap.cli.command import Parser, UsageError
from soap.cli.options import not_negative_number
from soap.errors import SoapError, did_you_mean, first_line, one_of
from soap.model.graph import OperatorGraph

if TYPE_CHECKING:
    import torch

    from soap.plan.plan import Plan
    from soap.runtime.updates.optimizers import Recipe
    from soap.runtime.updates.trial import Tried


def imported(spec: str, option: str, purpose: str, error: type[SoapError] = SoapError) -> Any:
    """What ``package.module:name`` names, which can be called. ``option``: its name in messages. ``purpose``: of the callable, in words.
    Raises ``error`` in one line if there is none, or importing its module fails, whatever the module does."""
    from soap.tracing.record import from_here

    module, _, name = spec.partition(":")
    wanted = f"package.module:callable, which {purpose}"
    if not module or not name:
        raise error(f"{option} {spec}: expected {wanted}")
    if module.endswith(".py") or "/" in module:
        raise error(f"{option} {spec}: {module!r} is a file; expected {wanted}: the module's name, with dots and without .py")
    try:
        found = from_here(module)
    except (Exception, SystemExit) as cause:  # a script without a guard may end the interpreter
        told = first_line(cause) if isinstance(cause, ImportError) else f"{type(cause).__name__} while it was imported: {first_line(cause)}"
        raise error(f"{option} {spec}: {told}; expected {wanted}, of a module that can be imported from here") from cause
    if not hasattr(found, name):
        raise error(f"{option} {spec}: module {module!r} has no {name!r}; expected {wanted}")
    value = getattr(found, name)
    if not callable(value):
        raise error(f"{option} {spec}: {type(value).__name__} cannot be called; expected {wanted}")
    return value


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?|[+-]?inf", re.ASCII)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_WORDS = {"true": True, "false": False, "none": None}
_OPEN = {"(": ")", "[": "]"}
VALUES = "numbers, true, false, none, words, and tuples such as (0.9,0.95)"


@dataclass(frozen=True)
class NamedCall:
    """A name and its options. ``text``: as it was given."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


def named_call(text: str) -> NamedCall:
    """Parse ``NAME`` or ``NAME:key=value,key=value``. Whether such a name exists is checked later."""
    name, found, rest = text.partition(":")
    pieces = _split_pieces(rest) if found else []
    if not _NAME.fullmatch(name) or pieces is None or (found and not pieces):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected NAME or NAME:key=value,key=value")
    options: dict[str, Any] = {}
    for piece in pieces:
        key, equals, value = piece.partition("=")
        key = key.strip()
        if not equals or not _KEY.fullmatch(key) or key in options:
            twice = "is given twice" if key in options else "is not allowed"
            raise argparse.ArgumentTypeError(f"{piece.strip()!r} in {text!r} {twice}; expected key=value once for each key")
        options[key] = _value(value.strip(), text)
    return NamedCall(name, options, text)


def setting(text: str) -> tuple[str, Any]:
    """Parse ``key=value``."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key.strip()):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed; expected KEY=VALUE; values are {VALUES}")
    return key.strip(), _value(value.strip(), text)


def _split_pieces(text: str) -> list[str] | None:
    """The parts between commas that are not in brackets; None if brackets do not match."""
    parts, closing = [""], list[str]()
    for char in text:
        if char in _OPEN:
            closing.append(_OPEN[char])
        elif char in _OPEN.values() and (not closing or closing.pop() != char):
            return None
        if char == "," and not closing:
            parts.append("")
        else:
            parts[-1] += char
    return None if closing else [part for part in parts if part.strip()]


def _value(text: str, whole: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[:1] in _OPEN and text[-1:] == _OPEN[text[0]]:
        items = [_value(item.strip(), whole) for item in _split_pieces(text[1:-1]) or []]
        return tuple(items) if text[0] == "(" else items
    if _WORD.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"value {text!r} in {whole!r} is not allowed; expected {VALUES}")


OWN = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
"""The command's own optimizers, and the names of their classes."""
OPTIM, SCHEDULES = "torch.optim.", "torch.optim.lr_scheduler."
LEARNING_RATE = 0.01
"""Learning rate of the command's own optimizers, if neither the command line nor a checkpoint gives one."""
TIMED_LEARNING_RATE = 1e-4
"""Learning rate of steps that are taken to be timed, all on one batch. With 0.01 Adam makes attention so sure after some tens of steps that
gradients leave the range of normal numbers, and a processor takes twice as long for products of them (docs/lab_notebook.md)."""
NEEDS_PYTHON = ("lr_lambda", "schedulers", "optimizer")
"""Options whose values are neither numbers nor words."""
OPTIMIZER_HELP = (
    "sgd, adam, adamw (torch's, fused), or any of torch's as torch.optim.NAME:key=value,key=value, such as "
    "torch.optim.AdamW:betas=(0.9,0.95),eps=1e-6; with GLOB= before it, of the parameters whose names match (repeatable): "
    "'*.bias=adamw:lr=0.001'"
)


def add_optimizer(parser: Parser, *, default: str) -> None:
    """Add ``--optimizer SPEC``."""
    parser.add_argument("--optimizer", metavar="SPEC", type=optimizer_spec, action="append", help=f"{OPTIMIZER_HELP} (default {default})")


def add_updating(parser: Parser) -> None:
    """Add all options of updating."""
    add_optimizer(parser, default="sgd")
    parser.add_argument(
        "--weight-decay",
        metavar="X",
        type=not_negative_number,
        help="of all parameters except those of at most one dimension (norms' weights and biases)",
    )
    parser.add_repeatable(
        "--no-decay",
        metavar="GLOB",
        help="with --weight-decay: parameters with these names have none either (repeatable)",
    )
    parser.add_repeatable(
        "--schedule",
        metavar="SPEC",
        type=schedule_spec,
        help="step torch.optim.lr_scheduler.NAME:key=value,key=value once per update, such as "
        "torch.optim.lr_scheduler.CosineAnnealingLR:T_max=100; one that asks for a metric gets the loss. Several run one after the "
        "other, each but the last with @N behind it, the number of updates from the start after which the next one begins",
    )


def optimizer_spec(text: str) -> str:
    """Check ``adamw`` or ``GLOB=torch.optim.NAME:key=value``; returns the text."""
    _pattern_and_call(text)
    return text


def schedule_spec(text: str) -> str:
    """Check ``torch.optim.lr_scheduler.NAME:key=value@N``; returns the text."""
    _call_and_end(text)
    return text


@dataclass(frozen=True)
class Updating:
    """The options as text, so that they can be sent to every rank. ``momentum``: as ``--correct-momentum``, of all parameters but those
    that are ``corrected``, which have it before they are compressed."""

    optimizers: tuple[str, ...] = ("sgd",)
    learning_rate: float | None = None
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    momentum: float | None = None
    corrected: tuple[str, ...] = ()

    @staticmethod
    def of(args: argparse.Namespace, default: str = "sgd") -> Updating:
        """Read the options."""
        if args.no_decay and args.weight_decay is None:
            raise UsageError("--no-decay without --weight-decay; add --weight-decay X")
        chosen = tuple(args.optimizer or (default,))
        momentum = getattr(args, "correct_momentum", None)
        return Updating(chosen, args.lr, args.weight_decay, tuple(args.no_decay), tuple(args.schedule), momentum)

    @property
    def only_name(self) -> str | None:
        """The name of the optimizer's class, known without torch; None if there are several."""
        (pattern, call), *more = [_pattern_and_call(text) for text in self.optimizers]
        return None if more or pattern is not None else OWN.get(call.name, call.name.removeprefix(OPTIM))

    def recipe(self) -> Recipe:
        """What trainers take. UsageError in one line for names, options and values that torch does not have."""
        from soap.runtime.updates.optimizers import Recipe

        pairs = [_pattern_and_call(text) for text in self.optimizers]
        general = [call for pattern, call in pairs if pattern is None]
        if len(general) > 1:
            raise UsageError(f"--optimizer {general[0].text} and {general[1].text}: expected one without GLOB= before it")
        if self.learning_rate is not None and all("lr" in call.options for _, call in pairs):
            raise UsageError(f"--lr {self.learning_rate:g} beside --optimizer {pairs[0][1].text}, which sets lr too; give it once")
        makes = {
            pattern: self._make(call) for pattern, call in [*((p, c) for p, c in pairs if p is not None), *(("*", c) for c in general)]
        }
        schedule = self._schedule(next(iter(makes.values())))
        only = next(iter(makes.values())) if list(makes) == ["*"] else makes
        return Recipe(only, None if self.weight_decay is None and self.momentum is None else self._groups, schedule)

    def timed(self) -> Updating:
        """The same for steps that are taken to be timed, with ``TIMED_LEARNING_RATE`` where none was chosen."""
        chosen = self.learning_rate is not None or all("lr" in _pattern_and_call(text)[1].options for text in self.optimizers)
        return self if chosen else replace(self, learning_rate=TIMED_LEARNING_RATE)

    @property
    def decays(self) -> bool:
        """Whether some parameters have weight decay."""
        return bool(self.weight_decay) or any(_pattern_and_call(text)[1].options.get("weight_decay") for text in self.optimizers)

    def tried(self, graph: OperatorGraph) -> Tried:
        """What the optimizer needs of this model's parameters, found by trying it."""
        from soap.runtime.updates.trial import try_optimizer

        trainable = {tensor.name: tensor.shape for tensor in graph.parameters if tensor.requires_grad}
        for pattern in self.no_decay:
            if not any(fnmatchcase(name, pattern) for name in trainable):
                some = ", ".join(list(trainable)[:3]) or "none"
                raise UsageError(f"--no-decay {pattern}: no parameter has such a name; expected a name or pattern of {some}, …")
        return try_optimizer(self.recipe().layout(trainable), trainable)

    def _make(self, call: NamedCall) -> Making:
        made = _making(call, self.learning_rate)
        if self.weight_decay is not None:
            if "weight_decay" in call.options:
                raise UsageError(
                    f"--weight-decay {self.weight_decay:g} beside --optimizer {call.text}, which sets weight_decay too; give it once"
                )
            if "weight_decay" not in _options(made.target):
                raise UsageError(f"--weight-decay: {call.name} has no weight decay; leave it out, or use --optimizer adamw")
            made = Making(made.target, made.options, made.explicit | {"weight_decay"})
        if self.momentum is not None:
            _require_plain_sgd(self.momentum, made, call)
            made = Making(made.target, made.options, made.explicit | {"momentum"})
        made.check(f"--optimizer {call.text}")
        return made

    def _groups(self, name: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        if self.weight_decay is not None:
            spared = len(shape) <= 1 or any(fnmatchcase(name, pattern) for pattern in self.no_decay)
            found["weight_decay"] = 0.0 if spared else self.weight_decay
        if self.momentum is not None:
            found["momentum"] = 0.0 if name in self.corrected else self.momentum
        return found

    def _schedule(self, optimizer: Making) -> Scheduling | None:
        if not self.schedules:
            return None
        calls = [_call_and_end(text) for text in self.schedules]
        ends = [end for _, end in calls if end is not None]
        if len(ends) != len(calls) - 1 or calls[-1][1] is not None or sorted({*ends}) != ends:
            raise UsageError(
                f"--schedule {' --schedule '.join(self.schedules)}: expected @N behind each but the last, rising, such as …LR@10, the "
                "number of updates after which the next one begins"
            )
        made = Scheduling(tuple(_scheduler(call) for call, _ in calls), tuple(ends))
        made.check(optimizer, f"--schedule {' --schedule '.join(self.schedules)}")
        return made


def states_of(optimizer: str) -> int:
    """Number of tensors of a parameter's size that an optimizer, as ``--optimizer`` names it, keeps for each parameter."""
    from soap.runtime.updates.trial import try_optimizer

    shapes = {"weight": (2, 3)}
    return try_optimizer(Updating((optimizer,)).recipe().layout(shapes), shapes).states


@dataclass(frozen=True)
class Making:
    """Makes an optimizer of tensors or groups. ``explicit``: options that were asked for, which overrule a checkpoint's."""

    target: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]
    explicit: frozenset[str] = field(default_factory=frozenset)

    def __call__(self, tensors: Any) -> torch.optim.Optimizer:
        """Make one optimizer."""
        return self.target(tensors, **self.options)

    def check(self, where: str) -> None:
        """UsageError unless torch takes these values."""
        import torch

        try:
            self([torch.zeros(2, 2, requires_grad=True)])
        except Exception as error:  # torch checks values in many ways
            raise UsageError(f"{where}: {_told(error)}; expected values like the defaults, {_defaults(self.target)}") from None


@dataclass(frozen=True)
class Scheduling:
    """Makes a schedule of an optimizer; several schedules run one after the other. ``ends``: after which updates the next ones begin."""

    parts: tuple[tuple[Callable[..., Any], Mapping[str, Any]], ...]
    ends: tuple[int, ...]

    def __call__(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Make one schedule."""
        import torch

        made = [make(optimizer, **options) for make, options in self.parts]
        return made[0] if len(made) == 1 else torch.optim.lr_scheduler.SequentialLR(optimizer, made, list(self.ends))

    def check(self, optimizer: Making, where: str) -> None:
        """UsageError unless torch takes these values, and makes some steps with them."""
        import torch

        tensor = torch.zeros(2, 2, requires_grad=True)
        tensor.grad = torch.ones_like(tensor)
        try:
            own = optimizer([tensor])
            made: Any = self(own)
            metric = (1.0,) if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
            for _ in range(2):
                own.step()
                made.step(*metric)
        except Exception as error:
            raise UsageError(f"{where}: {_told(error)}; expected options as torch has them: {_defaults(self.parts[0][0])}") from None


def _require_plain_sgd(momentum: float, made: Making, call: NamedCall) -> None:
    """UsageError unless the optimizer is SGD without momentum of its own."""
    import torch

    from soap.runtime.updates.optimizers import sgd

    if made.target not in (sgd, torch.optim.SGD):
        raise UsageError(f"--correct-momentum {momentum:g} beside --optimizer {call.text}; expected sgd, whose momentum that is")
    for option in ("momentum", "dampening", "nesterov"):
        if call.options.get(option):
            raise UsageError(
                f"--correct-momentum {momentum:g} beside --optimizer {call.text}, which sets {option} too; expected SGD without: all "
                "parameters get momentum from --correct-momentum"
            )


def _pattern_and_call(text: str) -> tuple[str | None, NamedCall]:
    pattern, equals, rest = text.partition("=")
    if equals and ":" not in pattern:
        if not pattern:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected SPEC or GLOB=SPEC, such as '*.bias=adamw'")
        return pattern, named_call(rest)
    return None, named_call(text)


def _call_and_end(text: str) -> tuple[NamedCall, int | None]:
    before, found, number = text.rpartition("@")
    if not found:
        return named_call(text), None
    if not (number.isascii() and number.isdigit() and 0 < int(number[:10]) < 10**9):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a number of updates of at least 1 behind the @")
    return named_call(before), int(number)


def _making(call: NamedCall, learning_rate: float | None) -> Making:
    import torch

    from soap.runtime.updates.optimizers import OPTIMIZERS

    own = OPTIMIZERS.get(call.name)
    target: Any = own or _class(call, OPTIM, torch.optim, torch.optim.Optimizer, [*OPTIMIZERS], "--optimizer")
    known = _options(target)
    _require_known(call, known, "--optimizer")
    options = dict(call.options)
    if learning_rate is not None and "lr" in known:
        options.setdefault("lr", learning_rate)
    explicit = frozenset(options)
    if own is not None:
        options.setdefault("lr", LEARNING_RATE)
    return Making(target, options, explicit)


def _scheduler(call: NamedCall) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    import torch

    schedules = torch.optim.lr_scheduler
    target: Any = _class(call, SCHEDULES, schedules, schedules.LRScheduler, [], "--schedule")
    known = _options(target)
    required = [name for name, default in known.items() if default is inspect.Parameter.empty]
    if any(name in NEEDS_PYTHON for name in required):
        raise UsageError(
            f"--schedule {call.text}: {call.name} needs {', '.join(required)}, which is no number; use soap.Trainer(schedule=…), or "
            "several --schedule one after the other"
        )
    _require_known(call, known, "--schedule")
    missing = [name for name in required if name not in call.options]
    if missing:
        raise UsageError(
            f"--schedule {call.text}: {call.name} needs {', '.join(missing)}; expected {SCHEDULES}{target.__name__}:{missing[0]}=…"
        )
    return target, call.options


def _class(call: NamedCall, prefix: str, module: Any, base: type, others: Sequence[str], option: str) -> Any:
    found = getattr(module, call.name.removeprefix(prefix), None) if call.name.startswith(prefix) else None
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    names = sorted(
        n for n, own in vars(module).items() if isinstance(own, type) and issubclass(own, base) and own is not base and n[0] != "_"
    )
    raise UsageError(
        f"{option} {call.text}: no {call.name!r}; expected one of {', '.join([*others, f'{prefix}NAME'])} with {', '.join(names)} as NAME"
        + did_you_mean(call.name, [*others, *(prefix + name for name in names)])
    )


def _options(target: Any) -> dict[str, Any]:
    """Name of an option -> its default in torch."""
    import torch

    own = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(getattr(target, "__name__", ""), target)
    parameters = list(inspect.signature(own).parameters.values())[1:]
    return {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _require_known(call: NamedCall, known: Mapping[str, Any], option: str) -> None:
    for key in call.options:
        if key not in known:
            raise UsageError(f"{option} {call.text}: {call.name} has no option {key!r}; expected {one_of(key, known)}")


def _defaults(target: Any) -> str:
    empty = inspect.Parameter.empty
    return ", ".join(name if default is empty else f"{name}={default}" for name, default in _options(target).items())


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def require_trainable(args: argparse.Namespace, plan: Plan, tried: Tried) -> None:
    """RuntimeFailure or UsageError in one line if the options do not go with this plan."""
    from soap.plan.syncs.compressed import compressed_names
    from soap.runtime.compression.dgc import require_correctable
    from soap.runtime.updates.loss_scaling import require_clippable
    from soap.runtime.updates.parts import require_possible

    require_possible(plan, tried, lazy_sparse=False)
    if args.correct_momentum is not None:
        require_correctable(plan)
    if args.clip_norm is not None and compressed_names(plan):
        require_clippable(plan, args.clip_norm)
        if getattr(args, "check", False):
            raise UsageError("--check with --clip-norm and a plan that compresses: each rank clips its own gradients; check without")
