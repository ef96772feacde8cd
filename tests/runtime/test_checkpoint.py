from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from soap.cluster.presets import local_topology
from soap.errors import CheckpointError, SoapWarning
from soap.plan.plan import Plan
from soap.runtime.checkpoint.checkpoint import read_state_dict
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL
from tests.extent import FEW
from tests.graph_builder import mlp, transformer
from tests.runtime.checkpointing import (
    TiedLanguage,
    alone_plan,
    make_optimizer,
    save_model,
    save_three_steps,
    train_handmade,
    train_traced,
    trainer_of,
)
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split
from tests.runtime.pool import FirstOf, Pool
from tests.runtime.traced import traced
from tests.strategies import CPU, cluster, graphs, strategies_for

TWO, FOUR = local_topology(2), local_topology(4)


@pytest.fixture(scope="module")
def pair(four: Pool) -> Pool:
    return FirstOf(four, 2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tied", "adam"),
        ("norm", "groups"),
        pytest.param("tied", "sgd", marks=pytest.mark.long),  # which keeps less than the others
        pytest.param("norm", "sgd", marks=pytest.mark.long),
    ],
)
def test_two_ranks_data_parallel_go_on_as_four_ranks_megatron(pair: Pool, four: Pool, name: str, kind: str, tmp_path: Path) -> None:
    spec = save_model(name, tmp_path)
    graph = traced(spec, "float64").graph
    before, after = CLASSICAL["data_parallel"](graph, TWO), CLASSICAL["megatron"](graph, FOUR)
    straight = pair.run(train_traced, spec, before, TWO, kind, 6, 5, None, None)[0]
    first = pair.run(train_traced, spec, before, TWO, kind, 3, 5, None, str(tmp_path / "saved"))
    assert [rank.saved for rank in first] == [str(tmp_path / "saved" / "step-00000003")] * 2
    resumed = four.run(train_traced, spec, after, FOUR, kind, 3, 99, str(tmp_path / "saved"), None)
    assert all(rank.losses == resumed[0].losses and rank.seed == 5 for rank in resumed)
    assert first[0].losses + resumed[0].losses == pytest.approx(straight.losses, rel=1e-9)
    for key, tensor in straight.state.items():
        torch.testing.assert_close(resumed[0].state[key], tensor, rtol=1e-9, atol=1e-11)


