"""Benchmark models, by name: ``build("inception_v3@1024", fake=True)``. Importing this package does not import torch.

A spec is ``NAME[:SIZE][@BATCH]``, with or without the prefix ``zoo:``; every model has the size ``tiny``. Of DLRM, ``:tables=ROWS-ROWS-…``
before the batch gives it tables as long as those of data. Every model is a plain module in training mode whose ``forward`` takes inputs
and targets, batch first, and returns the scalar training loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from soap.errors import ModelError, one_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from soap.zoo.recipe import Recipe

__all__ = ["ZooModel", "batches", "build", "names"]

_MODULES = {
    "alexnet": "alexnet",
    "vgg16": "vgg",
    "vgg19": "vgg",
    "inception_v3": "inception",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "resnet152": "resnet",
    "rnntc": "recurrent",
    "rnnlm": "recurrent",
    "lstm_ptb": "recurrent",
    "nmt": "nmt",
    "gpt": "gpt",
    "dlrm": "dlrm",
    "lm": "recurrent",
    "lm1b": "lm1b",
    "nmt_gnmt": "gnmt",
    "full_sparse": "full_sparse",
}
"""Model name -> module of this package whose ``RECIPES`` makes it."""

SEED_STRIDE = 1_000_003
"""Keeps the batches of neighbouring seeds apart."""

TABLES = ":tables="
"""Before the rows of each table, where data decide them."""

_SPEC = re.compile(r"(?:zoo:)?(?P<name>[^:@]+)(?P<size>:[^:@=]+)?(?P<tables>:tables=[0-9]+(?:-[0-9]+)*)?(?:@(?P<batch>[0-9]+))?")


@dataclass(frozen=True)
class ZooModel:
    """A model with one example batch: ``module(*args, **kwargs)`` is the training loss.

    ``name`` is the full spec, with the batch size. Dimension 0 of arguments of that size is the batch; other arguments belong to no sample.
    """

    name: str
    module: nn.Module
    args: tuple[torch.Tensor, ...]
    batch: int
    kwargs: dict[str, Any] = field(default_factory=dict)


def names() -> list[str]:
    """Names of all models; each also has a ``:tiny`` size, some have others."""
    return list(_MODULES)


def build(spec: str, *, seed: int = 0, fake: bool = False, dtype: torch.dtype | None = None) -> ZooModel:
    """The model of a spec such as ``gpt``, ``gpt:tiny`` or ``gpt@512`` (global batch), equal for equal seeds.

    ``fake`` puts parameters and inputs on the meta device: shapes without memory, enough to export and plan. ``dtype`` converts all
    floating-point tensors. The caller's random state is not touched.
    """
    name, recipe, batch = _recipe(spec)
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta" if fake else "cpu"):
        # Not torch.manual_seed: that would reset the random states of the caller's accelerators as well.
        torch.default_generator.manual_seed(seed)
        module = recipe.module()
        args = _inputs(recipe, batch, seed, 0)
    if dtype is not None:
        module = module.to(dtype)
        args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    return ZooModel(f"{name}@{batch}", module.train(), args, batch)


def batches(spec: str, *, seed: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches for the model of a spec, without end, each drawn anew; the first is the one that ``build`` gives."""
    _, recipe, batch = _recipe(spec)
    return _batches(recipe, batch, seed)


def _batches(recipe: Recipe, batch: int, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    import torch

    for step in count():
        with torch.random.fork_rng(devices=[]):
            drawn = _inputs(recipe, batch, seed, step)
        yield drawn


def _inputs(recipe: Recipe, batch: int, seed: int, step: int) -> tuple[torch.Tensor, ...]:
    """The batch of a step, by the default generator, which the caller restores."""
    import torch

    # The data has a seed of its own, so that one seed gives the same weights at every batch size.
    torch.default_generator.manual_seed(seed + 1 + step * SEED_STRIDE)
    return recipe.inputs(batch)


def _recipe(spec: str) -> tuple[str, Recipe, int]:
    """Name with size, what makes it, and the batch size."""
    match = _SPEC.fullmatch(spec)
    if match is None or match["name"] not in _MODULES:
        name = re.split("[:@]", spec.removeprefix("zoo:"))[0]
        raise ModelError(f"no zoo model {spec!r}: expected NAME[:SIZE][@BATCH] with NAME {one_of(name, _MODULES)}")
    if match["batch"] is not None and int(match["batch"]) == 0:
        raise ModelError(f"zoo model {spec!r} has batch 0: expected at least 1 sample, such as {match['name']}@64")
    recipes = import_module(f"soap.zoo.{_MODULES[match['name']]}").RECIPES
    name = match["name"] + (match["size"] or "")
    if name not in recipes:
        sizes = [known for known in recipes if known.partition(":")[0] == match["name"]]
        raise ModelError(f"no zoo model {spec!r}: expected {one_of(name, sizes)}")
    batch = recipes[name].batch if match["batch"] is None else int(match["batch"])
    if match["tables"] is None:
        return name, recipes[name], batch
    rows = tuple(map(int, match["tables"].removeprefix(TABLES).split("-")))
    with_tables = recipes[name].with_tables
    if with_tables is None or not all(0 < count < 2**31 for count in rows):
        raise ModelError(f"zoo model {spec!r}: expected a model whose tables are data's, such as dlrm, and from 1 to 2^31 rows of each")
    return name + match["tables"], with_tables(rows), batch
