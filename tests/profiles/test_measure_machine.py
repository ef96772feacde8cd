"""Measuring this machine: how rates are shared among processes, and when a measurement is repeated. Never how fast it is."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from soap.cluster.presets import LOCAL_BANDWIDTH_BYTES_PER_SECOND, preset
from soap.cluster.topology import Topology
from soap.errors import ProfileError, TopologyError
from soap.measure import compute_rates, machine_cache, this_machine
from soap.measure.compute_rates import Rates
from soap.measure.link_probe import LinkRates, Probed
from soap.measure.link_probes import LinkTiming, Operation, decode_timing, encode_timing, quick_probes
from soap.measure.this_machine import measure_device, measured_local_topology, measured_topology, threads_per_process
from soap.profiles.roofline import RooflineCosts
from soap.profiles.spreads import KnownSpreads
from soap.simulator.communication.prices import Communication
from soap.simulator.draws import Communicated


class Machine:
    """Four cores; each reaches 1e9 FLOP/s and 2e9 bytes/s, but while all four work only 0.75e9 of either."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.probed = 0
        self.ranks: list[tuple[int, int]] = []
        self.link_fails = False
        self.steps_fail = False

    def rates(self, workers: int) -> Rates:
        self.asked.append(workers)
        flops, memory = (0.75e9, 0.75e9) if workers == 4 else (1e9, 2e9)
        return Rates({"float32": flops, "float64": flops / 2}, memory, 1e-6)

    def link(self, in_steps_of: int = 0, threads: int = 1) -> Probed:
        """A message takes 70 us in training, 60 of them with the processor; a sum 300 us."""
        self.probed += 1
        self.ranks.append((in_steps_of, threads))
        if self.link_fails or (self.steps_fail and in_steps_of):
            raise ProfileError("no gloo here")
        probes = quick_probes(preset(f"local:{in_steps_of}")) if in_steps_of else []
        found = [LinkTiming(probe, (5e-5 + probe.size_bytes * 1e-9,), 4e-5) for probe in probes]
        longer = {Operation.STEP_MESSAGE: (7e-5, 6e-5), Operation.STEP_SUM: (3e-4, 1e-4)}
        for number, timing in enumerate(found):
            if timing.probe.operation in longer:
                seconds, busy_seconds = longer[timing.probe.operation]
                found[number] = LinkTiming(timing.probe, (seconds,), busy_seconds)
        return Probed(LinkRates(1e9 + 1e6 * self.probed, 1e-5), tuple(decode_timing(encode_timing(one)) for one in found))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine, "cpu_cores", lambda: 4)
    monkeypatch.setattr(this_machine, "memory_bytes", lambda: 2**30)
    monkeypatch.setattr(this_machine, "gpu_count", lambda: 0)
    monkeypatch.setattr(this_machine, "cpu_rates", made.rates)
    monkeypatch.setattr(this_machine, "measure_link", made.link)
    return made


@pytest.mark.parametrize(
    ("count", "workers", "flops", "memory", "kernel_seconds"),
    [
        (1, 4, 3e9, 3e9, 1e-6),
        (2, 4, 1.5e9, 1.5e9, 1e-6),
        (3, 3, 1e9, 2e9, 1e-6),
        (4, 4, 0.75e9, 0.75e9, 1e-6),
        (8, 4, 0.375e9, 0.375e9, 2e-6),
    ],
)
def test_processes_share_cores_and_memory(
    machine: Machine, count: int, workers: int, flops: float, memory: float, kernel_seconds: float
) -> None:
    device = measure_device("cpu", count)
    assert machine.asked == [workers]
    assert device.flops("float32") == pytest.approx(flops)
    assert device.memory_bandwidth_bytes_per_second == pytest.approx(memory)
    assert device.kernel_seconds == pytest.approx(kernel_seconds)
    assert device.memory_bytes == 2**30 // count


