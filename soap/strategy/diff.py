"""What two strategy files say differently about the operators and parameters that they have in common, and which they have not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soap.strategy.config import SyncConfig
from soap.strategy.json_file import OperatorEntry, StrategyContents

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Difference:
    """An operator that both files have and configure differently, or that is another kind of operator there."""

    operator: str
    first: OperatorEntry
    second: OperatorEntry


@dataclass(frozen=True, slots=True)
class Comparison:
    """``only_first``, ``only_second``: operators that one file lacks. ``parameters``: name, and how each file synchronizes it."""

    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    parameters: tuple[tuple[str, SyncConfig, SyncConfig], ...]
    same_model: bool
    same_cluster: bool

    @property
    def equal(self) -> bool:
        """Whether both say the same about the same model and cluster."""
        found = self.differences or self.only_first or self.only_second or self.parameters
        return not found and self.same_model and self.same_cluster


def compare(first: StrategyContents, second: StrategyContents) -> Comparison:
    """What tells two files apart, in the order of the first. What they remember of their searches does not count."""
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
        one.model_hash == other.model_hash,
        (one.cluster_hash, one.devices) == (other.cluster_hash, other.devices),
    )


def _whole(sync: SyncConfig) -> object:
    return sync


def _in_words(sync: SyncConfig) -> object:
    """All that files of version 1 can say."""
    return sync.contract.word, sync.partitions, sync.within


def grouped(differences: Iterable[Difference]) -> list[list[Difference]]:
    """Repeated layers together: operators whose names differ in numbers only, and which differ in the same way."""
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
    """Names that differ in numbers only, as one: ``*`` for each number that is not the same in all of them."""
    numbers = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    shown = iter(["*" if len(set(own)) > 1 else own[0] for own in numbers])
    return _NUMBER.sub(lambda _: next(shown), names[0])
