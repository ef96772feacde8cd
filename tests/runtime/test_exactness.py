"""Whole plans on two to four ranks train as a plain loop does in one process, in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.errors import RuntimeFailure
from soap.model.graph import OperatorGraph
from soap.runtime.check import check
from soap.runtime.inputs import PartBatch
from soap.runtime.trainer import Trainer
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import Strategy
from soap.strategy.recomputation import recomputed, repeatable
from soap.tracing.export import export_model
from tests.extent import ALL, often, so_many
from tests.kept_models import ModelFiles
from tests.runtime.exact_modules import EXAMPLES, Batch, Trained, batches, converted, module_of, sgd, train_plainly, with_local_norms, worst
from tests.runtime.pool import Pool
from tests.runtime.traced import traced as loaded

TOLERANCE = 1e-9
FOUR = local_topology(4)
SOME = ("data_parallel", "three", "recompute", "megatron", "random 0")
"""Samples over four ranks and, unevenly, over three; all of it run twice; cut parameters; anything."""
Options = Mapping[str, Any]
FILES = ModelFiles(
    "exact", lambda name, path: export_model(module_of(name), batches(name, [6])[0], path=path, dynamic_batch=True)
)


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Each example exported with 6 samples, for batches of any size."""
    return FILES


def train(
    path: str,
    strategy: Strategy,
    steps: Sequence[Sequence[Batch]],
    options: Options | None = None,
    reading: tuple[tuple[str, str], ...] = (),
    dtype: str | None = "float64",
    traced: bool = False,
    by_rank: bool = False,
) -> Trained:
    """What a rank does: each step's micro-batches at once; ``by_rank``: of each the samples that it reads."""
    model = loaded(path, dtype, reading)
    with Trainer(model, (strategy, FOUR), optimizer=sgd, **(options or {})) as trainer:
        losses = []
        for number, parts in enumerate(steps):
            whole = [t for part in parts for t in part]
            inputs = [part_of(trainer, part) for part in parts] if by_rank else whole
            if traced and number == len(steps) - 1:
                assert trainer.trace(*inputs)
                losses.append(0.0)
            else:
                losses.append(trainer.step(*inputs))
        return Trained(losses, trainer.state_dict())


def part_of(trainer: Trainer, batch: Batch) -> PartBatch:
    """A rank's part of a whole batch of any size."""
    name, dim = next(iter(trainer.sizes.divided.items()))
    size = batch[trainer.model.input_names.index(name)].shape[dim]
    return PartBatch.cut(batch, trainer.samples(size))


def checked(path: str, strategy: Strategy, sizes: Sequence[int], example: str, reading: tuple[tuple[str, str], ...], dtype: str) -> Any:
    model = loaded(path, dtype, reading)
    given = [converted(batch, getattr(torch, dtype)) for batch in batches(example, sizes)]
    with Trainer(model, (strategy, FOUR), optimizer=sgd) as trainer:
        return check(trainer, given.__getitem__, sgd, len(given))


def strategies(graph: OperatorGraph, randoms: int = so_many(1, 3)) -> dict[str, Strategy]:
    """Named and random ways to spread a model over two to four of the four devices."""
    result = {name: CLASSICAL[name](graph, FOUR) for name in ("data_parallel", "model_parallel", "megatron")}
    result["two"] = CLASSICAL["data_parallel"](graph, local_topology(2))
    result["three"] = CLASSICAL["data_parallel"](graph, local_topology(3))
    result["recompute"] = recomputed(graph, result["data_parallel"], sorted(repeatable(graph)))
    return result | {f"random {i}": random_strategy(graph, local_topology(2 + i % 3), random.Random(i)) for i in range(randoms)}


def some(found: Mapping[str, Strategy]) -> Mapping[str, Strategy]:
    """A part of the strategies, but for `make test-all`: where what a test is about does not depend on them."""
    return found if ALL else {kind: found[kind] for kind in SOME}


def fewest(found: Mapping[str, Strategy]) -> Mapping[str, Strategy]:
    """The last two of these, in types whose every step is compared with a process of its own."""
    return found if ALL else {kind: found[kind] for kind in SOME[-2:]}


