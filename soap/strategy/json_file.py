"""Strategies as files: versioned JSON that people can read and compare, one operator per line in graph order.

Text from outside is untrusted: its size is limited, it is parsed strictly (no duplicate keys, no NaN) and checked against a schema, and
it is refused in one line if it was made for another model or cluster. ``record`` holds what the caller wants to remember (seed, budget,
predictions); nothing here depends on it.

Version 2 describes a parameter's synchronization by owner, payload and residence; version 1 named a method.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import repeat
from math import prod
from typing import Annotated, Any

from soap.cluster.topology import Topology
from soap.errors import StrategyError, one_of
from soap.model.graph import SUM_DTYPES, Operator, OperatorGraph
from soap.model.json_text import (
    Schema,
    Unfit,
    given_options,
    one_line,
    option_kinds,
    parse_json,
    read_as,
    record,
    schema_of,
    short,
    written_options,
)
from soap.strategy.config import MAX_NUMBER, WORDED, Name, OpConfig, Strategy, SyncConfig, check_config
from soap.strategy.mismatch import cluster_differences, model_differences
from soap.strategy.stages import chunks_of, stages_of
from soap.strategy.sync import worded
from soap.strategy.sync_contracts import MAX_PARTITIONS, Within

FORMAT = "soap-strategy"
VERSION = 2
"""The version that is written; version 1 is read as well. Until a release, new fields do not change the version."""

WORDS_1 = ("allreduce", "allgather", "parameter_server")
"""The methods that files of version 1 may name."""

_DEVICE = Annotated[int, Schema(minimum=0, maximum=MAX_NUMBER)] | Name
_COUNTS = Mapping[Name, Annotated[int, Schema(minimum=1, maximum=MAX_NUMBER)]]
_OPERATOR = {"kind": Name, "sizes": _COUNTS, "degrees": _COUNTS, "devices": Annotated[tuple[_DEVICE, ...], Schema(minItems=1)]}
_SUMS = Annotated[str, Schema(enum=[*SUM_DTYPES])]
_MODEL = record(("sum_dtype",), name=str, hash=Name, operators=Annotated[int, Schema(minimum=0)], sum_dtype=_SUMS)
_CLUSTER = record(name=str, hash=Name, devices=Annotated[tuple[Name, ...], Schema(minItems=1)])
_PARAMETER_1 = record(
    ("partitions", "local_aggregation"),
    sync=Annotated[str, Schema(enum=[*WORDS_1])],
    partitions=Annotated[int, Schema(minimum=1, maximum=MAX_PARTITIONS)],
    local_aggregation=bool,
)
_APART = ("operators", "parameters")
"""Fields of a strategy that are no options of the whole."""


def schema(version: int = VERSION) -> dict[str, Any]:
    """The schema of one version of the format."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "SOAP parallelization strategy"}
    return about | schema_of(_document(version))


@cache
def _document(version: int) -> Any:
    """A document of one version of the format."""
    more = {} if version == 1 else option_kinds(Strategy, _APART)
    optional, synced = option_kinds(OpConfig), option_kinds(SyncConfig)
    return record(
        ("parameters", *more, "record"),
        format=Annotated[str, Schema(const=FORMAT)],
        version=Annotated[int, Schema(const=version)],
        model=_MODEL,
        cluster=_CLUSTER,
        operators=Mapping[Name, record(("degrees", *optional), **_OPERATOR, **optional)],  # type: ignore[misc]
        parameters=Mapping[Name, _PARAMETER_1 if version == 1 else record(synced, **synced)],  # type: ignore[misc]
        **more,
        record=Mapping[str, Any],
    )


MAX_CHARACTERS = 2**28
MAX_TILES = 2**22
"""Limits of what is read: far above real strategies, far below what would exhaust memory."""

