"""The disturbances of ``benchmarks.kills``, each at random moments of a run that counts (``benchmarks.kill_run``), and what came of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.kill_run import BATCH, COLUMNS, ROWS, SAMPLES, Settings, export_model
from benchmarks.ray_hosts import HOSTS, RayHosts, ray_hosts
from benchmarks.trainee import PATIENCE_S, DisturbedError, Trainee, pause
from soap.elastic import snapshots
from soap.elastic.faults import ElasticError

CUT_S = 5.0
AFTER_LEASES = 20
"""So many leases behind a disturbance, training has gone on."""
WINDOW_S = 1.0
TABLE_BYTES = 8 * ROWS * COLUMNS
DISK_BYTES, ROOM_BYTES = 8 * TABLE_BYTES, TABLE_BYTES // 4
"""Room for two snapshots of everything, a third, and the log; what a full disk has left: less than a snapshot of a partition, more than
the log needs for some seconds."""
HEAD = ("gcs_server", "raylet/raylet", "soap.elastic.head")
"""What a Ray head consists of."""


@dataclass
class Found:
    """Of one run. ``events``: what each disturbance was and brought. ``wrong``: what should not have been, in lines; empty if all is well.
    ``leases``: of the whole run; ``dealt_again``: of these."""

    kind: str
    seed: int
    leases: int
    events: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost_workers: int = 0
    dealt_again: int = 0


@dataclass(frozen=True)
class Scene:
    """Where a run is disturbed: its settings, an empty folder for temporary files, and the hosts that it runs on, if they are emulated."""

    settings: Settings
    temporary: Path
    hosts: RayHosts | None = None

    def begin(self) -> Trainee:
        """The run, from its beginning or from where it ended."""
        if self.hosts is None:
            return Trainee(self.settings, self.temporary)
        return Trainee(self.settings, self.temporary, self.hosts.words(0), self.hosts.environment, self.hosts.nodes)


Drill = Callable[[Scene, random.Random, int, Found], None]


def drill(kind: str, seed: int, kills: int, folder: Path) -> Found:
    """Run the drill of this kind with so many disturbances. ``folder``: an empty one, of which nothing is left. DisturbedError never:
    it is told in ``wrong``."""
    settings = Settings(str(folder), str(folder / "kept"), epochs=max(2, kills * EPOCHS[kind]))
    found = Found(kind, seed, settings.leases)
    folder.mkdir(exist_ok=True)
    export_model(folder)
    try:
        with tempfile.TemporaryDirectory(prefix="kill-", dir="/tmp") as temporary, scene(kind, settings, Path(temporary)) as made:
            DRILLS[kind](made, random.Random(seed), kills, found)
    except (DisturbedError, ElasticError) as error:
        found.wrong.append(str(error))
    shutil.rmtree(folder)
    return found


@contextmanager
def scene(kind: str, settings: Settings, temporary: Path) -> Iterator[Scene]:
    """What a drill of this kind needs."""
    with ExitStack() as stack:
        if kind == "disk":
            stack.enter_context(small_disk(Path(settings.kept)))
        if kind != "network":
            yield Scene(settings, temporary)
            return
        ray = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")))
        hosts = stack.enter_context(ray_hosts(ray))
        yield Scene(Settings(settings.folder, settings.kept, hosts.address, HOSTS, settings.epochs), temporary, hosts)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of ``DISK_BYTES`` in memory. Root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def kill_workers(scene: Scene, draw: random.Random, kills: int, found: Found) -> None:
    """A worker, with a lease in hand or without."""
    _kill_actors(scene, draw, kills, found, "Worker", scene.settings.workers)


def kill_servers(scene: Scene, draw: random.Random, kills: int, found: Found) -> None:
    """A server, whatever it does just then."""
    _kill_actors(scene, draw, kills, found, "Server", scene.settings.servers)


def _kill_actors(scene: Scene, draw: random.Random, kills: int, found: Found, kind: str, count: int) -> None:
    with running(scene, found) as trainee:
        for _ in range(kills):
            pause(draw)
            victim = draw.choice(trainee.actors(kind))
            back = partial(_another, trainee, kind, victim, count)
            found.events.append(disturbed(trainee, partial(os.kill, victim, signal.SIGKILL), back))


def _another(trainee: Trainee, kind: str, victim: int, count: int) -> bool:
    """Whether there are so many actors of a class, without the victim."""
    own = trainee.actors(kind)
    return len(own) >= count and victim not in own


def cut_network(scene: Scene, draw: random.Random, kills: int, found: Found) -> None:
    """The cable of one of the two hosts, for five seconds."""
    assert scene.hosts is not None
    hosts = scene.hosts
    with running(scene, found) as trainee:
        for _ in range(kills):
            pause(draw)
            host = draw.randrange(HOSTS)
            found.events.append({"host": host, **disturbed(trainee, partial(_cut, hosts, host), lambda: True)})


def _cut(hosts: RayHosts, host: int) -> None:
    with hosts.cut(host):
        time.sleep(CUT_S)


def fill_disk(scene: Scene, draw: random.Random, kills: int, found: Found) -> None:
    """The servers' disk, until it is warned of; then the room comes back."""
    kept = Path(scene.settings.kept)
    with running(scene, found) as trainee:
        for _ in range(kills):
            pause(draw)
            trainee.wait(lambda: _newest(kept) > 0, "a first snapshot")
            said = len(trainee.warnings)
            event = disturbed(trainee, partial(_fill, kept), partial(_warned, trainee, said))
            newest, damaged = _newest(kept), _damaged(kept)
            (kept / "filler").unlink()
            trainee.wait(partial(_newer, kept, newest), "a snapshot when there is room")
            own = trainee.warnings[said:]
            servers = [line.partition(":")[0] for line in own]
            if len(set(servers)) != len(servers) or not all("no snapshot was taken" in line for line in own):
                found.wrong.append(f"warnings: {own}; expected one of each server at most")
            found.wrong += damaged
            found.events.append({"warnings": len(own), **event})


