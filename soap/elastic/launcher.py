"""Training with servers that own and workers that hold no state: starts both as actors of Ray, deals leases, and notes what is done.

The launcher gives each idle worker a lease by a call of its actor, and the call's return is the acknowledgement: all owners have counted
the lease by then. If a worker is lost, Ray fails the call and starts the worker again on the same machine, and its lease is dealt again;
if the machine is gone for good, the worker is created on another (``Crew``). If a server is lost, Ray starts it again, it recovers from
its folder, and workers ask it again. If the launcher is, the same call goes on from the folder.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from torch import Tensor

from soap.elastic import leases
from soap.elastic.clocks import ASYNC, SYNC, Clocks
from soap.elastic.cut import Cut
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Layout, TableCut, lay_out, lay_out_planned
from soap.elastic.leases import Dealer, Finished, Lease, Steps
from soap.elastic.session import module
from soap.elastic.store import Keeping, Server
from soap.elastic.transport import PeerLost
from soap.elastic.worker import Batches, Owners, Report, Source, Worker
from soap.errors import SoapError, SoapWarning, first_line


def hosts(ray: Any, servers: int, noted: Sequence[str] | None = None, machines: Sequence[int] | None = None) -> list[str]:
    """The address of each server's machine: the noted ones, or those of these numbers, modulo how many there are, or each one of its own if
    there are enough. ElasticError in one line if a noted one is not there: its server's folder is."""
    there = [*alive(ray)]
    found = list(noted or [there[number % len(there)] for number in machines or range(servers)])
    for number, address in enumerate(found):
        if address not in there and not ip_address(address).is_loopback:
            raise ElasticError(
                f"server {number} has its folder on {address}, which is not in the cluster ({', '.join(there)}); expected Ray there too: "
                "'ray start' on that machine"
            )
    return found


def node(ray: Any, address: str) -> str:
    """Ray's name of a machine; of loopback, as a cluster of our own has it, this one's."""
    return alive(ray).get(address) or str(ray.get_runtime_context().get_node_id())


def alive(ray: Any) -> dict[str, str]:
    """The address of each machine that is there -> Ray's name of it, by address. One that has come back has another name."""
    found = {str(one["NodeManagerAddress"]): str(one["NodeID"]) for one in ray.nodes() if one["Alive"]}
    return dict(sorted(found.items(), key=lambda one: (ip_address(one[0]).version, ip_address(one[0]))))


def held_on(name: str) -> Any:
    """A place for an actor, by Ray's name of a machine: there Ray starts it, and starts it again, or nowhere. To one that an actor may
    leave (``soft``) Ray does not keep even while that machine is there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=name, soft=False)


def is_lost(ray: Any, error: BaseException) -> bool:
    """Whether a call has failed because its actor is gone, or cannot be where it is held. Not if the actor itself has met such an error."""
    gone = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
    return isinstance(error, gone) and not isinstance(error, ray.exceptions.RayTaskError)


REACH_S = 1.0
SILENT_S = 30.0
"""A head that refuses nobody, but does not answer for so long, is gone: Ray waits twice as long."""


class Pulse:
    """``address``: the head's, HOST:PORT. ``gone``: whether it was found to be."""

    def __init__(self, address: str) -> None:
        self.address, self.gone = address, False
        self._heard_s = time.monotonic()

    def check(self) -> None:
        """ElasticError in one line if nobody listens at the address, or nobody has answered there for ``SILENT_S``."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except ConnectionRefusedError:
            self.gone = True
        except OSError:
            self.gone = time.monotonic() > self._heard_s + SILENT_S
        else:
            self._heard_s = time.monotonic()
        if self.gone:
            raise ElasticError(f"Ray's head at {self.address} is gone; start it again: the same call then goes on from what is done")


RESTARTS = 20
"""Ray starts a worker again so often at most on one machine: one that ends at once, for want of memory, would be started for ever."""


class Crew:
    """``actors``: by worker. ``machines``: the address of each worker's machine. Both as they are now; empty before ``start``."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.actors: list[Any] = []
        self.machines: list[str] = []
        self._names: list[str] = []
        self._arguments: tuple[Any, ...] = ()

    def start(self, machines: Sequence[str], *arguments: Any) -> None:
        """A worker on each of these machines, with these arguments. They are held: workers that start again read them again."""
        self.machines, self._arguments = [*machines], arguments
        self._names = [node(self._ray, address) for address in machines]
        self.actors = [self._create(name) for name in self._names]

    def arrival(self, worker: int) -> Any:
        """A reference that is there when the worker is. Its error says that Ray has given the worker up."""
        return self.actors[worker].process.options(max_task_retries=-1).remote()

    def replace(self, worker: int) -> bool:
        """Create a worker anew that Ray has given up, if its machine is why: on that one if it has come back, else on another. False if the
        machine has been there all the time: the worker would only be lost again."""
        there = alive(self._ray)
        if self._names[worker] in there.values():
            return False
        if self.machines[worker] not in there:
            self.machines[worker] = self._least_used(there)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self.actors[worker])  # it may live, out of reach
        self._names[worker] = there[self.machines[worker]]
        self.actors[worker] = self._create(self._names[worker])
        return True

    def close(self) -> None:
        """End all."""
        for actor in self.actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self.actors, self._arguments = [], ()

    def _create(self, name: str) -> Any:
        actor = self._ray.remote(num_cpus=0, max_restarts=RESTARTS, scheduling_strategy=held_on(name))(Worker)
        return actor.remote(*self._arguments)

    def _least_used(self, there: Iterable[str]) -> str:
        """The machine with the fewest workers."""
        used = Counter(self.machines)
        return min(there, key=lambda address: used[address])


