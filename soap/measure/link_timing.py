"""Runs probes of links between the real ranks, through the communicator that training uses.

Collectives are timed as they come in training: behind a computation, when caches are cold and some ranks are later than others. The
time for which each rank waits for the last one is included, since in a simulation equal tiles end at the same time. (A small sum over
four emulated hosts takes 2 ms in a tight loop, and 3 ms so.) Messages and exchanges are timed in a loop: the simulation itself knows
who is late for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from soap.cluster.topology import DeviceKind
from soap.measure.link_probes import IN_STEPS, MOST_TIMES, LinkTiming, Operation, Probe
from soap.measure.step_timing import TURNS, measure_in_steps
from soap.runtime.comm import signs
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.system import clock

LEAST_ROUNDS, MOST_ROUNDS = 5, 400
SECONDS_PER_PROBE = 0.3
"""Seconds for which a probe is repeated, in at most ``MOST_ROUNDS`` rounds. More seconds allow more rounds in proportion."""
FLOAT_BYTES = 4
COMPUTED_SECONDS = 1e-3
"""Processor time of the computation before a collective, on each rank."""
COMPUTED_FLOATS = 2**19


def measure_links(
    probes: Sequence[Probe],
    device_count: int,
    kind: DeviceKind = "cpu",
    backend: str = "auto",
    seconds_per_probe: float = SECONDS_PER_PROBE,
    on_probe: Callable[[LinkTiming], None] | None = None,
    when_open: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
    turns: int = TURNS,
) -> list[LinkTiming]:
    """The times of all probes, on every rank; an entry for ``launch``. A probe is repeated for about so long; its first round warms up.
    Ranks that are not among a probe's devices wait at a barrier meanwhile. ``probes``: rank 0's list counts; other ranks may know of
    other measurements. ``on_probe`` is called on rank 0 with each probe that is done. ``when_open``: called on every rank as soon as
    all groups have their threads. ``enough``: called on rank 0 before each probe; True leaves the rest. ``turns``: of probes within
    steps (``measure_in_steps``)."""
    world = open_world(device_count, kind, backend)
    comm = Communicator(world.device, (), world.timeout)
    try:
        todo: tuple[Probe, ...] = comm.gather(tuple(probes))[0]
        comm.open_groups({probe.devices for probe in todo})
        when_open()
        found: list[LinkTiming] = []
        for probe in todo:
            if comm.gather_late(comm.rank == 0 and enough())[0]:
                break
            in_steps = probe.operation in IN_STEPS
            if in_steps:
                found.append(measure_in_steps(comm, probe, _busy_seconds, found, turns))
            else:
                found.append(_measure(comm, probe, seconds_per_probe))
            if on_probe is not None and comm.rank == 0:
                on_probe(found[-1])
        return found
    finally:
        comm.close()
        close_world(world)


def _measure(comm: Communicator, probe: Probe, seconds_per_probe: float) -> LinkTiming:
    """Time one probe. All ranks take the same number of rounds, which follows from the slowest rank's second trial."""
    here = comm.rank in probe.devices
    once = _round(comm, probe) if here else None
    collective = probe.operation in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL)
    before = _compute_on(torch.zeros(COMPUTED_FLOATS)) if collective and comm.device.type == "cpu" else None
    comm.barrier()
    trial = max(_timed(comm, once, before)[0] for _ in range(2)) if once else 0.0
    slowest = max(comm.gather(trial))
    most = min(MOST_TIMES, MOST_ROUNDS * max(1, round(seconds_per_probe / SECONDS_PER_PROBE)))
    rounds = min(most, max(LEAST_ROUNDS, int(seconds_per_probe / max(slowest, 1e-9))))
    comm.barrier()
    own_rounds = [_timed(comm, once, before) for _ in range(rounds)] if once else [(0.0, 0.0)] * rounds
    signs.meet()  # those without a part in it are here long before
    comm.barrier()
    gathered = comm.gather(([wall for wall, _ in own_rounds], median(busy for _, busy in own_rounds)))
    ways = 2 if probe.operation is Operation.MESSAGE else 1  # there and back
    walls = zip(*(gathered[rank][0] for rank in probe.devices), strict=True)  # by round
    seconds = tuple(sum(own) / len(own) if collective else max(own) / ways for own in walls)
    return LinkTiming(probe, seconds, median(gathered[rank][1] for rank in probe.devices) / ways)


def _compute_on(values: torch.Tensor) -> Callable[[], None]:
    """Additions to all of these values, for ``COMPUTED_SECONDS``."""

    def compute() -> None:
        end = time.thread_time() + COMPUTED_SECONDS
        while time.thread_time() < end:
            values.add_(1.0)
        clock.catch_up()

    return compute


def _timed(comm: Communicator, once: Callable[[], None], before: Callable[[], None] | None) -> tuple[float, float]:
    """Seconds of a round, and of these the seconds in which this device could not compute. ``before`` is not included."""
    if before is not None:
        before()
    busy, start = _busy_seconds(), time.perf_counter()
    once()
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    busy = _busy_seconds() - busy
    return max(time.perf_counter() - start, 1e-9), busy


def _busy_seconds() -> float:
    """Seconds that this process has computed so far, including the backend's threads; of a device of an emulated cluster without these,
    which work beside it."""
    paced = clock.busy_ns()
    return time.process_time() if paced is None else paced / 1e9


def _round(comm: Communicator, probe: Probe) -> Callable[[], None]:
    """One round of a probe: this rank's part of it."""
    devices, count = probe.devices, max(1, probe.size_bytes // FLOAT_BYTES)
    data, landing = (torch.zeros(count, device=comm.device) for _ in range(2))
    place = devices.index(comm.rank)
    other = devices[1 - place] if len(devices) == 2 else comm.rank

    def message() -> None:
        for sender in (0, 1):
            if place == sender:
                comm.send(data, other, tag=sender)
                comm.finish_sends()
            else:
                comm.receive(landing, other, tag=sender).wait()

    def exchange() -> None:
        coming = comm.receive(landing, other, tag=1 - place)  # first, as in a step's program: see Communicator.all_to_all
        comm.send(data, other, tag=place)
        coming.wait()
        comm.finish_sends()

    def all_reduce() -> None:
        comm.all_reduce(data, devices).wait()

    peers = len(devices) - 1
    parcels = [[] if device == comm.rank else [data] for device in devices]
    sizes = [0 if device == comm.rank else count for device in devices]
    gathered = torch.zeros(count * peers, device=comm.device) if probe.operation is Operation.ALL_TO_ALL else landing

    def all_to_all() -> None:
        comm.all_to_all(parcels, gathered, sizes, devices).wait()
        comm.finish_sends()

    rounds = {
        Operation.MESSAGE: message,
        Operation.EXCHANGE: exchange,
        Operation.ALL_REDUCE: all_reduce,
        Operation.ALL_TO_ALL: all_to_all,
    }
    return rounds[probe.operation]
