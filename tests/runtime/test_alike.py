"""Batches that differ between ranks behind the first one end the run in one line, whatever they are for and however they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from soap.errors import RuntimeFailure
from soap.runtime.comm.position import HERE
from soap.runtime.inputs import EACH, EVERY, HASHES, WORDS, PartBatch, hashed
from soap.runtime.trainer import Trainer, mean_loss
from tests.graph_builder import mlp
from tests.runtime.cases import optimizer
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split
from tests.runtime.pool import Pool

SAID = "; expected the same whole batch on every rank, or the same samples where ranks read parts of it: seed the data source equally"


def run(steps: int, last: str) -> tuple[int, int, str]:
    """Rank 1 reads all of "x", ranks 0 and 2 a half each. So many equal batches, then one in the way that ``last`` says. Returns the steps
    done, how often hashes were compared, and the failure."""
    plan = plan_of(mlp(batch=8), split((0, 1), b=2), fc0=split((0, 1, 1, 2), 2, b=2), cross_entropy=split((0, 1, 2), b=3))
    torch.manual_seed(0)
    HERE.enter(0)  # an earlier run has failed within a step
    model, compared, plain = HandModel(plan.graph), 0, dist.all_reduce

    def counted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        nonlocal compared
        compared += op == dist.ReduceOp.MAX
        return plain(tensor, op=op, **options)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        with Trainer(model, plan, optimizer=optimizer, dtype=torch.float64) as trainer:

            def given(number: int) -> Any:
                whole = model.inputs(number)
                return [PartBatch.cut(whole, trainer.samples())] if "part" in last else whole

            def evaluate(*inputs: Any) -> float:  # not by ``Trainer.evaluate``: this model has dropout
                return mean_loss(trainer, trainer.sizes, trainer.given_batches(trainer.sizes, inputs, "evaluation"))

            act: Callable[..., float] = evaluate if "evaluate" in last else trainer.step
            try:
                for number in range(steps):
                    act(*given(number))
                batch = given(steps + (trainer.rank if last.startswith("other") else 0))
                act(*(own.half() if "half" in last and own.is_floating_point() else own for own in batch))
            except RuntimeFailure as error:
                return trainer.steps, compared, str(error)
            return trainer.steps, compared, ""
    finally:
        dist.all_reduce = plain


@pytest.mark.parametrize(
    ("last", "said", "done"),
    [
        ("other batch", "batches in step 2", 1),
        ("other part", "samples 0 to 3 of input 'x' in step 2", 2),  # its message is waited for behind the step
        ("other batch to evaluate", "batches", 0),
    ],
)
def test_the_second_batch_must_be_the_same(pool: Pool, last: str, said: str, done: int) -> None:
    found = pool.run(run, 1, last)
    assert len(set(found)) == 1, "all ranks say the same"
    steps, _, failure = found[0]
    assert failure.endswith(f" were given other {said}{SAID}") and failure.startswith("ranks ")
    assert steps == done


def test_a_batch_of_no_use_is_told_before_batches_are_compared(pool: Pool) -> None:
    said = "input 'x' has dtype float16 in step 2: expected a tensor of dtype float32 or float64; convert it first"
    assert set(pool.run(run, 1, "other in half precision")) == {(1, 0, said)}


@pytest.mark.parametrize(("last", "messages"), [("batch", 1), ("part", 2)])
def test_few_messages_compare_equal_batches(pool: Pool, last: str, messages: int) -> None:
    steps = EACH + 3 * EVERY
    _, compared, failure = pool.run(run, steps, last)[0]
    assert (compared, failure) == (messages * (EACH - 1 + 4), "")


def test_a_hash_depends_on_values_places_and_shapes_alone() -> None:
    numbers = torch.randn(7, 5)
    swapped = numbers[[1, 0, *range(2, 7)]]
    assert int(hashed([numbers], 1)) == int(hashed([numbers.clone().T.contiguous().T], 1))
    others = [hashed([swapped], 1), hashed([numbers], 2), hashed([numbers, numbers], 1), hashed([numbers.double()], 1)]
    assert len({int(own) for own in (hashed([numbers], 1), *others)}) == 5
    for kind in (torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.complex64):
        zeros, ones = torch.zeros(3).to(kind), torch.tensor([0, 0, 1]).to(torch.float32).to(kind)
        assert 0 <= int(hashed([zeros], 0)) < HASHES and int(hashed([zeros], 0)) != int(hashed([ones], 0))
    assert int(hashed([torch.zeros(0)], 0)) != int(hashed([], 0))


def test_samples_of_large_batches_count_wherever_they_are() -> None:
    batch = torch.zeros(64, WORDS)
    for sample in (0, 31, 63):
        other = batch.clone()
        other[sample] = 1.0
        assert int(hashed([batch], 0)) != int(hashed([other], 0))
