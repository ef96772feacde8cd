"""Reads nested mappings from outside (YAML, JSON) strictly: an unknown key, a missing one or a wrong type is a TopologyError in one
line. Every message begins with the path of the value, e.g. ``cluster.yaml: hosts[0].devices.count``."""

from __future__ import annotations

from collections.abc import Sequence

from soap.errors import TopologyError, did_you_mean
from soap.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds

MOST_AMOUNT = 1e12


class Fields:
    """One mapping with its path. A getter with a default accepts a missing key; one without requires the key. The outermost path is the
    file's name with a colon and a space. ``allowed`` None accepts any keys."""

    def __init__(self, value: object, path: str, allowed: Sequence[str] | None = None) -> None:
        self.path = path
        if not isinstance(value, dict):
            raise TopologyError(f"{path.removesuffix(': ')}: {_shown(value)}; expected a mapping{_of(allowed)}")
        self._values: dict[str, object] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TopologyError(f"{path.removesuffix(': ')}: key {key!r}; expected text: put it in quotes")
            self._values[key] = item
        for key in self._values if allowed is not None else ():
            if key not in (allowed or ()):
                remedy = did_you_mean(key, allowed or ()) or ": remove it"
                raise TopologyError(f"{self.at(key)}: unknown key; expected one of {', '.join(allowed or ())}{remedy}")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, in file order."""
        return tuple(self._values)

    def at(self, key: str) -> str:
        """Path of a key."""
        return f"{self.path}{key}" if self.path.endswith(": ") else f"{self.path}.{key}"

    def value(self, key: str) -> object:
        """The raw value; TopologyError if it is missing or empty."""
        found = self._values.get(key)
        if found is None:
            raise TopologyError(f"{self.at(key)}: missing; expected a value: add {key!r}")
        return found

    def text(self, key: str, default: str | None = None) -> str:
        """Non-empty text."""
        found = default if key not in self and default is not None else self.value(key)
        if not isinstance(found, str) or not found.strip():
            raise TopologyError(f"{self.at(key)}: {_shown(found)}; expected text: write a name")
        return found

    def whole(self, key: str, default: int | None = None, *, most: int = 2**31) -> int:
        """A whole number from 1 to ``most``."""
        found = default if key not in self and default is not None else self.value(key)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
            raise TopologyError(f"{self.at(key)}: {_shown(found)}; expected a whole number from 1 to {most}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self._values.get(key, default)
        if not isinstance(found, bool):
            raise TopologyError(f"{self.at(key)}: {_shown(found)}; expected true or false")
        return found

    def choice(self, key: str, options: Sequence[str], default: str | None = None) -> str:
        """One of the options."""
        found = default if key not in self and default is not None else self.value(key)
        if found not in options:
            raise TopologyError(f"{self.at(key)}: {_shown(found)}; expected one of {', '.join(options)}")
        return str(found)

    def size_bytes(self, key: str) -> int:
        """A size, e.g. ``16 GiB``; above 0."""
        return int(self._positive(key, parse_bytes(self.value(key), self.at(key))))

    def bandwidth(self, key: str) -> float:
        """Bytes per second, e.g. from ``100 Gbit/s``; above 0."""
        return self._positive(key, parse_bandwidth(self.value(key), self.at(key)))

    def flops(self, key: str) -> float:
        """FLOP per second, e.g. from ``9.3 TFLOP/s``; above 0."""
        return self._positive(key, parse_flops(self.value(key), self.at(key)))

    def seconds(self, key: str) -> float:
        """Seconds, e.g. from ``2 us``; may be 0."""
        return parse_seconds(self.value(key), self.at(key))

    def amount(self, key: str) -> float:
        """A plain number without unit, from 0 to ``MOST_AMOUNT``."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= MOST_AMOUNT:
            expected = f"a number from 0 to {MOST_AMOUNT:.0e}, such as 2.5"
            raise TopologyError(f"{self.at(key)}: {_shown(found)}; expected {expected}: write it without a unit")
        return float(found)

    def section(self, key: str, allowed: Sequence[str] | None = None) -> Fields:
        """A nested mapping."""
        return Fields(self.value(key), self.at(key), allowed)

    def items(self, key: str, *, required: bool = False) -> list[tuple[object, str]]:
        """The elements of a list with their paths; [] if it is left out and not required."""
        if not required and key not in self:
            return []
        found = self.value(key)
        if not isinstance(found, list) or (required and not found):
            raise TopologyError(f"{self.at(key)}: {_shown(found)}; expected a list{' with at least one element' if required else ''}")
        return [(item, f"{self.at(key)}[{i}]") for i, item in enumerate(found)]

    def _positive(self, key: str, number: float) -> float:
        if not number > 0:
            raise TopologyError(f"{self.at(key)}: {self._values[key]!r}; expected more than 0: write the figure")
        return number


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return f"a mapping with {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} elements"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of(allowed: Sequence[str] | None) -> str:
    return f" with the keys {', '.join(allowed)}" if allowed else ""
