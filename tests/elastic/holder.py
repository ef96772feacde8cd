"""Holds a session until it is ended: ``python -m tests.elastic.holder HOW``. Says the session's folder and its processes, the first being
its keeper, in one line of JSON. HOW: wait, linger (wait, and take some seconds to end), leave (after a line comes), or fail (likewise)."""

from __future__ import annotations

import json
import sys
import time

from soap.elastic.session import module, session

LINGER_S = 4.0
"""Longer than the three seconds after which a handler in Ray's C++ would abort the process."""


class Sleeper:
    """An actor."""

    def begin(self) -> int:
        return 1


def main() -> None:
    with session(cpus=1) as own:
        ray = module()
        actor = ray.remote(num_cpus=0)(Sleeper).remote()
        ray.get(actor.begin.remote())
        own.check_listeners()
        print(json.dumps({"folder": str(own.folder), "processes": own.processes}), flush=True)
        if sys.argv[1] in ("wait", "linger"):
            try:
                time.sleep(600)
            finally:
                time.sleep(LINGER_S if sys.argv[1] == "linger" else 0)
        sys.stdin.readline()
        if sys.argv[1] == "fail":
            raise RuntimeError("as asked for")


if __name__ == "__main__":
    main()
