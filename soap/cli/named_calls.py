"""``torch.optim.AdamW:lr=0.001,betas=(0.9,0.95),amsgrad=true``: a dotted name with options, as the command line has it. Values are
numbers, ``true``, ``false``, ``none``, tuples and lists of values, and words. Nothing is evaluated.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from soap.errors import SoapError, first_line


def imported(spec: str, option: str, purpose: str, error: type[SoapError] = SoapError) -> Any:
    """What ``package.module:name`` names, which can be called. ``option``: its name in messages. ``purpose``: of the callable, in words.
    Raises ``error`` in one line if there is none, or importing its module fails, whatever the module does."""
    from soap.tracing.operators import from_here

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
    pieces = _split(rest) if found else []
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


def _split(text: str) -> list[str] | None:
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
        items = [_value(item.strip(), whole) for item in _split(text[1:-1]) or []]
        return tuple(items) if text[0] == "(" else items
    if _WORD.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"value {text!r} in {whole!r} is not allowed; expected {VALUES}")
