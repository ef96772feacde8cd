"""Holds a session until it is ended: ``python -m tests.elastic.holder HOW``. Says the session's folder and its processes, the first being
its keeper, in one line of JSON. HOW: wait, leave (after a line comes), or fail (likewise)."""

from __future__ import annotations

import json
import sys
import time

from soap.elastic.session import module, session


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
        if sys.argv[1] == "wait":
            time.sleep(600)
        sys.stdin.readline()
        if sys.argv[1] == "fail":
            raise RuntimeError("as asked for")


if __name__ == "__main__":
    main()
