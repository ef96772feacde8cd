"""What of a gradient travels when it is compressed: the methods, their settings, and what each promises. All are lossy, so opt-in.

``COMPRESSIONS`` is the only list of them. Each has a module of the same name in ``soap.plan.compression`` (sizes of its messages) and one
in ``soap.runtime.compression`` (what it does with numbers). All other code asks for the properties below, never for the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from soap.errors import StrategyError, one_of
from soap.model.json_text import Form, written_options

Selection = Literal["policy", "exact", "trimmed", "search", "sampled"]
"""How the largest elements are found. ``exact``: the k largest, by the maxima of blocks. ``trimmed``: the same set, by a threshold between
mean and maximum (RedSync's algorithm 2). ``search``: k to 2k elements above a threshold, by binary search (algorithm 3). ``sampled``: the
same, with a threshold of an earlier step in four steps of five. ``policy``: by the kind of layer, see ``soap.plan.compression.policy``."""
SELECTIONS: tuple[Selection, ...] = get_args(Selection)
EXACT: tuple[Selection, ...] = ("exact", "trimmed")
"""Selections of just k elements; the others select up to 2 k."""
Codes = Literal["2bit", "bf16"]
"""How ``chunked`` sends values: a sign and one of two magnitudes of the chunk, or bfloat16."""

DENSITY = 0.001
"""RedSync's and DGC's."""
MOST_RANK = 2**20
"""Of PowerSGD: above any real value, and small enough to compute with."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A method of compressing gradients with its settings. StrategyError if a setting is out of range.

    ``name``: in ``parse``, commands and files. ``number``: which setting a number behind the colon means. ``summed_state``: tensors of
    the parameter's shape that each rank keeps for itself from step to step, and whose sum over the ranks matters: a checkpoint holds them
    per rank, another number of ranks goes on from the sum.
    """

    name: ClassVar[str]
    number: ClassVar[str] = ""
    summed_state: ClassVar[tuple[str, ...]] = ("residual",)
    json_form: ClassVar[Form]

    @property
    def module(self) -> str:
        """The name of its modules."""
        return self.name.replace("+", "_")

    @property
    def word(self) -> str:
        """``name``, or ``name:number``: what ``parse`` takes. Settings beside the number are not in it."""
        return f"{self.name}:{getattr(self, self.number)}" if self.number else self.name

    @property
    def share(self) -> float:
        """The density; 1 for methods that have none."""
        return float(getattr(self, "density", 1.0))

    @property
    def padded(self) -> Self:
        """The same method with messages of one size; itself if it has no others."""
        return replace(self, **{"ragged": False}) if getattr(self, "ragged", False) else self

    def at(self, density: float) -> Self:
        """The same method at another density; itself if it has none."""
        return replace(self, **{"density": density}) if self.number == "density" else self


@dataclass(frozen=True, slots=True)
class Rgc(Compression):
    """Residual gradient compression: the largest ``density`` of the elements travel with their positions, the others stay as a residual.

    ``ragged``: ranks tell each other the sizes of their messages first, and then send just these; else messages are padded to as many
    elements as a selection can have, and go at once. The sums have the same bits. Only for selections of varying length.
    """

    name: ClassVar[str] = "rgc"
    number: ClassVar[str] = "density"
    density: float = DENSITY
    selection: Selection = "policy"
    ragged: bool = False

    def __post_init__(self) -> None:
        _require_density(self.name, self.density)
        _require_one_of(self.name, "selection", self.selection, SELECTIONS)
        _require_ragged(self.name, self.selection, self.ragged)


@dataclass(frozen=True, slots=True)
class RgcAsq(Compression):
    """RGC with alternating signs: in one step the largest, in the next the smallest elements, all of which travel as their mean.

    ``error_feedback``: the differences from the mean stay in the residual; RedSync drops them. A reused threshold would be the other
    sign's, so there is no sampled search. ``ragged``: see ``Rgc``.
    """

    name: ClassVar[str] = "rgc+asq"
    number: ClassVar[str] = "density"
    density: float = DENSITY
    selection: Selection = "policy"
    error_feedback: bool = False
    ragged: bool = False

    def __post_init__(self) -> None:
        _require_density(self.name, self.density)
        _require_one_of(self.name, "selection", self.selection, tuple(each for each in SELECTIONS if each != "sampled"))
        _require_ragged(self.name, self.selection, self.ragged)


@dataclass(frozen=True, slots=True)
class Chunked(Compression):
    """The largest elements of each chunk of 4,096, as SparseLoCo sends them: positions of 12 bits, short values, and a length known before.

    ``decay``: what a step keeps of the old residual. ``codes``: how values travel.
    """

    name: ClassVar[str] = "chunked"
    number: ClassVar[str] = "density"
    density: float = 64 / 4096
    codes: Codes = "2bit"
    decay: float = 0.95

    def __post_init__(self) -> None:
        _require_density(self.name, self.density)
        _require_one_of(self.name, "codes", self.codes, get_args(Codes))
        if not _is_of(self.decay, "float") or not 0 <= self.decay <= 1:
            shown = f"{self.name}: decay {_shown(self.decay)}"
            raise StrategyError(f"{shown}; expected a number from 0 to 1 (1: nothing of the residual is forgotten)")


@dataclass(frozen=True, slots=True)
class PowerSgd(Compression):
    """A product of two thin matrices of this ``rank`` (PowerSGD): one power iteration, begun where the last step's ended."""

    name: ClassVar[str] = "powersgd"
    number: ClassVar[str] = "rank"
    rank: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or not 1 <= self.rank <= MOST_RANK:
            raise StrategyError(f"{self.name}: rank {_shown(self.rank)}; expected a whole number from 1 to {MOST_RANK}")


@dataclass(frozen=True, slots=True)
class Bf16(Compression):
    """Gradients travel in bfloat16 and are summed in float32. Nothing is kept: what rounding takes is lost, as in PyTorch's hook."""

    name: ClassVar[str] = "bf16"
    summed_state: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Int8(Compression):
    """Gradients travel as whole numbers of eight bits with a scale for each block, and are summed in float32; errors stay as a residual."""

    name: ClassVar[str] = "int8"


COMPRESSIONS: dict[str, type[Compression]] = {kind.name: kind for kind in (Rgc, RgcAsq, Chunked, PowerSgd, Bf16, Int8)}
"""All methods by name."""


def parse(text: str) -> Compression:
    """``rgc``, ``rgc:0.01``, ``powersgd:4``: a method with its default settings but for the number. StrategyError if it cannot be read."""
    name, colon, number = text.partition(":")
    kind = COMPRESSIONS.get(name)
    if kind is None:
        raise StrategyError(f"compression {_shown(name)} is unknown; expected {one_of(str(name), COMPRESSIONS)}")
    if not colon:
        return kind()
    if not kind.number:
        raise StrategyError(f"compression {_shown(text)}: {name} has no setting; expected {name!r}")
    whole = any(own.name == kind.number and own.type == "int" for own in fields(kind))
    try:
        value: Any = int(number) if whole else float(number)
    except ValueError:
        example = kind().word
        raise StrategyError(f"compression {_shown(text)}: expected a {kind.number} behind the colon, such as {example!r}") from None
    return kind(**{kind.number: value})


def written_settings(compression: Compression) -> dict[str, Any]:
    """A method with the settings that differ from its defaults, as plain JSON values."""
    return {"method": compression.name} | written_options(compression)


def read_settings(entry: Mapping[str, Any]) -> Compression:
    """The reverse. StrategyError for an unknown method, setting or value."""
    given = dict(entry)
    name = given.pop("method", None)
    kind = COMPRESSIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        expected = one_of(name if isinstance(name, str) else "", COMPRESSIONS)
        raise StrategyError(f"compression {_shown(name)} is unknown; expected {expected}")
    known = {field.name: field.type for field in fields(kind)}
    expected = f"expected one of {', '.join(known)}" if known else "it has no settings"
    for setting, value in given.items():
        if setting not in known:
            raise StrategyError(f"{name}: unknown setting {_shown(setting)}; {expected}: take it out")
        if not _is_of(value, str(known[setting])):
            shown, wanted = _shown(value), _EXPECTED.get(str(known[setting]), "a text")
            raise StrategyError(f"{name}: {setting} {shown}; expected {wanted}")
    made = kind(**given)
    return replace(made, **{setting: float(value) for setting, value in given.items() if known[setting] == "float"})


def said_settings(entry: Mapping[str, Any]) -> str:
    """Such an entry for people: ``rgc, density 0.01``."""
    return ", ".join([entry["method"], *(f"{name} {value}" for name, value in entry.items() if name != "method")])


def _settings_schema() -> Mapping[str, Any]:
    """As far as it is the same for all methods; ``read_settings`` checks the rest."""
    value = {"type": ["number", "string", "boolean"]}
    return {
        "type": "object",
        "properties": {"method": {"enum": list(COMPRESSIONS)}},
        "required": ["method"],
        "additionalProperties": value,
    }


Compression.json_form = Form(_settings_schema, read_settings, written_settings, said_settings)

_EXPECTED = {"float": "a number", "int": "a whole number", "bool": "true or false"}


def _shown(value: object) -> str:
    """A value for a message: one short line, whatever it is."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return "a number of over 20 digits"  # Python writes out no number of over 4,300
    try:
        return " ".join(repr(value).split())[:60]
    except ValueError:  # such a number in a list
        return f"a {type(value).__name__}"


def _is_of(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("float", "int"):
        return isinstance(value, (int, float) if kind == "float" else int) and not isinstance(value, bool)
    return isinstance(value, str)


def _require_density(name: str, density: float) -> None:
    if not _is_of(density, "float") or not 0 < density <= 1:
        raise StrategyError(f"{name}: density {_shown(density)}; expected a share of the elements above 0 and up to 1, such as {DENSITY}")


def _require_ragged(name: str, selection: Selection, ragged: bool) -> None:
    if not isinstance(ragged, bool):
        raise StrategyError(f"{name}: ragged {_shown(ragged)}; expected true or false")
    if ragged and selection in EXACT:
        raise StrategyError(f"{name}: ragged with selection {selection!r}, whose messages all have one length; expected ragged false")


def _require_one_of(name: str, setting: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StrategyError(f"{name}: {setting} {_shown(value)}; expected one of {', '.join(allowed)}")
