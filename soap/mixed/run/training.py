"""Training by virtual workers on ranks: each rank computes one stage, the first one of each host is a server beside that.

A server answers in the process of a rank, each connection in a thread of its own. The clocks say which version a worker's next minibatch
has; then its stages pull just that version from all servers. They keep a version as long as somebody may ask for it.

Checkpoints of virtual workers: servers' values of a whole version, and what each worker has beside it.

A folder with one file for each server and each stage, and a manifest that is written last. Nothing in them is unpickled but tensors.
"""

from __future__ import annotations

import io
import json
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soap.elastic.clocks import Clocks, GlobalWeights
from soap.elastic.faults import ElasticError
from soap.elastic.messages import Buffer, Kind, Message, decode, encode
from soap.elastic.transport import Listener
from soap.elastic.worker import Batches, Source
from soap.errors import CheckpointError, RuntimeFailure, first_line
from soap.files import check_archive, read_text, reason, write_bytes_atomically, write_text_atomically
from soap.mixed.planned import WavePlan
from soap.mixed.run.stage import Addresses, Client, Seen, StageWork
from soap.mixed.run.stage_program import StageProgram, StageValues, Updates
from soap.runtime.comm import signs
from soap.runtime.comm.handing_out import from_first
from soap.runtime.comm.world import close_world, open_world, own_address
from soap.runtime.updates.optimizers import OptimizerFactory, ScheduleFactory

FORMAT = 1
MANIFEST = "workers.json"


@dataclass(frozen=True)
class StageState:
    """``incomplete``: see ``StageValues``. ``buffers``: batch norm's, those of the stage."""

    momentum: Tensor | None
    incomplete: tuple[int, Tensor] | None
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """``finished``: minibatches of each worker. ``seed``: of data and of what the model draws."""

    folder: str
    finished: int
    seed: int = 0

    def server(self, number: int) -> Path:
        """The file of a server."""
        return Path(self.folder) / f"server-{number}-at-{self.finished}.pt"

    def stage(self, worker: int, stage: int) -> Path:
        """The file of a stage."""
        return Path(self.folder) / f"worker-{worker}-stage-{stage}-at-{self.finished}.pt"


def save_server(at: Checkpoint, number: int, values: Sequence[Tensor]) -> None:
    """A server's pieces."""
    _write(at.server(number), {"values": [own.clone() for own in values]})


def save_stage(at: Checkpoint, worker: int, stage: int, state: StageState) -> None:
    """What a stage has beside them."""
    count, update = (0, None) if state.incomplete is None else state.incomplete
    kept = {"momentum": state.momentum, "minibatches": count, "update": update, "buffers": state.buffers}
    _write(at.stage(worker, stage), kept)


def save_manifest(at: Checkpoint, plan: WavePlan) -> None:
    """What the rest belongs to; from now on the checkpoint is there, and an earlier one in this folder is removed."""
    text = json.dumps({"format": FORMAT, "finished": at.finished, "seed": at.seed, "plan": _look(plan)}, indent=1)
    write_text_atomically(Path(at.folder) / MANIFEST, text, error=CheckpointError)
    for old in Path(at.folder).glob("*-at-*.pt"):
        if not old.name.endswith(f"-at-{at.finished}.pt"):
            old.unlink(missing_ok=True)


def checkpoint_of(folder: str, plan: WavePlan) -> Checkpoint:
    """The checkpoint in a folder. CheckpointError in one line if there is no checkpoint, or it is of another plan."""
    place = Path(folder) / MANIFEST
    text = read_text(place, what="checkpoint of virtual workers", error=CheckpointError)
    try:
        found = json.loads(text)
        made, found_one, look = found["format"], Checkpoint(folder, int(found["finished"]), int(found["seed"])), found["plan"]
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        said = f"no checkpoint of virtual workers ({first_line(cause)})"
        raise CheckpointError(f"{place}: {said}; expected what soap-run --save wrote") from None
    if made != FORMAT:
        raise CheckpointError(f"{place}: format {made}; expected {FORMAT}: of this version")
    own = _look(plan)
    for name, value in own.items():
        if look.get(name) != value:
            raise CheckpointError(f"{place}: saved with other {name}; expected those of the strategy: resume with the same one")
    return found_one


