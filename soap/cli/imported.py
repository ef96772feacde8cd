"""``package.module:name``: something of a user's, found by importing it, also from the working folder."""

from __future__ import annotations

from typing import Any

from soap.errors import SoapError, first_line


def imported(spec: str, option: str, purpose: str, error: type[SoapError] = SoapError) -> Any:
    """What ``package.module:name`` names, which can be called. ``option``: its name in messages. ``purpose``: of the callable, in words.
    Raises ``error`` in one line if there is none, or importing its module fails, whatever the module does."""
    from soap.tracing.imports import from_here

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
