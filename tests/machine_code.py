"""``python -m tests.machine_code`` compiles the simulator, the search and passes over gradients once, for all processes of the tests.

On a fresh checkout that takes two minutes of a core, here divided between two processes; tests that need it at the same time would each do
all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import torch
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher

import soap.search.compiled
import soap.simulator.compiled
from soap import api
from soap.api import ahead
from soap.profiles.roofline import RooflineCosts
from soap.runtime.compression import kernels
from soap.runtime.compression.selection import Surveyed
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.dynamic import dynamic_strategy
from soap.search.space import build_space
from soap.simulator.compiled.jit import is_compiled
from soap.simulator.compiled.memory_estimate import estimate_memory
from soap.simulator.compiled.task_keys import FORWARD, task_key
from soap.simulator.compiled.walking import walk
from soap.simulator.engine import Engine
from soap.simulator.memory.bound import MemoryBound
from soap.simulator.memory.ordered import ordered_bytes
from soap.strategy.config import OpConfig, Strategy
from tests.graph_builder import mlp
from tests.strategies import CPU, cluster


def functions() -> dict[str, CPUDispatcher]:
    """All compiled functions of this package, by module and name."""
    return dict(_functions())


def _functions() -> Iterator[tuple[str, CPUDispatcher]]:
    packages = (soap.simulator.compiled, soap.search.compiled)
    modules = [module.name for package in packages for module in iter_modules(package.__path__, f"{package.__name__}.")]
    for name in (*modules, kernels.__name__):
        for value in vars(import_module(name)).values():
            if isinstance(value, CPUDispatcher):
                yield f"{value.py_func.__module__}.{value.py_func.__qualname__}", value


def missing() -> list[str]:
    """Names of what Python calls and is not on disk."""
    kept = {name: function for name, function in functions().items() if isinstance(vars(function)["_cache"], FunctionCache)}
    return [name for name, function in kept.items() if not is_compiled(function)]


def compile_all() -> None:
    """A chain that asks whether proposals fit, edits, a walk, and what only tests call by itself. What is on disk is loaded."""
    graph, topology = mlp(), cluster([2, 2], CPU)
    costs = RooflineCosts(topology)
    starts = [api.classical(name, graph, topology) for name in ("data_parallel", "megatron")]
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
    walk(engine, {op.name: [OpConfig((1,) * len(op.factors), (device,)) for device in range(2)]}, 10, 1e-6)
    engine.proposed_tasks()
    memory = MemoryBound(engine, topology.memory_limits)
    estimate_memory(engine.world, memory.handle(), engine.last_trial(), True)
    ordered_bytes(engine, memory.handle())
    task_key(FORWARD, 0, 1, 0, 0, 0)
    for dtype in (torch.float32, torch.float64):
        surveyed = Surveyed.of(torch.arange(10, dtype=dtype))
        surveyed.above(surveyed.threshold(0.5))
    dynamic_strategy(build_space(graph, topology.device_count), topology, costs)


def _any(strategy: Strategy) -> bool:
    return True


if __name__ == "__main__":
    if missing():
        print("compiling the simulator, the search and passes over gradients", flush=True)
        with ahead.compiling():
            compile_all()
    if left := missing():
        sys.exit(f"not compiled: {', '.join(left)}")
