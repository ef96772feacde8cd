"""A parallelization strategy: one ``OpConfig`` per operator, one ``SyncConfig`` per parameter. Immutable; edits return a new one.

Construction checks what needs no graph; ``Strategy.validate`` checks the rest against a graph and a number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Self

from soap.errors import StrategyError
from soap.model.batch import MAX_MICROBATCHES, MicroBatches
from soap.model.graph import KEEP_STATE, LOCAL_BATCH_NORM, NEXT_STATE, Operator, OperatorGraph
from soap.model.json_text import Form, Schema
from soap.model.regions import proportional
from soap.schedules.named import parse
from soap.strategy import consistency as consistencies
from soap.strategy.compression import COMPRESSIONS, Compression
from soap.strategy.marks import MARKS, mark_of, require_allowed, require_one, with_value
from soap.strategy.recomputation import LEVEL_FORM, STAYS
from soap.strategy.shares import Shares, lowest_terms, said_shares, weights_of
from soap.strategy.stages import Chunk, require_numbers, require_stages, said_stages
from soap.strategy.sync_contracts import (
    COMPRESSED,
    MAX_PARTITIONS,
    MAX_PREFETCH,
    METHODS,
    Contract,
    Owner,
    Residence,
    Within,
    find_contract,
)
from soap.strategy.workers import Workers, require_workers, said_workers

MAX_NUMBER = 2**31
"""Upper limit of degrees, replicas and sizes in files: above any real value, and small enough to compute with."""
Name = Annotated[str, Schema(minLength=1, maxLength=1000)]
Word = Annotated[str, Schema(minLength=1, maxLength=40)]


@dataclass(frozen=True, slots=True)
class OpConfig:
    """How one operator is split and placed.

    ``degrees``: parts per factor, in the operator's factor order. ``replicas``: how many times the whole grid of tiles is computed.
    ``devices``: one device per tile, row-major over (replica, factor 0, factor 1, …); a device may occur more than once. ``recompute``:
    what the operator makes is not kept for the backward pass, but made again then: all of it (``RECOMPUTED``), or all but its products
    (``LIGHT``, ``soap.strategy.recomputation``), each also with what it gathers, or that alone (``GATHERING``). ``offload``:
    what it keeps for its backward pass is in its host's memory until then (``soap.plan.marks.offload``). ``shares``: for each factor that
    is split, in order, whole numbers in whose proportion its parts are
    (``regions.proportional``), () for equal parts; nothing at all if all are equal. They are kept in lowest terms. StrategyError if these
    do not agree, or several marks are asked for.
    """

    degrees: tuple[int, ...]
    devices: tuple[int, ...]
    replicas: Annotated[int, Schema(minimum=1, maximum=MAX_NUMBER)] = 1
    recompute: Annotated[int, LEVEL_FORM] = STAYS
    offload: bool = False
    shares: Annotated[Shares, Schema(minItems=1), Form(say=said_shares)] = ()

    def __post_init__(self) -> None:
        if min(self.degrees, default=1) < 1 or self.replicas < 1:
            raise StrategyError(f"degrees {self.degrees} and replicas {self.replicas}: expected whole numbers of at least 1")
        if len(self.devices) != prod(self.degrees) * self.replicas:
            raise StrategyError(
                f"{len(self.devices)} devices for degrees {self.degrees} and {self.replicas} replicas: "
                f"expected {prod(self.degrees) * self.replicas}, one per tile"
            )
        if min(self.devices) < 0:
            raise StrategyError(f"devices {self.devices}: expected non-negative device numbers")
        if self.shares:
            object.__setattr__(self, "shares", lowest_terms(self.degrees, self.shares))
        require_one(self)

    @property
    def weights(self) -> Shares:
        """For each factor the numbers in whose proportion its parts are, one for each part."""
        return weights_of(self.degrees, self.shares)

    def marked(self, field: str, value: object) -> Self:
        """A copy with this value of a mark's field; if that is not the default, without any other mark."""
        return with_value(self, field, value)

    def placed(self, degrees: tuple[int, ...], devices: tuple[int, ...], replicas: int = 1, shares: Shares = ()) -> Self:
        """A copy with these degrees, devices, replicas and shares; other fields stay. Returns itself if nothing changes."""
        if (self.degrees, self.devices, self.replicas, self.shares) == (degrees, devices, replicas, shares):
            return self
        return replace(self, degrees=degrees, devices=devices, replicas=replicas, shares=shares)

    def placed_like(self, other: OpConfig) -> Self:
        """A copy with the degrees, devices, replicas and shares of ``other``; other fields stay. Returns itself if nothing changes."""
        return self.placed(other.degrees, other.devices, other.replicas, other.shares)


