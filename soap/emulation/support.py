"""Whether this system can emulate a cluster; if not, what is missing and what to do."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from soap.emulation.quota import CpuGroups, find_cpu_groups
from soap.errors import RuntimeFailure

OWN_NETWORK = Path("/proc/self/ns/net")


def require_support() -> CpuGroups:
    """Where CPU quotas are set. RuntimeFailure in one line if something is missing that can be seen without trying."""
    if sys.platform != "linux":
        raise RuntimeFailure(f"--emulate needs Linux's network namespaces; this is {sys.platform}: run it on Linux, or without --emulate")
    if os.geteuid() != 0:
        raise RuntimeFailure("--emulate makes network namespaces, for which one has to be root: run it with sudo, or without --emulate")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise RuntimeFailure(f"--emulate needs the command {command!r}, which is not in PATH: install the package iproute2")
    if not OWN_NETWORK.exists():
        raise RuntimeFailure("--emulate needs network namespaces, which this kernel lacks: use one built with CONFIG_NET_NS")
    groups = find_cpu_groups()
    if groups is None:
        raise RuntimeFailure(
            "--emulate needs control groups that limit CPU time, and none are mounted: mount them with "
            "'mount -t cgroup2 none /sys/fs/cgroup' (CONFIG_CFS_BANDWIDTH in the kernel), or start the container with its host's"
        )
    return groups
