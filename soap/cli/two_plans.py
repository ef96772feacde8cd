"""The files of a search's two plans: the answer goes to ``--output``, and the other one of the fastest and the safe plan next to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soap import api
from soap.cli.command import UsageError
from soap.errors import SoapError, StrategyError
from soap.files import reason
from soap.search.deciding import FASTEST, SAFE, Answer


def path_beside(output: str, answer: Answer) -> Path:
    """Where the plan goes that is not the answer: ``strategy.safe.json`` for ``strategy.json``."""
    path = Path(output)
    return path.with_name(f"{path.stem}.{answer}{path.suffix}")


def check(output: str, others: Sequence[str]) -> None:
    """UsageError if what is where the other plan may go is not a search's into ``output``. ``others``: further files to be written."""
    taken = {os.path.realpath(path): path for path in others}
    for answer in (SAFE, FASTEST):
        path = path_beside(output, answer)
        if os.path.lexists(path) and not _is_beside(path, output):
            raise UsageError(
                f"{str(path)!r} is there, was not written next to {Path(output).name!r}, and is where the {answer} plan goes; move it, or "
                "choose another -o FILE"
            )
        if (other := taken.get(os.path.realpath(path))) is not None:
            raise UsageError(f"{other!r} is where the {answer} plan goes, next to {output!r}; choose another path")


def save(output: str, outcome: api.SearchOutcome) -> dict[Answer, str]:
    """Write the answer, and the other plan if it is another one. Returns both files, which are the same if the plans are, by plan."""
    drop(output)
    outcome.save(output)
    answer = outcome.decision.answer
    if outcome.other is None:
        return {answer: output, outcome.decision.other_answer: output}
    path = path_beside(output, outcome.decision.other_answer)
    outcome.other.save(path, beside=Path(output).name)
    return {answer: output, outcome.decision.other_answer: str(path)}


def drop(output: str) -> None:
    """Remove what an earlier search wrote next to ``output``: it is no plan of what ``output`` will be."""
    for path in (path_beside(output, answer) for answer in (SAFE, FASTEST)):
        if os.path.lexists(path) and _is_beside(path, output):
            try:
                os.unlink(path)
            except OSError as cause:
                raise SoapError(f"{str(path)!r} of an earlier search cannot be removed: {reason(cause)}; remove it") from None


def _is_beside(path: Path, output: str) -> bool:
    """Whether a search into ``output`` has written this file."""
    try:
        found: Mapping[str, Any] = api.load_strategy_contents(path).record
    except StrategyError:
        return False
    return found.get("beside") == Path(output).name
