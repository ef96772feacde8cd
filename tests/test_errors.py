from __future__ import annotations

import pytest

from soap.errors import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such file\nat all"), "no such file"),
        (ValueError("\n  two spaces, after an empty line  \nmore"), "two spaces, after an empty line  "),
        (KeyError("weight"), "'weight'"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError(" \n \t"), "RuntimeError"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_one_line_of_any_error(error: Exception, said: str) -> None:
    assert first_line(error) == said
