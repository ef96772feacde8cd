"""Benchmark models, by name: ``build("inception_v3@1024", fake=True)``. Importing this package does not import torch.

A spec is ``NAME[:tiny][@BATCH]``, with or without the prefix ``zoo:``. Every model is a plain module in training mode whose
``forward`` takes inputs and targets, batch first, and returns the scalar training loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from soap.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["ZooModel", "build", "names"]

_MODULES = {
    "alexnet": "alexnet",
    "inception_v3": "inception",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "rnntc": "recurrent",
    "rnnlm": "recurrent",
    "nmt": "nmt",
    "gpt": "gpt",
    "dlrm": "dlrm",
    "lm": "recurrent",
}
"""Model name -> module of this package whose ``RECIPES`` makes it."""

_SPEC = re.compile(r"(?:zoo:)?(?P<name>[^:@]+)(?P<tiny>:tiny)?(?:@(?P<batch>[0-9]+))?")


@dataclass(frozen=True)
class ZooModel:
    """A model with one example batch: ``module(*args, **kwargs)`` is the training loss.

    ``name`` is the full spec, with the batch size. ``batch_dims``: position of an argument -> its batch dimension, or None where
    dimension 0 of every argument is the batch.
    """

    name: str
    module: nn.Module
    args: tuple[torch.Tensor, ...]
    batch: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch_dims: Mapping[int, int] | None = None
    fake: bool = False


def names() -> list[str]:
    """Names of all models; each also has a ``:tiny`` size."""
    return list(_MODULES)


def build(spec: str, *, seed: int = 0, fake: bool = False, dtype: torch.dtype | None = None) -> ZooModel:
    """The model of a spec such as ``gpt``, ``gpt:tiny`` or ``gpt@512`` (global batch), equal for equal seeds.

    ``fake`` puts parameters and inputs on the meta device: shapes without memory, enough to export and plan. ``dtype`` converts all
    floating-point tensors. The caller's random state is not touched.
    """
    name, tiny, batch = _parse(spec)
    import torch

    recipe = import_module(f"soap.zoo.{_MODULES[name]}").RECIPES[name + tiny]
    batch = recipe.batch if batch is None else batch
    with torch.random.fork_rng(devices=[]), torch.device("meta" if fake else "cpu"):
        # Not torch.manual_seed: that would reset the random states of the caller's accelerators as well.
        torch.default_generator.manual_seed(seed)
        module = recipe.module()
        # The data has a seed of its own, so that one seed gives the same weights at every batch size.
        torch.default_generator.manual_seed(seed + 1)
        args = recipe.inputs(batch)
    if dtype is not None:
        module = module.to(dtype)
        args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    return ZooModel(f"{name}{tiny}@{batch}", module.train(), args, batch, fake=fake)


def _parse(spec: str) -> tuple[str, str, int | None]:
    """Name, ``":tiny"`` or ``""``, and the batch size if one is given."""
    match = _SPEC.fullmatch(spec)
    if match is None or match["name"] not in _MODULES:
        raise ModelError(f"no zoo model {spec!r}: expected NAME[:tiny][@BATCH] with NAME one of {', '.join(_MODULES)}")
    batch = None if match["batch"] is None else int(match["batch"])
    if batch == 0:
        raise ModelError(f"zoo model {spec!r} has batch 0: expected at least 1 sample, such as {match['name']}@64")
    return match["name"], match["tiny"] or "", batch
