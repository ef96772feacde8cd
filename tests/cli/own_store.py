"""A store of measurements of its own for each test."""

from __future__ import annotations

import shutil

import pytest

import soap
from soap.profiles.store import default_path


def use_own_store(cluster: str, monkeypatch: pytest.MonkeyPatch, folders: pytest.TempPathFactory) -> None:
    """An empty store for the test that asks; this machine's rates as ``cluster`` are measured once for all tests."""
    soap.load_cluster(cluster)
    common, own = default_path().parent, folders.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    (own / "soap").mkdir()
    for path in common.glob("machine-*.json"):
        shutil.copy(path, own / "soap")