def assert_exact(
    four: Pool,
    path: str,
    name: str,
    sizes: Sequence[Sequence[int]],
    options: Options | None = None,
    traced: bool = False,
    few: bool = False,
) -> None:
    """Every strategy, or ``some``, on these batches (sizes of each step's micro-batches) equals the plain loop."""
    flat = [size for step in sizes for size in step]
    given = iter([tuple(converted(batch, torch.float64)) for batch in batches(name, flat)])
    steps = [[next(given) for _ in step] for step in sizes]
    expected = train_plainly(module_of(name).double(), steps, clip_norm=(options or {}).get("clip_norm"))
    found = strategies(loaded(path, "float64", ()).graph)
    for kind, strategy in (some(found) if few else found).items():
        results = four.run(train, path, strategy, steps, options, (), "float64", traced)
        assert all(result.losses == results[0].losses for result in results)
        if traced:
            expected.losses[-1] = 0.0
        assert worst(results[0], expected) < TOLERANCE, (kind, worst(results[0], expected))


@pytest.mark.parametrize("name", often([*EXAMPLES], ["conv norm", "shared"], pytest.mark.slow))
def test_every_example_trains_as_a_plain_loop(four: Pool, files: dict[str, str], name: str) -> None:
    assert_exact(four, files[name], name, [[6], [6], [6]])


@pytest.mark.long
@pytest.mark.parametrize("name", often(["shared", "conv norm", "weighted"], ["weighted"], pytest.mark.slow))
def test_batches_of_other_sizes(four: Pool, files: dict[str, str], name: str) -> None:
    """Smaller than the others, than the number of shards, one sample, and larger."""
    if ALL:
        assert_exact(four, files[name], name, [[6], [5], [3], [1], [9], [1], [2], [6]])
    else:
        assert_exact(four, files[name], name, [[6], [5], [1], [9], [6]], few=True)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [5])
def test_uneven_shards_of_a_loss(four: Pool, tmp_path: Path, samples: int) -> None:
    path = tmp_path / "weighted.pt2"
    export_model(module_of("weighted"), batches("weighted", [samples])[0], path=path)
    assert_exact(four, str(path), "weighted", [[samples], [samples]], few=True)


@pytest.mark.long
def test_gradients_clipped_by_their_global_norm(four: Pool, files: dict[str, str]) -> None:
    assert_exact(four, files["shared"], "shared", [[6], [6], [5]], {"clip_norm": 0.1})  # less than any gradient's norm
    assert_exact(four, files["shared"], "shared", [[6]], {"clip_norm": 1e6})


@pytest.mark.slow
def test_accumulated_gradients(four: Pool, files: dict[str, str]) -> None:
    """Micro-batches of one size, of several, and fewer of them at the end."""
    options = {"accumulate": 3, "clip_norm": 0.2}
    sizes = [[6, 6, 6], [6, 4, 6], [6, 1]] if ALL else [[6, 6, 6], [6, 1]]
    assert_exact(four, files["shared"], "shared", sizes, options, few=True)
    if ALL:
        assert_exact(four, files["conv norm"], "conv norm", [[6, 6, 6], [3, 6]], {"accumulate": 3})


@pytest.mark.long
def test_a_traced_step_accumulates_as_well(four: Pool, files: dict[str, str]) -> None:
    assert_exact(four, files["weighted"], "weighted", [[6, 6], [6, 5]], {"accumulate": 2}, traced=True)


@pytest.mark.slow
def test_local_batch_norm_is_that_of_data_parallel_ranks(four: Pool, files: dict[str, str]) -> None:
    """Also with parts of different sizes; the running statistics are rank 0's."""
    reading = (("batch_norm", "local"),)
    graph = loaded(files["conv norm"], "float64", reading).graph
    assert [op.kind for op in graph.operators].count("batch_norm_local") == 2
    steps = [[tuple(converted(batch, torch.float64))] for batch in batches("conv norm", [6, 6, 5])]
    for parts in (2, 3):
        expected = train_plainly(with_local_norms(module_of("conv norm").double(), parts), steps)
        strategy = CLASSICAL["data_parallel"](graph, local_topology(parts))
        result = four.run(train, files["conv norm"], strategy, steps, None, reading)[0]
        assert worst(result, expected) < TOLERANCE
        plain = train_plainly(module_of("conv norm").double(), steps)
        assert worst(result, plain) > 1e-3  # which batch norm over the whole batch would give


