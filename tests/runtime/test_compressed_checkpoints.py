"""Checkpoints of compressed training: to the bit on the same ranks, as sums on others, and what is dropped is said."""

from __future__ import annotations

import json
import shutil
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
from soap.strategy.compression import Compression, Rgc
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import compressed
from soap.tracing.execute import TracedModel
from tests.extent import every
from tests.runtime.compressed_training import SAMPLES
from tests.runtime.exact_modules import Trained
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OF_SIX, batch_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.test_compressed_sync import METHODS as ALL
from tests.runtime.test_compressed_sync import table_momentum
from tests.runtime.test_sync_state import cut_strategy
from tests.runtime.traced import traced

METHODS = ALL | {"sampled": Rgc(0.2, "sampled")}
CORRECTED = CompressedTraining(Momentum(0.9), WarmUp(2, 3))


UNEVEN = {"three": (0, 3, 1, 1, 2, 3), "one": (0, 3, 1, 3, 2, 3), "all": (0, 0, 1, 1, 2, 2)}
"""Devices of three parts of the samples by two of the outputs: three and two readers of a region; three and one; three and three."""


def uneven_strategy(model: TracedModel, devices: tuple[int, ...]) -> Strategy:
    """The head is cut by samples and outputs, and its two regions have other numbers of readers."""
    strategy = by_samples(model.graph, range(4), SAMPLES)
    [op] = [op for op in model.graph.operators if op.parameters and any(factor.size == 5 for factor in op.factors)]
    parts = {6: 3, 5: 2}
    degrees = [1] * len(op.factors)
    for size, degree in parts.items():
        degrees[next(k for k, factor in enumerate(op.factors) if factor.size == size)] = degree
    return strategy.with_operator(op.name, OpConfig(tuple(degrees), devices))


def strategy_of(model: TracedModel, how: Compression | None, ranks: int, cut: bool | str) -> Strategy:
    if isinstance(cut, str):
        strategy = uneven_strategy(model, UNEVEN[cut])
    else:
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
    cut: bool | str = False,
    compressing: CompressedTraining = AS_IT_IS,
) -> tuple[Trained, dict[str, torch.Tensor], list[str]]:
    """Steps from a checkpoint to another; all ranks' residuals and momenta behind the loading, added up; warnings."""
    model = traced(path)
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
def path() -> str:
    return OF_SIX["words"]


RESUMED = [
    *((name, AS_IT_IS, False) for name in METHODS),
    *((name, CORRECTED, False) for name in ("policy", "asq")),
    *((name, CORRECTED, "three") for name in ("sampled", "asq", "powersgd")),
    *((name, AS_IT_IS, "one") for name in ("sampled", "asq", "powersgd")),  # a region with one reader is not compressed
]


@pytest.mark.parametrize(("method", "compressing", "cut"), every(15, RESUMED))
def test_a_run_that_is_resumed_at_step_seven(
    four: Pool, path: str, tmp_path: Path, method: str, compressing: CompressedTraining, cut: bool | str
) -> None:
    """Its losses and parameters are those of a run that was not interrupted, bit for bit. At step seven a threshold is reused, the sign is
    not the first one, and a warm-up is at its second density."""
    more = (4, cut, compressing)
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


def test_regions_with_unlike_readers_are_summed_each_for_itself(four: Pool, path: str, tmp_path: Path) -> None:
    """From three and two readers to three and three: the first region goes on as it was; of the second, one rank goes on from the sum."""
    folder = str(tmp_path)
    four.run(go_on, path, "exact", range(3), None, folder, 4, "three", ranks=4)
    before, after = (four.run(go_on, path, "exact", [], folder, None, 4, cut, ranks=4)[0] for cut in ("three", "all"))
    assert before[2] == []
    assert [line.split(";")[0] for line in after[2]] == [SUMMED.format(2, "head.weight", 2, 3)]
    assert before[1].keys() == after[1].keys() and before[1]["head.weight residual"].abs().sum() > 0
    assert all(torch.allclose(after[1][name], kept, rtol=1e-12, atol=1e-15) for name, kept in before[1].items())


SUMMED = "residuals of {} compressed parameters, such as {!r}, are of {} ranks"


def test_a_region_that_is_no_longer_compressed(four: Pool, path: str, tmp_path: Path) -> None:
    """One reader alone has nothing to compress. That what it had is lost is said, although the parameter's other region goes on."""
    folder = str(tmp_path)
    four.run(go_on, path, "exact", range(3), None, folder, 4, "three", ranks=4)
    _, kept, told = four.run(go_on, path, "exact", [], folder, None, 4, "one", ranks=4)[0]
    assert len(told) == 1 and told[0].startswith("residuals of 2 parameters, such as 'head.weight', are lost: this plan does not compress")
    assert kept["head.weight residual"][:3].any() and not kept["head.weight residual"][3:].any()