def server_values(at: Checkpoint, number: int) -> list[Tensor]:
    """See ``save_server``."""
    found = _read(at.server(number))
    values: list[Tensor] = found["values"]
    return values


def stage_state(at: Checkpoint, worker: int, stage: int) -> StageState:
    """See ``save_stage``."""
    found = _read(at.stage(worker, stage))
    begun = None if found["update"] is None else (int(found["minibatches"]), found["update"])
    return StageState(found["momentum"], begun, found["buffers"])


def _look(plan: WavePlan) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    stages = [[[stage.device, stage.first, stage.end] for stage in own] for own in plan.workers]
    pieces = {name: [[*piece.span, piece.server] for piece in own] for name, own in plan.pieces.items()}
    return {"stages": stages, "minibatches in flight": plan.in_flight, "pieces": pieces}


def _write(place: Path, kept: dict[str, Any]) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise CheckpointError(f"{place.parent}: cannot be made: {reason(cause)}; save to another folder") from None
    stream = io.BytesIO()
    torch.save(kept, stream)
    write_bytes_atomically(place, stream.getvalue(), error=CheckpointError)


def _read(place: Path) -> dict[str, Any]:
    try:
        check_archive(place)
        found: dict[str, Any] = torch.load(place, weights_only=True)
    except Exception as cause:  # torch fails in many ways
        raise CheckpointError(f"{place}: cannot be read ({first_line(cause)}); take another checkpoint") from None
    return found


LATEST = -1
"""Instead of a version: the last one."""
LOOK_S = 1.0
"""How often it is asked whether other ranks live while a worker waits until it may begin."""


