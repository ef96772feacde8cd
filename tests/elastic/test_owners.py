"""Workers and owners over TCP in one process: training as one process does it, whoever is lost meanwhile, and each byte accounted for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from soap.elastic import worker as owners
from soap.elastic.faults import ElasticError
from soap.elastic.layout import DENSE, Layout, TableCut, lay_out, lay_out_planned
from soap.elastic.leases import Steps
from soap.elastic.messages import Kind, Message, size_bytes
from soap.elastic.store import Keeping, Server
from soap.elastic.transport import HEADER
from soap.elastic.worker import InMemory, Owners, Source, Worker, whole
from soap.strategy.served import DENSE_SERVERS
from tests.elastic.models import in_float64, trained_alone

SECRET = b"k" * 32
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)
SOURCE = Source("zoo:full_sparse:tiny", "float64", seed=3)


class Servers:
    """Servers of this process, which can be ended and started anew."""

    def __init__(self, layout: Layout, folder: Path, steps: Steps | None = None) -> None:
        self._steps = steps
        self._layout, self._keeping = layout, Keeping(str(folder), ADAGRAD, snapshot_every_pushes=3)
        self.running: dict[int, Server] = {}
        for number in range(layout.servers):
            self.start(number)

    def start(self, number: int) -> None:
        self.running[number] = Server(number, self._layout, SOURCE, self._keeping, SECRET, "127.0.0.1", self._steps)

    def end(self, number: int) -> None:
        self.running.pop(number).close()

    def address(self, number: int) -> tuple[str, int]:
        if number not in self.running:
            self.start(number)
        return self.running[number].address()


def layout_of(servers: int, partitions: int, axis: int) -> Layout:
    model = SOURCE.load()
    shapes = {name: tuple(value.shape) for name, value in model.parameters.items()}
    tables = {name: shape for name, shape in shapes.items() if name in model.graph.sparse}
    dense = {name: shape for name, shape in shapes.items() if name not in tables}
    return cut_along(axis, tables, dense, servers, partitions)


def cut_along(
    axis: int, tables: Mapping[str, tuple[int, ...]], dense: Mapping[str, tuple[int, ...]], servers: int, partitions: int
) -> Layout:
    """All tables in so many partitions along an axis, or as many as it has positions."""
    cuts = {
        name: TableCut(axis, tuple(part % servers for part in range(min(partitions, shape[axis])))) for name, shape in tables.items()
    }
    return lay_out_planned(tables, dense, servers, cuts, range(min(servers, DENSE_SERVERS)))


@contextmanager
def serving(layout: Layout, folder: Path, steps: Steps | None = None) -> Iterator[Servers]:
    servers = Servers(layout, folder, steps)
    try:
        yield servers
    finally:
        for number in [*servers.running]:
            servers.end(number)


def samples(count: int) -> InMemory:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(50, (count, 2, 3), generator=draw)
    values = torch.rand(count, 2, 3, generator=draw, dtype=torch.float64)
    return InMemory((ids, values, torch.randint(2, (count,), generator=draw).double()))


def final(layout: Layout, servers: Servers, step: int = 0) -> dict[str, Tensor]:
    asking = Owners(layout, servers.address, SECRET)
    found = {name: whole(places, asking.values(places, step)) for name, places in layout.tables.items()}
    found.update(layout.apart(whole(layout.dense, asking.values(layout.dense, step))))
    asking.close()
    return found


@pytest.mark.parametrize(("count", "partitions", "axis"), [(1, 1, 0), (2, 3, 0), (3, 3, 1)])
def test_trains_like_one_process_though_a_server_is_lost(count: int, partitions: int, axis: int, tmp_path: Path) -> None:
    """Batches of 8, 8 and 3 samples; a server is ended after the first one."""
    data, layout = samples(19), layout_of(count, partitions, axis)
    leases = [range(8), range(8, 16), range(16, 19)]
    alone = trained_alone(SOURCE.spec, "float64", SOURCE.seed, [in_float64(data.batch(one)) for one in leases], ADAGRAD)
    with serving(layout, tmp_path) as servers:
        worker = Worker(SOURCE, data, layout, servers.address, SECRET)
        losses = []
        for number, lease in enumerate(leases):
            losses.append(worker.work(number, lease).loss)
            if number == 0:
                servers.end(count - 1)
        assert losses == pytest.approx(alone[0], rel=1e-9)
        found = final(layout, servers)
    assert {*found} == {*alone[1]}
    for name, value in alone[1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_averaged_steps_train_like_one_process_with_whole_batches(tmp_path: Path) -> None:
    """Steps of three leases, the last of one that is smaller. Leases come in any order; one is done again when all have pushed, and a
    server is lost with a step half counted. Adagrad, by which updates one by one would be others."""
    data, layout, steps = samples(20), layout_of(2, 3, 0), Steps(leases=7, workers=3)
    leases = [range(first, min(first + 3, 20)) for first in range(0, 20, 3)]
    whole_batches = [[index for lease in steps.members(step) for index in leases[lease]] for step in range(3)]
    alone = trained_alone(SOURCE.spec, "float64", SOURCE.seed, [in_float64(data.batch(one)) for one in whole_batches], ADAGRAD)
    with serving(layout, tmp_path, steps) as servers:
        workers = [Worker(SOURCE, data, layout, servers.address, SECRET) for _ in range(2)]
        losses = []
        for step, batch in enumerate(whole_batches):
            losses.append(0.0)
            for lease in reversed(steps.members(step)):
                share = len(leases[lease]) / len(batch)
                losses[step] += share * workers[lease % 2].work(lease, leases[lease], share, share, step).loss
                if lease == 4:
                    servers.end(0)
            again = workers[1].work(steps.members(step)[0], leases[steps.members(step)[0]], 1.0, 1.0, step)
            first = workers[0].work(steps.members(step)[0], leases[steps.members(step)[0]], 1.0, 1.0, step)
            assert again.loss == first.loss  # all of a step read the same values
        assert losses == pytest.approx(alone[0], rel=1e-9)
        found = final(layout, servers, len(whole_batches))
    for name, value in alone[1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_lease_that_another_worker_does_again_counts_once(tmp_path: Path) -> None:
    data, layout = samples(16), layout_of(2, 2, 0)
    with serving(layout, tmp_path / "once") as servers:
        first, second = (Worker(SOURCE, data, layout, servers.address, SECRET) for _ in range(2))
        first.work(0, range(8))
        second.work(1, range(8, 16))
        wanted = final(layout, servers)
    with serving(layout, tmp_path / "twice") as servers:
        first, second = (Worker(SOURCE, data, layout, servers.address, SECRET) for _ in range(2))
        first.work(0, range(8))
        second.work(0, range(8))
        second.work(1, range(8, 16))
        first.work(1, range(8, 16))
        found = final(layout, servers)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("axis", [0, 1])
def test_bytes_of_a_lease_are_those_of_its_messages(axis: int, tmp_path: Path) -> None:
    """Weights of tables never travel: no message holds more than ids, sums and gradients of sums."""
    data, layout = samples(8), layout_of(2, 2, axis)
    with serving(layout, tmp_path) as servers:
        worker = Worker(SOURCE, data, layout, servers.address, SECRET)
        report = worker.work(0, range(8))
        cut, inputs = worker._cut(data.batch(range(8))), data.batch(range(8))
        asked, answered = 0, 0
        for table, lookups in cut.look_ups(inputs).items():
            places = layout.tables[table]
            for place, own in zip(places, owners.route([one.partition for one in places], lookups), strict=True):
                columns = place.partition.cell[1]
                out = torch.zeros(8, columns, dtype=torch.float64)
                asked += size_bytes(Message.of(Kind.LOOK_UP, place.number, own.tensors())) + HEADER.size
                answered += size_bytes(Message.of(Kind.SUMS, place.number, [out])) + HEADER.size
                asked += size_bytes(Message.of(Kind.PUSH_OUTPUTS, place.number, (out, *own.tensors()))) + HEADER.size
                answered += size_bytes(Message(Kind.VERSION, place.number)) + HEADER.size
        for place in layout.dense:
            piece = torch.zeros(place.partition.cell, dtype=torch.float64)
            asked += (
                size_bytes(Message(Kind.PULL, place.number)) + size_bytes(Message.of(Kind.PUSH, place.number, [piece])) + 2 * HEADER.size
            )
            answered += size_bytes(Message.of(Kind.VALUES, place.number, [piece])) + size_bytes(Message(Kind.VERSION, 0)) + 2 * HEADER.size
    assert (report.sent_bytes, report.received_bytes) == (asked, answered)


def test_owner_that_stays_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "PATIENCE_S", 0.2)
    layout = layout_of(1, 1, 0)
    with serving(layout, tmp_path) as servers:
        address = servers.address(0)
        servers.end(0)
        asking = Owners(layout, lambda server: address, SECRET)
        with pytest.raises(ElasticError, match=r"servers 0 are away for 0\.2 s; expected Ray to start them again"):
            asking.pull()


def test_what_an_owner_refuses_is_told_and_training_can_go_on(tmp_path: Path) -> None:
    layout = layout_of(2, 2, 0)
    bad = samples(8)
    bad.inputs[0][5] = 50
    with serving(layout, tmp_path) as servers:
        with pytest.raises(ElasticError, match=r"id 50 is out of range; expected ids from 0 to 49"):
            Worker(SOURCE, bad, layout, servers.address, SECRET).work(0, range(8))
        asking = Owners(layout, servers.address, SECRET)
        with pytest.raises(ElasticError, match=r"gradient float32\[\d+\] for partition"):
            asking._ask([(layout.dense[0], Message.of(Kind.PUSH, layout.dense[0].number, [torch.zeros(layout.dense[0].partition.cell)]))])
        assert len(asking.pull()) == len(layout.shapes)
        asking.close()


def test_partitions_are_dealt_out_in_turn() -> None:
    layout = lay_out({"b": (2, 4), "a": (10, 4)}, {"w": (3, 2), "s": ()}, 3)
    assert [place.server for place in layout.tables["b"]] == [0, 1]
    assert [place.server for place in layout.tables["a"]] == [2, 0, 1]
    assert [(place.server, place.partition.cell) for place in layout.dense] == [(2, (4,)), (0, (3,))]
    assert [partition.name for partition in layout.of_server(0)] == ["b/0", "a/1", f"{DENSE}/1"]
    values = {"w": torch.arange(6.0).view(3, 2), "s": torch.tensor(9.0), "a": torch.rand(10, 4), "b": torch.rand(2, 4)}
    assert layout.joined(values).tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert {name: value.tolist() for name, value in layout.apart(layout.joined(values)).items()} == {"w": values["w"].tolist(), "s": 9.0}
    assert [tuple(value.shape) for value in layout.initial(0, values)] == [(1, 4), (3, 4), (3,)]


def test_nothing_is_left_of_a_temporary_server(tmp_path: Path) -> None:
    """Also on machines where nobody else removes its folder."""
    layout = layout_of(1, 1, 0)
    for temporary in (False, True):
        keeping = Keeping(str(tmp_path / "servers"), ADAGRAD, temporary=temporary)
        with warnings.catch_warnings():
            server = Server(0, layout, SOURCE, keeping, SECRET, "127.0.0.1")
            assert server.close() == []
        assert (tmp_path / "servers" / "server-0").exists() is (tmp_path / "servers").exists() is not temporary
