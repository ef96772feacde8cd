"""The reference simulation: hand-computed schedules, contention, ties, and what holds for every schedule."""

from __future__ import annotations

from dataclasses import replace

from soap.cluster.overheads import ColdPenalty, Port
from soap.plan.running.order import ExecutionOrder
from soap.simulator.communication.prices import Communication
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import execution_order, simulate
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind
from tests.simulator.examples import UNIT_NS, PointCosts, batch_split, chain, on, pairwise_cluster, strategy, units

TWO = pairwise_cluster(1, 1)


def times(tasks: TaskGraph, schedule: Schedule) -> dict[str, tuple[int, int]]:
    spans = zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True)
    return {task.name: (start, end) for task, start, end in spans}


def played(tasks: TaskGraph) -> dict[str, tuple[int, int]]:
    """Start and end by name, in the examples' units."""
    return {name: (units(start), units(end)) for name, (start, end) in times(tasks, simulate(tasks)).items()}


def by_hand(*tasks: Task) -> TaskGraph:
    plan = build_plan(chain(2, 2), batch_split(chain(2, 2), [0]), TWO)
    return TaskGraph(plan, TWO, tasks)


def task(name: str, key: int, duration: int, *resources: int, after: tuple[int, ...] = ()) -> Task:
    return Task((key,), name, TaskKind.FORWARD, resources, duration, after)


def test_two_operators_on_two_devices() -> None:
    tasks = lower(build_plan(chain(4, 2, 3), strategy(l1=on(0, degrees=(1, 1, 1)), loss=on(1, degrees=(1,))), TWO), TWO, PointCosts())
    assert played(tasks) == {
        "forward l1[0]": (0, 24),
        "transfer l1[0:4,0:3] 0->1": (24, 72),
        "forward loss[0]": (72, 76),
        "backward loss[0]": (76, 84),
        "transfer gradient of l1[0:4,0:3] 1->0": (84, 132),
        "backward l1[0]": (132, 180),
        "update @0": (180, 181),
    }
    assert units(simulate(tasks).makespan_ns) == 181


def test_two_transfers_share_a_link_one_after_the_other() -> None:
    split = strategy(l1=on(0, 0, degrees=(2, 1, 1)), loss=on(1, 1, degrees=(2,)))
    tasks = lower(build_plan(chain(4, 2, 3), split, TWO), TWO, PointCosts())
    assert played(tasks) == {
        "forward l1[0]": (0, 12),
        "forward l1[1]": (12, 24),
        "transfer l1[0:2,0:3] 0->1": (12, 36),
        "transfer l1[2:4,0:3] 0->1": (36, 60),
        "forward loss[0]": (36, 38),
        "forward loss[1]": (60, 62),
        "backward loss[0]": (62, 66),
        "backward loss[1]": (66, 70),
        "transfer gradient of l1[0:2,0:3] 1->0": (66, 90),
        "transfer gradient of l1[2:4,0:3] 1->0": (90, 114),
        "backward l1[0]": (90, 114),
        "backward l1[1]": (114, 138),
        "update @0": (138, 139),
    }


def test_a_message_sets_its_link_free_before_it_arrives() -> None:
    away = pairwise_cluster(1, 1, latency=4)
    split = strategy(l1=on(0, 0, degrees=(2, 1, 1)), loss=on(1, 1, degrees=(2,)))
    tasks = lower(build_plan(chain(4, 2, 3), split, away), away, PointCosts())
    spans = played(tasks)
    assert spans["transfer l1[0:2,0:3] 0->1"] == (12, 36 + 4)
    assert spans["transfer l1[2:4,0:3] 0->1"] == (36, 60 + 4)
    assert spans["forward loss[0]"] == (40, 42)
    assert spans["transfer gradient of l1[0:2,0:3] 1->0"] == (70, 94 + 4)
    assert spans["transfer gradient of l1[2:4,0:3] 1->0"] == (94, 118 + 4)
    sums = {one.kind for one in tasks.tasks if one.latency_ns}
    assert sums == {TaskKind.TRANSFER}


def test_a_message_of_nothing_holds_its_link_for_a_nanosecond() -> None:
    communication = Communication(pairwise_cluster(1, 1, latency=4))
    whole_ns = communication.transfer_ns(0, 0, 1)
    assert whole_ns == 4 * UNIT_NS and communication.latency_ns(whole_ns, 0, 1) == whole_ns - 1


