"""``python -m release.machine_code`` writes what a wheel brings along of the simulator and the search, into ``soap/machine_code``.

The source distribution and the wheel that are built next take it along. It takes two minutes of a core, once for all versions of Python.
"""

from __future__ import annotations

from importlib import import_module

from soap.simulator.compiled.compiling import SHIPPED, ship
from soap.simulator.compiled.machine_code import ENGINE


def main() -> None:
    """Write it, and remove what was made of other sources."""
    for module in ENGINE.modules:
        import_module(module)
    made = ship(ENGINE)
    for path in SHIPPED.iterdir():
        if path != made:
            path.unlink()
    print(made)


if __name__ == "__main__":
    main()
