"""What is told once on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from soap.profiles import measured_links
from soap.profiles.measured_links import is_news


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured_links, "_here", set())
    return tmp_path / "soap"


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_links, "_here", set())


def test_a_line_is_news_once_and_again_after_a_month(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1.7e9
    assert [is_news("a", lambda: now_s), is_news("a", lambda: now_s), is_news("b", lambda: now_s)] == [True, False, True]
    another_process(monkeypatch)
    assert not is_news("a", lambda: now_s + measured_links.KEPT_S - 1)
    another_process(monkeypatch)
    assert is_news("a", lambda: now_s + measured_links.KEPT_S)


@pytest.mark.parametrize("text", ["", "[]", '{"x": "y"}', "\x00"])
def test_a_file_of_something_else_counts_as_absent(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / measured_links.FILE).write_text(text)
    assert is_news("a")
    another_process(monkeypatch)
    assert not is_news("a")


def test_where_nothing_can_be_kept_it_is_news_in_each_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("no folder")
    assert is_news("a") and not is_news("a")
    another_process(monkeypatch)
    assert is_news("a")