def test_data_parallel_devices_meet_in_the_loss_and_in_the_synchronization() -> None:
    graph = chain(4, 2, 3)
    tasks = lower(build_plan(graph, batch_split(graph, [0, 1]), TWO), TWO, PointCosts())
    spans = played(tasks)  # an all-reduce of two: all bytes each way, and half of them added
    assert spans["forward l1[1]"] == (0, 12)
    assert spans["reduce loss[]#0"] == (14, 14 + 4 + 2)
    assert spans["backward loss[0]"] == (20, 24)
    assert spans["backward l1[0]"] == (24, 48)
    assert spans["sync l1.weight[0]"] == (48, 48 + 24 + 12)
    assert spans["update @0"] == spans["update @1"] == (84, 85)


def test_equal_ready_times_are_served_by_id_not_by_position() -> None:
    tasks = by_hand(task("late", 2, 5, 0), task("early", 1, 3, 0))
    assert times(tasks, simulate(tasks)) == {"early": (0, 3), "late": (3, 8)}


def test_a_resource_serves_in_the_order_of_readiness() -> None:
    tasks = by_hand(
        task("a", 1, 10, 0),
        task("b", 2, 4, 1),
        task("after a", 3, 1, 2, after=(0,)),
        task("after b", 4, 9, 2, after=(1,)),
    )
    assert times(tasks, simulate(tasks)) == {"a": (0, 10), "b": (0, 4), "after b": (4, 13), "after a": (13, 14)}


def test_a_task_waits_for_all_its_resources_and_holds_them() -> None:
    tasks = by_hand(task("a", 1, 10, 0), task("both", 2, 5, 0, 1), task("b", 3, 1, 1))
    assert times(tasks, simulate(tasks)) == {"a": (0, 10), "both": (10, 15), "b": (15, 16)}


def test_a_task_without_resources_only_waits_for_its_predecessors() -> None:
    tasks = by_hand(task("a", 1, 10, 0), task("free", 2, 5), task("end", 3, 1, after=(0, 1)))
    assert times(tasks, simulate(tasks)) == {"a": (0, 10), "free": (0, 5), "end": (10, 11)}


def test_nothing_to_do_takes_no_time() -> None:
    assert simulate(by_hand()).makespan_ns == 0


def test_execution_order_follows_the_simulated_starts() -> None:
    split = strategy(l1=on(0, 0, degrees=(2, 1, 1)), loss=on(1, 1, degrees=(2,)))
    tasks = lower(build_plan(chain(4, 2, 3), split, TWO), TWO, PointCosts())
    assert execution_order(tasks, simulate(tasks)) == ExecutionOrder((0, 1, 2, 3), (2, 3, 0, 1))
    crossed = strategy(l1=on(0, 1, degrees=(2, 1, 1)), l2=on(1, 1, degrees=(2, 1, 1)), loss=on(1, degrees=(1,)))
    tasks = lower(build_plan(chain(4, 2, 8, 8), crossed, TWO), TWO, PointCosts())
    assert execution_order(tasks, simulate(tasks)).forward == (0, 1, 3, 2, 4)


def test_a_port_keeps_its_device_busy() -> None:
    """From the start of a communication, or from when the device is free; the communication itself and its end do not move. Once, however
    many of a communication's links are a device's."""
    first, second, third = 4, 5, 3  # resources of links of ``TWO``
    ports = (Port(first - 2, 0, 0, 0), Port(second - 2, None, 0, 0), Port(third - 2, 0, 0, 0))
    tasks = TaskGraph(
        by_hand().plan,
        replace(TWO, ports=ports),
        (
            task("before", 0, 100, 0),
            replace(task("over three", 1, 80, first, second, third, after=(0,)), cpu_overhead_ns=30),
            task("behind", 2, 5, 0, after=(0,)),
            replace(task("over one", 3, 80, first, after=(1,)), cpu_overhead_ns=50),
            task("last", 4, 5, 0, after=(3,)),
            task("elsewhere", 5, 5, 1, after=(0,)),
        ),
    )
    assert times(tasks, simulate(tasks)) == {
        "before": (0, 100),
        "over three": (100, 180),
        "behind": (130, 135),
        "over one": (180, 260),
        "last": (260, 265),  # the device was busy until 180 + 50
        "elsewhere": (100, 105),
    }


def test_a_port_s_overhead_counts_from_the_start_of_what_waited_for_its_links() -> None:
    link = 4
    tasks = TaskGraph(
        by_hand().plan,
        replace(TWO, ports=(Port(link - 2, 0, 0, 0),)),
        (
            task("meanwhile", 0, 40, 0),
            task("ahead", 1, 100, link),
            replace(task("waits", 2, 10, link), cpu_overhead_ns=20),
            task("behind", 3, 5, 0, after=(0,)),
        ),
    )
    assert times(tasks, simulate(tasks)) == {
        "meanwhile": (0, 40),
        "ahead": (0, 100),
        "waits": (100, 110),
        "behind": (120, 125),
    }


