"""What the benchmark of stale training says of its numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.stale_convergence import TABLE_ROWS, Judge, auc, inputs
from soap.preprocessing.generate import draw_rows


def test_auc_is_the_share_of_pairs() -> None:
    draw = np.random.default_rng(0)
    scores, clicks = draw.integers(0, 6, 40) / 7, draw.random(40) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in scores[clicks] for b in scores[~clicks]]
    assert auc(scores, clicks) == pytest.approx(np.mean(pairs), rel=1e-12)


def test_the_known_model_is_the_best_and_an_untrained_one_is_no_good() -> None:
    made = draw_rows(1, 0, 4000, 1000)
    ids, numbers, clicks = inputs(made)
    assert ids.shape == (4000, 26) and int(ids.min()) >= 0 and int(ids.max()) < TABLE_ROWS
    assert len(torch.unique(ids)) > 0.9 * sum(len(np.unique(np.where(made.no_id, -1, made.ids)[:, i])) for i in range(26))
    assert torch.equal(clicks.bool(), torch.from_numpy(made.clicks)) and numbers.shape == (4000, 13)
    oracle = auc(made.probabilities, made.clicks)
    assert 0.8 < oracle < 0.86
    torch.manual_seed(0)
    from benchmarks.stale_convergence import Clicks

    assert abs(Judge(made).judged(Clicks().state_dict()) - 0.5) < 0.1
