"""The methods of synchronizing parameters: what each promises and which combination of owner, payload and residence it serves.

This registry is the only list of them. Each method has a module of the same name in ``soap.plan.syncs`` (what it moves, updates and holds)
and, unless it sums in place, one in ``soap.runtime.sync`` (what a rank does). All other code asks for the contract's properties, never for
the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from soap.errors import StrategyError, one_of

Owner = Literal["readers", "parts", "servers"]
"""Who holds the updated value and the optimizer's state: every device that reads it; each of these devices a part; or servers in
partitions."""
Residence = Literal["kept", "gathered"]
"""Whether readers keep the value between uses, or get it anew for each."""
Within = Literal["none", "host"]
"""What is done inside a host first: nothing; or local aggregation: its devices add up, and communicate with servers or peers through one of
them; of what readers own in parts each host has a copy in parts (HSDP), so that only sums of parts leave it."""

DENSE, ROWS, COMPRESSED = "dense", "rows", "compressed"
"""Payloads: whole gradients, the rows that a step touches, or what a compressor makes of them."""

MAX_PARTITIONS = 4096
"""Upper limit of the partitions on servers: above any host's cores, and few enough to simulate."""
MAX_PREFETCH = 4096
"""Upper limit of ``Strategy.prefetch``: more groups of values than any model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a method promises, and what it needs.

    ``name``: of its modules. ``word``: its name in commands, reports and strategy files of version 1; a method for sparse parameters and
    its counterpart for dense ones share a word. ``owner``, ``payload``, ``residence``: the combination that it serves. ``parameters``:
    which it serves; of a sparse parameter a step touches only some rows. ``exact``: N ranks train as one process does; a lossy method is
    used only if the user names it. ``within``: what it can do inside hosts. ``most_partitions``: on servers. ``state``: tensors that
    it keeps from step to step (a residual), which checkpoints must hold. ``offloads``: whether owners may keep the optimizer's state in
    their host's memory and update there (``SyncConfig.offload``). ``host_word``: its word if something is done inside hosts first, if it
    has one; else that is said beside ``word``.
    """

    name: str
    word: str
    owner: Owner
    payload: str
    residence: Residence = "kept"
    parameters: Literal["all", "dense", "sparse"]
    exact: bool = True
    within: tuple[Within, ...] = ("none",)
    most_partitions: int = 1
    state: tuple[str, ...] = ()
    offloads: bool = False
    host_word: str = ""

    @property
    def by_rows(self) -> bool:
        """Whether tiles are sparse lookups: they have, and give gradients to, only the rows that they look up."""
        return self.payload == "rows"

    @property
    def has_servers(self) -> bool:
        """Whether servers own the parameter, in partitions."""
        return self.owner == "servers"

    @property
    def owned_in_parts(self) -> bool:
        """Whether each owner has a part of what readers read: their own values are copies, of which parts are brought from others."""
        return self.owner != "readers"

    @property
    def gathers_values(self) -> bool:
        """Whether readers have dense values only for their uses: these are gathered before the forward passes and again before the backward
        passes that read them, and freed behind."""
        return self.owner == "parts" and self.residence == "gathered"

    @property
    def compresses(self) -> bool:
        """Whether gradients travel compressed: how is a field of the synchronization (``SyncConfig.compression``)."""
        return self.payload == COMPRESSED

    @property
    def in_buckets(self) -> bool:
        """Whether gradients of several regions travel together, dense or compressed alike."""
        return not self.by_rows and not self.has_servers

    @property
    def sums_in_place(self) -> bool:
        """Whether readers sum dense gradients in buffers that they keep from step to step."""
        return self.in_buckets and not self.owned_in_parts and not self.compresses

    def serves(self, *, sparse: bool) -> bool:
        """Whether it can synchronize a parameter that is sparse, or dense."""
        return self.parameters in ("all", "sparse" if sparse else "dense")


ALL_REDUCE = Contract(
    name="all_reduce",
    word="allreduce",
    owner="readers",
    payload=DENSE,
    parameters="all",
    offloads=True,
)
"""Gradients are summed over the readers, each of which updates its copy. The default method."""

METHODS: list[Contract] = [
    ALL_REDUCE,
    Contract(
        name="sparse_all_gather",
        word="allgather",
        owner="readers",
        payload="rows",
        parameters="sparse",
    ),
    Contract(
        name="parameter_server",
        word="parameter_server",
        owner="servers",
        payload="dense",
        parameters="dense",
        within=("none", "host"),
        most_partitions=MAX_PARTITIONS,
    ),
    Contract(
        name="row_server",
        word="parameter_server",
        owner="servers",
        payload="rows",
        residence="gathered",
        parameters="sparse",
        within=("none", "host"),
        most_partitions=MAX_PARTITIONS,
    ),
    Contract(
        name="compressed",
        word="compressed",
        owner="readers",
        payload=COMPRESSED,
        parameters="dense",
        exact=False,
        within=("none", "host"),
    ),
    Contract(
        name="sharded_state",
        word="zero",
        owner="parts",
        payload=DENSE,
        parameters="all",
        within=("none", "host"),
        offloads=True,
    ),
    Contract(
        name="sharded",
        word="fsdp",
        owner="parts",
        payload=DENSE,
        residence="gathered",
        parameters="all",
        within=("none", "host"),
        host_word="hsdp",
        offloads=True,
    ),
]
"""All methods, the default first. Their positions here are their numbers in compiled code."""


@lru_cache(256)
def find_contract(owner: object, payload: object, residence: object) -> Contract:
    """The contract of the method that serves a combination. StrategyError if none does."""
    for contract in METHODS:
        if (contract.owner, contract.payload, contract.residence) == (owner, payload, residence):
            return contract
    served = "; ".join(f"{c.owner}, {c.payload}, {c.residence}" for c in METHODS)
    asked = f"owner {owner!r}, payload {payload!r}, residence {residence!r}"
    raise StrategyError(f"no method synchronizes with {asked}; expected one of: {served}")


def named(name: str) -> Contract:
    """The contract with this name. StrategyError if there is none."""
    for contract in METHODS:
        if contract.name == name:
            return contract
    raise StrategyError(f"synchronization method {name!r} is unknown; expected {one_of(name, [c.name for c in METHODS])}")


def by_word(word: str, *, sparse: bool) -> Contract | None:
    """The method that a word means for a sparse or a dense parameter; None if the word has no method for such parameters.

    StrategyError if the word is unknown.
    """
    found = [contract for contract in METHODS if word in (contract.word, contract.host_word) and word]
    if not found:
        raise StrategyError(f"synchronization {word!r} is unknown; expected {one_of(word, words())}")
    return next((contract for contract in found if contract.serves(sparse=sparse)), None)


def words() -> tuple[str, ...]:
    """The words of all exact methods, each once. A lossy method is asked for by name elsewhere (``soap.strategy.compression.parse``)."""
    found = (word for contract in METHODS if contract.exact for word in (contract.word, contract.host_word) if word)
    return tuple(dict.fromkeys(found))
