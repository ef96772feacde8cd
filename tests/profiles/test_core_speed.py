"""The speed of a core is measured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soap.files import cache_folder
from soap.measure import this_machine
from soap.measure.this_machine import FILE, core_reference_ns


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder()
    assert folder is not None
    return folder / FILE


def _measures(monkeypatch: pytest.MonkeyPatch, found: float | None) -> list[float | None]:
    asked: list[float | None] = []
    monkeypatch.setattr(this_machine, "measured_reference_ns", lambda: asked.append(found) or found)
    return asked


def test_it_is_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _measures(monkeypatch, 21.5)
    assert core_reference_ns() == core_reference_ns() == 21.5
    assert asked == [21.5]
    monkeypatch.setattr(this_machine, "cpu_model", lambda: "another processor")
    _measures(monkeypatch, 30.5)
    assert core_reference_ns() == 30.5
    assert sorted(json.loads(file.read_text()).values()) == [21.5, 30.5]


@pytest.mark.parametrize("text", ["", "[]", '{"x": ', "{}", '{"KEY": "7"}', '{"KEY": -1.0}', '{"KEY": NaN}'])
def test_a_file_that_says_something_else_is_measured_again(text: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("KEY", f"{this_machine.cpu_model()}, yardstick {this_machine.VERSION}"))
    _measures(monkeypatch, 21.5)
    assert core_reference_ns() == 21.5
    assert list(json.loads(file.read_text()).values()) == [21.5]


def test_where_it_cannot_be_measured_or_kept_there_is_none_or_a_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _measures(monkeypatch, None)
    assert core_reference_ns() is None and not file.exists()
    file.parent.parent.mkdir(exist_ok=True)
    file.parent.write_text("in the way")
    _measures(monkeypatch, 21.5)
    with pytest.warns(UserWarning, match="is not kept"):
        assert core_reference_ns() == 21.5
