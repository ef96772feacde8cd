"""Hierarchical compression on real ranks: a host's ranks add up their gradients, and one of them compresses for all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.oracles.compression import Emulation, Training
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.regions import balanced
from soap.plan.compression.policy import settled
from soap.runtime.check import CheckResult, check
from soap.runtime.comm.redistribute import Traffic
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.trainer import Trainer
from soap.simulator.lowering import build_plan
from soap.strategy.compression import Compression, Int8, PowerSgd, Rgc, RgcAsq
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.sync import compressed
from soap.tracing.execute import TracedModel
from tests.extent import often
from tests.runtime.compressed_training import RANKS, SAMPLES
from tests.runtime.exact_modules import Trained, worst
from tests.runtime.pool import Pool
from tests.runtime.sparse_modules import OF_SIX, batch_of, module_of
from tests.runtime.sparse_plans import by_samples, hosts
from tests.runtime.test_compressed_sync import TOLERANCE, batches, require_equal_replicas
from tests.runtime.test_sync_methods import planned_bytes
from tests.runtime.traced import traced

EVEN, UNEVEN = hosts(2, 2), hosts(3, 1)
METHODS: dict[str, Compression] = {"exact": Rgc(0.3, "exact"), "asq": RgcAsq(0.2, "search"), "powersgd": PowerSgd(2), "int8": Int8()}
LAYERS = ("layer.weight", "head.weight")
CORRECTED = CompressedTraining(Momentum(0.9), WarmUp(1, 1))
SGD = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731


@pytest.fixture(scope="module")
def path() -> str:
    return OF_SIX["words"]


def strategy_of(model: TracedModel, sync: SyncConfig, names: tuple[str, ...] = LAYERS) -> Strategy:
    return by_samples(model.graph, range(RANKS), SAMPLES).with_changes(parameters=dict.fromkeys(names, sync))


def momentum_of_others(rule: Momentum, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"momentum": 0.0 if name in LAYERS else rule.factor}


def trainer_of(path: str, sync: SyncConfig, topology: Topology, compressing: CompressedTraining = AS_IT_IS, **more: Any) -> Trainer:
    model = traced(path)
    if compressing.momentum is not None:
        more["groups"] = partial(momentum_of_others, compressing.momentum)
    return Trainer(model, (strategy_of(model, sync), topology), optimizer=SGD, compressing=compressing, **more)


def trained(
    path: str, method: str, topology: Topology, steps: range, compressing: CompressedTraining, clip: float | None = None
) -> tuple[Trained, dict[int, torch.Tensor], Traffic]:
    with trainer_of(path, compressed(METHODS[method], "host"), topology, compressing, clip_norm=clip) as trainer:
        losses = [trainer.step(*batch_of(SAMPLES, step)) for step in steps]
        own = {number: tensor.detach().clone() for number, tensor in trainer.shards.tensors.items()}
        return Trained(losses, trainer.state_dict()), own, trainer.traffic


def emulated(
    path: str, method: str, per_host: int, steps: int, compressing: CompressedTraining, clip: float | None = None
) -> Trained:
    module, graph = module_of("words"), traced(path).graph
    how = {name: settled(graph, name, METHODS[method]) for name in LAYERS}  # the output layer's values are not averaged
    training = Training(0.1, compressing.momentum, warm_up=compressing.warm_up, clip_norm=clip)
    alone = Emulation(module, lambda own, part: own(*part), how, RANKS, training, per_host)
    losses = [alone.step([[t[a:b] for t in batch] for a, b in balanced(SAMPLES, RANKS)]) for batch in batches(steps)]
    return Trained(losses, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})


CASES = [(method, EVEN, 2, AS_IT_IS) for method in METHODS]
CASES += [("exact", UNEVEN, 3, AS_IT_IS), ("powersgd", UNEVEN, 3, AS_IT_IS), ("exact", EVEN, 2, CORRECTED)]


@pytest.mark.parametrize(("method", "topology", "per_host", "compressing"), CASES)
def test_hosts_lose_what_the_emulation_loses(
    four: Pool, path: str, method: str, topology: Topology, per_host: int, compressing: CompressedTraining
) -> None:
    """Two peers, whose replicas and those of their hosts' other ranks are equal to the bit; and every byte is in the plan."""
    results = four.run(trained, path, method, topology, range(8), compressing, ranks=RANKS)
    require_equal_replicas([(found, own) for found, own, _ in results])
    assert worst(results[0][0], emulated(path, method, per_host, 8, compressing)) < TOLERANCE
    if compressing is AS_IT_IS:
        model = traced(path)
        strategy = strategy_of(model, compressed(METHODS[method], "host"))
        plan = build_plan(model.graph, strategy, topology)
        sent = [own.compressed_bytes + own.handed_bytes + own.synchronized_bytes for *_, own in results]
        assert sent == [8 * planned for planned in planned_bytes(plan)]