def failing_load(path: str, method: str | None, folder: str, compressing: CompressedTraining) -> str:
    with pytest.raises(CheckpointError) as found:
        go_on(path, method, [], folder, None, 4, False, compressing)
    return str(found.value)


def test_state_that_the_method_does_not_keep_is_not_dropped_in_silence(four: Pool, path: str, tmp_path: Path) -> None:
    """bfloat16 keeps no residual. Nor do settings of another method go on as this one's."""
    folder = str(tmp_path)
    four.run(go_on, path, "sampled", range(3), None, folder, ranks=4)
    results = four.run(go_on, path, "bf16", [], folder, ranks=4)
    assert [len(told) for _, _, told in results] == [1, 0, 0, 0]
    assert results[0][2][0].startswith("residual of 4 parameters, such as 'layer.weight', is lost: this plan's compression keeps none")
    _, kept, told = four.run(go_on, path, "exact", [], folder, ranks=4)[0]
    assert len(told) == 1 and told[0].startswith("thresholds and bases of 4 compressed parameters, such as ") and kept
    powers = str(tmp_path / "powers")
    four.run(go_on, path, "powersgd", range(3), None, powers, ranks=4)
    told = four.run(go_on, path, "powersgd", [], powers, None, 4, True, ranks=4)[0][2]
    assert any(line.startswith("residuals of ") or line.startswith("thresholds and bases of ") for line in told)


@pytest.mark.parametrize(
    ("saved", "now", "what"),
    [
        (CORRECTED, CompressedTraining(None, WarmUp(2, 3)), "momentum {'factor': 0.9"),
        (AS_IT_IS, CompressedTraining(Momentum(0.9)), "momentum None"),
        (CORRECTED, CompressedTraining(Momentum(0.9, nesterov=True), WarmUp(2, 3)), "momentum {'factor': 0.9, 'nesterov': False"),
        (CORRECTED, CompressedTraining(Momentum(0.9)), "warm_up {'dense_steps': 2, 'stage_steps': 3}"),
    ],
)
def test_another_momentum_correction_or_warm_up_is_refused(
    four: Pool, path: str, tmp_path: Path, saved: CompressedTraining, now: CompressedTraining, what: str
) -> None:
    """In one line, the same on all ranks. A plan that compresses nothing goes on, and says what is lost, unless the optimizer differs."""
    folder = str(tmp_path)
    four.run(go_on, path, "exact", range(2), None, folder, 4, False, saved, ranks=4)
    for line in four.run(failing_load, path, "exact", folder, now, ranks=4):
        assert f"was saved with {what}" in line and "--correct-momentum and --warm-up" in line and "\n" not in line
    if saved.momentum is None:
        told = four.run(go_on, path, None, [2], folder, None, 4, False, now, ranks=4)[0][2]
        assert len(told) == 1 and "are lost" in told[0]
    else:  # momentum was corrected, and not the optimizer's
        for line in four.run(failing_load, path, None, folder, now, ranks=4):
            assert line.startswith("parameter 'layer.weight' was saved with momentum 0, another of its group with 0.9; expected the groups")


@pytest.fixture(scope="module")
def saved_at_two(four: Pool, path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps, to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    four.run(go_on, path, "exact", range(2), None, str(folder), ranks=4)
    return folder


def failing(path: str, folder: str) -> str:
    with pytest.raises(CheckpointError) as found:
        go_on(path, "exact", [], folder)
    return str(found.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("peers", 5),
        ("peers", 0),
        ("names", ["residual", "other"]),
        ("entries", [{"box": [], "place": 0}]),
        ("entries", [{"box": [[0, 6], [0, 7]], "place": 0, "peers": 4, "numbers": {}, "own": {}}]),
        ("entries", [{"box": [[0, 6]], "place": 0, "peers": 4, "numbers": {}, "own": {}}]),
        ("entries", [{"box": [[0, 6], [0, 6]], "place": 4, "peers": 4, "numbers": {}, "own": {}}]),
        ("entries", [{"box": [[0, 6], [0, 6]], "place": 0, "peers": 5, "numbers": {}, "own": {}}]),
        ("entries", [{"box": [[0, 6], [0, 6]], "place": 0, "peers": 4, "numbers": {}, "own": {"threshold": ["float32", 10**400]}}]),
        ("common", [3]),
        ("method", 3),
    ],
)
def test_damaged_manifests_are_refused_in_one_line(
    four: Pool, path: str, saved_at_two: Path, tmp_path: Path, place: str, value: object
) -> None:
    shutil.copytree(saved_at_two, tmp_path, dirs_exist_ok=True)
    [manifest] = tmp_path.glob("step-*/soap.json")
    document = json.loads(manifest.read_text())
    document["rank_states"]["layer.weight"][place] = value
    manifest.write_text(json.dumps(document))
    for line in four.run(failing, path, str(tmp_path), ranks=4):
        assert "is damaged: " in line and "\n" not in line
