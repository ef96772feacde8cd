"""Checks of values that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from soap.cli.command import UsageError
from soap.cli.options import data_spec, not_negative, refuse_overwriting


def test_an_output_may_not_be_an_input_or_another_output(tmp_path: Path) -> None:
    model, link = tmp_path / "m.pt2", tmp_path / "link.pt2"
    model.touch()
    link.symlink_to(model)
    for output in (model, link, tmp_path / "no" / ".." / "m.pt2"):
        with pytest.raises(UsageError, match=r"--output .* is the same file as MODEL"):
            refuse_overwriting({"MODEL": str(model)}, {"--output": str(output), "--timeline": None})
    new = str(tmp_path / "o.json")
    with pytest.raises(UsageError, match=r"--timeline .* is the same file as --output"):
        refuse_overwriting({"MODEL": str(model)}, {"--output": new, "--timeline": new})
    refuse_overwriting({"MODEL": "zoo:gpt", "--cluster": None}, {"--output": new, "--timeline": str(tmp_path / "t.json")})
    refuse_overwriting({"MODEL": str(model), "--strategy": str(model)}, {"--timeline": None})


def test_too_large_a_number_names_the_limit() -> None:
    assert not_negative("1000000000") == 10**9
    with pytest.raises(argparse.ArgumentTypeError, match="at most 1000000000"):
        not_negative("1000000001")


@pytest.mark.parametrize("text", ["mydata", ":batches", "mydata:"])
def test_data_needs_a_module_and_a_callable(text: str) -> None:
    assert data_spec("my.data:batches") == "my.data:batches"
    with pytest.raises(argparse.ArgumentTypeError, match=r"PACKAGE\.MODULE:CALLABLE"):
        data_spec(text)
