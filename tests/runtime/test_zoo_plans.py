"""680 pairs of a zoo model and a random strategy on two to four ranks: loss, gradients, parameters and buffers are those of plain PyTorch.

Every 39th is run, which takes in each model, with other plans; all of them by `make test-all`. A failing pair is repeated by its name:
``SOAP_TESTS=all python -m pytest "tests/runtime/test_zoo_plans.py::test_pair[gpt-17]"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from soap.cluster.presets import local_topology
from soap.runtime.check import TOLERANCES
from soap.strategy.classical import LONG_CONTEXT
from soap.tracing.load import DTYPES
from soap.zoo import names
from tests.extent import every, often
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced
from tests.runtime.zoo_pairs import STEPS, Pair, train_pair

PAIRS_PER_MODEL = 40


def pairs() -> Iterator[Pair]:
    for model in names():
        for number in range(PAIRS_PER_MODEL):
            yield Pair(model, number, PAIRS_PER_MODEL)


LARGE = ("inception_v3", "nmt_gnmt", "resnet50", "resnet101", "resnet152", "vgg16", "vgg19")
"""Of the same operators as smaller ones, and many of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=f"{pair.model}-{pair.number}", marks=pytest.mark.long if pair.model in LARGE else ())
        for pair in every(73, list(pairs()))
    ],
)
def test_pair(four: Pool, pair: Pair, record_property: Callable[[str, object], None]) -> None:
    answers = four.run(train_pair, pair, ranks=pair.ranks)
    worst, tolerance = answers[0][1], TOLERANCES[DTYPES[pair.dtype]]
    record_property("tally", ["zoo models under random strategies: worst error", f"{pair.model} {pair.dtype}", worst.error])
    assert [losses for losses, _ in answers] == [answers[0][0]] * pair.ranks
    assert len(answers[0][0]) == STEPS[pair.dtype]
    assert worst.error <= tolerance, f"{worst.what} is off by {worst.error:.2e}, expected at most {tolerance:.0e}: {pair}"


@pytest.mark.parametrize("kind", LONG_CONTEXT)
@pytest.mark.parametrize("name", often(names(), ("gpt",)))
def test_split_sequences(four: Pool, name: str, kind: str) -> None:
    spec = f"zoo:{name}:tiny"
    topology = local_topology(4)
    result = four.run(checked, spec, "float64", LONG_CONTEXT[kind](traced(spec, "float64").graph, topology), topology)[0]
    assert result.passed, result.worst


def test_pairs_are_680_on_two_to_four_ranks() -> None:
    drawn = list(pairs())
    assert len(set(drawn)) == 680
    assert {pair.ranks for pair in drawn} == {2, 3, 4}
    assert sum(pair.dtype == "float64" for pair in drawn) == 544
