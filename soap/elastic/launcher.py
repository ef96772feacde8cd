"""Training with servers that own and workers that hold no state: starts both as actors of Ray, deals leases, and notes what is done.

The launcher gives each idle worker a lease by a call of its actor, and the call's return is the acknowledgement: all owners have counted
the lease by then. If a worker is lost, Ray fails the call and starts the worker anew, and its lease is dealt again. If a server is lost,
Ray starts it anew, it recovers from its folder, and workers ask it again. If the launcher is, the same call goes on from the folder.
"""

from __future__ import annotations

import json
import re
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from soap.elastic.clocks import SYNC, Clocks
from soap.elastic.cut import Cut
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Layout, lay_out
from soap.elastic.leases import Dealer, Finished, Lease
from soap.elastic.owners import Owners, whole
from soap.elastic.places import hosts, node
from soap.elastic.pulse import Pulse
from soap.elastic.server_actor import Keeping, Server
from soap.elastic.session import module
from soap.elastic.transport import PeerLost
from soap.elastic.worker import Batches, Report, Source, Worker
from soap.errors import SoapError, SoapWarning, first_line
from soap.files import read_text, write_text_atomically

TICK_S = 0.5
NOTE_S = 2.0
"""How often it is noted which leases are done. What is done beyond that is dealt again after a restart, and counts no second time."""
ADDRESS_S = 30.0
CLOSE_S = 10.0
RESTARTS = 20
"""Ray starts a worker anew so often at most: one that ends at once, for want of memory, would be started for ever."""
LEASES = "leases.json"

Told = Callable[[int, Report], None]
"""Called with a lease's number and what its worker says of it."""


@dataclass(frozen=True)
class Options:
    """``partitions`` of each table (default: one per server), cut along ``axis`` (0: rows, 1: columns; for all tables or by name).
    ``bound``: see ``Clocks``: 0 (synchronous), D, or None (asynchronous). ``batch``: samples of a lease."""

    batch: int
    epochs: int = 1
    workers: int = 2
    servers: int = 1
    partitions: int | None = None
    axis: int | Mapping[str, int] = 0
    bound: int | None = SYNC
    seed: int = 0