_RUN = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([0-9]{1,9}))?", re.ASCII)
_REPEAT = re.compile(r"([0-9]{1,9})\*([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class StrategyHeader:
    """What a strategy file says about itself, readable without its model. ``sum_dtype``: ``OperatorGraph.sum_dtype`` of the model."""

    model: str
    model_hash: str
    operator_count: int
    cluster: str
    cluster_hash: str
    devices: tuple[str, ...]
    sum_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator's entry in a strategy file. ``sizes``, ``degrees``: by factor name; only degrees above 1. ``options``: its optional
    fields, as far as they are not the default."""

    kind: str
    sizes: Mapping[str, int]
    degrees: Mapping[str, int]
    devices: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StrategyContents:
    """All of a strategy file, readable without its model.

    ``parameters``: those with a synchronization other than the default. In files of version 1 a word may mean one method for dense
    parameters and another for sparse ones; it is read as for dense ones. ``options``: optional fields of the strategy as a whole.
    """

    header: StrategyHeader
    operators: Mapping[str, OperatorEntry]
    parameters: Mapping[str, SyncConfig]
    options: Mapping[str, Any]
    record: Mapping[str, Any]
    version: int = VERSION


def dumps(strategy: Strategy, graph: OperatorGraph, topology: Topology, record: Mapping[str, Any] | None = None) -> str:
    """The strategy as text: equal arguments give equal text. StrategyError if the strategy is illegal or the record is not JSON."""
    strategy.validate(graph, topology.device_count)
    operators = {op.name: _operator_entry(op, strategy.operators[op.name]) for op in graph.operators}
    parameters = {name: written_options(sync) for name, sync in _synchronized(strategy, graph)}
    whole = _whole(strategy, graph)
    sums = {} if graph.sum_dtype is None else {"sum_dtype": graph.sum_dtype}
    lines = [
        f'"format": {_text(FORMAT)}',
        f'"version": {VERSION}',
        f'"model": {_text({"name": graph.name, "hash": graph.hash, "operators": len(graph.operators), **sums})}',
        f'"cluster": {_text({"name": topology.name, "hash": topology.hash, "devices": [d.name for d in topology.devices]})}',
        f'"operators": {_block(operators)}',
        f'"parameters": {_block(parameters)}',
        *(f"{_text(name)}: {_text(value)}" for name, value in whole.items()),
        f'"record": {_record_text(record or {})}',
    ]
    return "{\n" + ",\n".join(f"  {line}" for line in lines) + "\n}\n"


def strategy_hash(strategy: Strategy, graph: OperatorGraph) -> str:
    """16 hex digits: equal for strategies that configure this graph's operators and parameters alike, on whatever cluster."""
    operators = {op.name: _operator_entry(op, strategy.operators[op.name]) for op in graph.operators}
    parameters = {name: _hashed_entry(sync) for name, sync in _synchronized(strategy, graph)}
    whole = _whole(strategy, graph)
    return hashlib.sha256(_text([operators, parameters, *([whole] if whole else [])]).encode()).hexdigest()[:16]


def loads(text: str, graph: OperatorGraph, topology: Topology, *, any_cluster: bool = False) -> tuple[Strategy, dict[str, Any]]:
    """The strategy and its record. StrategyError, in one line, if the text is malformed or not for this model and cluster.

    ``any_cluster``: accept a strategy for another cluster with as many devices; its devices are then taken by number.
    """
    document = _parse(text)
    theirs = document["cluster"]["devices"]
    elsewhere = any_cluster and len(theirs) == topology.device_count
    differences = model_differences(document, graph) + ([] if elsewhere else cluster_differences(document["cluster"], topology))
    if differences:
        raise StrategyError("; ".join(differences) + "; search again for this model and cluster")
    numbers = {name: number for number, name in enumerate(theirs)}
    configs: dict[str, OpConfig] = {}
    room = MAX_TILES
    for op in graph.operators:
        configs[op.name] = _config(op, document["operators"][op.name], numbers, room)
        room -= len(configs[op.name].devices)
    syncs = {name: _sync(name, entry, sparse=name in graph.sparse) for name, entry in document.get("parameters", {}).items()}
    strategy = Strategy(configs, syncs, **given_options(Strategy, document, _APART))
    strategy.validate(graph, topology.device_count)
    return strategy, document.get("record", {})


def load_header(text: str) -> StrategyHeader:
    """What the text says about its model and cluster. StrategyError if it is not a valid strategy file."""
    return _header(_parse(text))


def load_contents(text: str) -> StrategyContents:
    """Everything the text says. StrategyError if it is not a valid strategy file. It is not checked against its model."""
    document = _parse(text)
    header = _header(document)
    numbers = {name: number for number, name in enumerate(header.devices)}
    operators: dict[str, OperatorEntry] = {}
    room = MAX_TILES
    for name, entry in document["operators"].items():
        operators[name] = _contents_of(name, entry, numbers, room)
        room -= len(operators[name].devices)
    syncs = {name: _sync(name, entry, sparse=False) for name, entry in document.get("parameters", {}).items()}
    syncs = {name: sync for name, sync in syncs.items() if sync != SyncConfig()}
    options = whole_options(Strategy({}, **given_options(Strategy, document, _APART)))
    return StrategyContents(header, operators, syncs, options, document.get("record", {}), document["version"])


def _contents_of(name: str, entry: Mapping[str, Any], numbers: Mapping[str, int], room: int) -> OperatorEntry:
    """An operator's entry. ``numbers``: device name -> number. ``room``: how many tiles the file may still have."""
    degrees = {factor: degree for factor, degree in entry.get("degrees", {}).items() if degree > 1}
    config = _read_config(name, entry, [*degrees.values()], numbers, room)
    return OperatorEntry(entry["kind"], entry["sizes"], degrees, config.devices, written_options(config))


def _read_config(name: str, entry: Mapping[str, Any], degrees: Sequence[int], numbers: Mapping[str, int], room: int) -> OpConfig:
    """The configuration of an operator's entry, with these degrees."""
    more = given_options(OpConfig, entry)
    tiles = prod(degrees) * more.get("replicas", 1)
    if tiles > room:
        raise StrategyError(
            f"operator {short(name)}: {tiles} tiles; expected at most {MAX_TILES} in the whole strategy; lower the degrees"
        )
    try:
        return OpConfig(tuple(degrees), expand_devices(entry["devices"], numbers, tiles), **more)
    except StrategyError as cause:
        raise StrategyError(f"operator {short(name)}: {cause}") from None


def _header(document: Mapping[str, Any]) -> StrategyHeader:
    model, cluster = document["model"], document["cluster"]
    about = cluster["name"], cluster["hash"], cluster["devices"]
    return StrategyHeader(model["name"], model["hash"], model["operators"], *about, model.get("sum_dtype"))


def compact_devices(devices: Sequence[int]) -> list[int | str]:
    """Device numbers with runs shortened: ``"0-3"`` for 0, 1, 2, 3; ``"0-12:4"`` for 0, 4, 8, 12; ``"2*3"`` for 2, 2, 2."""
    items: list[int | str] = []
    i = 0
    while i < len(devices):
        first, step, stop = devices[i], (devices[i + 1] - devices[i] if i + 1 < len(devices) else -1), i + 1
        while stop < len(devices) and devices[stop] - devices[stop - 1] == step >= 0:
            stop += 1
        last, count = devices[stop - 1], stop - i
        if count < (3 if step <= 1 else 4):
            items.append(first)
            i += 1
            continue
        items.append(f"{first}*{count}" if step == 0 else f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}")
        i = stop
    return items


_compact = lru_cache(1024)(compact_devices)
"""Layers that repeat have the same devices."""


def expand_devices(items: Iterable[int | str], numbers: Mapping[str, int], limit: int) -> tuple[int, ...]:
    """The reverse of ``compact_devices``. ``numbers``: device name -> number; a name may stand for its number.

    StrategyError if there are more than ``limit`` devices.
    """
    devices: list[int] = []
    for item in items:
        count, run = _expand_item(item, numbers)
        if len(devices) + count > limit:
            raise StrategyError(f"more than {limit} devices listed; expected one per tile")
        devices.extend(run)
    return tuple(devices)


def _expand_item(item: int | str, numbers: Mapping[str, int]) -> tuple[int, Iterable[int]]:
    """How many devices an entry stands for, and which. They are not listed yet, because the count has not been checked."""
    if not isinstance(item, str):
        return 1, (int(item),)  # JSON's 1.0 counts as a whole number
    if item in numbers:
        return 1, (numbers[item],)
    run, copies = _RUN.fullmatch(item), _REPEAT.fullmatch(item)
    if run and int(run[1]) <= int(run[2]) and int(run[3] or 1) > 0:
        span = range(int(run[1]), int(run[2]) + 1, int(run[3] or 1))
        return len(span), span
    if copies:
        return int(copies[2]), repeat(int(copies[1]), int(copies[2]))
    some = ", ".join(list(numbers)[:3]) + (", …" if len(numbers) > 3 else "")
    raise StrategyError(f"unknown device {short(item)}; expected a number, a run such as '0-3', or one of {some}")


def whole_options(strategy: Strategy) -> dict[str, Any]:
    """What files say of a strategy beside its operators and parameters, as far as it is not the default."""
    return written_options(strategy, _APART)


def _whole(strategy: Strategy, graph: OperatorGraph) -> dict[str, Any]:
    """The optional fields of a strategy as a whole. Stages that mean the same are written alike."""
    plain = replace(strategy, stages=stages_of(graph, chunks_of(graph, strategy.stages))) if strategy.stages else strategy
    return whole_options(plain)


def _synchronized(strategy: Strategy, graph: OperatorGraph) -> Iterator[tuple[str, SyncConfig]]:
    """The parameters with a synchronization other than the default, in the graph's order."""
    for tensor in graph.parameters:
        if strategy.sync(tensor.name) != SyncConfig():
            yield tensor.name, strategy.sync(tensor.name)


def _operator_entry(op: Operator, config: OpConfig) -> dict[str, Any]:
    degrees = {factor.name: degree for factor, degree in zip(op.factors, config.degrees, strict=True) if degree > 1}
    return {
        "kind": op.kind,
        "sizes": {factor.name: factor.size for factor in op.factors},
        **({"degrees": degrees} if degrees else {}),
        **written_options(config),
        "devices": _compact(config.devices),
    }


def _hashed_entry(sync: SyncConfig) -> dict[str, Any]:
    """A synchronization's entry in ``strategy_hash``: as version 1 wrote it where it could, so that hashes stay the same."""
    word = sync.contract.word
    if word not in WORDS_1:
        return written_options(sync)
    more: dict[str, Any] = {"partitions": sync.partitions} if sync.partitions > 1 else {}
    more |= {"local_aggregation": True} if sync.within == "host" else {}
    return {"sync": word, **more, **written_options(sync, WORDED)}


def _sync(name: str, entry: Mapping[str, Any], *, sparse: bool) -> SyncConfig:
    """A parameter's synchronization from its entry. ``sparse``: whether the parameter is sparse, as far as is known."""
    try:
        if "sync" not in entry:
            return SyncConfig(**given_options(SyncConfig, entry))
        within: Within = "host" if entry.get("local_aggregation", False) else "none"
        return worded(entry["sync"], entry.get("partitions", 1), within, sparse=sparse)
    except StrategyError as cause:
        raise StrategyError(f"parameter {short(name)}: {cause}") from None


def _text(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _block(entries: Mapping[str, object]) -> str:
    """An object with one entry per line."""
    lines = [f"    {_text(name)}: {_text(entry)}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"


def _record_text(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(record), allow_nan=False, indent=2).replace("\n", "\n  ")
    except (TypeError, ValueError, RecursionError) as cause:
        raise StrategyError(f"the record cannot be written as JSON ({cause}); expected plain numbers, texts, lists and objects") from None


def _parse(text: str) -> dict[str, Any]:
    """The parsed document, checked against the schema. StrategyError if it is malformed or of an unknown version."""
    if len(text) > MAX_CHARACTERS:
        raise StrategyError(f"strategy file of {len(text)} characters; expected at most {MAX_CHARACTERS}")
    try:
        document = parse_json(text)
    except (ValueError, RecursionError) as cause:
        raise StrategyError(f"strategy file is not valid JSON ({one_line(str(cause))}); expected what soap-search wrote") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise StrategyError(f"not a strategy file: format is {short(found)}, expected {FORMAT!r}; give a file that soap-search wrote")
    version: Any = document.get("version")
    if version not in range(1, VERSION + 1) or isinstance(version, bool):
        raise StrategyError(f"strategy file has version {short(version)}; this program reads versions 1 to {VERSION}: search again with it")
    try:
        read: dict[str, Any] = read_as(_document(version), document)
    except Unfit as fault:
        place = fault.place or "top level"
        raise StrategyError(f"strategy file is malformed at {place}: {fault}; expected what soap-search wrote") from None
    return read


def _config(op: Operator, entry: Mapping[str, Any], numbers: Mapping[str, int], room: int) -> OpConfig:
    """An operator's configuration from its entry. ``room``: how many tiles the file may still have."""
    degrees, names = entry.get("degrees", {}), [factor.name for factor in op.factors]
    for name in degrees:
        if name not in names:
            raise StrategyError(f"operator {op.name!r} has no factor {short(name)}; expected {one_of(str(name), names)}")
    for factor in op.factors:
        if degrees.get(factor.name, 1) > factor.size:
            raise StrategyError(
                f"operator {op.name!r}: degree {degrees[factor.name]} of factor {factor.name!r} exceeds its size {factor.size}; "
                "lower the degree"
            )
    config = _read_config(op.name, entry, [degrees.get(name, 1) for name in names], numbers, room)
    check_config(op, config, len(numbers))
    return config
