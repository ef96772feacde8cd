"""A single-device script, made distributed by three lines, does what it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import soap
from soap.errors import RuntimeFailure
from soap.runner.runner import adapted, alike
from soap.runner.sharding import groups
from soap.runner.tuning import Range, divided
from soap.runtime.updates.optimizers import Recipe
from soap.runtime.updates.trial import optimizer_states, try_optimizer
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import parameter_server
from tests.extent import often, rows_often
from tests.launcher_variables import as_rank
from tests.runner import ranks
from tests.runner.ranks import ITEMS, Model, Stream, Words, sgd
from tests.runtime.pool import FirstOf, Pool


@pytest.fixture(scope="module")
def two(four: Pool) -> Pool:
    return FirstOf(four, 2)


def alone(batch: int, passes: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same script on one device."""
    model = Model()
    optimizer = sgd(list(model.parameters()))
    losses = []
    for _ in range(passes):
        for ids, targets in DataLoader(Words(), batch_size=batch):
            optimizer.zero_grad()
            loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("named", often([False, True], [True]))
def test_ranks_train_as_one_process(two: Pool, named: bool) -> None:
    expected, state = alone(12, 2)
    (losses, trained), (others, nothing) = two.run(ranks.train, 2, 6, 2, named, {})
    assert losses == others == pytest.approx(expected, rel=1e-12)
    assert nothing == {}
    assert trained.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-12, atol=1e-12)


def test_tuned_partitions_cost_neither_data_nor_weights(two: Pool) -> None:
    expected, state = alone(12, 1)
    (losses, trained, counts), (others, _, same) = two.run(ranks.tuned, 2)
    assert losses == others == pytest.approx(expected, rel=1e-12)
    for name, tensor in state.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-12, atol=1e-12)
    assert counts == same
    assert counts["table.weight"] == counts["other.weight"] == 3
    assert counts["head.weight"] == 2


def test_each_group_of_tables_is_tuned_by_itself() -> None:
    wanted = Range(("a", "b", "c", "d"), 2, 9)
    assert [own.parameters for own in divided(wanted, [])] == [("a", "b", "c", "d")]
    found = divided(wanted, [("c", "a", "dense"), ("other",), ("d",)])
    assert [own.parameters for own in found] == [("b",), ("a", "c"), ("d",)] and {(own.servers, own.most) for own in found} == {(2, 9)}


@pytest.mark.parametrize(("consistency", "most"), rows_often([("bounded:0", 0), ("bounded:2", 2), ("async", 6)], [("bounded:2", 2)]))
def test_ranks_that_are_apart(two: Pool, consistency: str, most: int) -> None:
    """The quick one is ahead by as much as it may be, and all values are rank 0's at first."""
    (losses, trained, missing), (others, nothing, _) = two.run(ranks.apart, 2, consistency, 6)
    assert len(losses) == len(others) == 6 == sum(missing.values()) and not nothing
    assert max(missing) <= most and (not most or max(missing) > 0)
    first = [Model()(*next(iter(DataLoader(soap.shard(Words(), rank, 2), batch_size=4)))).item() for rank in range(2)]
    begun = [found == pytest.approx(expected, rel=1e-9) for found, expected in zip((losses[0], others[0]), first, strict=True)]
    assert any(begun)  # whoever is first; the other one's values may be behind that update
    assert trained.keys() == Model().state_dict().keys()


def test_one_rank_that_is_apart_from_none_trains_as_one_process() -> None:
    losses, trained, missing = ranks.apart(1, "async", 6)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected, (ids, targets) in zip(losses, DataLoader(Words(), batch_size=4), strict=True):
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        assert expected == pytest.approx(loss.item(), rel=1e-9)
    assert missing == {0: 6}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-9, atol=1e-12)


