"""A launcher to be killed: ``python -m tests.emulation.launcher``. Prints its emulation's number and its two processes there, and waits.

The first is on its host as a rank is, and ends with the launcher. The second is only in the host's control group.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from soap.cluster.presets import preset
from soap.emulation.emulate import emulated
from soap.emulation.hosts import host_limits

PLACED = """
import sys, time
from soap.emulation.placement import Placement
Placement(((sys.argv[1], sys.argv[2]),))(0)
print("placed", flush=True)
time.sleep(100)
"""


def main() -> None:
    with emulated(host_limits(preset("emulated:2x1@80Mbit/s"), 1.0, 2)) as emulation:
        command = [sys.executable, "-c", PLACED, *emulation.place.hosts[0]]
        placed = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert placed.stdout is not None
        placed.stdout.readline()
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        (Path(emulation.place.hosts[1][1]) / "cgroup.procs").write_text(str(other.pid))
        print(emulation.number, placed.pid, other.pid, flush=True)
        time.sleep(100)


if __name__ == "__main__":
    main()
