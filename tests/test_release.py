"""What says the version says the same one, and pages that a release is made by name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import soap

ROOT = Path(__file__).parent.parent


def test_the_citation_is_of_this_version_and_its_date_that_of_the_changelog() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(cited["version"]) == soap.__version__
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert releases[0] == (soap.__version__, str(cited["date-released"]))


def test_the_changelog_begins_with_what_is_not_released() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert titles[0] == "[Unreleased]" and titles[1].startswith("[")


def test_templates_are_forms_that_can_be_filled_in() -> None:
    paths = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert {path.stem for path in paths} == {"bug", "feature"}
    for path in paths:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "id", "attributes"} <= field.keys() and field["attributes"]["label"] for field in form["body"])


def test_the_contributing_guide_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:soap|tests|docs)/[\w/.-]+)`", text) + re.findall(r"\]\(([\w/.-]+)\)", text)
    assert len(named) > 20 and [path for path in named if not (ROOT / path).exists()] == []
