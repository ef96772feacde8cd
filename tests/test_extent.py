"""How many examples hypothesis draws is said in one place, and changes with what is run."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

from hypothesis import settings

from tests import extent

TESTS = Path(__file__).parent


def test_tests_without_settings_have_the_profile_of_this_run() -> None:
    assert settings().max_examples == extent.USUAL.max_examples == extent.EXAMPLES[extent.CHOSEN][1]
    assert settings().deadline is None
    assert extent.FEW.max_examples < extent.USUAL.max_examples < extent.MANY.max_examples


def test_each_extent_has_more_than_the_one_before() -> None:
    assert tuple(extent.EXAMPLES) == extent.EXTENTS
    for fewer, more in pairwise(extent.EXAMPLES[name] for name in extent.EXTENTS):
        assert all(a < b for a, b in zip(fewer, more, strict=True))


def test_no_test_has_a_number_of_its_own() -> None:
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "max_examples" in text else ():
            if isinstance(node, ast.keyword) and node.arg == "max_examples" and path.name != "extent.py":
                raise AssertionError(f"{path}:{node.value.lineno}: max_examples; expected FEW or MANY of tests/extent.py")
