"""The benchmark of training with compressed gradients: what is trained, what is kept, and what its page says of made-up trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import convergence, convergence_cells, convergence_page, convergence_tasks
from benchmarks.convergence import trained
from benchmarks.convergence_cells import Cell, Key
from benchmarks.convergence_tasks import RANKS, Data
from soap.errors import SoapError

KEY = Key("lstm", "dense", "none", 32, 500, 0)


def cell(method: str = "dense", seed: int = 0, loss: float = 1.0, **more: object) -> Cell:
    made = Cell("lstm", method, "none", 32, 500, seed, (3.0, 2.0, 1.0), loss, loss / 10, 0.5, None, None, 60.0)
    return replace(made, **more)  # type: ignore[arg-type]


DENSE = [cell(seed=seed, loss=loss) for seed, loss in enumerate((1.0, 1.1, 1.2))]


def text_like(samples: int = 300) -> Data:
    """Each character follows from the one before."""
    steps = torch.arange(convergence_tasks.LENGTH + 1)
    text = (torch.arange(samples)[:, None] + steps) % 7
    return Data((text,), (text[:40],))


@pytest.mark.parametrize("method", ["rgc:0.05", "rgc+asq:0.05", "powersgd"])
def test_a_training_counts_what_ranks_send(method: str) -> None:
    """The union of what ranks send is at most p D, and at least D."""
    dense, found = trained(KEY._replace(steps=4, batch=8), text_like()), trained(KEY._replace(method=method, steps=4, batch=8), text_like())
    assert found.losses[0] == dense.losses[0] and found.losses[-1] != dense.losses[-1]
    assert dense.bytes_share == 1 and 0 < found.bytes_share < 1
    assert dense.density is None is dense.union
    if method == "powersgd":
        assert found.density is None is found.union
    else:
        assert found.density is not None and found.union is not None
        assert 0.02 <= found.density <= 0.1 and found.density < found.union <= RANKS * found.density


@pytest.mark.parametrize(
    ("losses", "said"),
    [((1.0, 1.2, 1.4), "yes"), ((1.31, 1.31, 1.31), "no"), ((0.8, 0.85, 0.9), "no, lower"), ((0.9, 0.9, 0.9), "yes")],
)
def test_within_is_the_spread_of_dense(losses: tuple[float, ...], said: str) -> None:
    assert convergence_page.verdict(losses, [own.loss for own in DENSE]) == said


def test_steps_to_dense_s_loss() -> None:
    falling = tuple(float(own) for own in range(100, 0, -1))
    assert convergence_page.first_step(falling, 88.0) == 25  # the mean of 100 to 76
    assert convergence_page.first_step(falling, 87.0) == 26
    assert convergence_page.first_step(falling, 0.5) is None
    assert convergence_page.first_step((3.0, 2.0, 1.0), 2.0) == 3  # shorter than the window
    slow = [cell("rgc", seed, losses=(5.0,) * 30) for seed in range(3)]
    assert convergence_page.steps_text(slow, DENSE) == "not in 500"
    assert convergence_page.steps_text([*slow[:2], DENSE[0]], DENSE) == "not in 500 (in 3 by 1 of 3)"
    assert convergence_page.steps_text(DENSE, DENSE) == "3"


def test_the_command_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, written, ran = tmp_path / "results.json", tmp_path / "page.md", []

    def made(key: Key, data: Data) -> Cell:
        if key.method == "rgc":
            raise SoapError("a gradient is nan")
        ran.append(key)
        return cell(key.method, key.seed, batch=key.batch, steps=key.steps)

    monkeypatch.setattr(convergence, "trained", made)
    arguments = ["--tasks", "lstm", "--seeds", "2", "--steps", "500", "--results", str(results), "--write", str(written)]
    assert convergence.main([*arguments, "--methods", "dense"]) == 0
    assert convergence.main([*arguments, "--methods", "dense", "int8"]) == 0
    assert [(key.method, key.seed) for key in ran] == [("dense", 0), ("dense", 1), ("int8", 0), ("int8", 1)]
    assert [own.key for own in convergence_cells.read(results)] == ran
    assert convergence.main([*arguments, "--methods", "rgc"]) == 1
    assert "lstm rgc none 32 500 0: a gradient is nan" in capsys.readouterr().err
    assert len(convergence_cells.read(results)) == 4
    assert convergence_page.main([str(results), str(tmp_path / "again.md")]) == 0
    assert (tmp_path / "again.md").read_text().count("\n| lstm |") == written.read_text().count("\n| lstm |")
