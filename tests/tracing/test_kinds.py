"""Each kind of model: the program is the module, eagerly; by tiles too. What cannot be trained exactly is refused in one line."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path

import pytest

from soap.api import export
from soap.errors import ModelError
from soap.tracing.load import load_model
from tests.extent import so_many
from tests.tracing.eager import assert_as_eager, eager_step
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.kinds import KINDS

TRAINED = [name for name, kind in KINDS.items() if not kind.refused]
AROUND = [name for name in TRAINED if not name.startswith("loss_")]
OFTEN = {name for number, name in enumerate(AROUND) if number % 12 == 1}
"""One in twelve of the others: drawn programs (``test_random_programs``) have most of their operators, too."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """Losses are quick; what is around them is not."""
    return [] if name.startswith("loss_") else [pytest.mark.slow if name in OFTEN else pytest.mark.long]


REFUSED = [name for name, kind in KINDS.items() if kind.refused]


def exported(name: str, folder: Path) -> str:
    """Where the kind was exported to: which holds its loss and gradients against one eager step, random numbers aligned."""
    built = KINDS[name].built()
    path = folder / f"{name}.pt2"
    export(built.module, built.args, built.kwargs, path=path, loss=built.loss)
    return str(path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in TRAINED])
def test_the_program_is_the_module(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = exported(name, tmp_path)
        model, wide = load_model(path), load_model(path, dtype="float64")
    if not KINDS[name].draws:
        built = KINDS[name].built()
        assert_as_eager(model, *eager_step(built.module, built.args, built.kwargs, built.loss))
    for number in range(so_many(1, 2)):
        compare(wide, draw_configs(wide.graph, random.Random(f"{name}/{number}")), tolerance=1e-8, floor=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        exported(name, tmp_path)
    assert re.search(KINDS[name].refused, str(error.value)) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
