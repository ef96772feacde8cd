"""What ``benchmarks.default_command`` keeps and says, and ``benchmarks.coverage`` after it, of made-up cells."""

from __future__ import annotations

from math import exp, inf, log
from pathlib import Path
from statistics import NormalDist, median, pvariance
from typing import Any

import pytest

from benchmarks import coverage, default_cells, default_command, default_page, small_models
from benchmarks.accuracy_report import Plan
from benchmarks.default_cells import FOUND, PEER, SAME, USUAL, Cell, Foreseen, ratio_of
from benchmarks.step_errors import judged, step_error
from soap.errors import SoapError

MS = 1_000_000
DRAWS = tuple(range(90 * MS, 111 * MS, MS))
"""90 to 110 ms: 80% lie between 92 and 108."""


def cell(
    model: str = "t5",
    cluster: str = "local:2",
    mode: str = "default",
    *,
    usual: int = 100,
    found: int | None = None,
    peer: int | None = None,
    rounds: int = 5,
    **more: Any,
) -> Cell:
    """Whose contenders take so many ms in each round, with draws around the usual time of 100."""
    times = {name: (own * MS,) * rounds for name, own in ((USUAL, usual), (FOUND, found), (PEER, peer)) if own is not None}
    draws = {USUAL: DRAWS} if found is None else {USUAL: DRAWS, FOUND: tuple(own // 2 for own in DRAWS)}
    return Cell(model, cluster, mode, "found 1" if found else USUAL, found is not None, more.pop("seconds", 60.0), times, draws, **more)


def test_a_ratio_is_the_median_of_the_rounds_with_the_sign_test_s_interval() -> None:
    usual = [110 * MS, 120 * MS, 90 * MS, 130 * MS, 100 * MS]
    assert ratio_of(usual, [100 * MS] * 5) == pytest.approx((1.1, 0.9, 1.3))  # of five, the least and the greatest: 1/32 each
    longer = [*usual, 110 * MS, 110 * MS, 110 * MS]
    assert ratio_of(longer, [100 * MS] * 8) == pytest.approx((1.1, 1.0, 1.2))  # of eight, the second on each side: 9/256
    assert ratio_of(usual[:4], [100 * MS] * 4) == (pytest.approx(1.15), 0.0, inf)


def test_a_cell_s_plan_stands_beside_both_kinds_of_data_parallelism() -> None:
    own = cell(found=80, peer=90)
    assert own.over_ours == pytest.approx((1.25,) * 3)
    assert own.over_peer == pytest.approx((1.125,) * 3)
    kept = cell(peer=90)
    assert kept.over_ours == SAME
    assert kept.over_peer == pytest.approx((0.9,) * 3)  # our data parallelism itself
    assert cell().over_peer is None


CELLS = [
    cell(found=80, peer=90, seconds=130.0),
    cell("vit", found=105, peer=80),
    cell("bert", peer=97, seconds=119.0),
    cell("bert", "local:4", found=100),
    cell("t5", mode="blind", found=200, peer=100),
]


def test_the_conclusion_counts_what_was_reached() -> None:
    modes = default_page.by_mode(CELLS)
    assert list(modes) == ["default", "blind"]
    assert default_page.conclusion(modes["default"], 0.97) == [
        "3 of 4 plans are at least 0.97 times as fast as our data parallelism (median 1.000, least 0.952).",
        "2 of 3 plans are at least 0.97 times as fast as DDP (median 0.970, least 0.762); 2 of 4 as both.",
        "3 differ from data parallelism (median 1.000, least 0.952).",
        "Less than 0.97 times as fast as our data parallelism: local:2 vit 0.95.",
        "Less than 0.97 times as fast as DDP: local:2 vit 0.76.",
        "Data parallelism was kept, which counts as 1: local:2 bert.",
        "The command took 60 to 130 s, median 90; 3 of 4 at most 120 s.",
    ]
    assert default_page.conclusion(modes["blind"], 0.97)[0].startswith("0 of 1 plans")
    assert default_page.conclusion([cell()], 0.97)[1] == "0 differ from data parallelism."


def test_finished_cells_are_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page, ran = tmp_path / "results.json", tmp_path / "page.md", []

    def finished(key: default_cells.Key, path: Path, turns: default_command.Turns) -> Cell:
        assert default_cells.read(results) == [before for before, _ in ran]  # each is kept before the next one begins
        assert (path.name, turns.rounds) == (f"{key[0]}.pt2", 5)
        if key == broken:
            raise SoapError("no luck")
        made = cell(*key, found=90, peer=100)
        ran.append((replaced(made), key))
        return made

    def replaced(made: Cell) -> Cell:
        return default_cells.Cell(**{**vars(made), "machine": "a box"})

    monkeypatch.setattr(default_command, "finished", finished)
    monkeypatch.setattr(default_command, "machine", lambda: "a box")
    monkeypatch.setattr(default_command, "export_small", lambda name, folder: folder / f"{name}.pt2")
    arguments = ["--models", "gpt2", "t5", "--clusters", "local:2", "--modes", "default", "blind", "--rounds", "5"]
    arguments += ["--results", str(results), "--write", str(page)]
    broken: default_cells.Key | None = ("gpt2", "local:2", "blind")
    assert default_command.main(arguments) == 1
    assert "gpt2 local:2 blind: no luck" in capsys.readouterr().err
    assert [key[:1] + key[2:] for _, key in ran] == [("gpt2", "default"), ("t5", "default"), ("t5", "blind")]
    broken = None
    assert default_command.main(arguments) == 0
    assert [key for _, key in ran[3:]] == [("gpt2", "local:2", "blind")]
    assert default_command.main(arguments) == 0
    assert len(ran) == 4
    assert page.read_text() == default_page.page(default_cells.read(results))
    assert default_page.main([str(results), str(tmp_path / "again.md")]) == 0
    assert (tmp_path / "again.md").read_text() == page.read_text()


def test_cells_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    default_cells.write(file, CELLS)
    assert default_cells.read(file) == CELLS
    assert default_cells.read(tmp_path / "none.json") == []


def test_a_strategy_that_the_command_names_is_the_one_it_kept() -> None:
    assert default_command.kept_of({"measured": {"kept": "found 2"}, "decision": {"kept": "other"}}) == "found 2"
    assert default_command.kept_of({"decision": {"kept": "data_parallel"}}) == "data_parallel"
    assert default_command.kept_of({"same_as": None}) == FOUND


def test_coverage_of_draws_is_the_share_of_plans_inside() -> None:
    # Draws of 0 to 99 are evenly spread, so a value v is inside the ranges of the share |2v / 99 - 1| and more: 0, 0.41, 0.76, 0.98.
    own = coverage.drawn("x", [Foreseen("plan", value, tuple(range(100))) for value in (49.5, 70.0, 12.0, 98.0)])
    at = dict(zip(coverage.SHARES, own.inside, strict=True))
    assert (at[0.1], at[0.4], at[0.45], at[0.75], at[0.8], at[0.95]) == (0.25, 0.25, 0.5, 0.5, 0.75, 0.75)
    assert (own.plans, own.at_range, own.below, own.above) == (4, 0.75, 0, 1)


def test_a_model_is_judged_by_the_errors_of_the_others() -> None:
    def plan(model: str, error: float) -> Plan:
        return Plan("c", model, "found", 10**12, round(10**12 * exp(error)))

    plans = [plan("a", 0.1), plan("a", -0.1), plan("b", 0.0), plan("b", 0.2)]
    assert coverage.others_spread(plans, "b") == pytest.approx(0.1)
    assert coverage.others_spread(plans, "a") == pytest.approx(0.02**0.5)
    own = coverage.left_out("x", plans)
    normal = NormalDist()
    a, b = 2 * normal.cdf(0.1 / 0.02**0.5) - 1, 2 * normal.cdf(2.0) - 1  # from which shares on they are inside: 0.52, 0.954
    assert own.inside == tuple((1 + 2 * (share >= a) + (share >= b)) / 4 for share in coverage.SHARES)
    assert (own.plans, own.at_range, own.below, own.above) == (4, 0.75, 0, 1)
    with pytest.raises(SoapError, match="all plans are of a; expected those of two models"):
        coverage.left_out("x", plans[:2])


def test_a_step_s_own_error_is_that_of_the_other_models() -> None:
    longer = {"a": 100, "b": 110, "c": 120, "d": 110, "e": 400}
    cells = [cell(model, usual=ms) for model, ms in longer.items()]
    known = step_error(cells[:4])
    errors = [log(ms / 100) for ms in (100, 110, 120, 110)]
    assert known.mean == pytest.approx(sum(errors) / 4)
    own = pvariance([log(ns) for ns in DRAWS])
    assert known.spread == pytest.approx(max(pvariance(errors) - own, 0) ** 0.5)
    last = judged(cells)[-1]  # whose 400 ms say nothing about its own draws
    assert median(last.draws_ns[USUAL]) == pytest.approx(100e6 * exp(known.mean), rel=0.05)
    assert last.times_ns == cells[-1].times_ns
    unmeasured = [*cells, cell("e", mode="unprofiled", usual=100)]
    assert judged(unmeasured)[-1].draws_ns == last.draws_ns  # of measured costs, too
    assert judged(cells[:4]) == cells[:4]  # three others are too few
    with pytest.raises(SoapError, match="3 models were timed with measured costs; expected 4 or more"):
        step_error(cells[:3])


def test_models_of_the_default_command_are_of_the_stated_sizes() -> None:
    for name, build in small_models.MODELS.items():
        module, inputs = build()
        assert 1e6 < sum(parameter.numel() for parameter in module.parameters()) < 8e6, name
        assert {len(own) for own in inputs.values()} == {16}
