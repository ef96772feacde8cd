"""Running ``ip`` and ``tc``, and saying in one line what the system lacks when they fail."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from soap.errors import RuntimeFailure

LIMIT_S = 30
REMEDIES = (
    ("qdisc kind is unknown", "the kernel has no token buckets: load them with 'modprobe sch_tbf'"),
    ("Unknown device type", "the kernel lacks this kind of network device: load it with 'modprobe veth bridge'"),
    ("Operation not supported", "the kernel lacks bridges, veth pairs or token buckets: 'modprobe bridge veth sch_tbf'"),
    ("not permitted", "even root may not do so here: start the container with the capabilities NET_ADMIN and SYS_ADMIN"),
    ("Permission denied", "even root may not do so here: start the container with the capabilities NET_ADMIN and SYS_ADMIN"),
    ("mount --make-shared", "namespaces need mounts, which are not allowed here: start the container with the capability SYS_ADMIN"),
)
"""Marks in what the commands say -> what to do."""


def run(*command: str, lines: Iterable[str] = ()) -> str:
    """What the command prints. ``lines``: its input, for ``-batch -``. RuntimeFailure in one line if it fails or is missing.

    Ctrl-C does not reach it: half of what it does would have to be found again.
    """
    try:
        done = subprocess.run(
            command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=LIMIT_S, process_group=0
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise RuntimeFailure(f"--emulate: {' '.join(command)}: {cause}; expected iproute2's commands to work") from None
    if done.returncode:
        raise RuntimeFailure(f"--emulate: {' '.join(command)}: {explain(done.stderr)}")
    return done.stdout


def explain(said: str) -> str:
    """What a command said in one line, with what to do about it where that is known."""
    text = " ".join(said.split()) or "it failed without saying why"
    remedies = [remedy for mark, remedy in REMEDIES if mark in text]
    return f"{text}; {remedies[0]}" if remedies else text
