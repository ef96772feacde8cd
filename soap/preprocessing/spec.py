"""What columns the data have, and what is done with each: a SPEC in YAML, or a preset's name. Nothing here touches data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from soap.errors import SoapError, one_of
from soap.files import read_text
from soap.yaml_text import parse_yaml

KINDS = ("label", "integer", "hex", "string")
LEAST, MOST = -(2**31), 2**31 - 1
"""Labels and integers are kept in 32 bits."""
MOST_COLUMNS = 10_000
LONGEST_SPEC_BYTES = 2**22
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_FIELDS: dict[str, tuple[str, ...]] = {
    "label": ("missing",),
    "integer": ("missing", "log1p"),
    "hex": ("missing", "modulus", "min_count", "dictionary"),
    "string": ("missing", "min_count", "dictionary"),
}
"""Fields of each kind, beside name, kind and count."""


class SpecError(SoapError):
    """A SPEC is malformed; the message names the field."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    ``missing``: what an empty field stands for: a number, or the text of a category. ``log1p``: whether training reads log(1 + x).
    ``modulus``: ids are taken modulo this before they are indexed (0: as they are). ``min_count``: categories that are seen less often
    share row 0. ``dictionary``: the name of the dictionary that indexes the column.
    """

    name: str
    kind: str
    missing: int | str = 0
    log1p: bool = False
    modulus: int = 0
    min_count: int = 1
    dictionary: str = ""

    @property
    def is_category(self) -> bool:
        """Whether the column is indexed."""
        return self.kind in ("hex", "string")


@dataclass(frozen=True, slots=True)
class Spec:
    """All columns, in the order of the input's fields."""

    columns: tuple[Column, ...]

    @property
    def labels(self) -> tuple[Column, ...]:
        """The labels."""
        return tuple(column for column in self.columns if column.kind == "label")

    @property
    def numbers(self) -> tuple[Column, ...]:
        """The integers."""
        return tuple(column for column in self.columns if column.kind == "integer")

    @property
    def categories(self) -> tuple[Column, ...]:
        """What is indexed."""
        return tuple(column for column in self.columns if column.is_category)

    @property
    def dictionaries(self) -> dict[str, tuple[Column, ...]]:
        """Dictionary name -> its columns. Both in the order of the input's fields."""
        found: dict[str, list[Column]] = {}
        for column in self.categories:
            found.setdefault(column.dictionary, []).append(column)
        return {name: tuple(columns) for name, columns in found.items()}

    def document(self) -> dict[str, Any]:
        """All fields of all columns, as plain JSON values."""
        return {"columns": [asdict(column) for column in self.columns]}

    @property
    def hash(self) -> str:
        """Of everything that the result depends on."""
        return _hash(self)


@lru_cache(maxsize=16)  # every task asks for it
def _hash(spec: Spec) -> str:
    return hashlib.sha256(json.dumps(spec.document(), sort_keys=True).encode()).hexdigest()


def _criteo(modulus: int) -> Spec:
    """Criteo's columns: a label, 13 counts, 26 categories in hexadecimal digits."""
    label = Column("label", "label")
    numbers = [Column(f"I{i}", "integer", log1p=True) for i in range(1, 14)]
    categories = [Column(f"C{i}", "hex", missing="0", modulus=modulus, dictionary=f"C{i}") for i in range(1, 27)]
    return Spec((label, *numbers, *categories))


PRESETS = {"criteo-kaggle": _criteo(0), "criteo-terabyte": _criteo(10_000_000)}
"""As Criteo's public script reads them: missing values are 0; of the terabyte, ids are taken modulo ten million (``max-ind-range``)."""


def load_spec(source: str | Path) -> Spec:
    """The SPEC of a preset's name or of a YAML file. SpecError, naming the field, if it is malformed."""
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    if not Path(source).exists():
        raise SpecError(f"SPEC {str(source)!r}: no such file; expected a YAML file or one of {', '.join(PRESETS)}")
    text = read_text(source, what="SPEC", error=SpecError, limit_bytes=LONGEST_SPEC_BYTES)
    try:
        document = parse_yaml(text)
    except ValueError as cause:
        raise SpecError(f"SPEC {str(source)!r}: {cause}") from None
    return from_document(document, str(source))


