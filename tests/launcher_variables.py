"""The environment of a rank that torchrun has started."""

from __future__ import annotations

import pytest


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Let this process look like one of ``size`` ranks of one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for name, value in {**numbers, "TORCHELASTIC_RUN_ID": "test"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
