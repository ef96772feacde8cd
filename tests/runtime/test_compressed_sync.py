"""Compressed gradients on real ranks: every method, momentum correction, warm-up, and the check of what they compute."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.oracles.compression import Emulation, Training
from soap.errors import RuntimeFailure
from soap.model.regions import balanced, lengths
from soap.plan.compression.policy import settled
from soap.plan.compression.rgc import SparseLayout
from soap.plan.syncs.compressed import compressed_shards
from soap.runtime.check import COMPRESSED_SUM, CheckResult, check
from soap.runtime.compression import peer as peers
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.peer import CompressedTraining
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.compression import Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import compressed
from soap.tracing.execute import TracedModel
from tests.extent import often
from tests.runtime.compressed_training import RANKS, SAMPLES, train_compressed
from tests.runtime.exact_modules import Batch, Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OF_SIX, OPTIMIZERS, batch_of, module_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.traced import traced

FOUR = hosts(2, 2)
METHODS: dict[str, Compression] = {
    "exact": Rgc(0.3, "exact"),
    "trimmed": Rgc(0.2, "trimmed"),
    "policy": Rgc(0.2),
    "search": Rgc(0.2, "search"),
    "ragged": Rgc(0.2, "search", ragged=True),
    "asq": RgcAsq(0.2),
    "feedback": RgcAsq(0.2, error_feedback=True),
    "chunked": Chunked(0.01),
    "powersgd": PowerSgd(2),
    "bf16": Bf16(),
    "int8": Int8(),
}
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def path() -> str:
    return OF_SIX["words"]


def strategy_of(model: TracedModel, how: Compression) -> Strategy:
    names = [tensor.name for tensor in model.graph.parameters if tensor.name not in model.graph.sparse]
    return by_samples(model.graph, range(RANKS), SAMPLES).with_changes(parameters=dict.fromkeys(names, compressed(how)))


def batches(count: int) -> list[Batch]:
    return [batch_of(SAMPLES, step) for step in range(count)]


def trained(path: str, method: str, steps: int, compressing: CompressedTraining, correct: bool) -> tuple[Trained, dict[int, torch.Tensor]]:
    """With ``correct`` compressed parameters have no momentum in the optimizer, and the table has the same as they before."""
    model = traced(path)
    more = {"groups": partial(table_momentum, compressing.momentum)} if correct else {}
    optimizer = (lambda p: torch.optim.SGD(p, lr=0.1)) if correct else OPTIMIZERS["sgd"]
    with Trainer(model, (strategy_of(model, METHODS[method]), FOUR), optimizer=optimizer, compressing=compressing, **more) as trainer:
        losses = [trainer.step(*batch) for batch in batches(steps)]
        own = {number: tensor.detach().clone() for number, tensor in trainer.shards.tensors.items()}
        return Trained(losses, trainer.state_dict()), own


def table_momentum(rule: Momentum | None, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Groups with momentum for the table, which is not compressed."""
    assert rule is not None
    return {"momentum": rule.factor, "nesterov": rule.nesterov} if name == "words.weight" else {}


def require_equal_replicas(results: list[tuple[Trained, dict[int, torch.Tensor]]]) -> None:
    for other, own in results[1:]:
        assert other.losses == results[0][0].losses
        assert all(torch.equal(tensor, results[0][1][number]) for number, tensor in own.items())