def kill_launcher(scene: Scene, draw: random.Random, kills: int, found: Found) -> None:
    """The process that deals leases, and has started everything; then the same call goes on."""
    for _ in range(kills):
        trainee = _until_a_moment(scene, draw)
        try:
            trainee.kill()
            trainee.ended()
            found.events.append({"leases": len(trainee.leases), **_gone(trainee, found)})
        finally:
            trainee.close()
    with running(scene, found):
        pass


def kill_head(scene: Scene, draw: random.Random, kills: int, found: Found) -> None:
    """A process of Ray's head. The run says one line and ends, and the same call goes on."""
    for _ in range(kills):
        trainee = _until_a_moment(scene, draw)
        try:
            part = draw.choice(HEAD)
            victim = trainee.named(part)[0]
            os.kill(victim, signal.SIGKILL)
            begin_s = time.monotonic()
            code = trainee.ended()
            if code != 1 or len(trainee.errors) != 1:
                found.wrong.append(f"{part} was killed: the run ends by {code} with {trainee.errors[:5]}; expected 1 and one line")
            facts = {"part": part, "leases": len(trainee.leases), "ended_s": round(time.monotonic() - begin_s, 2)}
            found.events.append({**facts, **_gone(trainee, found)})
        finally:
            trainee.close()
    with running(scene, found):
        pass


DRILLS: dict[str, Drill] = {
    "worker": kill_workers,
    "server": kill_servers,
    "launcher": kill_launcher,
    "head": kill_head,
    "network": cut_network,
    "disk": fill_disk,
}
EPOCHS = {"worker": 3, "server": 3, "launcher": 1, "head": 1, "network": 3, "disk": 4}
"""Of ``SAMPLES`` samples, for each disturbance: more than go by meanwhile."""
NEED_ROOT = ("network", "disk")


