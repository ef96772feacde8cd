"""The run that ``benchmarks.kills`` disturbs: ``python -m benchmarks.kill_run SETTINGS``. It trains a model that counts, and says in lines
of JSON what happens: ``started``, ``lease`` by lease, ``warning``, and at the end what was ``counted``.

Each sample has a row of a table to itself, to which a push adds 1/batch; a dense variable gets 1 from each push. So the values tell how
often each sample has counted, and how many pushes have; all these numbers are exact in float64.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import soap
from soap.elastic.launcher import Options, Run, train
from soap.elastic.layout import TableCut
from soap.elastic.session import module, session
from soap.elastic.store import Keeping
from soap.elastic.worker import InMemory, Report, Source
from soap.errors import SoapError

ROWS, COLUMNS, SAMPLES, BATCH = 2**18, 4, 2**12, 8
"""A snapshot of all has 8 MiB, a push some 500 bytes for each partition."""
DENSE = 3
MODEL, HURRY = "model.pt2", "hurry"
NODES_S = 60.0


class Counting(nn.Module):
    """See above. Values fall: the loss is their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum")
        nn.init.zeros_(self.rows.weight)
        self.pushes = nn.Parameter(torch.zeros(DENSE))

    def forward(self, ids: Tensor, ones: Tensor) -> Tensor:
        """``ids``: (batch, 1); ``ones``: (batch, ``DENSE``)."""
        return (self.rows(ids).sum(1) + ones @ self.pushes).mean()


@dataclass(frozen=True)
class Paced(InMemory):
    """Samples that take a while to come, as from a disk, until the file ``hurry`` is there."""

    pause_s: float = 0.0
    hurry: str = ""

    def batch(self, indices: Sequence[int]) -> Sequence[Tensor]:
        """See ``Batches``."""
        if not os.path.exists(self.hurry):
            time.sleep(self.pause_s)
        return super().batch(indices)


@dataclass(frozen=True)
class Settings:
    """``folder``: of the model and the file to hurry. ``kept``: where servers keep their partitions. ``address``: of a cluster to join,
    of which so many ``nodes`` must be there; None: a session of its own. ``server_machines``: as in ``Options``."""

    folder: str
    kept: str
    address: str | None = None
    nodes: int = 1
    epochs: int = 8
    workers: int = 2
    servers: int = 2
    partitions: int = 3
    snapshot_every_pushes: int = 100
    pause_s: float = 0.02
    server_machines: tuple[int, ...] | None = None

    @property
    def leases(self) -> int:
        """Of the whole run."""
        return self.epochs * SAMPLES // BATCH


def export_model(folder: Path) -> None:
    """Write the model's file."""
    soap.export(Counting(), (torch.zeros(BATCH, 1, dtype=torch.int64), torch.ones(BATCH, DENSE)), path=folder / MODEL, verify=False)


def samples(settings: Settings) -> Paced:
    """Sample n names a row of its own, all over the table."""
    ids = torch.arange(SAMPLES)[:, None] * (ROWS // SAMPLES)
    return Paced((ids, torch.ones(SAMPLES, DENSE, dtype=torch.float64)), settings.pause_s, str(Path(settings.folder) / HURRY))


COUNTED: dict[str, Any] = {"reduce_dense": "sum", "reduce_sparse": "sum"}
"""A push counts whole, not by its share of a step."""


def options(settings: Settings) -> Options:
    """Of the launcher."""
    machines = None if settings.server_machines is None else tuple(settings.server_machines)
    cut = TableCut(0, tuple(part % settings.servers for part in range(settings.partitions)))
    placed: dict[str, Any] = {"tables": {"rows.weight": cut}, "dense": tuple(range(settings.servers)), "server_machines": machines}
    return Options(BATCH, settings.epochs, settings.workers, settings.servers, bound=None, **placed, **COUNTED)


def counted(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """``samples``: how often -> how many samples counted so often, as all columns say. ``others``: the largest value of rows of no sample.
    ``pushes``: by element of the dense variable."""
    rows = -BATCH * parameters["rows.weight"]
    own = torch.zeros(ROWS, dtype=torch.bool)
    own[:: ROWS // SAMPLES] = True
    times = Counter(tuple(row) for row in rows[own].tolist())
    return {
        "samples": {" ".join(f"{value:g}" for value in sorted(set(row))): count for row, count in times.items()},
        "others": float(rows[~own].abs().max()),
        "pushes": (-parameters["pushes"]).tolist(),
    }


def say(**facts: Any) -> None:
    """One line."""
    print(json.dumps(facts), flush=True)


def run(settings: Settings) -> None:
    """Train, and say what happens."""
    warnings.showwarning = lambda message, *_, **__: say(warning=str(message))
    warnings.simplefilter("always")

    def started(made: Run) -> None:
        ray = module()
        servers = ray.get([server.address.remote() for server in made.servers])
        processes = ray.get([server.process.remote() for server in made.servers])
        workers = ray.get([made.crew.arrival(worker) for worker in range(settings.workers)])
        say(started={"servers": servers, "processes": processes, "workers": workers})

    def told(number: int, report: Report) -> None:
        say(lease=number)

    with session(settings.address, cpus=None if settings.address else 1):
        _await_nodes(settings.nodes)
        outcome = train(
            Source(str(Path(settings.folder) / MODEL), "float64"),
            samples(settings),
            Keeping(settings.kept, partial(torch.optim.SGD, lr=1.0), snapshot_every_pushes=settings.snapshot_every_pushes),
            options(settings),
            parameters=True,
            told=told,
            started=started,
        )
    assert outcome.parameters is not None
    say(counted=counted(outcome.parameters), lost_workers=outcome.lost_workers, dealt_again=outcome.dealt_again)


def _await_nodes(count: int) -> None:
    end_s = time.monotonic() + NODES_S
    while sum(node["Alive"] for node in module().nodes()) < count:
        if time.monotonic() > end_s:
            raise SoapError(f"fewer than {count} nodes after {NODES_S:g} s")
        time.sleep(0.2)


def settings_text(settings: Settings) -> str:
    """The argument that stands for the settings."""
    return json.dumps(asdict(settings))


def main() -> int:
    """Entry point: errors are one line, as a command's are."""
    torch.set_num_threads(1)
    try:
        run(Settings(**json.loads(sys.argv[1])))
    except SoapError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
