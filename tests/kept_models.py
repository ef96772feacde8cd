"""What tests read again and again is made once for all their processes, by whoever asks for it first: files of small models, and models of
the zoo.

What changes how a model is read is part of the key. Graphs and programs do not change once they are made, so what is read for planning
alone is shared within a process. Models that are trained have tensors of their own for whoever asks.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CACHE = "SOAP_TESTS_CACHE"
"""The variable that names the folder which all processes of the tests share."""

COLLECTED = 10_000, 10, 50
"""Python's own thresholds have the collector of garbage take a thirtieth of the tests' time."""


class ModelFiles(dict[str, str]):
    """Name of a model -> its file, which ``export(name, path)`` makes. All tests have the same path, and so a rank reads it once."""

    def __init__(self, group: str, export: Callable[[str, Path], object]) -> None:
        super().__init__()
        self.group, self.export = group, export

    def __missing__(self, name: str) -> str:
        path = made_once(f"{self.group}/{name}.pt2", lambda path: self.export(name, path))
        self[name] = str(path)
        return self[name]


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A file of the folder that the tests share. If it is not there, ``make`` writes it; others that ask for it wait meanwhile."""
    path = Path(os.environ[CACHE], "made once", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_name(f"part of {path.name}")
            make(part)
            part.rename(path)
    return path


def keep_zoo_models() -> None:
    """From now on, if the code that reads them is imported by now: half of the tests do without torch."""
    load: Any = sys.modules.get("soap.tracing.load")
    if load is None or hasattr(load.ZooSource, "kept"):
        return
    import torch

    real, kept = load.ZooSource.trace, dict[Any, Any]()

    @wraps(real)
    def trace(self: Any, *, shapes: Any = None, dtype: Any = None, plan_only: bool = False) -> Any:
        options = self.options
        if shapes is not None or options.batch_dims or CACHE not in os.environ:
            return real(self, shapes=shapes, dtype=dtype, plan_only=plan_only)
        usual = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        key = self.spec, plan_only, dtype, options.dtype, options.autocast, options.autocast_device, options.batch_norm, usual
        if key in kept:
            return copy.copy(kept[key])
        path = made_once(_named(key), lambda path: torch.save(real(self, dtype=dtype, plan_only=plan_only), path, pickle_module=_by_name()))
        model = torch.load(path, weights_only=False)
        model.graph = _with_footprints(model, _named(key[:1] + key[2:]), on_gpus=options.autocast_device == "cuda")
        if plan_only:
            kept[key] = model
        return copy.copy(model)

    load.ZooSource.trace, load.ZooSource.kept = trace, kept


def _named(key: object) -> str:
    return f"zoo/{hashlib.sha256(repr(key).encode()).hexdigest()}.pickle"


def _with_footprints(model: Any, name: str, *, on_gpus: bool) -> Any:
    """The model's graph; the first process that asks for its footprints finds them for all. They are those of models that are trained, and
    of models for planning."""
    from soap.tracing.footprints import FoundLater, footprints_later

    bare = replace(model, parameters={}, example_inputs=(), unchanged={}, source=None)

    def make(path: Path) -> None:
        path.write_bytes(pickle.dumps(footprints_later(bare, on_gpus=on_gpus)))

    @cache
    def found() -> Any:
        return pickle.loads(made_once(name, make).read_bytes())

    return replace(model.graph, footprints=FoundLater(lambda: found()[0]), part_footprints=FoundLater(lambda: found()[1]))


def _by_name() -> Any:
    """As ``pickle``, but that it writes operators of torch by name, and no footprints, which take longest."""
    import torch

    from soap.tracing.footprints import FoundLater

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch._ops.OpOverload):
                return _overload, (*value._schema.name.split("::"), value._overloadname)
            return (dict, ()) if isinstance(value, FoundLater) else NotImplemented

    return SimpleNamespace(__name__=__name__, Pickler=Pickler)


def _overload(library: str, name: str, overload: str) -> Any:
    import torch

    return getattr(getattr(getattr(torch.ops, library), name), overload)