class Desk:
    """The clocks of all workers, asked by their heads. ``finished``: minibatches of each before, whose whole waves servers have."""

    def __init__(self, plan: WavePlan, finished: int = 0) -> None:
        self._plan, self._changed = plan, threading.Condition()
        workers = range(len(plan.workers))
        self.clocks = Clocks(workers, plan.bound, plan.in_flight, finished=finished)
        self._finished = dict.fromkeys(workers, finished)
        self._told = {worker: deque([finished // plan.in_flight]) for worker in workers}
        """By worker, the version of its last finished minibatch, and those of all behind it that may begin."""
        self._parts: Counter[tuple[int, int]] = Counter()
        self._leaving: Counter[int] = Counter()

    def start(self, worker: int, finished: int) -> tuple[int, int]:
        """Wait until the worker may begin its next minibatch, having finished so many. Returns the version that this one has, and the least
        that anybody will ask for. It waits however long others take; RankLost in one line if one of their ranks is gone."""
        with self._changed:
            self._has_finished(worker, finished)
            while not self.clocks.may_start(worker):
                if not self._changed.wait(LOOK_S):
                    signs.require_life()
            version = self._told[worker][-1]
            if version < self.clocks.needed(worker) or self._plan.bound is None:
                version = self.clocks.slowest
            self.clocks.started(worker, version)
            self._told[worker].append(version)
            return version, self._least()

    def pushed(self, worker: int, wave: int) -> int:
        """Servers have a stage's part of a wave. Returns the least version that anybody will ask for."""
        with self._changed:
            self._parts[worker, wave] += 1
            if self._parts[worker, wave] == len(self._plan.workers[worker]):
                del self._parts[worker, wave]
                self._has_finished(worker, (wave + 1) * self._plan.in_flight)
                self.clocks.pushed(worker)
                self._changed.notify_all()
            return self._least()

    def left(self, worker: int) -> int:
        """A stage of a worker has no more waves. Returns what ``pushed`` does."""
        with self._changed:
            self._leaving[worker] += 1
            if self._leaving[worker] == len(self._plan.workers[worker]):
                self.clocks.left(worker)
                self._told.pop(worker)
                self._changed.notify_all()
            return self._least()

    def _has_finished(self, worker: int, finished: int) -> None:
        for _ in range(finished - self._finished[worker]):
            self.clocks.finished(worker, pushed=False)
            self._told[worker].popleft()
        self._finished[worker] = max(finished, self._finished[worker])

    def _least(self) -> int:
        """Stages of a worker may still pull what minibatches need that are not finished."""
        return min((own[0] for own in self._told.values()), default=self.clocks.slowest)


class WaveServer:
    """Pieces of one server. ``values``: of each piece, end to end. ``version``: which they are. ``desk``: on the first server."""

    def __init__(self, plan: WavePlan, number: int, values: Sequence[Tensor], version: int = 0, desk: Desk | None = None) -> None:
        self._pieces, self._desk, self._lock = plan.held_by(number), desk, threading.Lock()
        workers = range(len(plan.workers))
        self._weights = [GlobalWeights[Tensor](own.detach().clone(), workers, version) for own in values]

    def answer(self, frame: memoryview) -> Sequence[Buffer]:
        """What ``Listener`` asks for."""
        return encode(self.reply(decode(frame)))

    def reply(self, asked: Message) -> Message:
        """The answer to one message. ElasticError in one line for what is no question of ours."""
        if asked.kind is Kind.PULL:
            return self._values(asked)
        if asked.kind is Kind.PUSH:
            return self._count(asked)
        if asked.kind is Kind.LEFT and asked.arrays:
            with self._lock:
                for number in self._numbers(asked):
                    self._weights[number].left(asked.partition)
            return Message(Kind.VERSION, asked.partition)
        if self._desk is None or asked.kind not in (Kind.START, Kind.PUSHED, Kind.LEFT):
            raise ElasticError(
                f"a server of waves was asked {asked.kind.name}; expected PULL, PUSH, or at the first server START and others"
            )
        if asked.kind is Kind.START:
            version, least = self._desk.start(asked.partition, asked.version)
            return Message(Kind.STARTED, asked.partition, least, version)
        least = self._desk.pushed(asked.partition, asked.lease) if asked.kind is Kind.PUSHED else self._desk.left(asked.partition)
        return Message(Kind.STARTED, asked.partition, least)

    def held(self, version: int) -> dict[int, Tensor]:
        """By piece, its values of a version; ``LATEST``: of the last one."""
        with self._lock:
            return {number: own.values if version == LATEST else own.at(version) for number, own in enumerate(self._weights)}

    @property
    def pushes(self) -> int:
        """How many pushes of pieces have counted."""
        return sum(own.pushes for own in self._weights)

    def _values(self, asked: Message) -> Message:
        with self._lock:
            own = [self._weights[number] for number in self._numbers(asked)]
            for weights in own:
                weights.forget(asked.lease)
            found = [weights.values if asked.version == LATEST else weights.at(asked.version) for weights in own]
        return Message.of(Kind.VALUES, asked.partition, [torch.cat(found)], version=asked.version)

    def _count(self, asked: Message) -> Message:
        """A worker's part of a wave; arrays: numbers of pieces, and their updates end to end."""
        numbers, (_, update) = self._numbers(asked), asked.tensors()
        parts = torch.split(update, [len(self._weights[number].values) for number in numbers])
        with self._lock:
            for number, part in zip(numbers, parts, strict=True):
                self._weights[number].push(asked.partition, asked.lease, part.clone())
                self._weights[number].forget(asked.version)
        return Message(Kind.VERSION, asked.partition)

    def _numbers(self, asked: Message) -> list[int]:
        numbers: list[int] = asked.tensors()[0].tolist()
        if not all(0 <= number < len(self._pieces) for number in numbers):
            raise ElasticError(f"pieces {numbers[:8]} were asked for; expected numbers from 0 to {len(self._pieces) - 1}")
        return numbers


UNLIMITED = timedelta(days=3650)
"""For messages between stages: their ranks may be slow, or wait for other workers. That they live is seen otherwise."""


@dataclass(frozen=True)
class Job:
    """``minibatches``: by worker, how many more. Minibatch n of worker w, from 0 on, is sample n * V + w of ``batches``. ``ranks``: of all
    devices, also those that are in no worker. ``save``, ``resume``: folders that all ranks reach. ``parameters``: bring all values back.
    ``delays_s``: by worker, see ``StageWork``. ``evenly``: called in each stage's rank when its threads are there, such as
    ``emulation.placement.run_evenly``. ``timeout_s``: how long a rank may be silent, or late where all begin and end together."""

    plan: WavePlan
    source: Source
    batches: Batches
    optimizer: OptimizerFactory
    minibatches: tuple[int, ...]
    ranks: int
    schedule: ScheduleFactory | None = None
    save: str | None = None
    resume: str | None = None
    parameters: bool = False
    delays_s: tuple[float, ...] = ()
    evenly: Callable[[], None] | None = None
    timeout_s: float = 300.0


@dataclass
class Outcome:
    """``seen``: of all stages. ``missing``: see ``Clocks``. ``finished``: minibatches of each worker in all. ``parameters``: by name, and
    batch norm's buffers as worker 0 has them, if asked for. ``server_pushes``: pushes of pieces, by server."""

    seen: list[Seen]
    missing: Counter[int]
    finished: tuple[int, ...]
    server_pushes: tuple[int, ...] = ()
    parameters: dict[str, Tensor] | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def of(self, worker: int, stage: int) -> Seen:
        """What one stage has seen."""
        return next(own for own in self.seen if (own.worker, own.stage) == (worker, stage))

    def losses(self, worker: int) -> list[float]:
        """By minibatch."""
        return next(own.losses for own in self.seen if own.worker == worker and own.losses)


def train(job: Job) -> Outcome | None:
    """On all ranks at once. Returns what was seen, on rank 0; None on others. RuntimeFailure or ElasticError in one line."""
    if job.save is not None and len({*job.minibatches}) > 1:
        raise RuntimeFailure(
            f"workers with {job.minibatches} minibatches are saved; expected equal numbers: checkpoints are of whole versions"
        )
    world = open_world(job.ranks, "cpu", "gloo", job.timeout_s)
    try:
        rank = _Rank(job, world.rank)
        try:
            return rank.train()
        finally:
            rank.close()
    finally:
        close_world(world)


class _Rank:
    """One rank of a training: perhaps a stage, perhaps a server."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._plan, self._rank = job, job.plan, rank
        self._before = None if job.resume is None else checkpoint_of(job.resume, job.plan)
        self._finished = 0 if self._before is None else self._before.finished
        version = self._finished // self._plan.in_flight
        self._model = job.source.load()
        self._values = {name: value.detach() for name, value in self._model.parameters.items()}
        self._shapes = {name: value.shape for name, value in self._values.items()}
        self._server: WaveServer | None = None
        self._desk: Desk | None = None
        self._listener: Listener | None = None
        self._clients: list[Client] = []
        self._ways = (dist.new_group(timeout=UNLIMITED), dist.new_group(timeout=UNLIMITED))
        secret = from_first(lambda: secrets.token_bytes(32))
        self._address = own_address()
        if rank in self._plan.servers:
            self._serve(self._plan.servers.index(rank), version, secret)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if self._listener is None else (self._listener.host, self._listener.port))
        addresses: Addresses = [told[own] for own in self._plan.servers]
        self._work = self._stage(addresses, secret, version) if rank in self._plan.by_rank else None
        self._values = {}
        self._model.let_go([*self._plan.pieces])  # servers have them

    def train(self) -> Outcome | None:
        """Until all workers have done all minibatches."""
        job, work = self._job, self._work
        signs.meet()
        if work is not None:
            work.run(job.evenly)
        if job.save is not None:
            signs.meet()  # servers have all whole waves
            self._save(job.save)
        if work is not None:
            work.leave()
        signs.meet()  # which may be hours later: workers end when they end
        found: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        pushes = None if self._server is None else self._server.pushes
        dist.gather_object((None if work is None else work.seen, pushes, self._own_values()), found)
        dist.barrier()  # whoever has the store leaves last
        return None if found is None else self._outcome(found)

    def close(self) -> None:
        """End all connections."""
        for client in self._clients:
            client.close()
        if self._listener is not None:
            self._listener.close()

    def _serve(self, number: int, version: int, secret: bytes) -> None:
        if self._before is None:
            pieces = self._plan.held_by(number)
            values = [self._values[piece.parameter].reshape(-1)[slice(*piece.span)] for piece in pieces]
        else:
            values = server_values(self._before, number)
        self._desk = Desk(self._plan, self._finished) if number == 0 else None
        self._server = WaveServer(self._plan, number, values, version, self._desk)
        self._listener = Listener(self._server.answer, secret, self._address)

    def _stage(self, addresses: Addresses, secret: bytes, version: int) -> StageWork:
        job, plan = self._job, self._plan
        worker, stage = plan.by_rank[self._rank]
        own, count = plan.workers[worker][stage], len(plan.workers)
        batch = _Minibatches(job.batches, worker, count)
        shapes = [tuple(tensor.shape) for tensor in batch(0)]
        same = shapes == [tuple(tensor.shape) for tensor in self._model.example_inputs]
        model = self._model if same else self._model.resized(shapes)
        frozen = {name: self._values[name] for name in self._values if name not in plan.pieces}
        buffers = {name: value.detach().clone() for name, value in self._model.buffers.items()}
        last = stage == len(plan.workers[worker]) - 1
        program = StageProgram(model, own, frozen, buffers, job.source.seed, first=stage == 0, last=last)
        self._buffers, self._program = buffers, program
        updates = Updates(job.optimizer, job.schedule, count, self._finished)
        before = None if self._before is None else stage_state(self._before, worker, stage)
        begun = None
        if before is not None:
            updates.momentum, begun = before.momentum, before.incomplete
            buffers.update(before.buffers)
        self._clients = [Client(plan, worker, stage, addresses, secret) for _ in range(3)]
        asker, puller, pusher = self._clients
        clients, pulled = (asker, puller, pusher), puller.pull(version, version)
        if pulled is None:
            pulled = next(iter(self._values.values())).new_zeros(0)
        values = StageValues(plan.in_flight, pulled, version, begun)
        puller.pulled_bytes = 0  # what it begins with counts as no pull
        delay_s = job.delays_s[worker] if job.delays_s else 0.0
        goal = self._finished + job.minibatches[worker]
        return StageWork(plan, worker, stage, program, values, updates, batch, clients, self._finished, goal, delay_s, self._ways)

    def _save(self, folder: str) -> None:
        """Whole versions, and what each worker has beside them."""
        finished = self._finished + self._job.minibatches[0]
        at = Checkpoint(folder, finished, self._job.source.seed)
        if self._server is not None:
            number = self._plan.servers.index(self._rank)
            save_server(at, number, [*self._server.held(finished // self._plan.in_flight).values()])
        if self._work is not None:
            worker, stage = self._plan.by_rank[self._rank]
            state = StageState(self._work.updates.momentum, self._work.values.incomplete, self._program.own_buffers())
            save_stage(at, worker, stage, state)
        signs.meet()
        if self._rank == 0:
            save_manifest(at, self._plan)
        signs.meet()

    def _own_values(self) -> Any:
        """What rank 0 puts together at the end: a server's pieces, and worker 0's buffers."""
        if not self._job.parameters:
            return None
        first = self._work is not None and self._plan.by_rank[self._rank][0] == 0
        return {} if self._server is None else self._server.held(LATEST), self._program.own_buffers() if first else {}

    def _outcome(self, found: Sequence[tuple[Seen | None, int | None, Any]]) -> Outcome:
        finished = tuple(self._finished + own for own in self._job.minibatches)
        pushes = tuple(found[rank][1] or 0 for rank in self._plan.servers)
        missing = Counter[int]() if self._desk is None else self._desk.clocks.missing
        outcome = Outcome([seen for seen, _, _ in found if seen is not None], missing, finished, pushes)
        if self._job.parameters:
            held = [found[rank][2][0] for rank in self._plan.servers]
            outcome.parameters = self._whole(held)
            for own in found:
                outcome.buffers.update(own[2][1])
        return outcome

    def _whole(self, held: Sequence[Mapping[int, Tensor]]) -> dict[str, Tensor]:
        pieces = [{piece: held[s][n] for n, piece in enumerate(self._plan.held_by(s))} for s in range(len(held))]
        return {
            name: torch.cat([pieces[piece.server][piece] for piece in own]).view(self._shapes[name])
            for name, own in self._plan.pieces.items()
        }


@dataclass(frozen=True)
class _Minibatches:
    batches: Batches
    worker: int
    workers: int

    def __call__(self, number: int) -> Sequence[Tensor]:
        return self.batches.batch([number * self.workers + self.worker])
