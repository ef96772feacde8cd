"""A store's folder: one server at a time, and always of the same partitions and optimizer, since its logs can be applied by these only."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soap.elastic.faults import ElasticError
from soap.elastic.partitions import Partition
from soap.elastic.steps import Steps
from soap.files import read_text, reason, write_text_atomically
from soap.runtime.updates.optimizers import OptimizerFactory, recorded_name

MANIFEST, LOCK = "store.json", "store.lock"
FORMAT = 1


def locked(folder: Path) -> int:
    """The folder, made if need be, locked for this process: a file that the system closes with the process, however it ends. ElasticError
    in one line if another server has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as cause:
        raise ElasticError(f"cannot open the store {str(folder)!r}: {reason(cause)}; choose another folder") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ElasticError(f"store {str(folder)!r} is in use by another server; end that one, or choose another folder") from None
    return file


def described(
    partitions: Sequence[Partition], initial: Sequence[Tensor], make: OptimizerFactory, lazy: bool, steps: Steps | None = None
) -> dict[str, Any]:
    """What a store is of, as JSON gives it back."""
    made = make([torch.zeros(1, 1)])
    return {
        "format": FORMAT,
        "partitions": [[p.name, p.parameter, p.axis, p.start, p.stop, list(p.shape)] for p in partitions],
        "dtypes": [str(values.dtype) for values in initial],
        "optimizer": recorded_name(made),
        "options": [{key: repr(value) for key, value in group.items() if key != "params"} for group in made.param_groups],
        "lazy": lazy,
        "steps": None if steps is None else [steps.leases, steps.workers],
    }


def agree(folder: Path, own: Mapping[str, Any]) -> None:
    """Note what the store is of, or compare it with what is noted. ElasticError in one line if that differs."""
    path = folder / MANIFEST
    if not path.exists():
        write_text_atomically(path, json.dumps(own, indent=1), error=ElasticError)
        return
    try:
        noted = json.loads(read_text(path, what="store", error=ElasticError))
    except (ValueError, RecursionError) as cause:
        raise ElasticError(f"store {str(path)!r} is damaged: {cause}; bring it back from a copy, or begin in a new folder") from None
    for key, value in own.items():
        if not isinstance(noted, dict) or noted.get(key) != value:
            raise ElasticError(
                f"store {str(folder)!r} was made with other {key}; expected the same as before, or an empty folder: its logs can only be "
                "applied as they were written"
            )