def test_gradients_of_ranks_may_be_summed(two: Pool) -> None:
    begin = Model().state_dict()
    mean, dense, sparse = (two.run(ranks.reduced, 2, *how)[0] for how in (("mean", "mean"), ("sum", "mean"), ("mean", "sum")))
    for name, value in begin.items():
        table = not name.startswith("head")
        for found, times in ((dense, 1 if table else 2), (sparse, 2 if table else 1)):
            torch.testing.assert_close(found[name] - value, times * (mean[name] - value), rtol=1e-9, atol=1e-14)


def test_tuning_must_be_allowed() -> None:
    with pytest.raises(RuntimeFailure, match="tuning_iterations 5, search_partitions False: expected iterations"):
        soap.RunnerConfig(tuning_iterations=5, search_partitions=False)


def test_a_last_batch_that_is_smaller(two: Pool) -> None:
    expected, _ = alone(10, 1)  # 24 items: 10, 10, 4
    (losses, _), _ = two.run(ranks.train, 2, 5, 1, False, {"dynamic_batch": True})
    assert losses == pytest.approx(expected, rel=1e-12)


def test_ranks_get_the_samples_that_they_read(two: Pool) -> None:
    """All of them in the first step. A sample has three ids and a target; 24 samples are batches of 10, 10 and 4."""
    assert two.run(ranks.given_bytes, 2, 5) == [[320, 160, 64]] * 2


def test_every_rank_may_give_the_whole_batch(two: Pool) -> None:
    assert two.run(ranks.whole_batches, 2)[0] == pytest.approx(alone(12, 1)[0], rel=1e-12)


def test_training_goes_on_from_the_checkpoint(two: Pool, tmp_path: Path) -> None:
    losses, steps = two.run(ranks.resume, 2, tmp_path)[0]
    assert losses == pytest.approx(alone(8, 2)[0], rel=1e-12)
    assert steps == 6
    assert len(list(tmp_path.iterdir())) == 2


def test_what_goes_wrong_in_planning_is_said_on_all_ranks(two: Pool) -> None:
    said = two.run(ranks.fail, 2)
    assert said[0] == said[1]
    assert said[0].startswith("no sparse parameter is named 'head*'; expected one of ")


def test_what_does_not_train_as_the_module_is_refused_on_all_ranks(two: Pool) -> None:
    said = two.run(ranks.judged, 2, True)
    assert said[0] == said[1]
    message, steps = said[0]
    assert steps == 0 and "gradient of 'table.weight' is off by 300.0%" in message
    assert "autograd.Function Reverse in Adversarial" in message
    assert two.run(ranks.judged, 2, False) == [("", 1)] * 2


def test_one_process_needs_no_launcher() -> None:
    losses, state = ranks.train(1, 12, 1, False, {})
    assert losses == pytest.approx(alone(12, 1)[0], rel=1e-12)
    assert set(state) == set(Model().state_dict())


@pytest.mark.parametrize("sizes", [[3, 3], [4, 3], [2, 0], [1, 5]])
def test_parts_of_a_batch_come_together_in_the_order_of_the_items(two: Pool, sizes: list[int]) -> None:
    expected = sorted(((i, rank), rank + 2 * i) for rank, size in enumerate(sizes) for i in range(size))
    items = [item for _, item in expected]
    assert two.run(ranks.join, sizes) == [[items, [[float(item)] for item in items], 5, [item * (1 - 2j) for item in items], -5j]] * 2


def test_parts_that_do_not_fit_together(two: Pool) -> None:
    said = "rank 1 has a batch of float32[4], rank 0 of float32[3]; expected equal samples"
    assert two.run(ranks.mismatch) == [said, said]


@given(items=st.integers(0, 20), count=st.integers(1, 6))
def test_shards_have_every_item_once_by_index(items: int, count: int) -> None:
    data: Any = list(range(items))
    shards = [soap.shard(data, number, count) for number in range(count)]
    assert [[own[i] for i in range(len(own))] for own in shards] == [list(range(number, items, count)) for number in range(count)]  # type: ignore[arg-type]
    streams = [list(soap.shard(Stream(items), number, count)) for number in range(count)]
    assert streams == [list(range(number, items, count)) for number in range(count)]


