"""A Ray session of our own: who can reach it, who is let in, and that nothing is left of it however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from soap.elastic import session as sessions
from soap.elastic.faults import ElasticError
from soap.elastic.processes import listeners, lives
from soap.elastic.session import LOOPBACK, PREFIX, Session, join, module, session

ROOT = Path(__file__).parent.parent.parent
LEFT_S = 20.0


def test_only_ray_is_not_heard_while_it_starts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(sessions.LEVEL, sessions.QUIET)
    with sessions._silent():
        os.write(2, b"[2026-11-29 19:25:14,395 I 26899 26899] logging.cc:303: Set ray log level\nanother thread fails\n")
        os.write(2, b"[2026-11-29 19:25:14,395 F 26899 26899] raylet.cc:1: it ends the process\n[2026-11-29] mine")
    os.write(2, b" at the end\n")
    heard = capfd.readouterr().err.splitlines()
    assert heard[0] == "another thread fails" and heard[1].endswith("it ends the process") and heard[2:] == ["[2026-11-29] mine at the end"]


class Speaker:
    """An actor."""

    def environment(self, name: str) -> str:
        return os.environ.get(name, "")


@pytest.mark.slow
def test_all_of_it_listens_on_loopback_alone(cluster: Session) -> None:
    ray = module()
    ray.get(ray.remote(num_cpus=0)(Speaker).remote().environment.remote("HOME"))
    cluster.check_listeners()
    found = listeners(cluster.processes)
    assert {str(at.address) for at in found} == {LOOPBACK}
    assert cluster.address in {f"{at.address}:{at.port}" for at in found}
    with pytest.raises(ElasticError, match=r"Ray listens on 127\.0\.0\.1 \(port \d+\), .*; expected 127\.0\.0\.9 alone"):
        replace(cluster, interface="127.0.0.9").check_listeners()


def test_token_is_readable_by_this_user_alone_and_known_to_actors(cluster: Session) -> None:
    assert cluster.folder is not None
    token = cluster.folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and cluster.folder.stat().st_mode & 0o777 == 0o700
    assert len(token.read_text(encoding="ascii")) == 64
    ray = module()
    actor = ray.remote(num_cpus=0)(Speaker).remote()
    said = ray.get([actor.environment.remote(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")])
    assert said == ["token", str(token), ""]


def test_one_process_is_in_one_cluster(cluster: Session) -> None:
    assert not join(cluster.address)
    with pytest.raises(ElasticError, match="this process is in a Ray cluster already"), session():
        pass


@pytest.mark.parametrize("token", ["another", pytest.param("", marks=pytest.mark.long)])
def test_wrong_or_no_token_is_one_line(cluster: Session, tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token, encoding="ascii")
    authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")} if token else {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.elastic.joiner", cluster.address],
        cwd=ROOT, env={**os.environ, **authentication}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    said = "does not accept the token in" if token else "does not accept us without a token"
    assert len(lines) == 1 and said in lines[0] and "RAY_AUTH_TOKEN_PATH" in lines[0] and not done.stderr, done.stdout + done.stderr


def test_old_or_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.9.3", exceptions=None))
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace())
    with pytest.raises(ElasticError, match=r"Ray 2\.9\.3; expected at least 2\.60: pip install"):
        module()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ElasticError, match="Ray is missing"):
        module()


def test_address_where_nobody_answers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra 'elastic'")
    monkeypatch.setattr(module(), "is_initialized", lambda: False)
    said = r"no Ray cluster at '127\.0\.0\.1:\d+': .*refused; start one by 'ray start"
    with socket.socket() as unused, pytest.raises(ElasticError, match=said):
        unused.bind((LOOPBACK, 0))
        join(f"{LOOPBACK}:{unused.getsockname()[1]}")


def test_folders_without_a_living_keeper_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions.tempfile, "gettempdir", lambda: str(tmp_path))
    dead, beginning = tmp_path / f"{PREFIX}dead", tmp_path / f"{PREFIX}new"
    for folder in (dead, beginning):
        folder.mkdir()
    (dead / "lock").touch()
    sessions._remove_leftovers()
    assert not dead.exists() and beginning.exists()


@pytest.fixture
def hold() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], dict[str, Any]]]]:
    """Starts a process that holds a session; returns it and what it says of the session."""
    pytest.importorskip("ray", reason="the extra 'elastic'")
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        words, before = [sys.executable, "-m", "tests.elastic.holder", how], _shared_memory()
        held = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(held)
        assert held.stdout is not None and held.stderr is not None
        line = held.stdout.readline()
        assert line, held.stderr.read()
        return held, {**json.loads(line), "before": before}

    yield start
    for held in started:
        held.kill()
        held.communicate()


def left(said: dict[str, Any]) -> list[str]:
    """What is there of a session yet, after so long that nothing should be."""
    until = time.monotonic() + LEFT_S
    while True:
        found = [str(process) for process in said["processes"] if lives(process)]
        found += [said["folder"]] if Path(said["folder"]).exists() else []
        found += sorted(_shared_memory().difference(said["before"]))
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def _shared_memory() -> set[str]:
    """Files of Ray's in memory; others of this box's programs come and go."""
    return {path.name for path in Path("/dev/shm").iterdir() if "plasma" in path.name or "ray" in path.name}


def end(held: subprocess.Popen[str], said: dict[str, Any], how: str) -> None:
    if how in ("leave", "fail"):
        assert held.stdin is not None
        held.stdin.write("\n")
        held.stdin.flush()
    elif how == "keeper":
        os.kill(said["processes"][0], signal.SIGKILL)
        held.kill()
    else:
        held.send_signal({"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how])


@pytest.mark.parametrize(
    "how", ["kill", *(pytest.param(other, marks=pytest.mark.long) for other in ("leave", "fail", "interrupt", "terminate"))]
)
def test_nothing_is_left_however_it_ends(hold: Callable[[str], tuple[subprocess.Popen[str], dict[str, Any]]], how: str) -> None:
    held, said = hold({"leave": "leave", "fail": "fail", "terminate": "linger"}.get(how, "wait"))
    assert len(said["processes"]) > 3 and all(map(lives, said["processes"]))
    end(held, said, how)
    assert left(said) == []
    code = held.wait(LEFT_S)
    assert code == {"kill": -9, "leave": 0, "fail": 1, "interrupt": -2, "terminate": 15}[how]
    if how == "terminate":
        assert held.stderr is not None and "SIGTERM received" not in held.stderr.read()


@pytest.mark.long
def test_what_a_killed_keeper_leaves_is_removed_by_the_next_session(
    hold: Callable[[str], tuple[subprocess.Popen[str], dict[str, Any]]],
) -> None:
    held, said = hold("wait")
    end(held, said, "keeper")
    held.wait(LEFT_S)
    other, again = hold("leave")
    assert left(said) == []
    end(other, again, "leave")
    assert left(again) == []