@pytest.mark.parametrize(("count", "threads"), [(1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_threads_divide_the_cores(machine: Machine, count: int, threads: int) -> None:
    assert threads_per_process(count) == threads


def test_links_are_shared_by_more_processes_than_cores(machine: Machine) -> None:
    four, eight = (measured_local_topology(n, cache=False).described[0] for n in (4, 8))
    assert four.bandwidth_bytes_per_second == pytest.approx(1e9, rel=0.01)
    assert eight.bandwidth_bytes_per_second == pytest.approx(5e8, rel=0.01)
    assert eight.latency_seconds == pytest.approx(2 * four.latency_seconds)


def test_second_time_comes_from_the_cache(machine: Machine) -> None:
    first, second = measured_local_topology(2), measured_local_topology(2)
    assert first == second
    assert first.hash == second.hash
    assert machine.probed == 1
    assert measured_local_topology(3).device_count == 3
    assert machine.probed == 2


def test_without_cache_nothing_is_kept(machine: Machine, tmp_path: Path) -> None:
    measured_local_topology(2, cache=False)
    measured_local_topology(2, cache=False)
    assert machine.probed == 2
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_cache_is_rewritten(machine: Machine, tmp_path: Path) -> None:
    first = measured_local_topology(2)
    (path,) = (tmp_path / "soap").iterdir()
    path.write_text("not JSON")
    again = measured_local_topology(2)
    assert machine.probed == 2
    assert again.device_count == first.device_count
    assert json.loads(path.read_text())["key"]["devices"] == 2


class Day:
    """The time of day, which stands until it is moved."""

    now_s = 1.7e9

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Day:
    made = Day()
    monkeypatch.setattr(machine_cache, "time", made)
    monkeypatch.setattr(this_machine, "time", made)
    return made


def test_failing_links_are_told_once_and_alone_tried_again_on_another_day(machine: Machine, day: Day) -> None:
    machine.link_fails = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        topology = measured_local_topology(2)
    told = "no gloo here; going on with the usual figures for links of one machine, for a day or until --measure-again"
    assert str(caught[-1].message) == told
    assert topology.links[0].bandwidth_bytes_per_second == LOCAL_BANDWIDTH_BYTES_PER_SECOND
    machine.link_fails = False
    day.now_s += 86_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured_local_topology(2) == topology and machine.ranks == [(2, 2), (0, 1)]
    day.now_s += 1000
    again = measured_local_topology(2)
    assert again.links_known == "quick" and measured_local_topology(2) == again
    assert (machine.ranks, machine.asked) == ([(2, 2), (0, 1), (2, 2)], [4])


@pytest.mark.parametrize("known", [False, True], ids=["new", "rates known"])
def test_training_that_could_not_be_measured_is_tried_again_on_another_day(machine: Machine, day: Day, known: bool) -> None:
    if known:
        measured_topology(preset("emulated:2x1@200Mbit/s"))  # has the rates of two processes
    machine.steps_fail, machine.ranks = True, []
    with pytest.warns(UserWarning, match="no gloo here; going on with what two processes exchange at best; soap-profile links measures"):
        first = measured_local_topology(2)
    tried = [(2, 2)] if known else [(2, 2), (0, 1)]
    assert machine.ranks == tried and first.links_known == "described"
    assert first.links[0].bandwidth_bytes_per_second == pytest.approx(1e9, rel=0.01)  # measured, not the usual figures
    machine.steps_fail = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured_local_topology(2) == first and machine.ranks == tried
    day.now_s += machine_cache.FAILURE_S
    assert measured_local_topology(2).links_known == "quick" and machine.ranks == [*tried, (2, 2)]


def test_it_is_measured_again_once_if_that_is_asked_for(machine: Machine) -> None:
    first = measured_local_topology(2)
    with machine_cache.measuring_again():
        again = measured_local_topology(2)
        assert again.described[0].bandwidth_bytes_per_second != first.described[0].bandwidth_bytes_per_second
        assert measured_local_topology(2) == again and machine.asked == [4, 4]
    assert measured_local_topology(2) == again and machine.probed == 2


def test_emulated_hosts_have_nearly_the_devices_of_so_many_processes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    local = measured_topology(preset("local:4"))
    assert local == measured_local_topology(4)
    asked = list(machine.asked)
    monkeypatch.setattr(this_machine, "gpu_count", lambda: 8)  # emulated hosts have none
    emulated = measured_topology(preset("emulated:2x2@200Mbit/s"))
    rates = {device.type.memory_bandwidth_bytes_per_second for device in emulated.devices}
    assert rates == {0.75 * local.devices[0].type.memory_bandwidth_bytes_per_second}
    assert emulated.links[0].bandwidth_bytes_per_second == local.described[0].bandwidth_bytes_per_second
    assert emulated.hash == preset("emulated:2x2@200Mbit/s").hash
    assert {emulated.links[link].bandwidth_bytes_per_second for link in emulated.stated} == {25e6}
    assert machine.asked == asked  # from the cache


def test_communication_is_priced_as_training_has_it(machine: Machine, tmp_path: Path) -> None:
    plain = preset("local:2")
    found = measured_local_topology(2)
    assert machine.ranks == [(2, 2)]
    assert found == measured_local_topology(2) and machine.probed == 1  # the file holds all of it
    assert found.hash == plain.hash and found.links_known == "quick" != plain.links_known
    assert {port.device for port in found.ports} == {0, 1}
    assert {port.fixed_ns for port in found.ports} == {60_000}  # 40 us of a message by itself, and 20 more in training
    assert Communication(found).transfer_ns(0, 0, 1) == pytest.approx(50_000, rel=0.01)  # 70 us less the 20, which are its sender's
    assert Communication(found).allreduce(0, (0, 1))[0] == pytest.approx(300_000, rel=0.01)
    assert found.cpu_overhead.of_all_reduce(2).fixed_ns == 100_000
    assert {link.bandwidth_bytes_per_second for link in found.described} == {1.001e9}


def test_how_far_communication_may_be_off_follows_how_it_was_measured(machine: Machine) -> None:
    quick = measured_local_topology(2)
    known = {"described": 0.5, "quick": 0.3, "measured": 0.1}
    spreads = {
        "communication": {name: {"cpu": {"all": each, "sort": each / 2}} for name, each in known.items()},
        "overhead": {name: {"cpu": {"all": each / 4}} for name, each in known.items()},
    }
    for topology, each in ((preset("local:2"), 0.5), (quick, 0.3), (replace(quick, links_source="measured by soap-profile links"), 0.1)):
        own = KnownSpreads(RooflineCosts(topology), topology, spreads)
        assert [error.spread for error in own.of_communication(Communicated(False, True))] == [each, each / 2]
        assert [error.spread for error in own.of_overhead()] == [each / 4]
    KnownSpreads(RooflineCosts(quick), quick).of_communication(Communicated(False, True))  # the file has them, too
    KnownSpreads(RooflineCosts(quick), quick).of_overhead()


def test_a_file_of_before_is_used_and_gets_what_it_lacks(machine: Machine, tmp_path: Path) -> None:
    measured_local_topology(2)
    (path,) = (tmp_path / "soap").iterdir()
    record = json.loads(path.read_text())
    without = {**record, "measurement": {**record["measurement"], "timings": None}}
    for before in (without, {**record, "timings_version": 0}):
        asked = list(machine.asked)
        path.write_text(json.dumps(before))
        again = measured_local_topology(2)
        assert again.links_known == "quick" and machine.asked == asked  # rates are not measured again
        assert {link.bandwidth_bytes_per_second for link in again.described} == {1.001e9}  # nor what the first two exchanged
    assert machine.probed == 3


def test_emulated_hosts_and_many_processes_have_links_alone(machine: Machine) -> None:
    emulated = measured_topology(preset("emulated:2x2@200Mbit/s"))
    many = measured_local_topology(this_machine.MOST_RANKS + 1)
    assert machine.ranks == [(0, 1), (0, 1)]
    assert (emulated.links_known, many.links_known) == ("described", "described") and emulated.ports == many.ports == ()
    local = measured_local_topology(4)  # the same file as the emulated hosts'
    assert machine.ranks[2:] == [(4, 1)] and local.links_known == "quick"
    assert measured_topology(preset("emulated:2x2@200Mbit/s")) == emulated


def test_timings_that_cannot_be_right_are_not_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a large message may have been quicker than a small one."""

    def link(in_steps_of: int = 0, threads: int = 1) -> Probed:
        rates, timings = machine.link(in_steps_of, threads)
        return Probed(rates, tuple(replace(one, seconds=(1 / one.probe.size_bytes,)) for one in timings))

    monkeypatch.setattr(this_machine, "measure_link", link)
    for cache in (False, False, True):
        with pytest.warns(UserWarning, match="do not take longer when they are larger; measure again; going on"):
            assert measured_local_topology(2, cache).links_known == "described"
    assert measured_local_topology(2).links_known == "described"  # without a warning
    monkeypatch.setattr(this_machine, "measure_link", machine.link)
    assert measured_local_topology(2, cache=False).links_known == "quick"


def test_one_device_has_no_links_to_measure(machine: Machine) -> None:
    assert measured_local_topology(1).links == ()
    assert machine.probed == 0


@pytest.mark.parametrize("count", [0, -1, 10**6])
def test_impossible_numbers_are_refused_before_measuring(machine: Machine, count: int) -> None:
    with pytest.raises(TopologyError, match="expected a number of devices"):
        measured_local_topology(count)
    assert machine.asked == []


def test_this_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_rates, "SECONDS_PER_RATE", 0.0)
    device = measure_device("cpu", 2)
    assert device.is_measured
    assert device.flops("float32") > 1e6
    assert device.flops("float64") > 1e6
    assert 1e6 < device.memory_bandwidth_bytes_per_second < 1e13
    assert 0 < device.kernel_seconds < 1
    assert 2**20 < device.memory_bytes <= this_machine.memory_bytes() // 2


def test_measured_topologies_say_so(machine: Machine) -> None:
    assert RooflineCosts(measured_local_topology(2)).description == "measured rates of this machine"


def test_this_machine_has_cores_memory_and_a_name() -> None:
    assert this_machine.cpu_cores() >= 1
    assert this_machine.cpu_model()
    size = this_machine.memory_bytes()
    assert size > 2**20
    assert size < 2**30 or size % 2**30 == 0


def test_of_two_that_measure_at_once_the_first_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has measured and saved while this one was measuring."""
    others: list[Topology | None] = []

    def link(in_steps_of: int, threads: int) -> Probed:
        if not others:
            others.append(None)
            others[0] = measured_local_topology(2)
        return machine.link(in_steps_of, threads)

    monkeypatch.setattr(this_machine, "measure_link", link)
    found = measured_local_topology(2)
    assert machine.probed == 2 and found == others[0] == measured_local_topology(2)


def test_free_memory_is_what_the_system_or_the_container_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "memory_bytes", lambda: 8 * 2**30)
    files = {name: tmp_path / name for name in ("meminfo", "max", "stat")}
    monkeypatch.setattr(this_machine, "MEMINFO", files["meminfo"])
    monkeypatch.setattr(this_machine, "CGROUP_LIMITS", (str(files["max"]), str(tmp_path / "none")))
    monkeypatch.setattr(this_machine, "CGROUP_USES", ((str(files["stat"]), "anon"), (str(tmp_path / "none"), "total_rss")))
    assert this_machine.free_memory_bytes() == 8 * 2**30  # nobody tells
    files["meminfo"].write_text("MemTotal: 8388608 kB\nMemFree: 1024 kB\nMemAvailable:    4096 kB\n")
    assert this_machine.free_memory_bytes() == 4 * 2**20
    files["max"].write_text("max\n")
    files["stat"].write_text("anon 1048576\nfile 5000000\n")
    assert this_machine.free_memory_bytes() == 4 * 2**20
    files["max"].write_text("3145728\n")
    assert this_machine.free_memory_bytes() == 2 * 2**20  # caches of files go when there is need
    files["stat"].write_text("anon 9048576\n")
    assert this_machine.free_memory_bytes() == 0
