"""Which whole-number inputs may be drawn element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tracing.programs import Lambda, imported

IDS, LABELS = torch.arange(12).reshape(4, 3) % 7, torch.tensor([1, 0, 3, 2])


def _shifted(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """A language model's: the labels are the next tokens, and the decoder begins with a token of its own."""
    given = ids.new_zeros(ids.shape)
    given[:, 1:] = ids[:, :-1].clone()
    given = given.masked_fill(given == -100, 3)
    return F.cross_entropy(self.table(given)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _bags(self: Any, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(ids, self.table.weight, offsets, mode="mean").square().mean()


def _attention(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = self.table(ids)
    scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None, :] == 0, -1e9)
    return (scores.softmax(-1) @ x).square().mean()


def _last(self: Any, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return self.table(ids)[torch.arange(4), lengths - 1].square().mean()


def _padded(self: Any, ids: torch.Tensor) -> torch.Tensor:
    keep = (ids != 0).unsqueeze(-1)
    return ((self.table(ids) * keep).sum(1) / keep.sum(1)).square().mean()


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], set[str]]] = {
    "look-ups and labels": (lambda s, ids, y: F.cross_entropy(s.table(ids).mean(1), y), (IDS, LABELS), {"args_0", "args_1"}),
    "tables in one": (lambda s, ids: s.table(ids % 2 + torch.tensor([0, 2, 4])).square().mean(), (IDS,), {"args_0"}),
    "next tokens": (_shifted, (IDS,), {"args_0"}),
    "negative log-likelihood": (lambda s, ids, y: F.nll_loss(s.table(ids).mean(1), y), (IDS, LABELS), {"args_0", "args_1"}),
    "labels of which some are ignored": (
        lambda s, ids, y: F.cross_entropy(s.table(ids).mean(1), y, ignore_index=0), (IDS, LABELS), {"args_0"}
    ),
    "bags with offsets": (_bags, (IDS.flatten(), torch.tensor([0, 3, 3, 7])), {"args_0"}),
    "a mask of numbers": (_attention, (IDS, torch.ones(4, 3, dtype=torch.int64)), {"args_0"}),
    "lengths": (_last, (IDS, torch.tensor([1, 3, 2, 3])), {"args_0"}),
    "ids of which a mask is made": (_padded, (IDS,), set()),
    "a permutation": (lambda s, x, order: (x @ s.table.weight)[order].square().mean(), (torch.ones(4, 7), LABELS), set()),
    "differences of neighbours": (lambda s, ids: s.table((ids[:, 1:] - ids[:, :-1]).abs()).square().mean(), (IDS,), set()),
    "numbers by sample": (lambda s, ids: s.table((ids + torch.arange(4)[:, None]) % 7).square().mean(), (IDS,), set()),
    "numbers that are computed with": (lambda s, ids: (s.table(ids) * ids.unsqueeze(-1)).square().mean(), (IDS,), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_inputs_whose_elements_stand_for_themselves(name: str) -> None:
    forward, inputs, expected = CASES[name]
    model = imported(Lambda(forward, table=nn.Embedding(7, 7)), *(x.clone() for x in inputs))
    assert model.element_inputs == expected