@dataclass
class Outcome:
    """``losses``: by lease, those of this launcher. ``lost_workers``: how often a worker was lost; ``dealt_again``: leases dealt anew for
    that. ``parameters``: whole, if asked for."""

    losses: dict[int, float] = field(default_factory=dict)
    lost_workers: int = 0
    dealt_again: int = 0
    parameters: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Addresses:
    """Where servers listen, asked of their actors by anyone in the cluster."""

    servers: tuple[Any, ...]

    def __call__(self, server: int) -> tuple[str, int]:
        """Waits while the server is being started. PeerLost if that takes long."""
        ray = module()
        try:
            host, port = ray.get(self.servers[server].address.remote(), timeout=ADDRESS_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as cause:
            raise PeerLost(f"server {server} is away: {said(cause)}") from None
        return host, port


def train(
    source: Source,
    batches: Batches,
    keeping: Keeping,
    options: Options,
    *,
    parameters: bool = False,
    told: Told | None = None,
    started: Callable[[Run], None] | None = None,
) -> Outcome:
    """Train in the Ray cluster that this process is in (``session``). ``parameters``: bring all values here at the end. ``started``: called
    once with the run when its actors are there. ElasticError in one line for what goes wrong."""
    model = source.load(plan_only=True)
    cut = Cut(model)
    shapes = {name: model.graph.tensors[name].shape for name in (*cut.tables, *cut.dense)}
    layout = lay_out(
        {name: shapes[name] for name in cut.tables},
        {name: shapes[name] for name in cut.dense},
        options.servers,
        partitions=options.partitions,
        axis=options.axis,
    )
    run = Run(source, batches, keeping, options, layout)
    try:
        if started is not None:
            started(run)
        run.work(told)
        if parameters:
            run.outcome.parameters = run.parameters()
        return run.outcome
    finally:
        run.close()


class Run:
    """Servers and workers of one training, and the dealer of its leases. ``servers``, ``workers``: their actors."""

    def __init__(self, source: Source, batches: Batches, keeping: Keeping, options: Options, layout: Layout) -> None:
        self._ray, self._layout, self._options = module(), layout, options
        self._pulse = Pulse(str(self._ray.get_runtime_context().gcs_address))
        self._notes = Path(keeping.folder) / LEASES
        self._dealer, noted = _dealer(self._notes, len(batches), options)
        self._hosts = hosts(self._ray, layout.servers, noted)
        self._clocks = Clocks((), options.bound)
        self._secret = secrets.token_bytes(32)
        self.outcome = Outcome()
        self.servers: list[Any] = []
        self.workers: list[Any] = []
        self._leases: dict[Any, tuple[int, Lease]] = {}
        self._coming: dict[Any, int] = {}
        self._idle: set[int] = set()
        self._asked: dict[Any, int] = {}
        self._gone = ""
        try:
            self._start_servers(source, keeping)
            self._note()  # where they are
            self._start_workers(source, batches)
        except BaseException:
            self.close()
            raise

    def work(self, told: Told | None = None) -> None:
        """Until all leases are done."""
        noted_s = time.monotonic()
        while not self._deal() or self._leases:
            waiting = [*self._leases, *self._coming]
            if not waiting:
                self._pulse.check()
                why = f"all {len(self.workers)} workers are lost for good, the last one since {self._gone}"
                raise ElasticError(f"{why}; the same call goes on from what is done")
            ready, _ = self._ray.wait(waiting, num_returns=1, timeout=TICK_S)
            for reference in ready:
                if reference in self._coming:
                    self._welcome(reference)
                else:
                    self._take(reference, told)
            if time.monotonic() > noted_s + NOTE_S:
                self._pulse.check()
                self._note()
                self._hear()
                noted_s = time.monotonic()
        self._note()

    def parameters(self) -> dict[str, Tensor]:
        """All values, whole. Weights of tables travel for it."""
        owners = Owners(self._layout, Addresses(tuple(self.servers)), self._secret)
        try:
            found = {name: whole(places, owners.values(places)) for name, places in self._layout.tables.items()}
            if self._layout.dense:
                found.update(self._layout.apart(whole(self._layout.dense, owners.values(self._layout.dense))))
        finally:
            owners.close()
        return found

    def close(self) -> None:
        """End all actors. What was acknowledged is in the servers' folders."""
        try:
            self._pulse.check()
        except ElasticError:  # nobody is there who could end them; they end by themselves
            return
        with suppress(self._ray.exceptions.RayError):
            closing = {server.close.remote(): number for number, server in enumerate(self.servers)}
            ready, _ = self._ray.wait([*closing], num_returns=len(closing), timeout=CLOSE_S) if closing else ([], [])
            for reference in ready:
                self._warn(closing[reference], reference)
        for actor in (*self.workers, *self.servers):
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self.workers, self.servers = [], []

    def _start_servers(self, source: Source, keeping: Keeping) -> None:
        """Each where its folder is."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Server)
        for number, host in enumerate(self._hosts):
            place = NodeAffinitySchedulingStrategy(node_id=node(self._ray, host), soft=False)
            self.servers.append(actor.options(scheduling_strategy=place).remote(number, self._layout, source, keeping, self._secret))
        try:
            self._get([server.address.remote() for server in self.servers])
        except self._ray.exceptions.RayError as cause:
            raise ElasticError(f"a server cannot start: {said(cause)}") from None

    def _start_workers(self, source: Source, batches: Batches) -> None:
        actor = self._ray.remote(num_cpus=0, max_restarts=RESTARTS, scheduling_strategy="SPREAD")(Worker)
        addresses, self._batches = Addresses(tuple(self.servers)), self._ray.put(batches)  # kept for workers that are started anew
        for number in range(self._options.workers):
            self.workers.append(actor.remote(source, self._batches, self._layout, addresses, self._secret))
            self._await(number)

    def _get(self, references: Any) -> Any:
        """What Ray gets, however long it takes, while its head is there."""
        while True:
            try:
                return self._ray.get(references, timeout=NOTE_S)
            except self._ray.exceptions.GetTimeoutError:
                self._pulse.check()

    def _await(self, worker: int) -> None:
        """Notice when the worker is there."""
        self._coming[self.workers[worker].process.options(max_task_retries=-1).remote()] = worker

    def _welcome(self, reference: Any) -> None:
        worker = self._coming.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayActorError as cause:  # for good: Ray has tried
            self._gone = said(cause)
        else:
            self._idle.add(worker)

    def _deal(self) -> bool:
        """Give leases to idle workers that may begin. Returns whether all is done."""
        for worker in sorted(self._idle):
            self._clocks.joined(worker)
            if not self._clocks.may_start(worker):
                continue
            lease = self._dealer.deal(worker)
            if not isinstance(lease, Lease):
                self._clocks.left(worker)  # nobody is to wait for it
                if isinstance(lease, Finished):
                    return True
                continue
            self._clocks.started(worker)
            self._idle.remove(worker)
            self._leases[self.workers[worker].work.remote(lease.number, lease.indices)] = worker, lease
        return False

    def _take(self, reference: Any, told: Told | None) -> None:
        """What has become of a lease."""
        worker, lease = self._leases.pop(reference)
        try:
            report: Report = self._ray.get(reference)
        except self._ray.exceptions.RayActorError:
            self._clocks.left(worker)
            self.outcome.lost_workers += 1
            self.outcome.dealt_again += self._dealer.lost(worker)
            self._await(worker)
            return
        except self._ray.exceptions.RayError as error:
            raise ElasticError(f"lease {lease.number} failed: {said(error)}") from None
        self._clocks.finished(worker)
        self._dealer.done(lease.number)
        self._idle.add(worker)
        self.outcome.losses[lease.number] = report.loss
        if told is not None:
            told(lease.number, report)

    def _note(self) -> None:
        noted = {**self._dealer.state(), "hosts": self._hosts}
        write_text_atomically(self._notes, json.dumps(noted), error=ElasticError)

    def _hear(self) -> None:
        """Warn of what servers have warned of since they were last asked, and ask again."""
        ready, _ = self._ray.wait([*self._asked], num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for reference in ready:
            self._warn(self._asked.pop(reference), reference)
        for number, server in enumerate(self.servers):
            if number not in self._asked.values():
                self._asked[server.warnings.remote()] = number

    def _warn(self, number: int, reference: Any) -> None:
        with suppress(self._ray.exceptions.RayError):  # it is lost, and with it what it would have said
            for line in self._ray.get(reference):
                warnings.warn(f"server {number}: {line}", SoapWarning, stacklevel=1)


def _dealer(notes: Path, samples: int, options: Options) -> tuple[Dealer, list[str] | None]:
    """A new dealer, or the one that is noted, and the machine that each server was on."""
    dealer = Dealer(samples, options.batch, options.epochs, options.seed)
    if not notes.exists():
        notes.parent.mkdir(parents=True, exist_ok=True)
        return dealer, None
    try:
        noted = json.loads(read_text(notes, what="leases", error=ElasticError))
        before, where = Dealer.restored(noted), [str(host) for host in noted["hosts"]]
    except (ValueError, KeyError, TypeError) as cause:
        raise ElasticError(
            f"leases {str(notes)!r} are damaged: {first_line(cause)}; bring the file back, or choose another folder"
        ) from None
    for name in ("samples", "batch", "epochs", "seed"):
        if getattr(before, name) != getattr(dealer, name):
            raise ElasticError(
                f"{str(notes.parent)!r} is of a run with {name} {getattr(before, name)}, not {getattr(dealer, name)}; expected the same, "
                "or an empty folder"
            )
    if len(where) != options.servers:
        raise ElasticError(f"{str(notes.parent)!r} is of a run with {len(where)} servers, not {options.servers}; expected as many")
    return before, where


def said(cause: BaseException) -> str:
    """What an error within an actor says, in one line: ours in its own words."""
    inner = getattr(cause, "cause", None)
    if isinstance(inner, SoapError):
        return first_line(inner)
    if isinstance(inner, BaseException):
        return f"{type(inner).__name__}: {first_line(inner)}"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    named = [found[1] for line in lines if (found := re.fullmatch(r"soap(?:\.\w+)+: (.*)", line))]
    return named[-1] if named else first_line(cause).rstrip(".")[:200]