def test_shards_count_from_the_end_and_end() -> None:
    own: Any = soap.shard(Words(), 1, 5)
    assert len(own) == 5
    assert torch.equal(own[-1][0], Words().ids[21])
    with pytest.raises(IndexError):
        own[5]


def test_one_process_has_all_items_and_ranks_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = soap.shard(Words())
    assert len(whole) == ITEMS
    as_rank(monkeypatch, 2, 7)
    own: Any = soap.shard(Words())
    assert (own.number, own.count, len(own)) == (2, 7, 4)
    with pytest.raises(RuntimeFailure, match=r"^shard 7 of 7: expected a number from 0 to 6$"):
        soap.shard(Words(), 7, 7)


def test_parameters_made_inside_of_a_partitioner_belong_together() -> None:
    with soap.partitioner():
        first = nn.Linear(2, 3)
    second = nn.Linear(3, 2)
    with soap.partitioner():
        third = nn.Linear(2, 3)
    model = nn.Sequential(first, second, third).double()
    assert groups(model) == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    assert groups(Model()) == [("table.weight", "other.weight")]


def served(*partitions: int, together: bool = True) -> Strategy:
    syncs = {f"p{i}": parameter_server(count, "host" if together else "none") for i, count in enumerate(partitions)}
    return Strategy({}, {**syncs, "dense": SyncConfig()})


class FakeSimulator(Simulator):
    """Predicts that 4 partitions are best, and that more than 8 do not fit."""

    def __init__(self) -> None:
        pass

    def cost(self, strategy: Strategy) -> tuple[int, int]:
        counts = [sync.partitions for sync in strategy.parameters.values()]
        return sum(abs(count - 4) for count in counts), int(max(counts) > 8)


def test_parameters_of_a_group_get_the_best_number_of_partitions_of_theirs() -> None:
    found = alike(FakeSimulator(), served(16, 3, 1, 2), [("p0", "p1", "dense"), ("p2", "absent"), ("p3",)])
    assert found == served(3, 3, 1, 2)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda own: torch.optim.SGD(own, lr=0.1), 0),
        (lambda own: torch.optim.Adagrad(own, lr=0.1), 1),
        (lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9), 2),
        (lambda own: torch.optim.Adamax(own, lr=0.1), 2),
        (lambda own: torch.optim.Adam(own, lr=0.1, amsgrad=True), 3),
    ],
)
def test_predictions_count_the_optimizers_tensors(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], states: int) -> None:
    """Of models with tables one that changes rows without gradient counts as Adam at least."""
    shapes = {"w": (4, 3), "b": (3,)}
    assert optimizer_states(try_optimizer(Recipe(make).layout(shapes), shapes), sparse=True) == states


def test_configuration_overrules_the_search() -> None:
    assert adapted(served(4, 2), soap.RunnerConfig()) == served(4, 2)
    fixed = soap.RunnerConfig(search_partitions=False, partitions=3, local_aggregation=False)
    assert adapted(served(4, 2), fixed) == served(3, 3, together=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_option": "mpi"}, "run_option 'mpi': expected one of hybrid, ps, allreduce"),
        ({"save_every": 3}, "save_every 3: expected at least 1 step, and a folder as checkpoint"),
        ({"consistency": "bounded"}, "consistency 'bounded': expected sync, bounded:D with D from 0 to 1000000, or async"),
        ({"reduce_dense": "max"}, "reduce_dense 'max': expected one of mean, sum"),
        ({"consistency": "async", "sharded": False}, "consistency 'async' with sharded=False: expected each rank's own part of a batch"),
        ({"consistency": "async", "clip_norm": 1.0}, "consistency 'async' with clip_norm: workers that are apart .* leave it out"),
    ],
)
def test_wrong_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeFailure, match=f"^{message}$"):
        soap.RunnerConfig(**options)


def test_trained_values_before_a_batch() -> None:
    with soap.get_runner(Model(), "emulated:1x1@1Gbit/s") as runner, pytest.raises(RuntimeFailure, match="has not seen a batch yet"):
        runner.state_dict()