FLOATING = ("float32", "bfloat16", "float16", "float64")
"""Types of gradients that can be compressed."""


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """How a parameter's shards are synchronized. ``soap.strategy.sync_contracts`` lists the combinations of fields that a method serves.

    ``owner``: who holds the updated value and the optimizer's state. ``payload``: what of a gradient travels. ``residence``: whether
    readers keep the value between uses. ``within``: what is done inside a host first. ``partitions``: into how many parts, by rows, servers
    cut a shard. ``compression``: how gradients are compressed, with payload ``compressed`` alone. ``offload``: owners keep the
    optimizer's state in their host's memory: gradients are copied there, the host's cores update, and values come back (ZeRO-Offload:
    Ren et al., USENIX ATC 2021). The default is an all-reduce of gradients; ``soap.strategy.sync`` has names for the usual combinations.
    StrategyError if no method serves the combination.
    """

    owner: Owner = "readers"
    payload: Annotated[str, Schema(enum=list(dict.fromkeys(own.payload for own in METHODS)))] = "dense"
    residence: Residence = "kept"
    within: Within = "none"
    partitions: Annotated[int, Schema(minimum=1, maximum=MAX_PARTITIONS)] = 1
    compression: Compression | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        contract = self.contract
        if contract.compresses != (self.compression is not None):
            found = "without a compression" if self.compression is None else f"with compression {self.compression.word!r}"
            expected = f"one of {', '.join(COMPRESSIONS)}" if self.compression is None else f"payload {COMPRESSED!r}"
            raise StrategyError(f"payload {self.payload!r} {found}; expected {expected}")
        said = f"synchronization by {self.word}"
        if self.within not in contract.within:
            expected = " or ".join(map(repr, contract.within))
            raise StrategyError(f"{said}: within {self.within!r}, expected {expected} ('host': local aggregation)")
        if not 1 <= self.partitions <= contract.most_partitions:
            allowed = "1 to " * (contract.most_partitions > 1) + str(contract.most_partitions)
            raise StrategyError(f"{said} in {self.partitions} partitions: expected {allowed}")
        if self.offload and not contract.offloads:
            able = ", ".join(dict.fromkeys(own.word for own in METHODS if own.offloads))
            raise StrategyError(f"{said} with offload: expected one of {able}; leave offload out, or use one of these")

    @property
    def contract(self) -> Contract:
        """The contract of the method that serves this combination."""
        return find_contract(self.owner, self.payload, self.residence)

    @property
    def word(self) -> str:
        """What commands and reports call it."""
        return self.contract.host_word if self.within == "host" and self.contract.host_word else self.contract.word

    def require_serves(self, parameter: str, graph: OperatorGraph) -> None:
        """StrategyError if its method does not serve this parameter."""
        contract, sparse = self.contract, parameter in graph.sparse
        if not contract.serves(sparse=sparse):
            raise StrategyError(
                f"parameter {parameter!r} is {'sparse' if sparse else 'dense'}; expected {contract.word} with payload {self.payload!r} for "
                f"{contract.parameters} parameters only: {_some(graph)}"
            )
        if contract.compresses and graph.tensors[parameter].dtype not in FLOATING:
            found = f"parameter {parameter!r} has type {graph.tensors[parameter].dtype}"
            raise StrategyError(f"{found}; expected {', '.join(FLOATING)}: others are not compressed")