def content(checkpoint: str, folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, as torch's own tools read it, by full name."""
    dcp_to_torch_save(checkpoint, folder / "all.pt")
    found: dict[str, torch.Tensor] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        else:
            for key, inner in value.items():
                flatten(f"{prefix}/{key}" if prefix else key, inner)

    flatten("", torch.load(folder / "all.pt", weights_only=True))
    return found


@pytest.mark.slow
@settings(FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_plan_goes_on_from_any_other(pair: Pool, pool: Pool, data: st.DataObject, tmp_path: Path) -> None:
    """Two ranks train and save; three load and save at once: both checkpoints hold the same, bit by bit. Both go on alike."""
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    graph = data.draw(graphs(max_moves=3))
    plans = [build_plan(graph, data.draw(strategies_for(graph, n)), cluster([n], CPU)) for n in (2, 3)]
    kind = data.draw(st.sampled_from(["adam", "sgd", "groups", "plain"]))
    straight = pair.run(train_handmade, plans[0], kind, 3, None, None)[0]
    first = pair.run(train_handmade, plans[0], kind, 2, None, str(tmp_path / "a"))[0]
    copied = pool.run(train_handmade, plans[1], kind, 0, first.saved, str(tmp_path / "b"))[0]
    resumed = pool.run(train_handmade, plans[1], kind, 1, first.saved, None)[0]
    one, other = content(first.saved, tmp_path), content(copied.saved, tmp_path)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
    assert {f"model/{t.name}" for t in graph.parameters} == {name for name in one if name.startswith("model/")}
    assert resumed.losses == pytest.approx(straight.losses[2:], rel=1e-9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_three_steps(tmp_path_factory.mktemp("saved"))


def test_a_state_dict_for_the_module_that_was_exported(pair: Pool, tmp_path: Path) -> None:
    spec = save_model("tied", tmp_path)
    megatron = CLASSICAL["megatron"](traced(spec, "float64").graph, TWO)
    trained = pair.run(train_traced, spec, megatron, TWO, "sgd", 1, 0, None, str(tmp_path / "out"))[0]
    dcp_to_torch_save(trained.saved, tmp_path / "plain.pt")
    for state in (read_state_dict(tmp_path / "out"), torch.load(tmp_path / "plain.pt", weights_only=True)["model"]):
        module = TiedLanguage().double()
        module.load_state_dict(state, strict=True)
        assert state.keys() == trained.state.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in trained.state.items())
    size = sum(path.stat().st_size for path in Path(trained.saved).glob("*.distcp"))
    values = {tensor.data_ptr(): tensor.nbytes for tensor in module.state_dict().values()}
    assert size < 2 * sum(values.values()) + 2000 * 3 * len(values)  # the tied weight, the largest one, is stored once (beside momentum)


def test_what_no_rank_keeps_is_there_as_well(tmp_path: Path) -> None:
    one = local_topology(1)
    model = traced(save_model("sliced", tmp_path), "float64")
    with Trainer(model, (CLASSICAL["single_device"](model.graph, one), one)) as trainer:
        assert ((2, 6), (0, 4)) in [shard.box for shard in trainer.plan.shards]
        trainer.step(*model.example_inputs)
        path = trainer.save(tmp_path / "out")
        trainer.load(path)
        found, expected = read_state_dict(path), trainer.state_dict()
    assert found.keys() == expected.keys() == {"table", *(f"{m}.{p}" for m in ("layer", "unused") for p in ("weight", "bias"))}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_idle_ranks_take_part(pool: Pool, tmp_path: Path) -> None:
    plan = plan_of(mlp(), split((0, 1), n=2), device_count=2)  # on three ranks
    first = pool.run(train_handmade, plan, "adam", 2, None, str(tmp_path))
    assert len({rank.saved for rank in first}) == 1
    resumed = pool.run(train_handmade, plan, "adam", 1, str(tmp_path), None)
    straight = pool.run(train_handmade, plan, "adam", 3, None, None)
    assert [rank.losses for rank in resumed] == [rank.losses[2:] for rank in straight]


def test_options_steps_and_seed_are_those_of_the_checkpoint(saved: Path) -> None:
    def slower(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.5, betas=(0.1, 0.2), foreach=False)

    with trainer_of(alone_plan(), make=slower, seed=8) as trainer:
        trainer.load(saved.parent)
        assert trainer.optimizer is not None
        group = trainer.optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["amsgrad"], group["foreach"]) == (0.01, (0.9, 0.999), True, False)
        assert (trainer.steps, trainer.seed) == (3, 0)
        assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {3.0}


def test_loading_undoes_what_came_after(saved: Path) -> None:
    plan, model = alone_plan(), HandModel(mlp())
    with trainer_of(plan) as trainer:
        trainer.load(saved)
        first = [trainer.step(*model.inputs(step)) for step in (3, 4)]
        trainer.load(saved)
        assert [trainer.step(*model.inputs(step)) for step in (3, 4)] == first


def test_a_checkpoint_of_no_step_has_no_state(tmp_path: Path) -> None:
    plan, model = alone_plan(), HandModel(mlp())
    with trainer_of(plan) as trainer:
        path = trainer.save(tmp_path)
        trainer.step(*model.inputs(0))
        trainer.load(path)
        assert trainer.optimizer is not None
        assert (trainer.steps, dict(trainer.optimizer.state)) == (0, {})


def test_chunks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.runtime.checkpoint.storage.halved.__defaults__", (600,))
    plan = alone_plan(transformer(layers=1))
    with trainer_of(plan) as trainer:
        path = trainer.save(tmp_path)
        expected = trainer.state_dict()
    tensors = json.loads((path / "soap.json").read_text())["tensors"]
    assert max(len(tensor["chunks"]) for tensor in tensors.values()) > 4
    found = read_state_dict(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_another_model_is_refused(saved: Path) -> None:
    with trainer_of(alone_plan(transformer(layers=1))) as trainer, pytest.raises(CheckpointError) as caught:
        trainer.load(saved)
    assert "is of another model ('mlp', not 'transformer'): " in str(caught.value)
    assert str(caught.value).endswith("; load it into the model that it was saved from")
    with trainer_of(alone_plan(mlp(batch=4))) as trainer:
        trainer.load(saved)  # another batch, the same parameters


def test_another_type_is_converted(saved: Path) -> None:
    with Trainer(HandModel(mlp()), alone_plan(), optimizer=lambda p: make_optimizer("adam", p), dtype=torch.float32) as trainer:
        trainer.load(saved)
        assert trainer.optimizer is not None
        states = trainer.optimizer.state.values()
        assert {state[key].dtype for state in states for key in ("exp_avg", "max_exp_avg_sq")} == {torch.float32}
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, read_state_dict(saved)[name].float(), rtol=0, atol=0)


def test_another_optimizer_is_refused(saved: Path) -> None:
    with trainer_of(alone_plan(), "sgd") as trainer, pytest.raises(CheckpointError) as caught:
        trainer.load(saved)
    assert str(caught.value).endswith("was saved with optimizer Adam, this run has SGD; use the same optimizer")


def test_what_training_does_not_change_is_compared(pair: Pool, tmp_path: Path) -> None:
    spec = save_model("tied", tmp_path)
    model = traced(spec, "float64")
    plan = (CLASSICAL["single_device"](model.graph, local_topology(1)), local_topology(1))
    with Trainer(model, plan) as trainer:
        path = trainer.save(tmp_path / "out")
        trainer.load(path)
        scale = model.unchanged["scale"]
        scale[0] += 1
        try:
            with pytest.warns(SoapWarning, match="'scale' keeps the value that was exported"):
                trainer.load(path)
        finally:
            scale[0] -= 1


class _Listing(torch.optim.SGD):
    """Keeps a list of tensors of each parameter, as Shampoo does."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["blocks"] = [parameter.detach().clone()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: _Listing(p), "optimizer state 'blocks' of 'fc0.weight' is a list; expected a number"),
        (lambda p: torch.optim.SGD(p), "optimizer option 'line_search"),
    ],
)
def test_state_that_cannot_be_kept_is_refused(make: Callable[[Any], Any], words: str, tmp_path: Path) -> None:
    plan, model = alone_plan(), HandModel(mlp())
    with trainer_of(plan, make=make) as trainer:
        if "option" not in words:
            trainer.step(*model.inputs(0))
        else:
            assert trainer.optimizer is not None
            trainer.optimizer.param_groups[0]["line_search_fn"] = object()
        with pytest.raises(CheckpointError) as caught:
            trainer.save(tmp_path / "out")
        assert str(caught.value).startswith(words) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def save_with_uneven_steps(plan: Plan, folder: str) -> str:
    """Rank 1's shards say that they were updated more often."""
    model = HandModel(plan.graph)
    with trainer_of(plan) as trainer:
        trainer.step(*model.inputs(0))
        if trainer.rank == 1:
            assert trainer.optimizer is not None
            for state in trainer.optimizer.state.values():
                state["step"] += 1
        try:
            trainer.save(folder)
        except CheckpointError as error:
            return str(error)
        return "saved"


def test_numbers_that_differ_among_shards_are_refused_on_all_ranks(pair: Pool, tmp_path: Path) -> None:
    plan = plan_of(mlp(), split((0, 1), n=2), device_count=2)
    messages = pair.run(save_with_uneven_steps, plan, str(tmp_path / "out"))
    assert messages[0] == messages[1]
    assert messages[0].startswith("the optimizer's state or options differ among the shards of 'fc0.weight'; expected")
    assert not (tmp_path / "out").exists()
