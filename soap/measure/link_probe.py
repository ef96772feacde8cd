"""What links between processes of this machine carry, and what communication costs them: a short gloo run in processes of its own.

They are started as plain Python processes. ``multiprocessing`` would run the user's main script again. They meet through a file in a
temporary folder, so that no port can be taken. ``measure_link`` starts them; ``main`` is what each of them runs. Two processes measure
what a link carries. As many as there are devices also measure messages and collectives as training has them (``quick_probes``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from soap.cluster.presets import local_topology
from soap.errors import ProfileError
from soap.measure.link_probes import COLD_PENALTIES, IN_STEPS, LinkTiming, Probe, decode_timing, encode_timing, quick_probes
from soap.runtime.comm.launched import inherited, loopback
from soap.runtime.system.process import calm_gloo, keep_freed_memory

if TYPE_CHECKING:
    from torch import Tensor

BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); from soap.measure.link_probe import main; main()"
TIMEOUT_SECONDS, IN_STEPS_TIMEOUT_SECONDS = 30.0, 90.0
"""Seconds to start Pythons with torch on a busy machine, and to measure: a fraction of a second; training steps take some seconds."""
SECONDS_PER_PROBE, TURNS = 0.05, 2
"""How long each quick probe takes, and how often the steps of each chain are compared."""
PING_PONGS = 200
EXCHANGES = 10
EXCHANGE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What one direction of a link carries while the other direction is as busy."""

    bandwidth_bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        for value in (self.bandwidth_bytes_per_second, self.latency_seconds):
            if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
                raise ProfileError(f"link rates {self!r}: expected finite numbers above 0; measure again")


class Probed(NamedTuple):
    """What two processes exchange at best, and how long ``quick_probes`` take among all, one time of each; none if not asked for."""

    rates: LinkRates
    timings: tuple[LinkTiming, ...] = ()


def measure_link(
    in_steps_of: int = 0, threads: int = 1, timeout_seconds: float | None = None, command: tuple[str, ...] = ("-c", BOOTSTRAP)
) -> Probed:
    """Latency and bandwidth of gloo between two processes; ``in_steps_of``: also what so many, each with ``threads`` threads, measure in
    training. ProfileError if they do not finish in time. Leaves nothing behind."""
    package_root = str(Path(__file__).resolve().parents[2])
    limit = timeout_seconds or (IN_STEPS_TIMEOUT_SECONDS if in_steps_of else TIMEOUT_SECONDS)
    with tempfile.TemporaryDirectory(prefix="soap-link-") as folder:
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(max(2, in_steps_of)):
                arguments = [sys.executable, *command, package_root, str(rank), str(Path(folder) / "store"), str(in_steps_of), str(threads)]
                ranks.append(
                    subprocess.Popen(
                        arguments, cwd=folder, env=_environment(os.environ, threads), text=True, stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    )
                )  # fmt: skip
            return _answer(ranks, time.monotonic() + limit)
        except OSError as cause:
            raise ProfileError(f"cannot start a process to measure links: {cause}; expected a working Python executable") from None
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


def _environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """So many threads per process, and loopback unless the user chose another interface; nothing of a launcher's environment."""
    kept = {name: value for name, value in environment.items() if inherited(name)}
    return {**loopback(), **kept, "OMP_NUM_THREADS": str(threads)}


def _answer(ranks: list[subprocess.Popen[str]], deadline: float) -> Probed:
    """The output of rank 0, once both have ended well."""
    outputs = []
    for process in ranks:
        try:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ProfileError(f"measuring links between {len(ranks)} processes took too long; try again on an idle machine") from None
        if process.returncode != 0:
            reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise ProfileError(f"measuring links between {len(ranks)} processes failed: {reason}; check that torch has gloo")
        outputs.append(output)
    try:
        record = json.loads((outputs[0].splitlines() or [""])[-1])
        timings = tuple(decode_timing(timing) for timing in record.get("timings", ()))
        return Probed(LinkRates(record["bandwidth_bytes_per_second"], record["latency_seconds"]), timings)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProfileError(f"measuring links gave {outputs[0][-80:]!r}; expected a JSON record: try again") from None


def main() -> None:
    """Arguments: rank, the file through which all meet, and those of ``measure_link``. Rank 0 prints what was measured as JSON."""
    import torch
    from torch import distributed

    rank, store, in_steps_of, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    keep_freed_memory()
    timeout, size = timedelta(seconds=IN_STEPS_TIMEOUT_SECONDS if in_steps_of else TIMEOUT_SECONDS), max(2, in_steps_of)
    distributed.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=size, timeout=timeout)
    calm_gloo()  # as ranks do
    try:
        record: dict[str, Any] = _rates(rank) if rank < 2 else {}
        distributed.barrier()
        if in_steps_of:
            torch.set_num_threads(threads)
            record["timings"] = [encode_timing(timing) for timing in _timings(in_steps_of)]
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(record))


def _rates(rank: int) -> dict[str, Any]:
    """Of two processes, with a thread each."""
    import torch

    small, large = torch.zeros(1), torch.zeros(EXCHANGE_BYTES // 4)
    latency_seconds = _typical_seconds(lambda: _ping_pong(rank, small), PING_PONGS) / 2
    exchange_seconds = _typical_seconds(lambda: _exchange(rank, large, torch.empty_like(large)), EXCHANGES)
    moving_seconds = max(exchange_seconds - latency_seconds, exchange_seconds / 2)
    return {"bandwidth_bytes_per_second": EXCHANGE_BYTES / moving_seconds, "latency_seconds": latency_seconds}


def _timings(count: int) -> list[LinkTiming]:
    """Of all processes, through what training uses. What does not run within steps is measured twice; the faster time is kept."""
    from soap.measure.link_timing import measure_links

    probes = quick_probes(local_topology(count))
    again = [probe for probe in probes if probe.operation not in IN_STEPS]
    kept: dict[Probe, LinkTiming] = {}
    for timing in measure_links([*probes, *again], count, seconds_per_probe=SECONDS_PER_PROBE, turns=TURNS):
        one = replace(timing, seconds=(_kept_seconds(timing),))
        if timing.probe not in kept or one.typical_seconds < kept[timing.probe].typical_seconds:
            kept[timing.probe] = one
    return list(kept.values())


def _kept_seconds(timing: LinkTiming) -> float:
    """The fastest tenth, too; within steps, of differences between times, the median. Of a cold penalty what is sure: whatever else the
    machine does makes tiles across processes slower, but hardly those of one."""
    between_times = timing.probe.operation in IN_STEPS and timing.probe.operation not in COLD_PENALTIES
    return timing.typical_seconds if between_times else _fastest_tenth(timing.seconds)


def _typical_seconds(action: Callable[[], None], repetitions: int) -> float:
    """The fastest tenth of several times, after a first one that warms up."""
    action()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return _fastest_tenth(seconds)


def _fastest_tenth(seconds: Sequence[float]) -> float:
    """Other programs only ever add time, and these figures are kept for long."""
    return sorted(seconds)[len(seconds) // 10]


def _ping_pong(rank: int, tensor: Tensor) -> None:
    from torch import distributed

    first, second = (distributed.send, distributed.recv) if rank == 0 else (distributed.recv, distributed.send)
    first(tensor, 1 - rank)
    second(tensor, 1 - rank)


def _exchange(rank: int, outgoing: Tensor, incoming: Tensor) -> None:
    """Both directions at once, as in a ring: the two share the cores that copy the bytes."""
    from torch import distributed

    operations = [
        distributed.P2POp(distributed.isend, outgoing, 1 - rank),
        distributed.P2POp(distributed.irecv, incoming, 1 - rank),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