WORDED = ("owner", "payload", "residence", "within", "partitions")
"""Fields of ``SyncConfig`` that people are told in words (``parameter_server in 4 partitions with local aggregation``)."""

_USUAL_SYNC = SyncConfig()

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""No changes."""


@dataclass(frozen=True)
class Strategy:
    """{operator name: OpConfig} and {parameter name: SyncConfig}; parameters without an entry use the default SyncConfig.

    ``prefetch``: of values that readers have only for their uses, how many groups may be gathered while an earlier one is used.
    ``microbatches``: in how many parts along the samples each device runs a step (``soap.model.batch``). ``stages``: by the name of
    the operator that it begins with, a chunk of a pipeline (``soap.strategy.stages``). ``schedule``: the order in which devices run the
    passes of micro-batches, such as ``1f1b`` or ``interleaved:2`` (``soap.schedules.named``); None: one micro-batch after the other, or all
    together through operators that need several of them. ``consistency``: how far the tiles of the samples may be apart, each a worker with
    batches of its own (``soap.strategy.consistency``); ``sync``: not at all, which is one exact step of all. ``workers``: these are
    pipelines, on these devices (``soap.strategy.workers``). StrategyError unless prefetch is 0 to ``MAX_PREFETCH``, microbatches 1 to
    ``MAX_MICROBATCHES``, schedule and consistency some that are known; and if there are workers without a bound or ``async``.
    """

    operators: Mapping[str, OpConfig]
    parameters: Mapping[str, SyncConfig] = field(default_factory=dict)
    prefetch: Annotated[int, Schema(minimum=0, maximum=MAX_PREFETCH)] = 1
    microbatches: Annotated[int, Schema(minimum=1, maximum=MAX_MICROBATCHES)] = 1
    stages: Annotated[Mapping[Name, Chunk], Form(say=said_stages)] = field(default_factory=dict)
    schedule: Word | None = None
    consistency: Word = consistencies.SYNC
    workers: Annotated[Workers, Form(say=said_workers)] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "consistency", str(consistencies.parse(self.consistency)))
        if not 1 <= self.microbatches <= MAX_MICROBATCHES:
            raise StrategyError(f"microbatches {self.microbatches}: expected 1 to {MAX_MICROBATCHES}, parts of a step's samples")
        if not 0 <= self.prefetch <= MAX_PREFETCH:
            raise StrategyError(f"prefetch {self.prefetch}: expected 0 to {MAX_PREFETCH}, the groups of values to gather ahead")
        if self.workers is not None and not self.stale:
            raise StrategyError(
                f"workers with consistency {self.consistency}: minibatches in flight are never in step; expected {consistencies.BOUNDED}D, "
                f"{consistencies.BOUNDED}0 for the tightest, or {consistencies.ASYNC}"
            )
        require_numbers(self.stages)
        if self.schedule is not None:
            parse(self.schedule)
        for name in ("operators", "parameters", "stages"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[object, ...]:
        values = {own.name: getattr(self, own.name) for own in fields(self)}
        plain = {name: dict(value) if isinstance(value, MappingProxyType) else value for name, value in values.items()}
        return (_rebuilt, (type(self), plain))

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from soap.strategy.rich_display import strategy_html  # which reads files' fields, and so this module

        return strategy_html(self)

    def with_changes(self, operators: Mapping[str, OpConfig] = NOTHING, parameters: Mapping[str, SyncConfig] = NOTHING) -> Self:
        """A copy with other configurations of some operators, and other synchronizations of some parameters."""
        configs = {**self.operators, **operators} if operators else self.operators
        syncs = {**self.parameters, **parameters} if parameters else self.parameters
        return replace(self, operators=configs, parameters=syncs)

    def with_operator(self, name: str, config: OpConfig) -> Self:
        """A copy with one operator's configuration replaced."""
        return self.with_changes({name: config})

    def with_parameter(self, name: str, sync: SyncConfig) -> Self:
        """A copy with one parameter's synchronization replaced."""
        return self.with_changes(parameters={name: sync})

    def sync(self, parameter: str) -> SyncConfig:
        """The parameter's synchronization."""
        return self.parameters.get(parameter, _USUAL_SYNC)

    @property
    def stale(self) -> bool:
        """Whether workers may read values that lack others' updates: no step of the whole batch is computed then."""
        return consistencies.parse(self.consistency).stale

    def require_exact(self) -> None:
        """StrategyError if it is stale."""
        if self.stale:
            raise StrategyError(
                f"consistency {self.consistency}: the strategy is stale, so that no step of the whole batch is computed; expected "
                f"{consistencies.SYNC} here: soap-run trains stale ones with servers and workers"
            )

    def validate(self, graph: OperatorGraph, device_count: int, *, empty_tiles: bool = False) -> None:
        """Raise StrategyError naming the first thing that is illegal for this graph and number of devices.

        ``empty_tiles``: allow cutting a factor into more parts than it has elements; some parts are then empty.
        """
        missing = [op.name for op in graph.operators if op.name not in self.operators]
        unknown = [name for name in self.operators if name not in graph.index]
        if missing or unknown:
            raise StrategyError(
                f"strategy does not fit model {graph.name!r}: "
                f"{len(missing)} operators without configuration {missing[:3]}, {len(unknown)} unknown operators {unknown[:3]}; "
                "search again for this model"
            )
        for op in graph.operators:
            check_config(op, self.operators[op.name], device_count, empty_tiles=empty_tiles)
            require_allowed(graph, op, self.operators[op.name])
        known = {t.name for t in graph.parameters}
        for name, sync in self.parameters.items():
            if name not in known:
                raise StrategyError(f"strategy names parameter {name!r}, which model {graph.name!r} does not have")
            sync.require_serves(name, graph)
        if self.stages or self.schedule is not None:
            require_stages(graph, self.stages, self.schedule, self.operators)
        if self.workers is not None:
            require_workers(graph, self, self.workers, device_count)
        if self.microbatches > 1:
            self._require_parts(graph, empty_tiles=empty_tiles)

    def _require_parts(self, graph: OperatorGraph, *, empty_tiles: bool) -> None:
        """StrategyError unless the samples, and the configurations, may be cut into micro-batches."""
        cut, count = MicroBatches(graph, self.microbatches), self.microbatches
        if cut.samples is None and not empty_tiles:
            raise StrategyError(f"microbatches {count}: model {graph.name!r} has no dimension of samples; expected 1")
        if count > (cut.samples or count) and not empty_tiles:
            raise StrategyError(f"microbatches {count}: model {graph.name!r} has {cut.samples} samples per step; expected at most so many")
        local = next((op.name for op in graph.operators if op.kind == LOCAL_BATCH_NORM), None)
        if local is not None:
            raise StrategyError(
                f"microbatches {count}: operator {local!r} normalizes each tile by itself (batch_norm='local'), so they would change what "
                "is computed; expected 1, or batch norm over the whole batch"
            )
        for position, op in enumerate(graph.operators if not empty_tiles else ()):
            check_parts(cut, position, self.operators[op.name])


