"""What a link between two processes of this machine carries: a short gloo run in two processes of its own.

They are started as plain Python processes. ``multiprocessing`` would run the user's main script again. They meet through a file in a
temporary folder, so that no port can be taken. ``measure_link`` starts them; ``main`` is what each of them runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from soap.errors import ProfileError
from soap.runtime.system.gloo_threads import calm_gloo
from soap.runtime.system.malloc import keep_freed_memory

if TYPE_CHECKING:
    from torch import Tensor

BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); from soap.measure.link_probe import main; main()"
TIMEOUT_SECONDS = 30.0
"""Seconds to start two Pythons with torch on a busy machine; the run itself takes a fraction of a second."""
PING_PONGS = 200
EXCHANGES = 10
EXCHANGE_BYTES = 8 * 2**20
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What one direction of a link carries while the other direction is as busy."""

    bandwidth_bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        for value in (self.bandwidth_bytes_per_second, self.latency_seconds):
            if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
                raise ProfileError(f"link rates {self!r}: expected finite numbers above 0; measure again")


def measure_link(timeout_seconds: float = TIMEOUT_SECONDS, command: tuple[str, ...] = ("-c", BOOTSTRAP)) -> LinkRates:
    """Latency and bandwidth of gloo between two processes; ProfileError if they do not finish in time. Leaves nothing behind."""
    package_root = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory(prefix="soap-link-") as folder:
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(2):
                arguments = [sys.executable, *command, package_root, str(rank), str(Path(folder) / "store")]
                ranks.append(
                    subprocess.Popen(
                        arguments, cwd=folder, env=_environment(os.environ), text=True, stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    )
                )  # fmt: skip
            return _answer(ranks, time.monotonic() + timeout_seconds)
        except OSError as cause:
            raise ProfileError(f"cannot start a process to measure links: {cause}; expected a working Python executable") from None
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One thread per process, and the loopback interface unless the user chose one: a host name need not resolve."""
    result = {**environment, "OMP_NUM_THREADS": "1"}
    loopback = LOOPBACK.get(sys.platform)
    if loopback is not None:
        result.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return result


def _answer(ranks: list[subprocess.Popen[str]], deadline: float) -> LinkRates:
    """The output of rank 0, once both have ended well."""
    outputs = []
    for process in ranks:
        try:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ProfileError("measuring links between two processes took too long; try again on an idle machine") from None
        if process.returncode != 0:
            reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise ProfileError(f"measuring links between two processes failed: {reason}; check that torch has gloo")
        outputs.append(output)
    try:
        record = json.loads((outputs[0].splitlines() or [""])[-1])
        return LinkRates(record["bandwidth_bytes_per_second"], record["latency_seconds"])
    except (ValueError, KeyError, TypeError):
        raise ProfileError(f"measuring links gave {outputs[0][-80:]!r}; expected a JSON record: try again") from None


def main() -> None:
    """Arguments: rank (0 or 1) and the file through which the two meet. Rank 0 prints the rates as JSON."""
    import torch
    from torch import distributed

    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    keep_freed_memory()
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    distributed.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=2, timeout=timeout)
    calm_gloo()  # as ranks do
    try:
        small, large = torch.zeros(1), torch.zeros(EXCHANGE_BYTES // 4)
        latency_seconds = _typical_seconds(lambda: _ping_pong(rank, small), PING_PONGS) / 2
        exchange_seconds = _typical_seconds(lambda: _exchange(rank, large, torch.empty_like(large)), EXCHANGES)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        moving_seconds = max(exchange_seconds - latency_seconds, exchange_seconds / 2)
        rates = {"bandwidth_bytes_per_second": EXCHANGE_BYTES / moving_seconds, "latency_seconds": latency_seconds}
        print(json.dumps(rates))


def _typical_seconds(action: Callable[[], None], repetitions: int) -> float:
    """The fastest tenth of several times, after a first one that warms up: other programs only ever add time."""
    action()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
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
