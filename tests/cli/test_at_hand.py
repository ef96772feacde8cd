"""What ``soap-search`` measures and runs by default, and what it says if that fails; who measures and runs is made up."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import soap
from soap import api
from soap.cli import first_measuring, links, measuring, verification, wanted
from soap.cli.first_measuring import DEFAULT_S, LINKS_SHARE, Wish, measure_first, wish
from soap.cli.search import main
from soap.cli.verification import ASKED_S, DEFAULT_FINALISTS
from soap.cli.wanted import Wanted
from soap.cluster import yaml_file
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, StoppedBySignal
from soap.measure.link_probes import NEEDED, Probe, probes_for
from soap.profiles.keys import environments
from soap.profiles.link_places import link_place
from soap.profiles.store import Store, default_path
from soap.search.options import SearchOptions
from soap.simulator.costs import CostSource
from tests.cli.own_store import use_own_store
from tests.cli.refusals import assert_refused
from tests.cli.test_links import keep
from tests.launcher_variables import as_rank

MODEL, CLUSTER = "zoo:lm:tiny", "local:2"
READING = {"batch_dims": None, "autocast": None, "batch_norm": "global"}
Capsys = pytest.CaptureFixture[str]


@dataclass
class MadeUp:
    """In place of what measures: ``probes`` and ``computations`` are what it was asked for, ``fails`` what it raises instead."""

    probes: list[Probe] = field(default_factory=list)
    computations: list[Wanted] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    verified: list[tuple[int, float]] = field(default_factory=list)
    fails: dict[str, BaseException] = field(default_factory=dict)

    def measure_links(self, topology: Topology, todo: Sequence[Probe], store: Store, seconds: float) -> int:
        self._fail("links")
        self.probes += todo
        self.seconds.append(seconds)
        return len(todo)

    def measure_computations(
        self, model: str, reading: Any, topology: Topology, place: Any, todo: Sequence[Wanted], store: Store, seconds: float
    ) -> int:
        self._fail("computations")
        self.computations += todo
        self.seconds.append(seconds)
        return len(todo) - 1

    def verify(self, outcome: api.SearchOutcome, finalists: int, *rest: Any, seconds: float, only_chances: bool) -> api.SearchOutcome:
        self._fail("verify")
        self.verified.append((finalists, seconds))
        usual = outcome.usual
        assert usual is not None
        return outcome.with_runs([api.Run("data_parallel", usual, outcome.result.data_parallel_ns, 5, True)])

    def _fail(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    use_own_store(monkeypatch, tmp_path_factory)
    found = MadeUp()
    monkeypatch.setattr(first_measuring, "_links", found.measure_links)
    monkeypatch.setattr(first_measuring, "_computations", found.measure_computations)
    monkeypatch.setattr(verification, "verify", found.verify)
    monkeypatch.setattr(first_measuring, "aim", lambda *_: None)
    return found


def search(out: Path, *options: str) -> int:
    return main([MODEL, "--cluster", CLUSTER, "--budget", "5", "-o", str(out), *options])


@pytest.mark.slow
def test_by_default_it_measures_then_runs(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    assert search(tmp_path / "s.json") == 0
    said = capsys.readouterr()
    assert set(made.probes) == set(probes_for(soap.load_cluster(CLUSTER)))
    assert len(made.computations) > 20
    assert made.seconds[0] == DEFAULT_S * LINKS_SHARE and 0 < made.seconds[1] <= DEFAULT_S
    assert made.verified == [(DEFAULT_FINALISTS, verification.DEFAULT_S)]
    assert f": {len(made.probes)} probes of links, {len(made.computations) - 1} computations; 1 are left, with which the next" in said.out
    assert "kept: data_parallel" in said.out and "verifying took" in said.out and said.err == ""
    record = json.loads((tmp_path / "s.json").read_text())["record"]
    assert record["measured"]["kept"] == "data_parallel"


@pytest.mark.slow
def test_the_report_says_what_it_cost(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    assert search(tmp_path / "s.json", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["profiled"].pop("seconds") >= 0
    assert report["profiled"] == {
        "probes": len(made.probes),
        "computations": len(made.computations) - 1,
        "probes_left": 0,
        "computations_left": 1,
        "sure": False,
        "problem": None,
    }
    assert report["measured"]["seconds"] >= 0 and report["measured"]["kept"] == "data_parallel"


def test_nothing_is_measured_or_run_if_that_is_left_out_and_then_equal_commands_write_equal_files(made: MadeUp, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert search(tmp_path / name, "--profile", "0", "--verify", "0") == 0
    assert made == MadeUp()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_what_is_asked_for_has_the_time_it_needs(made: MadeUp, tmp_path: Path) -> None:
    assert search(tmp_path / "s.json", "--profile", "7.5", "--verify", "2") == 0
    assert made.seconds[0] == 7.5 * LINKS_SHARE and made.verified == [(2, ASKED_S)]


def test_what_is_known_is_not_measured_again(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    topology = soap.load_cluster(CLUSTER)
    keep(topology)
    assert search(tmp_path / "s.json") == 0
    assert made.probes == [] and len(made.seconds) == 1 and made.seconds[0] > DEFAULT_S * LINKS_SHARE


def test_links_begin_with_what_predictions_need(made: MadeUp, tmp_path: Path) -> None:
    assert search(tmp_path / "s.json", "--verify", "0") == 0
    needed = [probe.operation in NEEDED for probe in made.probes]
    assert needed == sorted(needed, reverse=True) and not all(needed)


def test_time_that_links_have_taken_is_missing_for_computations(made: MadeUp) -> None:
    graph, topology = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    times = iter([100.0, 130.0, 155.0])
    measured = measure_first(MODEL, READING, graph, topology, 60.0, lambda: next(times))  # type: ignore[arg-type]
    assert made.seconds == [40.0, 30.0] and measured.seconds == 55.0
    late = iter([100.0, 170.0, 171.0])
    made.computations.clear()
    measured = measure_first(MODEL, READING, graph, topology, 60.0, lambda: next(late))  # type: ignore[arg-type]
    assert made.computations == [] and measured.computations_left > 20 and measured.problem == ""


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("links", RuntimeError("gloo is\nnot here"), "not everything was measured; the search goes on with what is known: links: gloo is"),
        ("links", PermissionError(13, "denied"), "links: [Errno 13] denied"),
        ("computations", RuntimeFailure("a process has ended"), "with what is known: computations: a process has ended"),
        ("verify", RuntimeFailure("rank 1 failed"), "nothing was verified; the search's choice by predictions stands: rank 1"),
        ("verify", MemoryError(), "by predictions stands: MemoryError"),
    ],
)
def test_what_fails_by_default_does_not_end_the_search(
    what: str, error: Exception, said: str, made: MadeUp, tmp_path: Path, capsys: Capsys
) -> None:
    made.fails[what] = error
    assert search(tmp_path / "s.json") == 0
    found = capsys.readouterr()
    assert said in found.err and found.err.count("\n") == 1
    assert soap.load_strategy(tmp_path / "s.json", MODEL, CLUSTER).operators
    assert bool(made.computations) is (what != "computations") and bool(made.verified) is (what != "verify")


def test_runs_that_were_asked_for_and_fail_end_it(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    made.fails["verify"] = RuntimeFailure("rank 1 failed: killed")
    assert search(tmp_path / "s.json", "--profile", "0", "--verify") == 8
    assert f"rank 1 failed: killed; what the search chose by its predictions is in {tmp_path / 's.json'}" in capsys.readouterr().err
    assert soap.load_strategy(tmp_path / "s.json", MODEL, CLUSTER).operators


def test_a_store_that_cannot_be_used_is_one_line(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    default_path().write_text("no database" * 1000)
    assert search(tmp_path / "s.json", "--verify", "0") == 0
    assert "the search goes on with what is known: the store of measurements" in capsys.readouterr().err
    assert made.probes == [] and made.computations == []


def test_ctrl_c_while_measuring_goes_on_to_the_search_and_runs_nothing(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    made.fails["computations"] = KeyboardInterrupt()
    assert search(tmp_path / "s.json") == 0
    assert capsys.readouterr().err == (
        "soap-search: measuring interrupted: the search goes on with what is known and will run nothing afterwards; Ctrl-C ends it\n"
    )
    assert made.probes and not made.verified
    assert json.loads((tmp_path / "s.json").read_text())["record"]["search"]["interrupted"] is False


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("in_ranks", [True, False])
def test_sigterm_while_measuring_saves_the_best_start(
    in_ranks: bool, made: MadeUp, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*_: Any) -> int:
        if in_ranks:  # the launcher has handled the signal, and says so
            raise StoppedBySignal("stopped by SIGTERM; all ranks have ended", signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal should have ended this")

    monkeypatch.setattr(first_measuring, "_links", terminated)
    assert search(tmp_path / "s.json") == 143
    assert capsys.readouterr().err.endswith(f"the best strategy so far is in {tmp_path / 's.json'}\n")
    assert soap.load_strategy(tmp_path / "s.json", MODEL, CLUSTER).operators and not made.verified


def test_ctrl_c_while_verifying_leaves_what_was_chosen(made: MadeUp, tmp_path: Path, capsys: Capsys) -> None:
    made.fails["verify"] = KeyboardInterrupt()
    assert search(tmp_path / "s.json", "--profile", "0") == 130
    assert capsys.readouterr().err == (
        f"soap-search: interrupted while verifying: what the search chose by its predictions is in {tmp_path / 's.json'}\n"
    )
    assert soap.load_strategy(tmp_path / "s.json", MODEL, CLUSTER).operators


def test_a_model_too_large_for_this_machine_is_neither_measured_nor_run(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    use_own_store(monkeypatch, tmp_path_factory)
    monkeypatch.setattr(first_measuring, "_links", lambda *_: 0)
    monkeypatch.setattr(wanted, "free_memory_bytes", lambda: 1000)
    assert search(tmp_path / "s.json", "--verify", "0") == 0
    assert "computations: " in (said := capsys.readouterr().err) and "are needed, and this machine has 1000 B" in said
    outcome = api.find(MODEL, CLUSTER, SearchOptions(budget=5))
    with pytest.raises(RuntimeFailure, match=r"are needed, and this machine has 1000 B"):
        verification.verify(outcome, 3, MODEL, READING, 0)  # type: ignore[arg-type]


def test_as_many_strategies_are_tried_together_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = api.simulator_for(MODEL, "p100-4x4")
    topology = replace(soap.load_cluster(CLUSTER), name="local:2")
    simulator = api.simulator_for(MODEL, topology)
    named = {name: api.classical(name, simulator.graph, topology) for name in ("data_parallel", "megatron", "model_parallel")}
    simulations = {name: simulator.run(strategy) for name, strategy in named.items()}
    loaded = 2 * sum(tensor.bytes for tensor in simulator.graph.parameters)

    def held(names: Sequence[str]) -> int:
        """All that stays, and for each device the most that passes by."""
        chosen = [simulations[name] for name in names]
        stay = [[sum(own[kind] for kind in ("values", "gradients", "states")) for own in run.peak_by_kind] for run in chosen]
        passing = [[peak - own for peak, own in zip(run.peak_bytes, kept, strict=True)] for run, kept in zip(chosen, stay, strict=True)]
        return loaded + sum(map(sum, stay)) + sum(map(max, zip(*passing, strict=True)))

    for names in (["data_parallel", "megatron"], list(named)):
        monkeypatch.setattr(wanted, "free_memory_bytes", lambda names=names: held(names))
        assert wanted.together(simulator.graph, topology, simulations) == names
    monkeypatch.setattr(wanted, "free_memory_bytes", lambda: held(["data_parallel", "megatron"]) - 1)
    with pytest.raises(RuntimeFailure, match="of memory are needed"):
        wanted.together(simulator.graph, topology, simulations)


REMOTE, LOCAL, ONE, HOSTS = "p100-4x4", CLUSTER, "local:1", "emulated:2x1@200Mbit/s"
USUAL = Wish(DEFAULT_S, DEFAULT_FINALISTS)


@pytest.mark.parametrize(
    ("cluster", "profile_s", "finalists", "costs", "expected"),
    [
        (LOCAL, None, None, "auto", USUAL),
        (LOCAL, 0.0, None, "auto", replace(USUAL, profile_s=0.0)),
        (LOCAL, None, 0, "auto", replace(USUAL, finalists=0)),
        (LOCAL, 5.0, 1, "auto", Wish(5.0, 1, asked=True)),
        (LOCAL, None, None, "estimate", replace(USUAL, profile_s=0.0)),
        (REMOTE, None, None, "auto", Wish()),
        (REMOTE, 0.0, 0, "auto", Wish()),
        (ONE, None, None, "auto", Wish()),  # nothing to choose between
        (HOSTS, None, None, "auto", USUAL),
    ],
)
def test_where_the_machines_are_at_hand(
    cluster: str, profile_s: float | None, finalists: int | None, costs: CostSource, expected: Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_measuring, "require_support", lambda: None)
    assert wish(yaml_file.load_cluster(cluster), profile_s, finalists, costs) == expected
    as_rank(monkeypatch, 0, 2)
    assert wish(yaml_file.load_cluster(cluster), None, None, costs) == Wish()


def test_hosts_that_cannot_be_emulated_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeFailure("--emulate makes network namespaces, for which one has to be root")

    monkeypatch.setattr(first_measuring, "require_support", missing)
    topology = yaml_file.load_cluster(HOSTS)
    why = "nothing is measured or run: --emulate makes network namespaces, for which one has to be root"
    assert wish(topology, None, None, "auto") == Wish(problem=why)
    assert wish(topology, 0.0, 0, "auto") == Wish()
    with pytest.raises(RuntimeFailure, match="has to be root"):
        first_measuring.check_asked(HOSTS, 5.0, None, "auto")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--cluster", REMOTE, "--profile", "5"], 2, ["--profile measures this machine", repr(REMOTE), "local:N"]),
        (["--cluster", LOCAL, "--profile", "5", "--costs", "estimate"], 2, ["--profile with --costs estimate"]),
        (["--cluster", LOCAL, "--profile", "-1"], 2, ["--profile", "'-1'"]),
        (["--cluster", LOCAL, "--profile", "long"], 2, ["--profile", "'long'"]),
    ],
)
def test_what_cannot_be_asked_for(options: list[str], code: int, words: list[str], tmp_path: Path, capsys: Capsys) -> None:
    assert_refused(capsys, main, [MODEL, *options, "-o", str(tmp_path / "s.json")], code, *words)


@pytest.mark.long
def test_it_really_measures_and_runs(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    use_own_store(monkeypatch, tmp_path_factory)
    keep(topology := soap.load_cluster(CLUSTER), slower=1.0)  # half a minute's measuring, which test_links has
    monkeypatch.setattr(first_measuring, "LEAST_VALUE", -1.0)  # never sure before anything is measured
    (place,) = environments(topology).values()
    assert search(tmp_path / "s.json", "--json", "--profile", "20", "--verify", "1") == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert said.err == "" and report["profiled"]["problem"] is None and report["profiled"]["probes_left"] == 0
    assert report["profiled"]["computations"] == len(Store().entries(place)) > 0
    assert report["costs"]["shares"]["estimated"] < 1 and report["costs"]["links"] is not None
    if "measured" in report:  # unless data parallelism alone was found
        assert {"data_parallel"} < set(report["measured"]["runs"])
    assert soap.load_strategy(tmp_path / "s.json", MODEL, CLUSTER).operators


@pytest.mark.long
def test_measuring_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The time of a search, in which everything is prepared as well, not a budget that begins behind that."""
    topology, store = soap.load_cluster(CLUSTER), Store(tmp_path / "s.sqlite")
    (place,) = environments(topology).values()
    graph = soap.load(MODEL, plan_only=True).graph
    todo = first_measuring._unknown(graph, topology, place, store)
    seconds = count(100)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))  # others look at the clock, too
    monkeypatch.setattr(measuring, "Neighbours", NoNeighbours)
    done: list[Wanted] = []
    kept = measuring.measure(MODEL, READING, topology, place, todo, store, None, done.append, stop_at=102.0)  # type: ignore[arg-type]
    assert 0 < kept == len(done) < len(todo) and len(store.entries(place)) == kept


class NoNeighbours:
    """In place of processes that keep the other cores busy."""

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> NoNeighbours:
        return self

    def __exit__(self, *_: object) -> None: ...
    def check(self) -> None: ...


def test_links_are_left_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from soap.cli import link_measuring

    topology = soap.load_cluster(CLUSTER)
    asked: list[bool] = []

    def measured(todo: Any, *rest: Any) -> None:
        enough: Callable[[], bool] = rest[-1]
        asked.extend(enough() for _ in range(3))

    times = iter([9.0, 10.0, 11.0])
    monkeypatch.setattr(link_measuring, "measure_links", measured)
    monkeypatch.setattr(link_measuring.time, "time", lambda: next(times))
    place = link_place(topology, "gloo", emulated=False)
    job = link_measuring.LinkJob(probes_for(topology), 2, "cpu", place, tmp_path / "s.sqlite", stop_at=10.0)
    assert link_measuring.measure_and_keep(job) == 0 and asked == [False, True, True]
    assert links.measure.__kwdefaults__["stop_at"] == float("inf")
