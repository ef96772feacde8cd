"""A store of measurements of its own for each test."""

from __future__ import annotations

import shutil

import pytest

from soap.profiles.store import default_path


def use_own_store(monkeypatch: pytest.MonkeyPatch, folders: pytest.TempPathFactory) -> None:
    """An empty store for the test that asks, with this machine's rates and the machine code of all tests."""
    common, own = default_path().parent, folders.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    (own / "soap").mkdir()
    for path in common.glob("machine-*.json"):
        shutil.copy(path, own / "soap")
    if (common / "machine_code").exists():
        (own / "soap" / "machine_code").symlink_to(common / "machine_code")