TICK_S = 0.5
NOTE_S = 2.0
"""How often it is noted which leases are done. What is done beyond that is dealt again after a restart, and counts no second time."""
ADDRESS_S = 30.0
CLOSE_S = 10.0

Reduction = Literal["mean", "sum"]
"""How the gradients of a step's leases count: by their shares of its samples, or each as it is."""
Told = Callable[[int, Report], None]
"""Called with a lease's number and what its worker says of it."""


@dataclass(frozen=True)
class Options:
    """``tables``: where each is cut, and placed; ``dense``: servers with a piece of the dense variables; without these, by ``lay_out``.
    ``worker_machines``, ``server_machines``: by number, a machine of the cluster, modulo how many there are.

    ``bound``: see ``Clocks``: 0, D, or None (asynchronous). ``averaged``: synchronous training instead: as many leases as there are workers
    are a step; they read the same values, and one update follows. ``reduce_dense``, ``reduce_sparse``: gradients of a step's leases count
    by their share of its samples (``mean``), so that if all read the same values their sum is the gradient of the step's mean loss; or
    each as it is (``sum``). ``batch``: samples of a lease. ``steps``: at most so many of all workers, if epochs are longer. ``shuffled``:
    samples come in another order in each epoch, which follows from ``seed``."""

    batch: int
    epochs: int = 1
    workers: int = 2
    servers: int = 1
    bound: int | None = SYNC
    seed: int = 0
    tables: Mapping[str, TableCut] | None = None
    dense: tuple[int, ...] = ()
    worker_machines: tuple[int, ...] | None = None
    server_machines: tuple[int, ...] | None = None
    averaged: bool = False
    reduce_dense: Reduction = "mean"
    reduce_sparse: Reduction = "mean"
    steps: int | None = None
    shuffled: bool = True

    def steps_of(self, samples: int) -> Steps:
        """Which leases of so many samples are a step."""
        return Steps(-(-samples // self.batch), self.workers)


@dataclass
class Outcome:
    """``losses``: by lease, those of this launcher; ``step_losses``: by step, of those whose leases it has all seen, by their shares of the
    samples. ``lost_workers``: how often a worker was lost; ``dealt_again``: leases dealt anew for that. ``missing``: how many earlier
    minibatches of the slowest other worker a lease may not have seen -> how often (``Clocks``). ``samples``: of the leases; bytes: of all
    frames between workers and servers. ``parameters``: whole, if asked for."""

    losses: dict[int, float] = field(default_factory=dict)
    step_losses: dict[int, float] = field(default_factory=dict)
    lost_workers: int = 0
    dealt_again: int = 0
    missing: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    parameters: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Addresses:
    """Where servers listen, asked of their actors by anyone in the cluster. ``machines``: the address of each one's machine."""

    servers: tuple[Any, ...]
    machines: tuple[str, ...]

    def __call__(self, server: int) -> tuple[str, int]:
        """Waits while the server is being started. PeerLost if that takes long; ElasticError if its machine is gone for good."""
        ray = module()
        try:
            host, port = ray.get(self.servers[server].address.remote(), timeout=ADDRESS_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as cause:
            raise PeerLost(f"server {server} is away: {said(cause)}") from None
        except ray.exceptions.ActorUnschedulableError:
            why = f"server {server} is lost: its machine {self.machines[server]} is gone, and its folder is there"
            raise ElasticError(f"{why}; start Ray there again, then the same call goes on from what is done") from None
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
    run = Run(source, batches, keeping, options, laid_out(source, options))
    try:
        if started is not None:
            started(run)
        run.work(told)
        if parameters:
            run.outcome.parameters = run.parameters()
        return run.outcome
    finally:
        run.close()


def laid_out(source: Source, options: Options) -> Layout:
    """Which server has what of a model. ElasticError if it has no such tables."""
    cut = Cut(source.load(plan_only=True), options.tables)
    if options.tables is not None:
        return lay_out_planned(*cut.shapes, options.servers, options.tables, options.dense)
    return lay_out(*cut.shapes, options.servers)


class Run:
    """Servers and workers of one training, and the dealer of its leases. ``servers``, ``crew.actors``: their actors."""

    def __init__(self, source: Source, batches: Batches, keeping: Keeping, options: Options, layout: Layout) -> None:
        self._ray, self._layout, self._options = module(), layout, options
        self._pulse = Pulse(str(self._ray.get_runtime_context().gcs_address))
        self._folder, self._steps = keeping.folder, options.steps_of(len(batches))
        self._dealer, noted = _dealer(self._folder, len(batches), options)
        self._hosts = hosts(self._ray, layout.servers, noted, options.server_machines)
        self._clocks = Clocks((), ASYNC if options.averaged else options.bound)  # averaged: the dealer holds back what is not due
        self._secret = secrets.token_bytes(32)
        self.outcome = Outcome()
        self.servers: list[Any] = []
        self.crew = Crew(self._ray)
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

    @property
    def first_left(self) -> int:
        """The first step that is not done."""
        return self._steps.of(self._dealer.first_left)

    def work(self, told: Told | None = None) -> None:
        """Until all leases are done."""
        noted_s = time.monotonic()
        while not self._deal() or self._leases:
            waiting = [*self._leases, *self._coming]
            if not waiting:
                self._pulse.check()
                why = f"all {len(self.crew.actors)} workers are lost for good, the last one since {self._gone}"
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
        return Owners(self._layout, self._addresses, self._secret).parameters(self.first_left if self._options.averaged else 0)

    def close(self) -> None:
        """End all actors. What was acknowledged is in the servers' folders."""
        with suppress(ElasticError):
            self._note()
        try:
            self._pulse.check()
        except ElasticError:  # nobody is there who could end them; they end by themselves
            return
        with suppress(self._ray.exceptions.RayError):
            closing = {server.close.remote(): number for number, server in enumerate(self.servers)}
            ready, _ = self._ray.wait([*closing], num_returns=len(closing), timeout=CLOSE_S) if closing else ([], [])
            for reference in ready:
                self._warn(closing[reference], reference)
        self.crew.close()
        for server in self.servers:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(server)
        self.servers = []

    def _start_servers(self, source: Source, keeping: Keeping) -> None:
        """Each where its folder is."""
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Server)
        own = (source, keeping, self._secret, None, self._steps if self._options.averaged else None)
        for number, host in enumerate(self._hosts):
            place = held_on(node(self._ray, host))
            self.servers.append(actor.options(scheduling_strategy=place).remote(number, self._layout, *own))
        try:
            self._get([server.address.remote() for server in self.servers])
        except self._ray.exceptions.RayError as cause:
            raise ElasticError(f"a server cannot start: {said(cause)}") from None

    def _start_workers(self, source: Source, batches: Batches) -> None:
        """Where they are planned, or dealt out over the machines behind the servers."""
        turn = range(len(self.servers), len(self.servers) + self._options.workers)
        there = hosts(self._ray, self._options.workers, machines=self._options.worker_machines or turn)
        self.crew.start(there, source, self._ray.put(batches), self._layout, self._addresses, self._secret)
        for number in range(self._options.workers):
            self._await(number)

    @property
    def _addresses(self) -> Addresses:
        return Addresses(tuple(self.servers), tuple(self._hosts))

    def _get(self, references: Any) -> Any:
        """What Ray gets, however long it takes, while its head is there."""
        while True:
            try:
                return self._ray.get(references, timeout=NOTE_S)
            except self._ray.exceptions.GetTimeoutError:
                self._pulse.check()

    def _await(self, worker: int) -> None:
        """Notice when the worker is there."""
        self._coming[self.crew.arrival(worker)] = worker

    def _welcome(self, reference: Any) -> None:
        worker = self._coming.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as cause:
            if not is_lost(self._ray, cause):
                raise ElasticError(f"worker {worker} cannot start: {said(cause)}") from None
            before = self.crew.machines[worker]
            if self.crew.replace(worker):
                why = f"its machine {before} is gone, so it works on {self.crew.machines[worker]}"
                warnings.warn(f"worker {worker}: {why}", SoapWarning, stacklevel=1)
                self._await(worker)
            else:  # for good: Ray has tried
                self._gone = said(cause)
        else:
            self._idle.add(worker)

    def _deal(self) -> bool:
        """Give leases to idle workers that may begin. Returns whether all is done."""
        due = self._steps.members(self.first_left).stop if self._options.averaged else None
        for worker in sorted(self._idle):
            self._clocks.joined(worker)
            if not self._clocks.may_start(worker):
                continue
            lease = self._dealer.deal(worker, due)
            if not isinstance(lease, Lease):
                self._clocks.left(worker)  # nobody is to wait for it
                if isinstance(lease, Finished):
                    return True
                continue
            self._clocks.started(worker)
            self._idle.remove(worker)
            step, share = self._steps.of(lease.number), self._share(lease.number)
            scales = [share if reduce == "mean" else 1.0 for reduce in (self._options.reduce_dense, self._options.reduce_sparse)]
            reference = self.crew.actors[worker].work.remote(lease.number, lease.indices, *scales, step if self._options.averaged else 0)
            self._leases[reference] = worker, lease
        return False

    def _share(self, lease: int) -> float:
        """A lease's share of its step's samples."""
        whole = sum(self._dealer.size(number) for number in self._steps.members(self._steps.of(lease)))
        return self._dealer.size(lease) / whole

    def _take(self, reference: Any, told: Told | None) -> None:
        """What has become of a lease."""
        worker, lease = self._leases.pop(reference)
        try:
            report: Report = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            if not is_lost(self._ray, error):
                raise ElasticError(f"lease {lease.number} failed: {said(error)}") from None
            self._clocks.left(worker)
            self.outcome.lost_workers += 1
            self.outcome.dealt_again += self._dealer.lost(worker)
            self._await(worker)
            return
        self._clocks.finished(worker)
        self._dealer.done(lease.number)
        self._idle.add(worker)
        self._count(lease, report)
        if told is not None:
            told(lease.number, report)

    def _count(self, lease: Lease, report: Report) -> None:
        own, members = self.outcome, self._steps.members(self._steps.of(lease.number))
        own.losses[lease.number] = report.loss
        own.samples += len(lease.indices)
        own.sent_bytes, own.received_bytes = own.sent_bytes + report.sent_bytes, own.received_bytes + report.received_bytes
        own.missing = Counter({0: len(own.losses)}) if self._options.averaged else self._clocks.missing
        if all(number in own.losses for number in members):
            own.step_losses[self._steps.of(lease.number)] = sum(self._share(number) * own.losses[number] for number in members)

    def _note(self) -> None:
        leases.note_leases(self._folder, self._dealer, self._hosts)

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


def _dealer(folder: str, samples: int, options: Options) -> tuple[Dealer, list[str] | None]:
    """A new dealer, or the one that is noted, and then the machine that each server was on."""
    most = None if options.steps is None else options.steps_of(samples).members(options.steps).start
    wanted = Dealer(samples, options.batch, options.epochs, options.seed, shuffled=options.shuffled, most=most)
    return leases.continued_dealer(folder, wanted, options.servers)


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
