"""What columns the data have, and what is done with each: a SPEC in YAML, or a preset's name. Nothing here touches data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from soap.errors import SoapError
from soap.files import read_text
from soap.model.json_text import Form, Schema, Unfit, located, read_as, reader_of, record
from soap.yaml_text import parse_yaml

Kind = Literal["label", "integer", "hex", "string"]
LEAST, MOST = -(2**31), 2**31 - 1
"""Labels and integers are kept in 32 bits."""
MOST_COLUMNS = 10_000
LONGEST_SPEC_BYTES = 2**22
Name = Annotated[
    str,
    Schema(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,99}\Z", description="up to 100 letters, digits, - and _: files are named by it"),
]
_WHOLE = Annotated[int, Schema(minimum=LEAST, maximum=MOST)]
_DIGITS = Annotated[str, Schema(pattern=r"^[0-9a-fA-F]{1,16}\Z", description="1 to 16 hexadecimal digits in quotes")]
_TEXT = Annotated[str, Schema(pattern=r"^[^\t\r\n]*\Z", description="text without tabs and line breaks")]
_ANY = {"name": Name, "kind": str, "count": Annotated[int, Schema(minimum=1, maximum=MOST_COLUMNS)]}
_INDEXED = {"min_count": Annotated[int, Schema(minimum=1, maximum=2**62)], "dictionary": Name}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "label": {"missing": _WHOLE},
    "integer": {"missing": _WHOLE, "log1p": bool},
    "hex": {"missing": _DIGITS, "modulus": Annotated[int, Schema(minimum=1, maximum=2**31 - 1)], **_INDEXED},
    "string": {"missing": _TEXT, **_INDEXED},
}
"""Fields of each kind with their types, beside those of any."""
_ENTRIES = {kind: record(("count", *own), **_ANY, **own) for kind, own in _FIELDS.items()}
_MISSING = {"hex": "0", "string": ""}
"""What an empty category stands for, if nothing is said."""


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
    kind: Kind
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
    try:
        columns = [column for own in read_as(_SPEC, document)["columns"] for column in own]
    except Unfit as fault:
        place = "".join(f"[{own}]" if isinstance(own, int) else f".{own}" for own in fault.path).removeprefix(".")
        raise SpecError(": ".join(filter(None, (where, place, str(fault))))) from None
    if len(columns) > MOST_COLUMNS:
        raise SpecError(f"{where}: columns: {len(columns)} of them; expected at most {MOST_COLUMNS}")
    _check_together(columns, where)
    return Spec(tuple(columns))


def _columns(entry: Any) -> list[Column]:
    """The columns of one entry: as many as its ``count``, numbered from 1 then."""
    kind: Kind = located("kind", reader_of(Kind), entry.get("kind") if isinstance(entry, dict) else "label")
    digit = isinstance(entry, dict) and kind == "hex" and type(given := entry.get("missing")) is int and 0 <= given <= 9
    if digit:  # of longer ones YAML does not say how they were written: 0x10 and 020 are 16
        entry = {**entry, "missing": str(given)}
    found = read_as(_ENTRIES[kind], entry)
    name, count = found.pop("name"), found.pop("count", 0)
    names = [f"{name}{i + 1}" for i in range(count)] if count else [name]
    found = {"missing": _MISSING.get(kind, 0), **found}
    shared = found.pop("dictionary", None)
    return [Column(own, dictionary=(shared or own) if kind in _MISSING else "", **found) for own in names]


_SPEC = record(
    columns=Annotated[
        tuple[Annotated[Any, Form(read=_columns)], ...],
        Schema(minItems=1, description="a list of columns, in the order of the input's fields"),
    ]
)


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