@pytest.mark.long
def test_local_batch_norm_is_checked_by_the_same_groups(four: Pool, files: dict[str, str]) -> None:
    reading = (("batch_norm", "local"),)
    graph = loaded(files["conv norm"], "float64", reading).graph
    for kind, strategy in fewest(strategies(graph, 5)).items():
        result = four.run(checked, files["conv norm"], strategy, [6, 6, 2], "conv norm", reading, "float64")[0]
        assert result.passed and result.tolerance == TOLERANCE, (kind, result.worst)


@pytest.mark.slow
def test_autocast_computes_as_torch_does(four: Pool, files: dict[str, str]) -> None:
    """Within the rounding of bfloat16 of plain training under torch.autocast, and of the check's process under any strategy."""
    reading = (("autocast", "bfloat16"),)
    for name in ("shared", "conv norm") if ALL else ("conv norm",):
        steps = [[batch] for batch in batches(name, [6, 6, 5] if ALL else [6, 6])]
        expected = train_plainly(module_of(name), steps, autocast=torch.bfloat16)
        graph = loaded(files[name], None, reading).graph
        assert graph.tensors[graph.loss].dtype == "float32"
        assert "bfloat16" in {graph.tensors[op.outputs[0].tensor].dtype for op in graph.operators}
        for kind, strategy in fewest(strategies(graph, 2)).items():
            result = four.run(train, files[name], strategy, steps, None, reading, None)[0]
            assert worst(result, expected) < 2e-2, kind
            outcome = four.run(checked, files[name], strategy, [6, 5] if ALL else [6], name, reading, "float32")[0]
            assert outcome.passed and outcome.tolerance == 5e-2, (kind, outcome.worst)


@pytest.mark.long  # ``test_types`` trains in bfloat16, too
def test_everything_in_bfloat16(four: Pool, files: dict[str, str]) -> None:
    for name in ("shared", "weighted") if ALL else ("weighted",):
        graph = loaded(files[name], "bfloat16", ()).graph
        for kind, strategy in fewest(strategies(graph, 1)).items():
            outcome = four.run(checked, files[name], strategy, [6, 5], name, (), "bfloat16")[0]
            assert outcome.passed and outcome.tolerance == 5e-2, (kind, outcome.worst)


@pytest.mark.long
def test_zoo_models_take_batches_of_other_sizes(four: Pool) -> None:
    graph = loaded("zoo:gpt:tiny", "float64", ()).graph
    for kind in ("data_parallel", "megatron"):
        for result in four.run(zoo_sizes, CLASSICAL[kind](graph, FOUR), (8, 5, 1, 8)):
            assert result.passed, (kind, result.worst)


def zoo_sizes(strategy: Strategy, sizes: Sequence[int]) -> Any:
    model = loaded("zoo:gpt:tiny", "float64", ())
    with Trainer(model, (strategy, FOUR), optimizer=sgd, seed=3) as trainer:
        return check(trainer, lambda step: [t[: sizes[step]] for t in model.example_inputs], sgd, len(sizes))


def refused(path: str, sizes: Sequence[int], accumulate: int) -> list[str]:
    model = loaded(path, "float64", ())
    strategy = CLASSICAL["data_parallel"](model.graph, FOUR)
    said = []
    with Trainer(model, (strategy, FOUR), accumulate=accumulate) as trainer:
        for size in sizes:
            try:
                trainer.step(*converted(batches("shared", [size])[0], torch.float64) * (accumulate + 1 if size == 5 else 1))
                said.append("")
            except RuntimeFailure as error:
                said.append(str(error))
    return said


@pytest.mark.slow
def test_one_line_for_a_program_of_one_batch_size(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "fixed.pt2"
    export_model(module_of("shared"), batches("shared", [5])[0], path=path)
    first = "10 tensors given to a step: expected 2 (tokens, labels)" + " for each of 1 to 4 micro-batches, one after the other"
    second = (
        "input 'tokens' has shape (3, 7): expected (5, 7), the whole batch, on every rank; "
        "the program was exported for one batch size: soap.export(..., dynamic_batch=True) makes one for all sizes"
    )
    assert four.run(refused, str(path), [5, 3], 4) == [[first, second]] * 4


def test_options_that_make_no_sense() -> None:
    with pytest.raises(RuntimeFailure, match=r"^accumulate 0, clip_norm None: expected at least 1 micro-batch and a norm above 0"):
        Trainer(None, None, accumulate=0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure, match=r"clip_norm 0\.0"):
        Trainer(None, None, clip_norm=0.0)  # type: ignore[arg-type]
