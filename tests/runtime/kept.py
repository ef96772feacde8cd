"""Launches on kept ranks: those that a command starts take two seconds of a core each, and as much again to export their first model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from soap.errors import RuntimeFailure, SoapError
from tests.runtime.pool import Pool


class Refused(NamedTuple):
    """In place of a rank's result."""

    why: str


def launch_on(pool: Pool) -> Callable[..., dict[int, Any]]:
    """Takes the place of ``soap.runtime.comm.launch.launch``. Ranks find a world that is open, as under a script of the user's own."""

    def launch(
        processes: int,
        entry: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        limit_s: float | None = None,
        place: Callable[[int], None] | None = None,
        address: str = "localhost",
        modules: Sequence[str] = (),
    ) -> dict[int, Any]:
        assert place is None, "kept ranks go nowhere"
        found = dict(enumerate(pool.run(_in_folder, os.getcwd(), entry, tuple(args), ranks=processes)))
        for rank, result in found.items():
            if isinstance(result, Refused):
                raise RuntimeFailure(f"rank {rank} failed: {result.why}")
        return found

    return launch


def _in_folder(folder: str, entry: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As a process that is started there: with the modules of this folder, and none of another's."""
    home, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    try:
        return entry(*args)
    except SoapError as error:
        return Refused(str(error))
    finally:
        os.chdir(home)
        sys.path[:] = path
        for name in _modules_in(Path(folder), sys.modules) if folder != home else ():
            del sys.modules[name]


def _modules_in(folder: Path, modules: Mapping[str, Any]) -> list[str]:
    files = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return [name for name, file in files.items() if file and Path(file).is_relative_to(folder)]
