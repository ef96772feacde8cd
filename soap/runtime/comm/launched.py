"""Whether a launcher has started this process as one of several ranks, by the environment: torchrun, Slurm, MPI, or ours.

Their variables stay behind in shells and containers. Whoever takes them at their word waits for ranks that nobody starts.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from functools import cache

from soap.errors import RuntimeFailure

NUMBERS = frozenset(f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE"))
GIVEN_TO_RANKS = NUMBERS | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that torch's launcher sets in each rank, in addition to those that begin with ``OF_LAUNCHER``."""
OF_LAUNCHER = "TORCHELASTIC_"
RUN = "TORCHELASTIC_RUN_ID"
OTHERS = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
"""Number and count of processes as Slurm's srun and kinds of MPI give them to each process that they start."""
REACH_S = 5.0
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
"""By platform, the interface that only this machine reaches."""


def under_launcher(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, Slurm or MPI has started this process as one of several ranks. RuntimeFailure in one line that names the variables
    if they say so, but were left behind, or are no numbers. An empty variable counts as none."""
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        return False
    why = _doubt(environment)
    if why:
        found = [name for name in environment if name in GIVEN_TO_RANKS or name.startswith(OF_LAUNCHER)]
        told = ", ".join(f"{name}={environment[name]}" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in found)
        raise RuntimeFailure(
            f"{told}: {why}; expected none of these variables if they were left behind: unset {' '.join(sorted(found))}; or torchrun, "
            f"srun or mpirun; or, for ranks that you start by hand, {RUN} with any word, the same for all"
        )
    return True


def world_size(environment: Mapping[str, str]) -> int:
    """Number of processes that the environment announces. RuntimeFailure as for ``under_launcher``."""
    return int(environment["WORLD_SIZE"]) if under_launcher(environment) else 1


def own_rank(environment: Mapping[str, str]) -> int:
    """This process's number among those. RuntimeFailure as for ``under_launcher``."""
    return int(environment["RANK"]) if under_launcher(environment) else 0


def local_numbers(environment: Mapping[str, str], size: int) -> tuple[int, int]:
    """This process's number among those of its machine, and how many these are: all ``size`` unless a launcher has said so."""
    if not under_launcher(environment):
        return 0, size
    found = [environment.get(name) or str(other) for name, other in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", size))]
    if not all(number.isdecimal() for number in found) or not int(found[0]) < int(found[1]):
        raise RuntimeFailure(f"LOCAL_RANK={found[0]}, LOCAL_WORLD_SIZE={found[1]}; expected a number below the second one: unset both")
    return int(found[0]), int(found[1])


def all_here(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are known to be on this machine."""
    return not under_launcher(environment) or environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]


def loopback() -> dict[str, str]:
    """Environment variables by which backends listen on loopback alone, for ranks that are all on this machine."""
    interface = LOOPBACK.get(sys.platform)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def inherited(name: str) -> bool:
    """Whether processes that we start have an environment variable from us: not what a launcher gives to its own."""
    return name not in GIVEN_TO_RANKS and not name.startswith(OF_LAUNCHER)


def _doubt(environment: Mapping[str, str]) -> str:
    """Why no launcher can have set the variables; empty if one may have."""
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal()):
        return "no numbers"
    if RUN in environment:
        address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not _answers(address, port):
            return f"the torchrun that has set them is gone: nobody listens at {address}:{port}"
        return ""
    if any((environment.get(own), environment.get(count)) == (rank, size) for own, count in OTHERS):
        return ""
    return f"this process would be one of {size}, but neither torchrun nor Slurm nor MPI has started it"


@cache
def _answers(address: str, port: str) -> bool:
    """Whether somebody listens there; also if that cannot be told, such as past a firewall. torchrun does before it starts ranks."""
    try:
        socket.create_connection((address, int(port)), REACH_S).close()
    except TimeoutError:
        return True
    except (OSError, ValueError):
        return False
    return True