@contextmanager
def running(scene: Scene, found: Found) -> Iterator[Trainee]:
    """A run that has begun to train. Behind the context it ends in a hurry; then it is checked what was counted, and what is left."""
    trainee = scene.begin()
    try:
        trainee.wait_for_leases(AFTER_LEASES)
        yield trainee
        trainee.hurry()
        code = trainee.ended(3 * PATIENCE_S)
        if code or trainee.errors:
            found.wrong.append(f"the run ends by {code} and says {trainee.errors[:5]}")
        found.wrong += miscounted(trainee)
        found.lost_workers, found.dealt_again = trainee.end.get("lost_workers", 0), trainee.end.get("dealt_again", 0)
        _gone(trainee, found)
    finally:
        trainee.close()


def miscounted(trainee: Trainee) -> list[str]:
    """What the values say of samples that were lost or counted twice, in lines."""
    settings, counted = trainee.settings, trainee.end.get("counted")
    expected = {
        "samples": {f"{settings.epochs}": SAMPLES},
        "others": 0.0,
        "pushes": [float(settings.epochs * SAMPLES // BATCH)] * len(counted["pushes"] if counted else ()),
    }
    return [] if counted == expected else [f"counted: {counted}; expected {expected}"]


def disturbed(trainee: Trainee, act: Callable[[], None], back: Callable[[], bool]) -> dict[str, Any]:
    """Act, and wait until all is back and training has gone on. ``before_per_s``: leases a second in the two seconds before;
    ``least_per_s``: in the worst second from then on; ``gap_s``: the longest time without a lease; ``back_s``: until all was back."""
    begin_s = time.monotonic()
    before = trainee.rate(begin_s - 2 * WINDOW_S, begin_s)
    act()
    trainee.wait(back, "whatever was lost comes back")
    back_s = time.monotonic() - begin_s
    trainee.wait_for_leases(len(trainee.leases) + AFTER_LEASES)
    end_s = time.monotonic()
    steps = int(max(0.0, end_s - WINDOW_S - begin_s) / (WINDOW_S / 4))
    rates = [trainee.rate(begin_s + i * WINDOW_S / 4, begin_s + i * WINDOW_S / 4 + WINDOW_S) for i in range(steps + 1)]
    times = [begin_s, *(at for at in trainee.leases if begin_s <= at < end_s), end_s]
    gap = max(after - at for at, after in pairwise(times))
    return {key: round(value, 2) for key, value in {
        "before_per_s": before, "least_per_s": min(rates), "gap_s": gap, "back_s": back_s,
    }.items()}  # fmt: skip


def _until_a_moment(scene: Scene, draw: random.Random) -> Trainee:
    trainee = scene.begin()
    try:
        trainee.wait_for_leases(draw.randrange(1, 50))
        pause(draw)
    except BaseException:
        trainee.close()
        raise
    return trainee


def _gone(trainee: Trainee, found: Found) -> dict[str, Any]:
    left = trainee.left()
    if left:
        found.wrong.append(f"left behind: {left[:5]}")
    return {"left": len(left)}


def _fill(folder: Path) -> None:
    """Take all of the disk's room but ``ROOM_BYTES``."""
    state = os.statvfs(folder)
    os.posix_fallocate(descriptor := os.open(folder / "filler", os.O_RDWR | os.O_CREAT), 0, state.f_bavail * state.f_frsize - ROOM_BYTES)
    os.close(descriptor)


def _warned(trainee: Trainee, said: int) -> bool:
    return len(trainee.warnings) > said


def _newer(folder: Path, version: int) -> bool:
    return _newest(folder) > version


def _snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("server-*/partition-*/snapshot-*"))


def _newest(folder: Path) -> int:
    """The least of the latest versions that partitions have snapshots of; -1 if there are none."""
    latest: dict[Path, int] = {}
    for path in _snapshots(folder):
        latest[path.parent] = max(latest.get(path.parent, 0), int(path.name.rpartition("-")[2]))
    return min(latest.values(), default=-1)


def _damaged(folder: Path) -> list[str]:
    """Which snapshots cannot be read, in lines."""
    wrong = []
    for path in _snapshots(folder):
        try:
            snapshots.read(path)
        except ElasticError as error:
            if path.exists():  # servers have taken a newer one meanwhile, and removed it
                wrong.append(str(error))
    return wrong
