"""How two strategy files differ: operators and parameters that both have but configure differently, and those that only one has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from soap.model.json_text import written_options
from soap.strategy.config import WORDED, SyncConfig
from soap.strategy.json_file import OperatorEntry, StrategyContents

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Difference:
    """An operator that both files have, but configure differently or list as different kinds."""

    operator: str
    first: OperatorEntry
    second: OperatorEntry


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two files differ.

    ``differences``: operators that both have. ``only_first``, ``only_second``: operators that only one has. ``parameters``: name, and how
    the first and the second file synchronize it, where that differs. ``options``: name, and the values of an optional field of the strategy
    as a whole, where they differ; None where a file has the default.
    """

    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    parameters: tuple[tuple[str, SyncConfig, SyncConfig], ...]
    options: tuple[tuple[str, Any, Any], ...]
    same_model: bool
    same_cluster: bool

    @property
    def equal(self) -> bool:
        """Whether both have the same configurations for the same model and cluster."""
        found = self.differences or self.only_first or self.only_second or self.parameters or self.options
        return not found and self.same_model and self.same_cluster


def compare(first: StrategyContents, second: StrategyContents) -> Comparison:
    """The differences between two files, in the order of the first. Their ``record`` of how they were found does not count."""
    differences = [
        Difference(name, entry, second.operators[name])
        for name, entry in first.operators.items()
        if name in second.operators and entry != second.operators[name]
    ]
    synced = dict.fromkeys((*first.parameters, *second.parameters))
    usual = SyncConfig()
    pairs = [(name, first.parameters.get(name, usual), second.parameters.get(name, usual)) for name in synced]
    said = _in_words if 1 in (first.version, second.version) else _whole
    one, other = first.header, second.header
    return Comparison(
        tuple(differences),
        tuple(name for name in first.operators if name not in second.operators),
        tuple(name for name in second.operators if name not in first.operators),
        tuple(pair for pair in pairs if said(pair[1]) != said(pair[2])),
        tuple((name, a, b) for name, a, b in _options(first, second) if a != b),
        one.model_hash == other.model_hash,
        (one.cluster_hash, one.devices) == (other.cluster_hash, other.devices),
    )


def _whole(sync: SyncConfig) -> object:
    return sync


def _in_words(sync: SyncConfig) -> object:
    """A synchronization without what files of version 1 do not tell: which method a word means."""
    return sync.contract.word, sync.partitions, sync.within, written_options(sync, WORDED)


def _options(first: StrategyContents, second: StrategyContents) -> list[tuple[str, Any, Any]]:
    return [(name, first.options.get(name), second.options.get(name)) for name in {**first.options, **second.options}]


def grouped(differences: Iterable[Difference]) -> list[list[Difference]]:
    """The differences with repeated layers joined: operators whose names differ only in numbers and whose entries differ alike."""
    found: dict[tuple[str, str], list[list[Difference]]] = {}
    order: list[list[Difference]] = []
    for difference in differences:
        alike = found.setdefault((masked(difference.operator), difference.first.kind), [])
        for group in alike:
            if (group[0].first, group[0].second) == (difference.first, difference.second):
                group.append(difference)
                break
        else:
            alike.append([difference])
            order.append(alike[-1])
    return order


def masked(name: str) -> str:
    """A name with ``*`` for each number: what repeated layers have in common."""
    return _NUMBER.sub("*", name)


def pattern_of(names: Sequence[str]) -> str:
    """Names that differ only in numbers, as one pattern: ``*`` for each number that is not the same in all of them."""
    numbers = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    shown = iter(["*" if len(set(own)) > 1 else own[0] for own in numbers])
    return _NUMBER.sub(lambda _: next(shown), names[0])
