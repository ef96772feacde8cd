"""Where in the user's own code an error of torch's came from."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

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
