"""Why dimensions are not split: the call that is to blame is named, wherever in the operator it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soap.tracing.rules import notation
from tests.tracing.programs import Lambda, imported

PROGRAMS: dict[str, tuple[Callable[..., Any], str, list[tuple[str, int, int, str]]]] = {
    "nothing to explain": (lambda self, x: (x @ self.w).sum(), "matmul", []),
    "by its own rule": (lambda self, x: torch.softmax(x @ self.w, 1)[:, 0].sum(), "softmax", [("softmax", 1, 6, "softmax needs it whole")]),
    "only the outer part of a dimension": (
        lambda self, x: torch.cumsum((x @ self.w).view(4, 2, 3).transpose(0, 1), 1).sum(),
        "matmul",
        [("matmul", 2, 3, "view splits it by an outer dimension")],
    ),
    "through calls of the same operator": (
        lambda self, x: torch.softmax((x @ self.w).sin().t(), 0).sum(),
        "softmax",
        [("softmax", 0, 6, "softmax needs it whole")],
    ),
    "a part that is always the same": (
        lambda self, x: F.layer_norm(x @ self.w, (6,))[:, 0].cumsum(0).sum(),
        "cumsum",
        [("cumsum", 0, 4, "cumsum needs it whole"), ("layer_norm", 1, 6, "select takes a fixed part of it")],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_reasons(name: str) -> None:
    function, operator, expected = PROGRAMS[name]
    model = imported(Lambda(function, w=nn.Parameter(torch.ones(3, 6))), torch.ones(4, 3))
    found = [(one.tensor, one.dim, one.size, one.reason) for one in model.graph.unsplit.get(operator, ())]
    assert operator in model.graph.index
    assert found == expected


def test_the_part_of_a_call_that_was_decomposed_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(notation._RULES, "aten.renorm")
    module = Lambda(lambda self, x: torch.renorm(x @ self.w, 2.0, 0, 1.0).sum(), w=nn.Parameter(torch.ones(3, 6)))
    (found,) = imported(module, torch.ones(4, 3)).graph.unsplit["renorm"]
    assert (found.tensor, found.dim, found.size, found.reason) == ("matmul", 1, 6, "linalg_vector_norm in renorm needs it whole")


def test_reasons_are_no_part_of_the_hash() -> None:
    graph = imported(Lambda(PROGRAMS["by its own rule"][0], w=nn.Parameter(torch.ones(3, 6))), torch.ones(4, 3)).graph
    assert graph.unsplit
    assert replace(graph, unsplit={}).hash == graph.hash
