from __future__ import annotations

import io
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.oracles.exhaustive import exhaustive_search
from soap.errors import InfeasibleError, StrategyError
from soap.model.graph import OperatorGraph
from soap.search import search
from soap.search.allowance import chain_budgets
from soap.search.options import SearchOptions
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.units import parse_bytes
from tests.graph_builder import mlp, transformer
from tests.search.toys import Lacking, TileCosts, layers, simulated
from tests.simulator.examples import PointCosts, chain
from tests.strategies import cluster


class Interrupting(IncrementalSimulator):
    """Presses Ctrl-C during the n-th evaluation, which ends by that or by what a library makes of it."""

    def __init__(self, graph: OperatorGraph, call: int, raised: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__(Simulator(graph, cluster([4]), PointCosts(1)))
        self.left, self.raised = call, raised

    def makespan_ns(self, strategy: Strategy) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.raised
        return super().makespan_ns(strategy)


UNASKED = SearchOptions(budget=100, pipelines=False, syncs=[SyncConfig()])
"""Each evaluation is of a start or a proposal: nothing is looked for that may become a start."""


def limited(graph: OperatorGraph, device_bytes: int) -> Lacking:
    """Two devices with so little memory for their largest operators."""
    return Lacking(graph, cluster([2]), TileCosts(graph, device_bytes=device_bytes).overflow_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 64, 2), (64, 2, 64)])
def test_optimum_of_simulated_models_is_found(widths: tuple[int, ...]) -> None:
    graph, topology = chain(8, *widths), cluster([2])
    simulator = Simulator(graph, topology, PointCosts(1))
    best = exhaustive_search(graph, 2, simulator)
    result = search(graph, topology, IncrementalSimulator(simulator), SearchOptions(budget=300))
    assert best.evaluations == 6 * 6 * 4
    assert result.cost_ns <= best.cost_ns
    assert result.cost_ns == simulator.run(result.strategy).makespan_ns


def test_never_worse_than_the_best_start() -> None:
    graph, topology = transformer(), cluster([2, 2])
    simulator = Simulator(graph, topology, PointCosts(1))
    for seed in range(3):
        result = search(graph, topology, IncrementalSimulator(simulator), SearchOptions(budget=5, seed=seed))
        assert result.cost_ns <= min(cost for cost, fits in result.start_costs.values() if fits)
        assert result.data_parallel_ns == simulator.cost(CLASSICAL["data_parallel"](graph, topology))[0]
        result.strategy.validate(graph, 4)


def test_further_starts_are_made_and_evaluated_last() -> None:
    graph, made = layers(2, rows=4), Strategy(dict.fromkeys(("layer.0", "layer.1"), OpConfig((2,), (1, 0))))
    options = SearchOptions(budget=5, starts=["single_device"])
    result = search(graph, cluster([2]), simulated(graph, cluster([2])), options, further_starts={"mine": lambda: made})
    assert [start.name for start in result.starts] == ["data_parallel", "single_device", "mine"]
    assert result.starts[-1].strategy == made and result.cost_ns <= result.starts[-1].cost_ns


def test_equal_seed_and_budget_give_the_same_search() -> None:
    graph, topology = mlp(), cluster([4])

    def run(seed: int):  # type: ignore[no-untyped-def]
        return search(graph, topology, simulated(graph, topology), SearchOptions(budget=60, seed=seed))

    assert run(1).rows == run(1).rows
    assert run(1).strategy == run(1).strategy
    assert run(1).rows != run(2).rows


HASHED = """
from tests.graph_builder import mlp
from tests.search.toys import simulated
from tests.strategies import cluster
from soap.search import search
from soap.search.options import SearchOptions
result = search(mlp(), cluster([4]), simulated(mlp(), cluster([4])), SearchOptions(budget=40, seed=3))
print(result.rows, sorted(result.strategy.operators.items()))
"""


