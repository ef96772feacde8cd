"""Notes of what commands have told about this machine's measurements, so that they tell it once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress

from soap.errors import SoapError
from soap.files import cache_folder, read_text, write_text_atomically

FILE = "told.json"
KEPT_S = 30 * 86_400.0
"""After so long it may be told again."""

_here: set[str] = set()


def is_news(text: str, clock: Callable[[], float] = time.time) -> bool:
    """Whether this was not told yet; from now on it was. In this process it is told once even if nothing can be kept."""
    name, now_s, folder = hashlib.sha256(text.encode()).hexdigest()[:16], clock(), cache_folder()
    place = f"{folder} {name}"
    if place in _here:
        return False
    _here.add(place)
    if folder is None:
        return True
    path, known = folder / FILE, dict[str, float]()
    with suppress(SoapError, ValueError, AttributeError, TypeError, RecursionError):  # a file of something else counts as absent
        known = {str(key): float(told_s) for key, told_s in json.loads(read_text(path)).items() if 0 <= now_s - float(told_s) < KEPT_S}
    if name in known:
        return False
    with suppress(OSError, SoapError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps({**known, name: now_s}, indent=1) + "\n")
    return True
