"""The checks by name, in order of importance: what is lost first if time runs out stands last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

PROFILE_S = 30
"""Seconds for each model, at most."""


@dataclass(frozen=True)
class Setup:
    """``device``: cuda or cpu. ``tiny``: sizes of a dry run. ``folder``: of results; ``scratch``: of what one check leaves to another."""

    device: str
    tiny: bool
    folder: Path
    scratch: Path


@dataclass(frozen=True)
class Check:
    """``run`` gives plain JSON values. ``limit_s``: then it is stopped, and the next one begins."""

    what: str
    run: Callable[[Setup], Any]
    limit_s: int = 120
    environment: Mapping[str, str] = field(default_factory=dict)


def _kernels(name: str, setup: Setup) -> Any:
    from benchmarks.gpu import kernels

    return getattr(kernels, name)(setup.device, setup.tiny)


def _updates(setup: Setup) -> Any:
    from benchmarks.gpu.updates import time_updates

    return time_updates(setup.device, setup.tiny)


def _ranks(name: str, setup: Setup) -> Any:
    from benchmarks.gpu import ranks

    return getattr(ranks, name)(setup.device, setup.tiny)


def _offloading(setup: Setup) -> Any:
    from benchmarks.gpu.offloading import beside_usual, kept_beside_usual

    found = {name: own(setup.device, setup.tiny) for name, own in (("states", beside_usual), ("kept", kept_beside_usual))}  # type: ignore[operator]
    return {**found, "ok": all(own["ok"] for own in found.values())}


def _collectives(name: str, setup: Setup) -> Any:
    from benchmarks.gpu import collectives

    return getattr(collectives, name)(setup.device, setup.tiny)


def _step(model: str, precision: str, compiled: bool, setup: Setup) -> Any:
    from benchmarks.gpu.steps import step

    export = None if compiled or precision == "tf32" else setup.folder / f"profile-{model.removeprefix('zoo:')}-{precision}.json"
    profile_s = 0 if export is None else PROFILE_S
    return step(model, precision, profile_s, compiled=compiled, tiny=setup.tiny, folder=setup.scratch, export=export)


def _steps(model: str, precision: str, compiled: bool = False) -> tuple[str, Check]:
    from benchmarks.gpu.steps import PRECISIONS

    name = "-".join(["step", model.removeprefix("zoo:"), precision, *(["compiled"] if compiled else [])])
    what = f"a training step of {model} in {precision}{', by torch.compile' if compiled else ''}: measured and predicted, peak memory"
    return name, Check(what, partial(_step, model, precision, compiled), 240, PRECISIONS[precision])


CHECKS: dict[str, Check] = dict(
    [
        ("products", Check("products of matrices and attention, by size and type of number", partial(_kernels, "time_products"))),
        ("operators", Check("convolutions, calls bound by memory, recurrent layers, launches", partial(_kernels, "time_operators"))),
        ("updates", Check("an optimizer's update by implementation, number of tensors and size", _updates)),
        _steps("zoo:gpt", "bfloat16"),
        _steps("zoo:gpt", "float32"),
        _steps("zoo:resnet50", "bfloat16"),
        _steps("bert", "bfloat16"),
        _steps("llama", "bfloat16"),
        ("suites", Check("kinds of models, random programs and complex numbers on four ranks on the GPU", partial(_ranks, "suites"), 240)),
        ("plans", Check("plans of ranks that share the GPU, and of one over NCCL", partial(_ranks, "checked_plans"), 300)),
        ("plans-pipelines", Check("plans of stages and micro-batches on the GPU", partial(_ranks, "pipelines"), 180)),
        ("plans-compressed", Check("plans with gradients compressed on the GPU", partial(_ranks, "compressed"), 240)),
        ("offloading", Check("states and what operators keep in the host's pinned memory: same training, less on the GPU", _offloading)),
        ("collectives", Check("all-gathers and reduce-scatters of equal parts in a world of one", partial(_collectives, "alone"))),
        ("plans-collectives", Check("plans of two ranks with sharded states and parameters", partial(_collectives, "plans"), 300)),
        ("failures", Check("what cannot run says so in one line", partial(_ranks, "failures"))),
        ("plain", Check("resnet50 and gpt beside the plain module, in turns", partial(_ranks, "beside_plain"))),
        _steps("zoo:resnet50", "float32"),
        _steps("bert", "float32"),
        _steps("zoo:gpt", "tf32"),
        _steps("llama", "tf32"),
        _steps("bert", "tf32"),
        _steps("zoo:gpt", "bfloat16", compiled=True),
        _steps("bert", "bfloat16", compiled=True),
        _steps("zoo:rnnlm", "float32"),
        _steps("llama", "float32"),
    ]
)  # fmt: skip
