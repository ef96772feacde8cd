"""The reference speed of a core of this machine for emulated hosts (``reference_work``), kept in the user's cache folder. It is
measured once, so that whatever is measured of emulated devices, now or later, refers to the same core."""

from __future__ import annotations

import json
import warnings

from soap.emulation.reference_work import VERSION, measured_reference_ns
from soap.errors import ProfileError, SoapError
from soap.files import cache_folder, read_text, write_text_atomically
from soap.measure.this_machine import cpu_model

FILE = "core-speed.json"


def core_reference_ns() -> float | None:
    """Nanoseconds of the reference work on a core of this machine; None if they cannot be measured."""
    folder = cache_folder()
    key = f"{cpu_model()}, yardstick {VERSION}"  # an older word for the reference work: another key would measure the core anew
    path = None if folder is None else folder / FILE
    try:
        known = json.loads(read_text(path, what="cache file")) if path is not None and path.exists() else {}
        if isinstance(known.get(key), float) and known[key] > 0:
            return float(known[key])
    except (SoapError, ValueError, AttributeError, RecursionError):
        known = {}
    found = measured_reference_ns()
    if found is not None and path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps({**known, key: found}, indent=1) + "\n", error=ProfileError)
        except (OSError, ProfileError) as cause:
            warnings.warn(f"the speed of this machine's cores is not kept: {cause}; repeated runs will differ slightly", stacklevel=2)
    return found
