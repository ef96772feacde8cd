"""Imports modules that a user names, also from the working folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from soap.errors import ModelError, first_line


def from_here(name: str) -> ModuleType:
    """The module of this name, which may be in the working folder. Raises what importing it raises."""
    if os.getcwd() not in sys.path:  # an installed command, unlike ``python``, does not search the working folder
        sys.path.insert(0, os.getcwd())
    return import_module(name)


def import_all(names: Iterable[str], option: str) -> None:
    """Import modules that define custom operators. ``option``: the option that named them. ModelError if one cannot be imported."""
    for name in names:
        try:
            from_here(name)
        except Exception as cause:
            raise ModelError(f"{option} {name}: {first_line(cause)}; expected a module that can be imported from here") from cause
