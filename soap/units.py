"""Quantities with units, as people write them in ``cluster.yaml``: text to base units and back.

Base units: bytes, bytes per second, seconds, FLOP per second. Bits are written ``bit``, bytes ``B``. Decimal prefixes (k, M, G, T, P) stand
for powers of 1000, binary ones (Ki, Mi, Gi, Ti, Pi) for powers of 1024. Case matters, so that ``m`` is never taken for ``M``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from soap.errors import TopologyError

_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*?)\s*", re.ASCII)
_LONGEST = 80
"""The most characters of a quantity: numbers become exact fractions, which must not grow without bound."""
_MOST = 1e24

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}

Units = dict[str, Fraction]

_BYTES: Units = {f"{prefix}B": Fraction(factor) for prefix, factor in _PREFIXES.items()}
_BITS: Units = {f"{prefix}bit": Fraction(factor, 8) for prefix, factor in _PREFIXES.items()}
_SECONDS: Units = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
_SECONDS |= {"\u00b5s": Fraction(1, 10**6), "\u03bcs": Fraction(1, 10**6)}  # the micro sign and the Greek letter look alike
_BANDWIDTHS: Units = {f"{unit}/s": factor for unit, factor in {**_BYTES, **_BITS}.items()}
_BANDWIDTHS |= {f"{prefix}bps": Fraction(factor, 8) for prefix, factor in _DECIMAL.items()}
_RATES: Units = {f"{prefix}{unit}": Fraction(factor) for prefix, factor in _DECIMAL.items() for unit in ("FLOP/s", "FLOPS")}


def parse_bytes(text: object, where: str = "size") -> int:
    """Bytes of e.g. ``16 GiB``, rounded to whole bytes. ``where`` names the value in error messages."""
    return round(_parse(text, _BYTES, where, "a size such as '16 GiB'"))


def parse_bandwidth(text: object, where: str = "bandwidth") -> float:
    """Bytes per second of e.g. ``100 Gbit/s`` or ``900 GB/s``."""
    return float(_parse(text, _BANDWIDTHS, where, "a bandwidth such as '100 Gbit/s' or '900 GB/s'"))


def parse_seconds(text: object, where: str = "time") -> float:
    """Seconds of e.g. ``2 us`` or ``250ms``."""
    return float(_parse(text, _SECONDS, where, "a time such as '2 us'"))


def parse_flops(text: object, where: str = "compute rate") -> float:
    """FLOP per second of e.g. ``9.3 TFLOP/s``."""
    return float(_parse(text, _RATES, where, "a compute rate such as '9.3 TFLOP/s'"))


def _parse(text: object, units: Units, where: str, expected: str) -> Fraction:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        raise TopologyError(f"{where}: {text!r} has no unit; expected {expected}: add the unit")
    match = _NUMBER.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match is None:
        raise TopologyError(f"{where}: {_shown(text)} is no quantity; expected {expected}: write a number and a unit")
    number, unit = Fraction(match[1]), match[2]
    if unit not in units:
        raise TopologyError(f"{where}: {_unit_problem(str(text), unit)}; expected {expected}: {_remedy(unit, units)}")
    value = number * units[unit]
    if not 0 <= value <= _MOST:
        raise TopologyError(f"{where}: {text!r} is out of range; expected {expected}: write a number from 0 to {_MOST:.0e} base units")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _unit_problem(text: str, unit: str) -> str:
    return f"{text!r} has unit {unit!r}" if unit else f"{text!r} has no unit"


def _remedy(unit: str, units: Units) -> str:
    if not unit:
        return "add the unit"
    for prefix in _PREFIXES if units is _BANDWIDTHS else ():  # "Gb/s" is meant in bits by some and in bytes by others
        if unit.lower() in (f"{prefix}b/s".lower(), f"{prefix}bps".lower()):
            return f"write '{prefix}bit/s' for bits or '{prefix}B/s' for bytes"
    alike = [known for known in units if known.lower() == unit.lower()]
    return f"write {alike[0]!r}" if len(alike) == 1 else f"use one of {', '.join(list(units)[:12])}"


def format_bytes(size_bytes: float) -> str:
    """For people, in binary units and three significant digits: ``1.50 GiB``."""
    return _scaled(size_bytes, [("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)], "B")


def format_seconds(seconds: float) -> str:
    """For people, three significant digits: ``2.50 us``, ``1.20 s``; from two minutes on as ``2 min 05 s``."""
    if abs(seconds) >= 119.5:
        minutes, rest = divmod(round(abs(seconds)), 60)
        hours, minutes = divmod(minutes, 60)
        sign = "-" if seconds < 0 else ""
        return f"{sign}{hours} h {minutes:02d} min" if hours else f"{sign}{minutes} min {rest:02d} s"
    return _scaled(seconds, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)], "ns", base=1e-9)


def format_rate(per_second: float, unit: str = "B") -> str:
    """For people, in decimal units and three significant digits: ``12.5 GB/s``, ``9.30 TFLOP/s``."""
    steps = [(f"{prefix}{unit}/s", float(factor)) for prefix, factor in reversed(_DECIMAL.items()) if prefix]
    return _scaled(per_second, steps, f"{unit}/s")


def format_count(number: float, unit: str = "") -> str:
    """For people, in decimal steps and three significant digits: ``12.5 M``, ``1.20 GFLOP``; small whole numbers as they are."""
    steps = [(f"{prefix}{unit}", float(factor)) for prefix, factor in reversed(_DECIMAL.items()) if prefix]
    return _scaled(number, steps, unit).rstrip()


def _scaled(value: float, steps: list[tuple[str, float]], smallest: str, base: float = 1.0) -> str:
    """``value`` in the largest unit in which it is at least 1. A value that three digits would round up to 1000 moves to the next unit."""
    for unit, factor in steps:
        if abs(value) >= factor * 0.9995:
            return f"{_three_digits(value / factor)} {unit}"
    scaled = value / base
    return f"{scaled:.0f} {smallest}" if scaled == round(scaled) else f"{_three_digits(scaled)} {smallest}"


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"