@pytest.mark.slow
def test_order_of_hashes_does_not_matter() -> None:
    outputs = [
        subprocess.run([sys.executable, "-c", HASHED], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] and "proposal=40" in outputs[0]


def test_the_whole_budget_is_spent_and_recorded() -> None:
    graph = mlp()
    result = search(graph, cluster([4]), simulated(graph, cluster([4])), SearchOptions(budget=1000, seed=0), polish_up_to=0)
    history = result.history
    assert list(history.columns) == [
        "proposal", "phase", "chain", "move", "operator", "operators", "cost_ns", "fits", "accepted", "best_ns",
    ]  # fmt: skip
    assert list(history.proposal) == list(range(1, 1001))
    assert result.evaluations == 1000 + len(result.starts)
    assert history.best_ns.is_monotonic_decreasing and history.best_ns.iloc[-1] == result.cost_ns
    assert set(history.phase) == {"descent", "chain"} and history.chain.nunique() == 1
    assert sum(count.proposed for count in result.acceptance.values()) == 1000
    accepted = history.groupby("move").accepted.sum().to_dict()
    assert {move: count.accepted for move, count in result.acceptance.items()} == accepted
    assert result.speedup == result.data_parallel_ns / result.cost_ns


def test_data_parallelism_on_fewer_devices_is_tried_first() -> None:
    graph = layers(3, rows=8)
    result = search(graph, cluster([2, 2]), simulated(graph, cluster([2, 2])), SearchOptions(budget=20))
    adopted = [row.cost_ns for row in result.rows if row.move == "adopt"]
    assert adopted == [row.cost_ns for row in result.rows[: len(adopted)]] == [3 * 4]  # a single device is a start already


def test_budget_is_divided_without_rest() -> None:
    assert chain_budgets(7, 1) == [7]
    assert chain_budgets(7, 2) == [4, 3]
    assert chain_budgets(1501, 3) == [751, 375, 375]
    assert all(sum(chain_budgets(n, k)) == n for n in range(1, 50) for k in (1, 2, 3))


def test_patience_ends_a_chain_early() -> None:
    graph = layers(2)
    result = search(graph, cluster([2]), simulated(graph, cluster([2])), SearchOptions(budget=1000, patience=0.2))
    assert 200 <= len(result.rows) < 1000
    last = max((row.proposal for row in result.rows if row.best_ns != result.rows[-1].best_ns), default=0)
    assert len(result.rows) - last >= 200


def test_one_device_ends_at_once() -> None:
    result = search(mlp(), cluster([1]), simulated(mlp(), cluster([1])), SearchOptions(budget=10))
    assert result.rows == () and result.speedup == 1.0 and not result.interrupted
    assert list(result.history.columns)[:2] == ["proposal", "phase"] and len(result.history) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0}, r"^budget 0: expected at least 1 proposal; a few hundred are a good beginning$"),
        ({"budget": -3}, r"^budget -3: expected at least 1 proposal"),
        ({"budget": 1, "beta": 0.0}, r"^beta 0.0: expected a positive number; the default is 1000$"),
        ({"budget": 1, "beta": float("nan")}, r"^beta nan: expected a positive number"),
        ({"budget": 1, "patience": 2.0}, r"^patience 2.0: expected a share of the budget above 0 and up to 1"),
        ({"budget": 1, "starts": ["best"]}, r"^start 'best': expected one of"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(StrategyError, match=message) as info:
        search(mlp(), cluster([2]), simulated(mlp(), cluster([2])), SearchOptions(**arguments))  # type: ignore[arg-type]
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("call", [2, 6, 30])
def test_interrupt_returns_the_best_so_far(call: int) -> None:
    graph = mlp()
    result = search(graph, cluster([4]), Interrupting(graph, call), UNASKED)
    assert result.interrupted and result.evaluations == call - 1
    costs = [row.cost_ns for row in result.rows] + [start.cost_ns for start in result.starts]
    assert result.cost_ns == min(costs) == Simulator(graph, cluster([4]), PointCosts(1)).makespan_ns(result.strategy)


def test_what_a_library_makes_of_an_interrupt_returns_the_best_so_far() -> None:
    graph = mlp()
    pressing = Interrupting(graph, 30, raised=TypeError)
    result = search(graph, cluster([4]), pressing, UNASKED, stopped=lambda: pressing.left <= 0)
    assert result.interrupted and result.evaluations == 29
    with pytest.raises(KeyboardInterrupt):
        pressing = Interrupting(graph, 1, raised=TypeError)
        search(graph, cluster([4]), pressing, UNASKED, stopped=lambda: pressing.left <= 0)
    with pytest.raises(TypeError):  # nobody has pressed anything
        search(graph, cluster([4]), Interrupting(graph, 30, raised=TypeError), UNASKED)


def test_interrupt_before_anything_is_known_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(mlp(), cluster([4]), Interrupting(mlp(), 1), SearchOptions(budget=100))


def test_start_that_does_not_fit_is_skipped() -> None:
    graph = layers(3)
    result = search(graph, cluster([2]), limited(graph, 600), SearchOptions(budget=30))
    assert result.start_costs["single_device"][1] is False
    assert result.start_costs["data_parallel"] == (3, True)
    assert {row.chain for row in result.rows} == {"data_parallel"}
    assert all(not row.accepted for row in result.rows if not row.fits)
    assert any(not row.fits for row in result.rows)


def only(name: str, config: OpConfig) -> Callable[[Strategy], int]:
    return lambda strategy: 0 if strategy.operators[name] == config else 100 - 10 * strategy.operators[name].replicas


def test_if_no_start_fits_the_search_first_makes_room() -> None:
    graph = layers(2, rows=4)
    wanted = OpConfig((2,), (2, 3), 1)
    evaluator = Lacking(graph, cluster([4]), only("layer.1", wanted))
    result = search(graph, cluster([4]), evaluator, SearchOptions(budget=300, starts=["single_device"]))
    assert result.strategy.operators["layer.1"] == wanted
    assert all(not fits for _, fits in result.start_costs.values())
    first = next(i for i, row in enumerate(result.rows) if row.fits)
    assert all(row.phase == "descent" and row.best_ns is None for row in result.rows[:first])
    assert result.history.best_ns.isna().sum() == first
    assert len(result.rows) == 300 and all(row.fits for row in result.rows[first:] if row.accepted)


def test_nothing_fits() -> None:
    graph = layers(2)
    with pytest.raises(InfeasibleError) as info:
        search(graph, cluster([2]), limited(graph, 500), SearchOptions(budget=20, starts=["data_parallel"]))
    assert str(info.value) == (
        "model 'layers' does not fit into the memory of cluster 'test': 100 B more needed than the 8.00 GiB available on 2 devices, in the "
        "closest of 20 proposals and all starts: data_parallel, lacks 100 B in all, 50 B a device; ways out: (1) more devices or devices "
        "with more memory, (2) a smaller batch, "
        "(3) an optimizer that keeps fewer states, (4) a larger budget"
    )
    with pytest.raises(InfeasibleError, match=r"\(4\) syncs zero or fsdp, by which devices share states or values, \(5\) a larger"):
        search(graph, cluster([2]), limited(graph, 500), SearchOptions(budget=20, syncs=[SyncConfig()]))


def test_simulator_says_which_device_needs_how_much() -> None:
    graph, topology = mlp(batch=2**22, widths=(4096, 4096)), cluster([1, 1])
    with pytest.raises(InfeasibleError, match=r"host\d/device0 needs \d+(\.\d+)? [GT]iB, available \d+(\.\d+)? GiB, in the closest of 5 "):
        search(graph, topology, simulated(graph, topology), SearchOptions(budget=5, starts=["single_device"]))


def test_with_a_budget_the_plan_whose_devices_need_least_is_said() -> None:
    """What lacks least in all is one device's; what fits into the smallest budget is shared by all."""
    graph, topology = mlp(batch=64, widths=(256, 256)), replace(cluster([4]), limits=(1000,) * 4)
    with pytest.raises(InfeasibleError) as info:
        search(graph, topology, simulated(graph, topology), SearchOptions(budget=5, starts=["single_device", "megatron"]))
    said = re.search(r"/device0 needs (.*?B), .*; with (\S+) no device needs more than (.*?B); ways out", str(info.value))
    assert said is not None and said[2] != "single_device" and parse_bytes(said[3]) < parse_bytes(said[1]), info.value


def test_bar_is_quiet_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    search(mlp(), cluster([2]), simulated(mlp(), cluster([2])), SearchOptions(budget=5), progress=True)
    assert capsys.readouterr() == ("", "")


def test_bar_shows_the_best_and_the_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    result = search(mlp(), cluster([2]), simulated(mlp(), cluster([2])), SearchOptions(budget=25), progress=True)
    last = terminal.getvalue().replace("\n", "\r").split("\r")[-2]
    assert f"best cost {result.cost_ns / 1e6:.3f} ms, data parallel {result.data_parallel_ns / 1e6:.3f} ms" in last and "25/25" in last


def test_the_users_strategy_is_a_start() -> None:
    graph = layers(2)
    initial = Strategy({op.name: OpConfig((2,), (1, 0)) for op in graph.operators})
    options = SearchOptions(budget=3, starts=["model_parallel"], initial=initial)
    result = search(graph, cluster([2]), simulated(graph, cluster([2])), options)
    assert list(result.start_costs) == ["data_parallel", "model_parallel", "initial"]


def test_search_leaves_the_global_random_state_alone() -> None:
    state = random.getstate()
    search(mlp(), cluster([2]), simulated(mlp(), cluster([2])), SearchOptions(budget=20))
    assert random.getstate() == state
