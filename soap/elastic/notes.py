"""Which leases of a run are done, noted in its folder, so that another launcher goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

from soap.elastic.faults import ElasticError
from soap.elastic.leases import Dealer
from soap.elastic.steps import Steps
from soap.errors import first_line
from soap.files import read_text, write_text_atomically

LEASES = "leases.json"
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
        raise ElasticError(f"{str(folder)!r} has no run of servers and workers; expected the folder of --save")
    return Noted(_read(path, {}))


def note(folder: str | Path, dealer: Dealer) -> None:
    """Write down where a dealer is."""
    write_text_atomically(Path(folder) / LEASES, json.dumps(dealer.state()), error=ElasticError)


def continued(folder: str | Path, wanted: Dealer) -> Dealer:
    """The dealer that is noted, for as many leases as the one that is wanted; that one where nothing is noted. ElasticError in one line if
    they are of different runs."""
    path = Path(folder) / LEASES
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return wanted
    before = _read(path, {"epochs": wanted.epochs, "most": wanted.most})
    for name in COMPARED:
        if getattr(before, name) != getattr(wanted, name):
            raise ElasticError(
                f"{str(folder)!r} is of a run with {name} {getattr(before, name)}, not {getattr(wanted, name)}; expected the same, or an "
                "empty folder"
            )
    return before


def _read(path: Path, instead: dict[str, int | None]) -> Dealer:
    try:
        return Dealer.restored({**json.loads(read_text(path, what="leases", error=ElasticError)), **instead})
    except (ValueError, KeyError, TypeError) as cause:
        raise ElasticError(
            f"leases {str(path)!r} are damaged: {first_line(cause)}; bring the file back, or choose another folder"
        ) from None
