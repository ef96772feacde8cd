"""Checkpoints of compressed training: to the bit on the same ranks, without loss on others."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from soap.errors import CheckpointError, SoapWarning
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.trainer import Trainer
from soap.strategy.compression import Compression
from soap.strategy.config import Strategy
from soap.strategy.sync import compressed
from soap.tracing.execute import ExecutableModel
from soap.tracing.export import export_model
from tests.runtime.compressed_training import SAMPLES
from tests.runtime.exact_modules import Trained
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import batch_of, module_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.test_compressed_sync import METHODS, loaded, table_momentum
from tests.runtime.test_sync_state import cut_strategy

CORRECTED = CompressedTraining(Momentum(0.9), WarmUp(2, 3))


def strategy_of(model: ExecutableModel, how: Compression | None, ranks: int, cut: bool) -> Strategy:
    strategy = cut_strategy(model, ranks) if cut else by_samples(model.graph, range(ranks), SAMPLES)
    names = [tensor.name for tensor in model.graph.parameters if tensor.name not in model.graph.sparse]
    return Strategy(strategy.operators, {} if how is None else dict.fromkeys(names, compressed(how)))


def go_on(
    path: str,
    method: str | None,
    steps: Sequence[int],
    source: str | None = None,
    target: str | None = None,
    ranks: int = 4,
    cut: bool = False,
    compressing: CompressedTraining = AS_IT_IS,
) -> tuple[Trained, dict[str, torch.Tensor], list[str]]:
    """Steps from a checkpoint to another; all ranks' residuals and momenta behind the loading, added up; warnings."""
    model = loaded(path)
    how = None if method is None else METHODS[method]
    plan = strategy_of(model, how, ranks, cut), hosts(*[1] * ranks)
    uncompressed = {} if how is None or compressing.momentum is None else {"groups": partial(table_momentum, compressing.momentum)}
    with Trainer(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), compressing=compressing, **uncompressed) as trainer:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if source is not None:
                trainer.load(source)
        own = trainer.sizes.gradients.compressed
        kept: dict[str, torch.Tensor] = {}
        for states in trainer.comm.gather([] if own is None else [(shard, state.summed) for shard, state in own.states.items()]):
            for shard, summed in states:
                name, box = trainer.plan.shards[shard].parameter, trainer.plan.shards[shard].box
                for key, value in summed.items():
                    whole = kept.setdefault(f"{name} {key}", torch.zeros(model.graph.tensors[name].shape, dtype=torch.float64))
                    whole[tuple(slice(a, b) for a, b in box)] += value.view([b - a for a, b in box])
        losses = [trainer.step(*batch_of(SAMPLES, step)) for step in steps]
        if target is not None:
            trainer.save(target)
        lines = [str(one.message) for one in told if one.category is SoapWarning]
        return Trained(losses, trainer.state_dict()), kept, lines


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("models") / "words.pt2"
    export_model(module_of("words"), batch_of(SAMPLES), path=found)
    return str(found)


@pytest.mark.parametrize(("method", "compressing"), [*((name, AS_IT_IS) for name in METHODS), ("policy", CORRECTED), ("asq", CORRECTED)])
def test_a_run_that_is_resumed_at_step_seven(
    four: Pool, path: str, tmp_path: Path, method: str, compressing: CompressedTraining
) -> None:
    """Its losses and parameters are those of a run that was not interrupted, bit for bit. At step seven a threshold is reused, the sign is
    not the first one, and a warm-up is at its second density."""
    more = (4, False, compressing)
    straight, _, _ = four.run(go_on, path, method, range(12), None, None, *more, ranks=4)[0]
    four.run(go_on, path, method, range(7), None, str(tmp_path), *more, ranks=4)
    results = four.run(go_on, path, method, range(7, 12), str(tmp_path), None, *more, ranks=4)
    for resumed, _, told in results:
        assert resumed.losses == straight.losses[7:] and told == []
    assert all(torch.equal(tensor, straight.state[name]) for name, tensor in results[0][0].state.items())


@pytest.mark.parametrize("method", ["exact", "chunked", "int8"])
def test_other_ranks_and_cuts_lose_nothing(four: Pool, path: str, tmp_path: Path, method: str) -> None:
    """Residuals and momenta of four ranks, of two, and of four that cut layers add up to the same."""
    first, second, third = (str(tmp_path / name) for name in "abc")
    four.run(go_on, path, method, range(4), None, first, 4, False, CORRECTED, ranks=4)
    _, saved, told = four.run(go_on, path, method, [], first, None, 4, False, CORRECTED, ranks=4)[0]
    assert told == [] and {key for name, kept in saved.items() for key in [name.split()[1]] if kept.any()} >= {"residual"}
    _, two, told = four.run(go_on, path, method, [4], first, second, 2, False, CORRECTED, ranks=2)[0]
    assert len(told) == 1 and told[0].startswith("residuals of 4 compressed parameters, such as 'layer.weight', are of 4 ranks; of 2 ranks")
    _, cut, told = four.run(go_on, path, method, [], first, third, 4, True, CORRECTED, ranks=4)[0]
    for found in (two, cut):
        assert found.keys() == saved.keys()
        assert all(torch.allclose(found[name], kept, rtol=1e-12, atol=1e-15) for name, kept in saved.items())
    back = four.run(go_on, path, method, [5], third, None, 4, False, CORRECTED, ranks=4)[0][1]
    assert all(torch.allclose(back[name], kept, rtol=1e-12, atol=1e-15) for name, kept in saved.items())


def test_what_a_plan_has_no_use_for_is_said(four: Pool, path: str, tmp_path: Path) -> None:
    four.run(go_on, path, "exact", range(3), None, str(tmp_path), ranks=4)
    results = four.run(go_on, path, None, [3], str(tmp_path), ranks=4)
    assert [len(told) for _, _, told in results] == [1, 0, 0, 0]
    assert results[0][2][0].startswith("residuals of 4 parameters, such as 'layer.weight', are lost: this plan does not compress them")
    dense = str(tmp_path / "dense")
    four.run(go_on, path, None, range(3), None, dense, ranks=4)
    _, kept, told = four.run(go_on, path, "exact", [], dense, ranks=4)[0]
    assert told == [] and not any(float(own.abs().max()) for own in kept.values())


def failing(path: str, folder: str) -> str:
    with pytest.raises(CheckpointError) as found:
        go_on(path, "exact", [], folder)
    return str(found.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [("peers", 5), ("peers", 0), ("names", ["residual", "other"]), ("entries", [{"box": [], "place": 0}]), ("common", [3])],
)
def test_damaged_manifests_are_refused_in_one_line(four: Pool, path: str, tmp_path: Path, place: str, value: object) -> None:
    four.run(go_on, path, "exact", range(2), None, str(tmp_path), ranks=4)
    [manifest] = tmp_path.glob("step-*/soap.json")
    document = json.loads(manifest.read_text())
    document["rank_states"]["layer.weight"][place] = value
    manifest.write_text(json.dumps(document))
    for line in four.run(failing, path, str(tmp_path), ranks=4):
        assert "is damaged: " in line and "\n" not in line
