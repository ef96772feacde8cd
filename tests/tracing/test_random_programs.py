"""Random small modules with complex parts, writes in place and constants of their own: the program is the module, by tiles too."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from soap.tracing.execute import TracedModel
from soap.tracing.export import exported_program
from soap.tracing.importer import import_program
from tests.extent import often, so_many
from tests.tracing.eager import assert_as_eager, eager_step
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.random_programs import draw_module


def _imported(seed: int, dtype: torch.dtype | None = None) -> TracedModel:
    module, args = draw_module(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_program(exported_program(module, args), name=f"random {seed}", dtype=dtype)


def _check(seed: int) -> None:
    module, args = draw_module(seed)
    assert_as_eager(_imported(seed), *eager_step(module, args))
    wide = _imported(seed, torch.float64)
    for number in range(2):
        compare(wide, draw_configs(wide.graph, random.Random(f"{seed}/{number}")), tolerance=1e-8, floor=1e-4)


@pytest.mark.parametrize("seed", often(range(24), range(3), pytest.mark.slow))
def test_a_random_program_is_its_module(seed: int) -> None:
    _check(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24, so_many(200, 1000)))
def test_many_random_programs_are_their_modules(seed: int) -> None:
    """With the ones above: 200 modules."""
    _check(seed)
