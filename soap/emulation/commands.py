"""Runs ``ip`` and ``tc``. If they fail, the error says in one line what the system lacks."""

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
"""Words in the commands' errors -> what to do."""


def run(*command: str, lines: Iterable[str] = ()) -> str:
    """Run a command; its output. ``lines``: its input, for ``-batch -``. RuntimeFailure in one line if it fails or is missing. Ctrl-C
    does not reach the command: half-done work would be hard to undo."""
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
    """A command's error in one line, with what to do about it where that is known."""
    text = " ".join(said.split()) or "it failed without saying why"
    remedies = [remedy for mark, remedy in REMEDIES if mark in text]
    return f"{text}; {remedies[0]}" if remedies else text
