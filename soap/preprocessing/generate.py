"""Made-up data in Criteo's format, for tests and demonstrations: counts like theirs, categories by Zipf's law, clicks by a known model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.files import reason
from soap.preprocessing.container import PreprocessError

BIAS = -1.85
ID_EFFECT, NUMBER_EFFECT = 0.3, 0.1
"""Standard deviations: of what an id adds to the log-odds, and of what a number's logarithm is multiplied by."""
USUAL_LOG = 1.9
"""Near the mean of the numbers' logarithms, from which their effects count."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def probabilities(
    numbers: NDArray[np.int64], no_number: NDArray[np.bool_], ids: NDArray[np.int64], no_id: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Of a click, for each row. ``numbers``, ``ids``: (rows, columns); ``no_...``: where there is none, which adds nothing."""
    rows, columns = ids.shape
    odds = np.full(rows, BIAS)
    for column in range(columns):
        odds += np.where(no_id[:, column], 0.0, ID_EFFECT * effects(column, ids[:, column]))
    for column in range(numbers.shape[1]):
        slope = NUMBER_EFFECT * float(effects(columns + column, np.zeros(1, np.int64))[0])
        odds += np.where(no_number[:, column], 0.0, slope * (np.log1p(np.maximum(numbers[:, column], 0)) - USUAL_LOG))
    found: NDArray[np.float64] = 1 / (1 + np.exp(-odds))
    return found


def effects(column: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number for each id of a column, always the same: over all ids they are even, with mean 0 and variance 1."""
    mixed = ids.astype(np.uint64) * np.uint64(64) + np.uint64(column)
    with np.errstate(over="ignore"):  # splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
        mixed = (mixed + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.float64] = (mixed / 2.0**64 - 0.5) * np.sqrt(12)
    return found


KINDS = ("criteo-like",)
ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
    7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the categories of Criteo's display advertising data (Kaggle 2014): as many can be drawn here."""
NUMBERS = 13
EXPONENT = 1.05
"""Of Zipf's law: a few values are most of a column, most are rare."""
MISSING_NUMBERS, MISSING_CATEGORIES = 0.1, 0.03
BLOCK_ROWS = 50_000
"""Rows that are drawn together: file and block decide what they are, not how many there are."""
_HEX = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), np.uint8).reshape(256, 2)


def generate(
    folder: Path, rows: int, *, files: int = 1, seed: int = 0, categories: int | None = None, wrote: Callable[[int], None]
) -> None:
    """Write so many rows into ``day_0.tsv``, … of a new or empty folder. ``categories``: distinct values of a column at most. ``wrote``:
    told of rows. PreprocessError if the folder is not empty or not writable; an early end leaves no file."""
    if not 0 <= seed < 2**64:
        raise PreprocessError(f"seed {seed}: expected a whole number from 0 to 2^64 - 1")
    begun: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PreprocessError(f"{str(folder)!r} holds files; expected a new or empty folder: choose another path")
        for number, (first, last) in enumerate(pairwise([rows * i // files for i in range(files + 1)])):
            begun.append(folder / f"day_{number}.tsv")
            with begun[-1].open("wb") as stream:
                for begin in range(first, last, BLOCK_ROWS):
                    count = min(BLOCK_ROWS, last - begin)
                    stream.write(_block(draw_rows(seed, begin, count, categories)))
                    wrote(count)
    except BaseException as cause:
        for path in begun:
            path.unlink(missing_ok=True)
        if isinstance(cause, OSError):
            raise PreprocessError(f"cannot write {str(folder)!r}: {reason(cause)}; make room or give another -o") from None
        raise


@dataclass(frozen=True)
class Rows:
    """``probabilities``: of a click, by the known model (``clicks``); ``clicks``: drawn from these. ``numbers``: (rows, 13); ``ids``:
    (rows, 26), of 32 bits; ``no_number``, ``no_id``: where the field is empty."""

    probabilities: NDArray[np.float64]
    clicks: NDArray[np.bool_]
    numbers: NDArray[np.int64]
    no_number: NDArray[np.bool_]
    ids: NDArray[np.int64]
    no_id: NDArray[np.bool_]


def draw_rows(seed: int, begin: int, rows: int, categories: int | None = None) -> Rows:
    """The rows from ``begin`` on that ``generate`` writes as one block."""
    draw = np.random.Generator(np.random.Philox(key=[seed, begin]))
    luck = draw.random(rows)
    numbers, no_number = np.empty((rows, NUMBERS), np.int64), np.empty((rows, NUMBERS), np.bool_)
    for i in range(NUMBERS):
        own = np.floor(np.exp(draw.normal(1.5 + 0.3 * (i % 5), 1.6, rows))).astype(np.int64) - (2 if i == 1 else 0)
        numbers[:, i], no_number[:, i] = np.minimum(own, 2**31 - 1), draw.random(rows) < MISSING_NUMBERS
    ids, no_id = np.empty((rows, len(ROWS)), np.int64), np.empty((rows, len(ROWS)), np.bool_)
    for i, count in enumerate(ROWS):
        ids[:, i], no_id[:, i] = _ids(draw, rows, min(count, categories or count), i), draw.random(rows) < MISSING_CATEGORIES
    chances = probabilities(numbers, no_number, ids, no_id)
    return Rows(chances, luck < chances, numbers, no_number, ids, no_id)


def _block(made: Rows) -> bytes:
    """Rows as lines of text."""
    rows = len(made.clicks)
    fields = [_texts(made.clicks.astype(np.int64), np.zeros(rows, bool))]
    fields += [_texts(made.numbers[:, i], made.no_number[:, i]) for i in range(NUMBERS)]
    for i in range(len(ROWS)):
        text = _HEX[np.ascontiguousarray(made.ids[:, i]).astype(">u4").view(np.uint8)].reshape(rows, 8)
        fields.append((text, np.where(made.no_id[:, i], 0, 8)))
    return _lines(fields)


def _ids(draw: np.random.Generator, rows: int, count: int, column: int) -> NDArray[np.int64]:
    """Ids of 32 bits: ranks by Zipf's law (see ``soap/zoo/zipf.py``), spread over all of them by a multiplication that can be undone."""
    power = 1 - EXPONENT
    ends = (1 + draw.random(rows) * np.expm1(power * np.log(count + 1))) ** (1 / power)
    ranks = np.clip(ends.astype(np.int64) - 1, 0, count - 1)
    ids: NDArray[np.int64] = (ranks * 2654435761 + 97 * column) % 2**32
    return ids


Field = tuple[NDArray[np.uint8], NDArray[Any]]
"""Bytes (rows, width) of which the first so many count."""


def _texts(numbers: NDArray[np.int64], missing: NDArray[np.bool_]) -> Field:
    texts = numbers.astype("S12")
    lengths = np.char.str_len(texts)
    return texts.view(np.uint8).reshape(len(numbers), 12), np.where(missing, 0, lengths)


def _lines(fields: list[Field]) -> bytes:
    """Fields with tabs between them and a line feed behind the last."""
    parts, keep = [], []
    for i, (text, lengths) in enumerate(fields):
        end = np.full((len(text), 1), ord("\n" if i == len(fields) - 1 else "\t"), np.uint8)
        parts += [text, end]
        keep += [np.arange(text.shape[1]) < lengths[:, None], np.ones((len(text), 1), bool)]
    found: NDArray[np.uint8] = np.concatenate(parts, axis=1)[np.concatenate(keep, axis=1)]
    return found.tobytes()
