"""Strategies of servers and workers, read as plans for workers without state, and the way back.

Such a strategy (``soap.strategy.served``) splits the samples over the workers' devices, looks tables up at their servers, and has servers
keep all else that is trained. Each tile of the samples is a worker: read as a plan, its part of a step is a lease of its own. Which servers
have a piece of the dense variables a strategy does not say, only how many: they are the first ones, by their devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from soap.elastic.launcher import Options, Reduction
from soap.elastic.layout import ElasticPlan, TableCut
from soap.errors import StrategyError
from soap.model.batch import sample_factor, samples_of
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from soap.strategy.consistency import parse
from soap.strategy.marks import require_unmarked
from soap.strategy.served import TableAt, configured, look_ups, served


def plan_of(strategy: Strategy, graph: OperatorGraph) -> ElasticPlan:
    """What the strategy plans for servers and workers. StrategyError in one line, naming the operator, if it is not of that form."""
    if strategy.workers is not None:
        raise StrategyError(
            f"the strategy has {len(strategy.workers.groups)} virtual workers; expected none: workers without state compute "
            "their lease on one device"
        )
    tables = dict(configured(graph, strategy))
    if not tables:
        raise StrategyError(
            "no table is looked up at servers: all sparse parameters, if there are any, are synchronized by servers; expected a strategy "
            "like those of soap-simulate --builtin bipartite"
        )
    _require_plain(graph, strategy)
    at_servers = {use.operator for name in tables for use in look_ups(graph, name)}
    workers = _workers(graph, strategy, at_servers)
    samples = samples_of(graph) or 0
    if samples % len(workers):
        raise StrategyError(f"{samples} samples over {len(workers)} workers; expected a number that divides them: leases are equal")
    servers = tuple(sorted({device for place in tables.values() for device in place.parts_at}))
    number = {device: place for place, device in enumerate(servers)}
    cuts = {name: TableCut(place.axis, tuple(number[device] for device in place.parts_at)) for name, place in tables.items()}
    pieces = _pieces(graph, strategy, tables)
    dense = tuple(range(min(pieces, len(servers))))
    return ElasticPlan(workers, servers, cuts, dense, samples // len(workers), parse(strategy.consistency))


def strategy_of(plan: ElasticPlan, graph: OperatorGraph) -> Strategy:
    """The strategy that means this plan: ``plan_of`` gives ``in_order(plan)`` back. StrategyError if none can say it for this model."""
    plan = in_order(plan)
    samples = samples_of(graph) or 0
    if plan.batch * len(plan.workers) != samples:
        raise StrategyError(f"{len(plan.workers)} workers with {plan.batch} samples each; expected the model's {samples} samples together")
    tables = {name: TableAt(cut.axis, tuple(plan.servers[server] for server in cut.servers)) for name, cut in plan.tables.items()}
    for name, place in tables.items():
        look_ups(graph, name)
        size = graph.tensors[name].shape[place.axis]
        if not 1 <= len(place.parts_at) <= size:
            raise StrategyError(f"table {name!r} in {len(place.parts_at)} parts along axis {place.axis}; expected 1 to {size}")
    trained = [tensor.name for tensor in graph.parameters if tensor.requires_grad and tensor.name not in tables]
    if bool(trained) != bool(plan.dense):
        expected = f"one at least, for {trained[0]!r}" if trained else "none: all that is trained is a table"
        raise StrategyError(f"{len(plan.dense)} servers have pieces of the dense variables; expected {expected}")
    return served(graph, plan.workers, tables, len(plan.dense), str(plan.consistency))


def in_order(plan: ElasticPlan) -> ElasticPlan:
    """The same plan as ``plan_of`` writes it: servers by their devices, only those with a part of a table, and axis 0 where a table is in
    one part. StrategyError in one line if dense variables are elsewhere than on the first servers, or devices come twice."""
    for what, devices in (("workers", plan.workers), ("servers", plan.servers)):
        if not devices or len({*devices}) < len(devices):
            raise StrategyError(f"{what} on devices {list(devices)}; expected one on each, and one at least")
    used = sorted({server for cut in plan.tables.values() for server in cut.servers}, key=lambda server: plan.servers[server])
    number = {server: place for place, server in enumerate(used)}
    dense = tuple(sorted(number.get(server, -1) for server in plan.dense))
    if dense != tuple(range(len(dense))):
        raise StrategyError(
            f"dense variables are on servers {list(plan.dense)}; expected those on the first devices of the servers that have tables, as "
            "strategies say their number alone"
        )
    cuts = {
        name: TableCut(cut.axis if len(cut.servers) > 1 else 0, tuple(number[server] for server in cut.servers))
        for name, cut in plan.tables.items()
    }
    return replace(plan, servers=tuple(plan.servers[server] for server in used), tables=cuts, dense=dense)


def options_of(
    plan: ElasticPlan,
    *,
    machines: Sequence[int] = (),
    epochs: int = 1,
    steps: int | None = None,
    seed: int = 0,
    shuffled: bool = True,
    batch: int | None = None,
    reduce: Mapping[str, Reduction] | None = None,
) -> Options:
    """The launcher's options for a plan. ``machines``: by device, the number of its machine. ``batch``: of a lease, if the data counts
    something else than samples. ``reduce``: of ``dense``, ``sparse``."""
    reductions = reduce or {}
    return Options(
        batch=plan.batch if batch is None else batch,
        epochs=epochs,
        steps=steps,
        shuffled=shuffled,
        workers=len(plan.workers),
        servers=len(plan.servers),
        tables=plan.tables,
        dense=plan.dense,
        bound=plan.consistency.bound,
        averaged=not plan.consistency.stale,
        reduce_dense=reductions.get("dense", "mean"),
        reduce_sparse=reductions.get("sparse", "mean"),
        worker_machines=tuple(machines[device] for device in plan.workers) if machines else None,
        server_machines=tuple(machines[device] for device in plan.servers) if machines else None,
        seed=seed,
    )


def _require_plain(graph: OperatorGraph, strategy: Strategy) -> None:
    """StrategyError if the strategy asks for what workers without state do not do."""
    if strategy.microbatches > 1 or strategy.stages or strategy.schedule is not None:
        raise StrategyError("the strategy has micro-batches or stages; expected none: a worker computes its lease at once")
    require_unmarked(graph, strategy, "workers hold no state")


def _workers(graph: OperatorGraph, strategy: Strategy, at_servers: set[int]) -> tuple[int, ...]:
    """The workers' devices: those of the tiles of the operator with most samples. All others must have them, too."""
    dense = [op for position, op in enumerate(graph.operators) if position not in at_servers]
    divided = [(op, factor, strategy.operators[op.name]) for op in dense if (factor := sample_factor(op)) is not None]
    if not divided:
        raise StrategyError(f"model {graph.name!r} has no operator with samples beside its look-ups; expected one, to divide among workers")
    first, factor, config = max(divided, key=lambda own: own[2].degrees[own[1]])  # the first of several
    workers = config.devices
    if len({*workers}) < len(workers):
        raise StrategyError(f"operator {first.name!r} has several tiles on one device; expected one worker on each of its devices")
    expected = f"expected samples in {len(workers)} parts on devices {_few(workers)}, the workers, and nothing else split"
    for op, factor, own in divided:
        wanted = [1] * len(own.degrees)
        wanted[factor] = min(len(workers), op.factors[factor].size)
        if [*own.degrees] != wanted or (wanted[factor] == len(workers) and own.devices != workers) or not {*own.devices} <= {*workers}:
            split = ", ".join(f"{f.name}:{degree}" for f, degree in zip(op.factors, own.degrees, strict=True) if degree > 1) or "nothing"
            raise StrategyError(f"operator {op.name!r} is split by {split} on devices {_few(own.devices)}; {expected}")
    for op in dense:
        if sample_factor(op) is None and not {*strategy.operators[op.name].devices} <= {*workers}:
            raise StrategyError(f"operator {op.name!r} is on devices {_few(strategy.operators[op.name].devices)}; {expected}")
    return workers


def _pieces(graph: OperatorGraph, strategy: Strategy, tables: Mapping[str, TableAt]) -> int:
    """In how many pieces servers have the dense variables; 0 if there are none."""
    found: dict[int, str] = {}
    for tensor in graph.parameters:
        if not tensor.requires_grad or tensor.name in tables:
            continue
        sync = strategy.sync(tensor.name)
        if not sync.contract.has_servers:
            raise StrategyError(f"parameter {tensor.name!r} is synchronized by {sync.word}; expected servers to own it: parameter_server")
        found.setdefault(sync.partitions, tensor.name)
    if len(found) > 1:
        (one, first), (other, second) = [*found.items()][:2]
        raise StrategyError(
            f"parameter {first!r} is in {one} partitions, {second!r} in {other}; expected one number for all, which lie end to end"
        )
    return next(iter(found), 0)


def _few(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices[:6])) + (", …" if len(devices) > 6 else "")