def from_document(document: object, where: str = "SPEC") -> Spec:
    """The SPEC of plain values: ``{"columns": [{"name": …, "kind": …}, …]}``."""
    top = _mapping(document, where, ("columns",))
    entries = top.get("columns")
    if not isinstance(entries, list) or not entries:
        raise SpecError(f"{where}: columns: {_shown(entries)}; expected a list of columns, in the order of the input's fields")
    columns = [column for i, entry in enumerate(entries) for column in _columns(entry, f"{where}: columns[{i}]")]
    if len(columns) > MOST_COLUMNS:
        raise SpecError(f"{where}: columns: {len(columns)} of them; expected at most {MOST_COLUMNS}")
    _check_together(columns, where)
    return Spec(tuple(columns))


def _columns(entry: object, where: str) -> list[Column]:
    """The columns of one entry: as many as its ``count``, numbered from 1 then."""
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if isinstance(entry, dict) and kind not in KINDS:
        raise SpecError(f"{where}.kind: {_shown(kind)}; expected {one_of(str(kind), KINDS)}")
    fields = _mapping(entry, where, ("name", "kind", "count", *_FIELDS.get(str(kind), ())))
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{where}.name: {_shown(name)}; expected up to 100 letters, digits, - and _: files are named by it")
    count = _whole(fields, "count", 1, 1, MOST_COLUMNS, where)
    names = [f"{name}{i + 1}" for i in range(count)] if "count" in fields else [name]
    missing = _missing(fields, str(kind), where)
    log1p = fields.get("log1p", False)
    if not isinstance(log1p, bool):
        raise SpecError(f"{where}.log1p: {_shown(log1p)}; expected true or false")
    modulus = _whole(fields, "modulus", 0, 1, 2**31 - 1, where)
    min_count = _whole(fields, "min_count", 1, 1, 2**62, where)
    shared = fields.get("dictionary")
    if shared is not None and (not isinstance(shared, str) or not _NAME.fullmatch(shared)):
        raise SpecError(f"{where}.dictionary: {_shown(shared)}; expected up to 100 letters, digits, - and _: files are named by it")
    category = kind in ("hex", "string")
    return [Column(own, str(kind), missing, log1p, modulus, min_count, (shared or own) if category else "") for own in names]


def _missing(fields: dict[str, Any], kind: str, where: str) -> int | str:
    given = fields.get("missing", {"hex": "0", "string": ""}.get(kind, 0))
    if kind in ("label", "integer"):
        return _whole({"missing": given}, "missing", 0, LEAST, MOST, where)
    if kind == "hex":
        digit = type(given) is int and 0 <= given <= 9  # of longer ones YAML does not say how they were written: 0x10 and 020 are 16
        text = str(given) if digit or isinstance(given, str) else ""
        if not re.fullmatch(r"[0-9a-fA-F]{1,16}", text):
            raise SpecError(f"{where}.missing: {_shown(given)}; expected 1 to 16 hexadecimal digits in quotes")
        return text
    if not isinstance(given, str) or re.search(r"[\t\r\n]", given):
        raise SpecError(f"{where}.missing: {_shown(given)}; expected text without tabs and line breaks")
    return given


def _check_together(columns: Sequence[Column], where: str) -> None:
    """SpecError if names repeat, nothing is to be done, or columns of one dictionary differ in what they index."""
    seen: dict[str, Column] = {}
    names: set[str] = set()
    for i, column in enumerate(columns):
        if column.name in names:
            raise SpecError(f"{where}: columns: the name {column.name!r} (column {i + 1}) is taken; expected each name once")
        names.add(column.name)
        if column.is_category:
            first = seen.setdefault(column.dictionary, column)
            for field in ("kind", "modulus", "min_count"):
                if getattr(first, field) != getattr(column, field):
                    raise SpecError(
                        f"{where}: column {column.name!r}: {field} {getattr(column, field)!r} is not that of {first.name!r}, with which it "
                        f"shares dictionary {column.dictionary!r} ({getattr(first, field)!r}); expected the same"
                    )


def _mapping(value: object, where: str, allowed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{where}: {_shown(value)}; expected a mapping of {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            raise SpecError(f"{where}.{key}: unknown field; expected {one_of(str(key), allowed)}")
    return value


def _whole(fields: dict[str, Any], key: str, default: int, least: int, most: int, where: str) -> int:
    value = fields.get(key, default) if key in fields else default
    if key in fields and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise SpecError(f"{where}.{key}: {_shown(value)}; expected a whole number from {least} to {most}")
    return int(value)


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