@pytest.mark.parametrize("method", often([*METHODS], {"policy", "ragged", "feedback", "chunked", "powersgd", "int8"}))
def test_ranks_lose_what_the_compressors_lose(four: Pool, path: str, method: str) -> None:
    """And their replicas are equal to the bit."""
    results = four.run(trained, path, method, 7, CompressedTraining(), False, ranks=RANKS)
    require_equal_replicas(results)
    graph, module = traced(path).graph, module_of("words")
    how = {t.name: settled(graph, t.name, METHODS[method]) for t in graph.parameters if t.name not in graph.sparse}
    expected = train_compressed(module, [[batch] for batch in batches(7)], OPTIMIZERS["sgd"], how)
    assert worst(results[0][0], expected) < TOLERANCE
    assert isinstance(how["head.weight"], RgcAsq) is False  # the output layer


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_correction_and_warm_up(four: Pool, path: str, nesterov: bool, masking: bool) -> None:
    """One dense step, one at each of five densities, then the final one."""
    compressing = CompressedTraining(Momentum(0.9, nesterov, masking), WarmUp(1, 1))
    results = four.run(trained, path, "exact", 8, compressing, True, ranks=RANKS)
    require_equal_replicas(results)
    module, names = module_of("words"), ("layer.weight", "layer.bias", "head.weight", "head.bias")
    how = dict.fromkeys(names, METHODS["exact"])
    training = Training(0.1, compressing.momentum, warm_up=compressing.warm_up)
    alone = Emulation(module, lambda own, part: own(*part), how, RANKS, training)
    losses = [alone.step([[t[a:b] for t in batch] for a, b in balanced(SAMPLES, RANKS)]) for batch in batches(8)]
    expected = Trained(losses, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})
    assert worst(results[0][0], expected) < TOLERANCE


def refused(path: str) -> list[str]:
    model = traced(path)
    lines = []
    plain, rule = lambda p: torch.optim.SGD(p, lr=0.1), CompressedTraining(Momentum())
    nested = lambda name, shape: {} if name != "words.weight" else {"momentum": 0.9, "nesterov": True}  # noqa: E731
    damped = lambda name, shape: {} if name != "words.weight" else {"momentum": 0.9, "dampening": 0.5}  # noqa: E731
    for options in (
        {"optimizer": OPTIMIZERS["momentum"], "compressing": rule},
        {"optimizer": plain, "compressing": rule},
        {"optimizer": plain, "compressing": rule, "groups": nested},
        {"optimizer": plain, "compressing": rule, "groups": damped},
        {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1), "compressing": rule},
    ):
        with pytest.raises(RuntimeFailure) as found:
            Trainer(model, (strategy_of(model, METHODS["exact"]), FOUR), **options)  # type: ignore[arg-type]
        lines.append(str(found.value))
    return lines


def test_momentum_is_applied_once_to_each_parameter(four: Pool, path: str) -> None:
    for lines in four.run(refused, path, ranks=RANKS):
        twice, missing, nested, damped, adam = lines
        assert twice.startswith("momentum correction of 'layer.weight', whose optimizer has momentum 0.9; expected SGD with momentum 0")
        beside = "momentum correction beside 'words.weight', which is not compressed and whose optimizer has momentum "
        for line, own in ((missing, "0"), (nested, "0.9, nesterov"), (damped, "0.9, dampening 0.5")):
            assert line.startswith(f"{beside}{own}; expected SGD with momentum 0.9 for such parameters")
        assert "optimizer has no option 'momentum'; expected SGD with momentum" in adam


def refused_everywhere(path: str) -> str:
    """Of a plan whose only compressed parameter is on ranks 0 and 1."""
    model = traced(path)
    strategy = by_samples(model.graph, range(RANKS), SAMPLES).with_changes(parameters={"head.weight": compressed(METHODS["exact"])})
    [op] = [op for op in model.graph.operators if any(use.tensor == "head.weight" for use in op.parameters)]
    first = next(number for number, factor in enumerate(op.factors) if factor.size == SAMPLES)
    degrees = tuple(2 if number == first else 1 for number in range(len(op.factors)))
    strategy = strategy.with_operator(op.name, OpConfig(degrees, (0, 1)))
    with pytest.raises(RuntimeFailure) as found:
        Trainer(model, (strategy, FOUR), optimizer=OPTIMIZERS["momentum"], compressing=CompressedTraining(Momentum()), timeout_s=10)
    return str(found.value)


def test_ranks_without_the_parameter_refuse_it_too(four: Pool, path: str) -> None:
    lines = four.run(refused_everywhere, path, ranks=RANKS)
    assert len(set(lines)) == 1 and lines[0].startswith("momentum correction of 'head.weight', whose optimizer has momentum 0.9; expected")