def _rebuilt(kind: type[Strategy], values: Mapping[str, Any]) -> Strategy:
    """What pickle calls: ``MappingProxyType`` cannot be pickled."""
    return kind(**values)


def _some(graph: OperatorGraph) -> str:
    """The sparse parameters in words."""
    names = list(graph.sparse)
    return "this model has no sparse ones" if not names else f"sparse are {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def check_config(op: Operator, config: OpConfig, device_count: int, *, empty_tiles: bool = False) -> None:
    """Raise StrategyError if the configuration is illegal for the operator."""
    if len(config.degrees) != len(op.factors):
        raise StrategyError(
            f"operator {op.name!r}: {len(config.degrees)} degrees given, expected {len(op.factors)} "
            f"({', '.join(f.name for f in op.factors)})"
        )
    for factor, degree in zip(op.factors, config.degrees, strict=True):
        if degree > factor.size and not empty_tiles:
            raise StrategyError(
                f"operator {op.name!r}: degree {degree} of factor {factor.name!r} exceeds its size {factor.size}; lower the degree"
            )
    if config.shares and not empty_tiles:
        _require_no_empty(op, config)
    settled = settled_config(op, device_count)
    if settled is not None and config.placed_like(settled) is not config:
        raise StrategyError(
            f"operator {op.name!r} {_SETTLED[op.kind]}: expected devices {_few(settled.devices)}, found {_few(config.devices)} with "
            f"{config.replicas} replicas; soap.strategy.config.settled corrects it"
        )
    if max(config.devices) >= device_count:
        device = next(device for device in config.devices if device >= device_count)
        raise StrategyError(f"operator {op.name!r}: device {device} does not exist; expected 0 to {device_count - 1} on this cluster")


