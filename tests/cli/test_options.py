"""Checks of values that several commands share."""

from __future__ import annotations

import argparse

import pytest

from soap.cli.options import data_spec, not_negative


def test_too_large_a_number_names_the_limit() -> None:
    assert not_negative("1000000000") == 10**9
    with pytest.raises(argparse.ArgumentTypeError, match="at most 1000000000"):
        not_negative("1000000001")


@pytest.mark.parametrize("text", ["mydata", ":batches", "mydata:"])
def test_data_needs_a_module_and_a_callable(text: str) -> None:
    assert data_spec("my.data:batches") == "my.data:batches"
    with pytest.raises(argparse.ArgumentTypeError, match=r"PACKAGE\.MODULE:CALLABLE"):
        data_spec(text)
