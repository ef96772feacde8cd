"""Which leases of a run are done, noted in its folder, so that another launcher goes on from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from soap.elastic.leases import Dealer, Steps
from soap.errors import ElasticError, first_line
from soap.files import read_text, write_text_atomically

LEASES = "leases.json"
HOSTS = "hosts"
COMPARED = ("samples", "batch", "seed", "shuffled")
"""What must be as before. There may be more epochs."""


class Noted:
    """What is noted of a run."""

    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._dealer.seed

    def steps(self, workers: int) -> int:
        """How many steps of so many workers are done, all of their leases."""
        return Steps(self._dealer.batches, workers).of(self._dealer.first_left)


def noted(folder: str | Path) -> Noted:
    """What a folder says. ElasticError in one line if it is no run's."""
    path = Path(folder) / LEASES
    if not path.exists():
        raise ElasticError(f"{str(folder)!r} has no run of servers and workers; expected the folder of soap-run --save")
    return Noted(_read(path, {})[0])


def note(folder: str | Path, dealer: Dealer, hosts: Sequence[str]) -> None:
    """Write down where a dealer is, and on which machine each server is."""
    noted = {**dealer.state(), HOSTS: [*hosts]}
    write_text_atomically(Path(folder) / LEASES, json.dumps(noted), error=ElasticError)


def continued(folder: str | Path, wanted: Dealer, servers: int) -> tuple[Dealer, list[str] | None]:
    """The dealer that is noted, for as many leases as the one that is wanted, and the machine that each server was on; the wanted one
    where nothing is noted. ElasticError in one line if they are of different runs."""
    path = Path(folder) / LEASES
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return wanted, None
    before, hosts = _read(path, {"epochs": wanted.epochs, "most": wanted.most})
    for name in COMPARED:
        if getattr(before, name) != getattr(wanted, name):
            raise ElasticError(
                f"{str(folder)!r} is of a run with {name} {getattr(before, name)}, not {getattr(wanted, name)}; expected the same, or an "
                "empty folder"
            )
    if len(hosts) != servers:
        raise ElasticError(f"{str(folder)!r} is of a run with {len(hosts)} servers, not {servers}; expected as many")
    return before, hosts


def _read(path: Path, instead: dict[str, int | None]) -> tuple[Dealer, list[str]]:
    try:
        found = json.loads(read_text(path, what="leases", error=ElasticError))
        return Dealer.restored({**found, **instead}), [str(host) for host in found[HOSTS]]
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise ElasticError(
            f"leases {str(path)!r} are damaged: {first_line(cause)}; bring the file back, or choose another folder"
        ) from None