@pytest.mark.parametrize(("clip", "topology", "per_host"), [(0.05, EVEN, 2), (0.4, UNEVEN, 3), (1e6, EVEN, 2)])
def test_hosts_clip_their_sums(four: Pool, path: str, clip: float, topology: Topology, per_host: int) -> None:
    """Of all parameters together, at N^(-1/2) of the norm, where N is the number of hosts."""
    results = four.run(trained, path, "exact", topology, range(6), AS_IT_IS, clip, ranks=RANKS)
    require_equal_replicas([(found, own) for found, own, _ in results])
    assert worst(results[0][0], emulated(path, "exact", per_host, 6, AS_IT_IS, clip)) < TOLERANCE


def refused(path: str) -> str:
    model = traced(path)
    strategy = strategy_of(model, compressed(METHODS["exact"], "host")).with_parameter("head.weight", compressed(METHODS["exact"]))
    with pytest.raises(RuntimeFailure) as found:
        Trainer(model, (strategy, EVEN), optimizer=SGD, clip_norm=1.0)
    return str(found.value)


def test_devices_and_hosts_do_not_clip_side_by_side(four: Pool, path: str) -> None:
    for line in four.run(refused, path, ranks=RANKS):
        assert line.startswith("clip_norm 1 where 'layer.weight' and 'head.weight' are compressed by other devices; expected ")


def checked(path: str, method: str, topology: Topology, spoilt: bool) -> CheckResult:
    """``spoilt``: the second host's peer gets another sum than the host has."""
    with trainer_of(path, compressed(METHODS[method], "host"), topology) as trainer:
        trainer.step(*batch_of(SAMPLES, 9))
        own = trainer.sizes.gradients.compressed
        assert own is not None
        if spoilt and trainer.rank == 2:
            whole = own._sums_of_host
            own._sums_of_host = lambda number: [each.mul_(1.5) for each in whole(number)]  # type: ignore[method-assign]
        return check(trainer, lambda step: batch_of(SAMPLES, step), SGD, steps=2)


@pytest.mark.parametrize("method", often([*METHODS], ["asq", "powersgd"]))
def test_checks_pass(four: Pool, path: str, method: str) -> None:
    for result in four.run(checked, path, method, EVEN if method != "asq" else UNEVEN, False, ranks=RANKS):
        result.require()
        assert result.compared == 2 * (1 + 5 + 5 + 2)


def test_checks_notice_another_sum(four: Pool, path: str) -> None:
    for result in four.run(checked, path, "exact", EVEN, True, ranks=RANKS):
        assert not result.passed and result.worst.kind == "compressed sum of"


def go_on(
    path: str, sync: SyncConfig, topology: Topology, steps: range, source: str | None, target: str | None
) -> tuple[Trained, dict[str, torch.Tensor], list[int]]:
    """Steps from a checkpoint to another; residuals and momenta behind the loading, added up, and how many ranks have some."""
    with trainer_of(path, sync, topology, CORRECTED) as trainer:
        if source is not None:
            trainer.load(source)
        method, kept = trainer.sizes.gradients.compressed, dict[str, torch.Tensor]()
        assert method is not None
        found = trainer.comm.gather({shard: state.summed for shard, state in method.states.items()})
        for states in found:
            for shard, summed in states.items():
                for key, value in summed.items():
                    name = f"{trainer.plan.shards[shard].parameter} {key}"
                    kept[name] = kept.get(name, torch.zeros_like(value)) + value
        losses = [trainer.step(*batch_of(SAMPLES, step)) for step in steps]
        if target is not None:
            trainer.save(target)
        return Trained(losses, trainer.state_dict()), kept, [rank for rank, states in enumerate(found) if states]


@pytest.mark.parametrize("topology", [EVEN, UNEVEN])
def test_checkpoints_hold_what_peers_keep(four: Pool, path: str, tmp_path: Path, topology: Topology) -> None:
    """The same plan goes on bit for bit. Where each device compresses, the first goes on from the sum, and back again: nothing is lost."""
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    by_host, by_device = compressed(METHODS["exact"], "host"), compressed(METHODS["exact"])
    straight = four.run(go_on, path, by_host, topology, range(10), None, None, ranks=RANKS)[0][0]
    four.run(go_on, path, by_host, topology, range(7), None, first, ranks=RANKS)
    resumed, saved, peers = four.run(go_on, path, by_host, topology, range(7, 10), first, None, ranks=RANKS)[0]
    assert resumed.losses == straight.losses[7:]
    assert all(torch.equal(tensor, straight.state[name]) for name, tensor in resumed.state.items())
    assert peers == [0, topology.devices.index(next(d for d in topology.devices if d.host == 1))]
    assert all(float(kept.abs().max()) > 0 for kept in saved.values())
    _, apart, ranks = four.run(go_on, path, by_device, topology, range(0), first, second, ranks=RANKS)[0]
    _, back, _ = four.run(go_on, path, by_host, topology, range(0), second, None, ranks=RANKS)[0]
    assert ranks == list(range(RANKS))
    for other in (apart, back):
        assert other.keys() == saved.keys()
        assert all(torch.allclose(other[name], kept, rtol=1e-12, atol=1e-15) for name, kept in saved.items())