def _require_no_empty(op: Operator, config: OpConfig) -> None:
    """StrategyError if shares leave a part of a factor without anything."""
    for place, (factor, weights) in enumerate(zip(op.factors, config.weights, strict=True)):
        for part, (start, stop) in enumerate(proportional(factor.size, weights)):
            if start == stop:
                after = prod(config.degrees[place + 1 :])
                raise StrategyError(
                    f"operator {op.name!r}: shares {':'.join(map(str, weights))} of factor {factor.name!r}, of size {factor.size}, leave "
                    f"part {part}, on device {config.devices[part * after]}, without any; expected shares of which each part gets one at "
                    "least"
                )


def check_parts(cut: MicroBatches, position: int, config: OpConfig) -> None:
    """Raise StrategyError if micro-batches do not allow the configuration of the operator at ``position``."""
    factor, op = cut.factors[position], cut.graph.operators[position]
    feature = MARKS[mark_of(config)].feature
    if feature is not None and feature.repeats and not cut.may_repeat(position):
        raise StrategyError(
            f"operator {op.name!r} needs all of {cut.count} micro-batches at once, or runs once for all of them; expected it not to "
            f"{feature.wanted}, or 1 micro-batch"
        )
    if factor is not None and config.shares and any(a == b for own in cut.pieces(position, factor, config.weights[factor]) for a, b in own):
        raise StrategyError(
            f"operator {op.name!r}: shares {':'.join(map(str, config.weights[factor]))} of factor {op.factors[factor].name!r} leave a part "
            f"without any in the smallest of {cut.count} micro-batches; expected fewer micro-batches, or more even shares"
        )
    if factor is not None and config.degrees[factor] > (least := cut.least_size(position, factor)):
        raise StrategyError(
            f"operator {op.name!r}: degree {config.degrees[factor]} of factor {op.factors[factor].name!r} exceeds {least}, its size in the "
            f"smallest of {cut.count} micro-batches; lower the degree, or microbatches"
        )


_SETTLED = {NEXT_STATE: "assembles the buffers that the forward pass changes", KEEP_STATE: "keeps changed buffers on every device"}
"""Kinds of operators that may have only one configuration, and why."""


def settled_config(op: Operator, device_count: int) -> OpConfig | None:
    """The configuration of an operator that may have only one; None if it has a choice.

    Every device keeps a copy of the buffers that the forward pass changes, and all copies must be equal to the bit, although devices may
    add up in different orders. So the first device assembles the new values, and all others copy them from there.
    """
    if op.kind == NEXT_STATE:
        return OpConfig((), (0,))
    return OpConfig((), tuple(range(device_count)), device_count) if op.kind == KEEP_STATE else None


def settled(graph: OperatorGraph, strategy: Strategy, device_count: int) -> Strategy:
    """The strategy with the required configuration for every operator that has no choice; itself if the graph has no such operator."""
    own = {op.name: settled_config(op, device_count) for op in graph.operators if op.kind in _SETTLED}
    found = {name: strategy.operators.get(name, config).placed_like(config) for name, config in own.items() if config is not None}
    return strategy.with_changes(found) if found else strategy


def _few(devices: tuple[int, ...]) -> str:
    return ", ".join(map(str, devices[:4])) + (", …" if len(devices) > 4 else "")
