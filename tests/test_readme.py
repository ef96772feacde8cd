"""What the README shows works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import soap
from soap.cluster_yaml import parse_cluster

TEXT = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_cluster_description() -> None:
    (text,) = blocks("yaml")
    cluster = parse_cluster(text)
    assert cluster.device_count == 8
    assert [host.name for host in cluster.hosts] == ["box0", "box1"]


def test_python_from_export_to_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, use = blocks("python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("soap.api.load_cluster", lambda spec: parse_cluster(blocks("yaml")[0]))  # local:4 would measure this machine
    monkeypatch.setitem(vars(soap), "load_cluster", soap.api.load_cluster)
    names: dict[str, object] = {}
    exec(export, names)
    exec("import soap\n" + use.replace("budget=500", "budget=20"), names)
    assert soap.load_strategy("strategy.json", "model.pt2", parse_cluster(blocks("yaml")[0])) == names["found"].strategy  # type: ignore[attr-defined]
