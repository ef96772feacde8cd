"""A Ray head, as the child of a keeper: ``python -m soap.elastic.head FOLDER INTERFACE CPUS OBJECT_STORE_BYTES``. Says its address, or an
error, in one line of JSON, and waits to be ended. Not done in the keeper itself, which Ray would end with the raylet."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from soap.elastic.session import as_told
from soap.errors import first_line
from soap.runtime.system.process import die_with_parent


def start(folder: Path, interface: str, cpus: int, object_store_bytes: int) -> str:
    """Start a head that listens on ``interface`` alone, with everything of it below ``folder``. Returns its address."""
    import ray

    with as_told(interface):
        context: Any = ray.init(
            address="local",
            num_cpus=cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _node_ip_address=interface,
            _temp_dir=str(folder / "ray"),  # which Ray opens to all; the folder around it stays closed
        )
    return str(context.address_info["gcs_address"])


def main() -> None:
    """Entry point."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but the answer goes to the keeper
    try:
        answer = {"address": start(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))}
    except Exception as error:  # Ray raises all kinds
        answer = {"error": first_line(error)}
    print(json.dumps(answer), file=answers, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray has set its own, and would wait for those who have been ended
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
