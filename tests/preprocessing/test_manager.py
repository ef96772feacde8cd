"""Which X and Y the resource manager chooses, and how it reads limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from soap.preprocessing.container import PreprocessError
from soap.preprocessing.manager import WORKER_BYTES, Machine, Manager, Sample, State
from soap.preprocessing.node import Lost, Node
from soap.preprocessing.work import CONVERT, INDEX, Done, Task

GIB = 2**30
IDLE = Sample(8, 0, 64 * GIB, 64 * GIB, 2**40)
CHUNK = 32 * 2**20


def _state(waiting: dict[int, int], running: int = 0, used: int = 0, workers: int = 0) -> State:
    return State(waiting, running, used, workers, CHUNK)


@pytest.mark.parametrize(
    ("mode", "waiting", "expected"),
    [
        ("serial", {0: 9, 1: 9}, (1, 1, 1)),
        ("unit", {0: 9, 1: 9, 2: 9}, (3, 1, 3)),
        ("chunk", {0: 9, 1: 9}, (1, 8, 8)),
        ("adaptive", {0: 20, 1: 20}, (1, 8, 8)),
        ("adaptive", {0: 3, 1: 3, 2: 3}, (3, 3, 8)),
        ("adaptive", dict.fromkeys(range(20), 1), (8, 1, 8)),
    ],
)
def test_units_and_chunks_by_mode(mode: str, waiting: dict[int, int], expected: tuple[int, int, int]) -> None:
    found = Manager({INDEX: mode}).limits(INDEX, _state(waiting), IDLE)
    assert (found.units, found.chunks, found.tasks) == expected


def test_adapts_to_memory_and_to_others_and_back() -> None:
    told: list[dict[str, object]] = []
    manager = Manager(told=told.append)
    state = _state({0: 50})
    each = manager.task_bytes(INDEX, CHUNK) + WORKER_BYTES
    tight = Sample(8, 0, 3 * each + GIB, 20 * GIB, 2**40)
    busy = Sample(8, 5.2, 64 * GIB, 64 * GIB, 2**40)
    found = [manager.limits(INDEX, state, sample).tasks for sample in (IDLE, tight, busy, IDLE, IDLE)]
    assert found == [8, 3, 3, 8, 8]
    assert [entry["because_of"] for entry in told] == ["cores", "memory", "cores"]
    assert [entry["tasks"] for entry in told] == [8, 3, 8]


def test_learns_what_chunks_need() -> None:
    manager = Manager()
    before = manager.task_bytes(INDEX, CHUNK)
    manager.learn(Done(Task(INDEX, 0, size=CHUNK), peak_bytes=10 * CHUNK))
    assert manager.task_bytes(INDEX, CHUNK) > 10 * CHUNK > before
    manager.learn(Done(Task(INDEX, 1, size=CHUNK), peak_bytes=2 * CHUNK))
    assert manager.task_bytes(INDEX, CHUNK) > 10 * CHUNK, "the largest counts"
    assert manager.task_bytes(CONVERT, CHUNK) < 3 * CHUNK, "other steps have needs of their own"


def test_one_task_may_always_run_and_pressure_takes_one_back() -> None:
    none = Sample(8, 8, 0, GIB, 2**40)
    manager = Manager()
    assert manager.limits(INDEX, _state({0: 5}), none).tasks == 1
    assert manager.limits(INDEX, _state({0: 5}, running=2), none).pressed
    assert not manager.limits(INDEX, _state({0: 5}, running=1), none).pressed


class Killing:
    """An executor whose tasks are killed while more than ``most`` run."""

    processes = ()

    def __init__(self, most: int) -> None:
        self.most, self.running, self.peak = most, list[Task](), 0

    def used_bytes(self) -> int:
        return 0

    def start(self, task: Task) -> None:
        self.running.append(task)
        self.peak = max(self.peak, len(self.running))

    def wait(self, limit_s: float) -> list[Done | Lost]:
        task = self.running.pop()
        return [Lost(task) if len(self.running) >= self.most else Done(task)]

    def take_back(self) -> Task | None:
        return self.running.pop() if self.running else None

    def close(self) -> None:
        pass


class Roomy(Machine):
    def sample(self, own: object) -> Sample:
        return IDLE


def test_killed_tasks_are_done_again_with_fewer_at_once() -> None:
    executor = Killing(2)
    tasks = [Task(INDEX, i, size=CHUNK) for i in range(20)]
    done = Node(executor, Manager(), Roomy(Path("."))).run(tasks)
    assert sorted(one.task.number for one in done) == list(range(20))
    assert executor.peak == 8


def test_task_that_never_gets_through_is_an_error() -> None:
    with pytest.raises(PreprocessError, match="a process was killed, most likely because memory ran out"):
        Node(Killing(0), Manager(), Roomy(Path("."))).run([Task(INDEX, 0, size=CHUNK)])


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(tmp_path: Path, version: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   8388608 kB\n")
    (proc / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    own = groups / ("" if version == 2 else "memory") / "outer" / "inner"
    own.mkdir(parents=True)
    if version == 2:
        (proc / "self/mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
        (proc / "self/cgroup").write_text("0::/outer/inner\n")
        (own / "memory.max").write_text("max\n")
        (own / "memory.current").write_text("5\n")
        (own.parent / "memory.max").write_text(f"{2 * GIB}\n")
        (own.parent / "memory.current").write_text(f"{GIB}\n")
        (own.parent / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\nactive_file 0\n")
        (own / "cpu.max").write_text("max 100000\n")
        (own.parent / "cpu.max").write_text("50000 100000\n")
    else:
        cpu = groups / "cpu"
        cpu.mkdir(parents=True)
        (proc / "self/mounts").write_text(
            "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
        )
        (proc / "self/cgroup").write_text("4:memory:/outer/inner\n1:cpu,cpuacct:/\n")
        (own / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        (own / "memory.usage_in_bytes").write_text("5\n")
        (own.parent / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
        (own.parent / "memory.usage_in_bytes").write_text(f"{GIB}\n")
        (own.parent / "memory.stat").write_text(f"total_rss 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n")
        (cpu / "cpu.cfs_quota_us").write_text("50000\n")
        (cpu / "cpu.cfs_period_us").write_text("100000\n")
    found = Machine(tmp_path, tmp_path).sample(())
    assert (found.limit_bytes, found.available_bytes, found.cores) == (2 * GIB, GIB + GIB // 2, 0.5)