def disagreeing(path: str, name: str, own: object) -> str:
    """Rank 1 has another value of an option than the others."""
    model, more = traced(path), {name: own} if dist.get_rank() == 1 else {}
    with pytest.raises(RuntimeFailure) as found:
        Trainer(model, (strategy_of(model, METHODS["exact"]), FOUR), timeout_s=10, **more)  # type: ignore[arg-type]
    return str(found.value)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("compressing", CompressedTraining(None, WarmUp(2))),
        ("compressing", CompressedTraining(Momentum(0.9))),
        ("seed", 3),
        ("lazy_sparse", True),
        ("accumulate", 2),
    ],
)
def test_ranks_that_train_otherwise_are_refused(four: Pool, path: str, name: str, own: object) -> None:
    """With another warm-up ranks would wait for each other, or add up what does not belong together; with another seed dropout differs."""
    lines = four.run(disagreeing, path, name, own, ranks=RANKS)
    assert len(set(lines)) == 1 and "\n" not in lines[0]
    assert lines[0].startswith(f"rank 1 trains with {name} {own}, rank 0 with ") and "expected the same on all ranks" in lines[0]


def counted(path: str) -> tuple[int, list[list[int]]]:
    """Bytes of compressed gradients that a rank has moved in three steps; of each step the lengths of its messages."""
    model, lengths = traced(path), []
    with Trainer(model, (strategy_of(model, METHODS["ragged"]), FOUR), optimizer=OPTIMIZERS["sgd"]) as trainer:
        own = trainer.sizes.gradients.compressed
        assert own is not None
        for batch in batches(3):
            trainer.step(*batch)
            sent = [own.peers[shard].sent for shard in sorted(own.peers)]
            lengths.append([len(one.positions) for one in sent if one is not None])
        return trainer.traffic.compressed_bytes, lengths


def test_only_real_lengths_travel(four: Pool, path: str) -> None:
    """Each rank sends its messages to three others, and gets theirs; behind the sizes, of eight bytes each."""
    model = traced(path)
    plan = build_plan(model.graph, strategy_of(model, METHODS["ragged"]), FOUR)
    layouts = []
    for shard, sync in compressed_shards(plan).items():
        assert isinstance(sync.compression, Rgc)
        layouts.append(SparseLayout.of(sync.compression, lengths(plan.shards[shard].box), 8, RANKS))
    results = four.run(counted, path, ranks=RANKS)
    for rank, (found, _) in enumerate(results):
        expected = 0
        for other, (_, steps) in enumerate(results):
            sizes = [layout.holding(count).row_bytes for own in steps for layout, count in zip(layouts, own, strict=True)]
            expected += (3 if other == rank else 1) * sum(8 + size for size in sizes)
        assert found == expected
    assert len({tuple(map(tuple, steps)) for _, steps in results}) > 1  # lengths differ


def checked(path: str, method: str, spoilt: bool) -> CheckResult:
    """``spoilt``: rank 2 adds something of its own to what it sends in the second step."""
    model = traced(path)
    with Trainer(model, (strategy_of(model, METHODS[method]), FOUR), optimizer=OPTIMIZERS["sgd"]) as trainer:
        trainer.step(*batch_of(SAMPLES, 9))
        whole = peers.Peer.course

        def other(self: peers.Peer, gradient: torch.Tensor) -> peers.Course:
            own = gradient + 1e-3 if trainer.rank == 2 and self.state.numbers["steps"] == 2 else gradient
            return (yield from whole(self, own))

        with patch.object(peers.Peer, "course", other if spoilt else whole):
            return check(trainer, lambda step: batch_of(SAMPLES, step), OPTIMIZERS["sgd"], steps=3)


@pytest.mark.parametrize("method", often([*METHODS], ["policy", "powersgd", "int8"]))
def test_checks_pass(four: Pool, path: str, method: str) -> None:
    for result in four.run(checked, path, method, False, ranks=RANKS):
        result.require()
        assert result.compared == 3 * (1 + 5 + 5 + 4)  # loss, gradients, parameters, compressed sums


def test_checks_notice_a_rank_that_sends_something_else(four: Pool, path: str) -> None:
    for result in four.run(checked, path, "exact", True, ranks=RANKS):
        assert not result.passed and result.worst.kind == COMPRESSED_SUM and result.worst.step == 2
