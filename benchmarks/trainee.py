"""The training that is disturbed, as those see it who disturb it: its process, all processes below, what it says, and what it leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kill_run import HURRY, Settings, settings_text
from soap.elastic.processes import PROC, descendants, lives, name_of

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120.0
LEFT_S = 20.0
POLL_S = 0.1
MEMORY = Path("/dev/shm")
ACTORS = ("ray::Worker", "ray::Server")


class DisturbedError(Exception):
    """What should have come has not. One line."""


def started_at(process: int) -> int:
    """When a process was started, in ticks since the machine was: with its number that tells it from all others. 0 if it is gone."""
    try:
        return int((PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


class Trainee:
    """A run of ``benchmarks.kill_run``. ``temporary``: an empty folder for its temporary files. ``prefix``: see ``RayHosts.words``;
    ``roots``: other processes below which Ray's are. ``leases``: when each was acknowledged, in seconds of ``time.monotonic``."""

    def __init__(
        self,
        settings: Settings,
        temporary: Path,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        roots: Sequence[int] = (),
    ) -> None:
        self.settings, self.temporary, self._roots = settings, temporary, tuple(roots)
        self.leases: list[float] = []
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.started: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self._memory = shared_memory()
        self._seen: set[tuple[int, int]] = set()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.kill_run", settings_text(settings)],
            cwd=ROOT,
            env={**(environment or os.environ), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def below(self) -> list[int]:
        """All processes of the run, but its own and ``roots``."""
        found = [one for root in (self.process.pid, *self._roots) for one in descendants(root)]
        self._seen.update((one, at) for one in found if (at := started_at(one)))
        return found

    def actors(self, kind: str) -> list[int]:
        """The processes of actors of a class that live."""
        return [one for one in self.below() if lives(one) and name_of(one).startswith(f"ray::{kind}")]

    def named(self, *words: str) -> list[int]:
        """Those processes below it in whose command one of these words is."""
        return [one for one in self.below() if lives(one) and any(word in name_of(one) for word in words)]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
        """Until it holds. DisturbedError if the run ends before, or it takes too long."""
        end_s = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                self._join()
                if condition():
                    return
                raise DisturbedError(f"{what}: the run has ended before, by {self.process.returncode}: {' / '.join(self.errors)[-500:]}")
            if time.monotonic() > end_s:
                raise DisturbedError(f"{what}: not within {seconds:g} s")
            time.sleep(POLL_S)

    def wait_for_leases(self, count: int) -> None:
        """Until so many are acknowledged."""
        self.wait(lambda: len(self.leases) >= count, f"lease {count}")

    def rate(self, begin_s: float, end_s: float) -> float:
        """Leases a second in this time."""
        return sum(begin_s <= at < end_s for at in self.leases) / max(1e-9, end_s - begin_s)

    def hurry(self) -> None:
        """Let the rest of the samples come at once."""
        (Path(self.settings.folder) / HURRY).touch()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the run's own process a signal."""
        self.below()
        self.process.send_signal(number)

    def ended(self, seconds: float = PATIENCE_S) -> int:
        """Its exit code, when it has ended. DisturbedError if it does not."""
        end_s = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > end_s:
                raise DisturbedError(f"the run has not ended after {seconds:g} s")
            self.below()
            time.sleep(2 * POLL_S)
        self._join()
        return self.process.returncode

    def left(self) -> list[str]:
        """What is there yet of an ended run, after so long that nothing should be."""
        end_s = time.monotonic() + LEFT_S
        while True:
            names = {one: name_of(one) for one, at in self._seen if lives(one) and started_at(one) == at}
            if self._roots:  # a cluster that stays: our actors do not
                names = {one: name for one, name in names.items() if name.startswith(ACTORS)}
            found = [f"process {one}: {name[:60]}" for one, name in names.items()]
            found += [f"/dev/shm/{name}" for name in sorted(shared_memory() - self._memory)]
            found += [str(path) for path in self.temporary.iterdir()]
            if not found or time.monotonic() > end_s:
                return found
            time.sleep(0.1)

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._join()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(LEFT_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                self.errors.append(f"on standard output: {line.rstrip()}")
                continue
            if "lease" in said:
                self.leases.append(time.monotonic())
            elif "warning" in said:
                self.warnings.append(said["warning"])
            elif "started" in said:
                self.started = said["started"]
            else:
                self.end = said

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(line.rstrip("\n") for line in self.process.stderr)


def shared_memory() -> set[str]:
    """Files of Ray's in memory; others of this box's programs come and go."""
    return {path.name for path in MEMORY.iterdir() if "plasma" in path.name or "ray" in path.name}


def pause(draw: random.Random, most_s: float = 2.0) -> None:
    """Wait for a random moment."""
    time.sleep(draw.uniform(0.1, most_s))
