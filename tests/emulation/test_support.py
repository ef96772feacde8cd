"""What is missing, and what to do, in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from soap.emulation import network, support
from soap.emulation.hosts import Card, HostLimits
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeFailure, match=r"^--emulate needs Linux's network namespaces; this is darwin"):
        require_support()


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeFailure, match="has to be root: run it with sudo, or without --emulate"):
        require_support()


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_missing_command(root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str) -> None:
    for command in {"ip", "tc"} - {missing}:
        script(tmp_path / command, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFailure, match=f"needs the command '{missing}', which is not in PATH: install the package iproute2"):
        require_support()


def test_a_kernel_without(root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for command in ("ip", "tc"):
        script(tmp_path / command, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(support, "find_cpu_groups", lambda: None)
    monkeypatch.setattr(support, "OWN_NETWORK", tmp_path)
    with pytest.raises(RuntimeFailure, match="needs control groups that limit CPU time, and none are mounted"):
        require_support()
    monkeypatch.setattr(support, "OWN_NETWORK", tmp_path / "no")
    with pytest.raises(RuntimeFailure, match="needs network namespaces, which this kernel lacks"):
        require_support()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Error: Specified qdisc kind is unknown.", "modprobe sch_tbf"),
        ("RTNETLINK answers: Operation not permitted", "NET_ADMIN and SYS_ADMIN"),
        ("mount --make-shared /run/netns failed: Permission denied", "SYS_ADMIN"),
        ("Error: Unknown device type.", "modprobe veth bridge"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, remedy: str) -> None:
    script(tmp_path / "ip", "exit 0")
    script(tmp_path / "tc", f"echo '{said}' >&2; exit 2")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hosts = [HostLimits("a", (0,), 1.0, Card(0, 1e6), Card(1, 1e6), None)]
    with pytest.raises(RuntimeFailure) as caught:
        network.build(3, hosts)
    text = str(caught.value)
    assert text.startswith("--emulate: tc -n soap3-0 -batch -: ") and said in text and remedy in text and "\n" not in text


def test_a_command_that_says_nothing() -> None:
    assert network.explain(" \n") == "it failed without saying why"
    with pytest.raises(RuntimeFailure, match=r"--emulate: no-such-command -x: .*expected iproute2's commands to work"):
        network.run("no-such-command", "-x")
