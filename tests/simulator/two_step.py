"""A method of synchronization that tests add: sums on the first device of each host, then between hosts, then spread on the hosts.

It is all that a method with tasks of its own takes in the plan: the engine plays its template, and asks nothing about it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from soap.plan.plan import Plan, ShardSync, sync_name
from soap.plan.syncs.amounts import Group, reading_groups
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.seam import PULL, PUSH, SUM, WHOLE, Hold, How, Phase, Row, Setting, SyncMethod, Template
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import METHODS, Contract, find_contract

CONTRACT = Contract(
    name="two_step",
    word="two_step",
    owner="readers",
    payload="two steps",
    residence="kept",
    parameters="all",
    exact=True,
    within=("none", "host"),
    offloads=True,
)


class TwoStepSum(SyncMethod):
    """Each row moves whole buckets: to the hosts' first devices, among these, and back."""

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """Only regions with several readers."""
        return len(readers) > 1

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """At most three rows."""
        within, peers = [(own, first) for own, first in zip(readers, leaders, strict=True) if own != first], tuple(dict.fromkeys(leaders))
        into, out = tuple((*pair, WHOLE) for pair in within), tuple((first, own, WHOLE) for own, first in within)
        rows = [Row(Phase.AFTER_BACKWARD, PUSH, "collect", How.EXCHANGE, rounds=((into, True),), large=True)] if within else []
        rows += [Row(Phase.AFTER_BACKWARD, SUM, "sync", How.SUM, (peers,), large=True)] if len(peers) > 1 else []
        rows += [Row(Phase.AFTER_BACKWARD, PULL, "spread", How.EXCHANGE, rounds=((out, False),))] if within else []
        return Template(tuple(rows))

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """What the first devices receive, from its coming on."""
        for first, *others in reading_groups(sync):
            yield Hold(first, len(others) * gradient_bytes(plan, sync), since=sync_name(sync, "collect"))


METHOD = TwoStepSum(CONTRACT)


@contextmanager
def registered() -> Iterator[None]:
    """It is in the registry meanwhile."""
    module = ModuleType("soap.plan.syncs.two_step")
    module.METHOD = METHOD  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    METHODS.append(CONTRACT)
    try:
        yield
    finally:
        METHODS.remove(CONTRACT)
        del sys.modules[module.__name__]
        find_contract.cache_clear()
