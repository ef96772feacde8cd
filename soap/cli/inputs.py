"""Checks of input files that commands make at once: importing torch, reading a model and measuring this machine take seconds to minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from soap import api
from soap.cluster import yaml_file
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.model.files import check_exists


def check_inputs(args: argparse.Namespace) -> None:
    """Raise what the command would otherwise say later: of files that are not there, and of a strategy for another cluster. Nothing is
    imported for it that takes long, and nothing measured."""
    strategy = getattr(args, "strategy", None)
    header = api.load_strategy_header(strategy) if strategy else None
    if not args.model.startswith("zoo:"):
        check_exists(Path(args.model))
    for spec in args.cluster if isinstance(args.cluster, list) else [args.cluster]:
        if spec is not None and spec != LOCAL:  # how many devices that has takes a while to know
            topology = yaml_file.load_cluster(spec)
            if strategy and header is not None and not _may_fit(len(header.devices), topology, args):
                api.require_cluster(strategy, topology)


def _may_fit(devices: int, topology: Topology, args: argparse.Namespace) -> bool:
    """Whether it is to be seen later if a strategy for so many devices fits: what this machine's devices are is measured, and
    ``--what-if`` takes those of another cluster."""
    return devices == topology.device_count and (family(topology.name) is not None or hasattr(args, "what_if"))
