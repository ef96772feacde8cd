"""Every compiled function of the simulator and the search: which there are, and a call of each that Python calls.

``python -m soap.api.every_function FOLDER`` compiles them for the processor that is shipped for, and writes their machine code there
(``simulator.compiled.shipping``). It takes two minutes of a core. Expected in its environment: ``shipping.ENVIRONMENT``, and an empty
``NUMBA_CACHE_DIR``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

from numba.core.registry import CPUDispatcher

import soap.search.compiled
import soap.simulator.compiled
from soap.api import ahead
from soap.api.models import graph_of, load_cluster
from soap.api.strategies import classical
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.dynamic import dynamic_strategy
from soap.search.space import build_space
from soap.simulator.compiled.jit import is_compiled, is_entry
from soap.simulator.compiled.memory_estimate import estimate_memory
from soap.simulator.compiled.shipping import ship
from soap.simulator.compiled.task_keys import FORWARD, task_key
from soap.simulator.engine import Engine
from soap.simulator.memory.bound import MemoryBound
from soap.simulator.memory.ordered import ordered_bytes
from soap.strategy.config import Strategy

PACKAGES = (soap.simulator.compiled, soap.search.compiled)


def functions() -> dict[str, CPUDispatcher]:
    """All compiled functions by module and name."""
    return dict(_functions())


def _functions() -> Iterator[tuple[str, CPUDispatcher]]:
    for package in PACKAGES:
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(import_module(module.name)).values():
                if isinstance(value, CPUDispatcher):
                    yield f"{value.py_func.__module__}.{value.py_func.__qualname__}", value


def missing() -> list[str]:
    """Names of what Python calls and is not on disk."""
    return [name for name, function in functions().items() if is_entry(function) and not is_compiled(function)]


def call_every(graph: OperatorGraph, topology: Topology) -> None:
    """A chain that asks whether proposals fit, edits, and what is seldom called. What is on disk is loaded."""
    costs = RooflineCosts(topology)
    starts = [classical(name, graph, topology) for name in ("data_parallel", "megatron")]
    space = CompiledSpace(build_space(graph, topology.device_count, references=starts), topology, costs)
    chain = CompiledChain(space, starts[0], seed=0, proposals=20)
    chain.run(20, beta=10.0, focus=10.0, fits=_any)
    engine = Engine(graph, topology, costs)
    engine.load(starts[0])
    engine.simulate()
    op = graph.operators[0]
    for end in (engine.reject, engine.accept):
        engine.propose(op.name, starts[1].operators[op.name])
        end()
    engine.proposed_tasks()
    memory = MemoryBound(engine, topology.memory_limits)
    estimate_memory(engine.world, memory.handle(), engine.last_trial(), True)
    ordered_bytes(engine, memory.handle())
    task_key(FORWARD, 0, 1, 0, 0, 0)
    dynamic_strategy(build_space(graph, topology.device_count), topology, costs)


def _any(strategy: Strategy) -> bool:
    return True


def main(folder: str) -> None:
    """Compile all and write it to a folder. SoapError if something cannot be kept."""
    topology = load_cluster("p100-4x4")
    with ahead.compiling():
        call_every(graph_of("zoo:rnnlm:tiny"), topology)
    if left := missing():
        raise SoapError(f"not compiled: {', '.join(left)}; expected that {call_every.__name__} calls it")
    ship([function for function in functions().values() if is_entry(function)], Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