def test_what_becomes_ready_comes_between_the_chunks_of_a_sum() -> None:
    """Messages in the order in which they are ready; together all of it takes as long as ever."""
    link = 4
    chunks = (Task((0, 0, 0, 0, 0, 0, k), "sum", TaskKind.SYNC, (link,), 25, (k - 1,) if k else ()) for k in range(4))
    tasks = by_hand(
        *chunks,
        task("before", 1, 30, 0),
        task("message", 2, 20, link, after=(4,)),
        task("next", 3, 10, link, after=(4,)),
        task("who waits for the sum", 4, 5, 1, after=(3,)),
    )
    schedule = simulate(tasks)
    assert list(zip(schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True)) == [
        (0, 25),
        (25, 50),
        (80, 105),
        (105, 130),
        (0, 30),
        (50, 70),
        (70, 80),
        (130, 135),
    ]


def test_a_tile_takes_longer_behind_a_sum_than_behind_a_message() -> None:
    """The last communication at the device's port before a wait decides for all tiles until the next wait."""
    tasks = TaskGraph(
        by_hand().plan,
        replace(TWO, cold_penalty=ColdPenalty(((10, 8),), ((20, 4),)), ports=(Port(3, 0, 0, 0),)),
        (
            replace(task("message", 0, 5, 5), latency_ns=2),
            replace(task("behind the message", 1, 10, 0, after=(0,)), tile=0),
            task("sum", 2, 30, 5, after=(0,)),  # the next tile does not wait, so it does not count
            replace(task("at once", 3, 20, 0, after=(1,)), tile=0),
            task("late sum", 4, 40, 5, after=(2,)),
            replace(task("behind the sum", 5, 5, 0, after=(4,)), tile=0),
        ),
    )
    assert times(tasks, simulate(tasks)) == {
        "message": (0, 5),
        "behind the message": (5, 17),
        "sum": (5, 35),
        "at once": (17, 39),
        "late sum": (35, 75),
        "behind the sum": (75, 84),
    }


def test_a_tile_takes_longer_if_its_device_has_waited() -> None:
    """By how much follows from what has followed since; a message never does. Communication is as good as a wait."""

    def tile(made: Task) -> Task:
        return replace(made, tile=0)

    tasks = TaskGraph(
        by_hand().plan,
        replace(TWO, cold_penalty=ColdPenalty(((4, 2), (14, 7))), ports=(Port(3, 1, 0, 0),)),
        (
            tile(task("first", 0, 10, 0)),
            task("sent", 1, 20, 4, after=(0,)),
            tile(task("short", 2, 5, 0, after=(1,))),
            tile(task("at once", 3, 10, 0, after=(2,))),
            task("sent again", 4, 20, 4, after=(3,)),
            tile(task("long", 5, 100, 0, after=(4,))),
            tile(task("elsewhere", 6, 4, 1, after=(0,))),
            replace(task("from there", 7, 1, 5, after=(6,)), cpu_overhead_ns=3),
            tile(task("behind its port", 8, 10, 1, after=(6,))),
        ),
    )
    assert times(tasks, simulate(tasks)) == {
        "first": (0, 10),
        "sent": (10, 30),
        "short": (30, 37),  # and a half of 5
        "at once": (37, 52),  # what is left of 7
        "sent again": (52, 72),
        "long": (72, 179),
        "elsewhere": (10, 16),
        "from there": (16, 17),
        "behind its port": (19, 34),  # the device has been busy with what it sends
    }


def test_a_device_does_not_begin_before_its_work_is_launched() -> None:
    """It is launched in order, without waiting for the device, which ends no earlier than the launching does."""
    launched = [(30, 10), (10, 50), (100, 10), (20, 0), (5, 10)]
    tasks = by_hand(*(replace(task(str(i), i, ns, 0), launch_ns=launch) for i, (ns, launch) in enumerate(launched)))
    assert times(tasks, simulate(tasks)) == {
        "0": (0, 30),  # begins with its first kernel
        "1": (50, 60),  # its last kernel is launched at 60
        "2": (60, 160),  # launched by 70, which is early enough
        "3": (160, 180),
        "4": (180, 185),
    }


def test_devices_work_is_launched_apart() -> None:
    first, second = task("a", 0, 10, 0), task("b", 1, 10, 1)
    tasks = by_hand(replace(first, launch_ns=40), replace(second, launch_ns=20))
    assert times(tasks, simulate(tasks)) == {"a": (30, 40), "b": (10, 20)}
