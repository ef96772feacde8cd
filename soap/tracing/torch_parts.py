"""Private parts of torch that we replace for a while: by ones of ours, each by a name that a version may lack, or to silence its log; where
in the code of the user an error of torch came from; and whether a tensor is on a GPU, or stands for one that is."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.export._trace
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from soap.errors import ModelError
from soap.logs import silenced

TRIED = "2.11 to 2.13"
"""Versions of torch with which every such part is tested."""


@contextmanager
def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context a part of torch (a function, or ``Class.method``) is what ``make`` makes of it. ModelError if it is missing."""
    *within, last = name.split(".")
    try:
        owner: Any = import_module(module)
        for step in within:
            owner = getattr(owner, step)
        original = getattr(owner, last)
    except (ImportError, AttributeError):
        raise ModelError(
            f"torch {torch.__version__} has no {module}.{name}, in whose place SOAP has one of its own; expected torch {TRIED}: install "
            "one of these, or a newer SOAP"
        ) from None
    setattr(owner, last, make(original))
    try:
        yield
    finally:
        setattr(owner, last, original)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within this context torch's loggers write nothing, and torch.export prints no graphs, as it does for errors that it raises."""
    printing: Any = torch.export._trace
    printing.print = lambda *_, **__: None  # our ``print`` hides the built-in one, in that module alone
    try:
        with silenced("torch"):
            yield
    finally:
        del printing.print


_FRAME = re.compile(r'File "(?P<path>[^"\n]+)", line (?P<line>\d+), in [^\n]*\n(?P<text>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_PYTHON = sysconfig.get_paths()["stdlib"]


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the last one first."""
    seen: set[int] = set()
    waiting: BaseException | None = error
    while waiting is not None and id(waiting) not in seen:
        seen.add(id(waiting))
        yield waiting
        waiting = waiting.__cause__ or waiting.__context__


def user_line(error: BaseException) -> str | None:
    """``file.py:12 (its text)``: the innermost line that is neither torch's, nor Python's own, nor ours; None if there is none."""
    found: traceback.FrameSummary | None = None
    for one in chain(error):
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if _is_user(frame.filename)]
        if frames:
            found = frames[-1]  # of the first cause that has such a line
    if found is None:
        return None
    text = (found.line or linecache.getline(found.filename, found.lineno or 0)).strip()
    return f"{_short(found.filename)}:{found.lineno}" + (f" ({text})" if text else "")


def torchs_module(error: BaseException) -> nn.Module | None:
    """The innermost of torch's own modules in whose forward an error occurred; None if there is none."""
    own = [frame.f_locals.get("self") for one in chain(error) for frame, _ in traceback.walk_tb(one.__traceback__)]
    found = [one for one in own if isinstance(one, nn.Module) and type(one).__module__.startswith("torch.nn.modules.")]
    return next((one for one in reversed(found) if not isinstance(one, _CONTAINERS)), None)


def is_packed(error: BaseException) -> bool:
    """Whether an error occurred where a packed sequence was made or read."""
    frames = [frame for one in chain(error) for frame, _ in traceback.walk_tb(one.__traceback__)]
    own = [frame for frame in frames if frame.f_code.co_filename.startswith(_TORCH)]
    packs = any("pack" in frame.f_code.co_name and frame.f_code.co_filename.endswith("rnn.py") for frame in own)
    return packs or any(isinstance(value, PackedSequence) for frame in own for value in frame.f_locals.values())


def node_line(node: torch.fx.Node) -> str | None:
    """The same for a node of a program, from what torch has noted of it."""
    found = [match for match in _FRAME.finditer(str(node.meta.get("stack_trace") or "")) if _is_user(match["path"])]
    return f"{_short(found[-1]['path'])}:{found[-1]['line']} ({found[-1]['text'].strip()})" if found else None


def _is_user(path: str) -> bool:
    if path.startswith("<") and not path.startswith("<ipython"):
        return False
    return not path.startswith((_TORCH, _OURS)) and not (path.startswith(_PYTHON) and "site-packages" not in path)


def _short(path: str) -> str:
    """A file as people know it: relative to the working folder, or the end of its path."""
    own = Path(path)
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else "/".join(own.parts[-2:])


_as_on_gpus: ContextVar[bool] = ContextVar("as_on_gpus", default=False)


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """What is run here, on tensors without values, takes the memory that it would take on a GPU."""
    token = _as_on_gpus.set(True)
    try:
        yield
    finally:
        _as_on_gpus.reset(token)


def stands_for_gpu() -> bool:
    """Whether what runs here is tried ``as_on_gpus``."""
    return _as_on_gpus.get()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or tried as if it were."""
    return tensor.is_cuda or stands_for_gpu()
