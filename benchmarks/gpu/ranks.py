"""Plans on a GPU that all ranks share, held against one process; and what is said when a run fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import soap
from benchmarks.layers import by_layers
from benchmarks.models import export_model
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.policy import chosen, layer_of
from soap.strategy import compression
from soap.strategy.classical import data_parallel
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.strategy.sync import compressed as compressed_by

SOAP_RUN = "from soap.cli.run import main; import sys; sys.exit(main(sys.argv[1:]))"
MODELS = ("zoo:gpt:tiny", "zoo:rnnlm:tiny", "zoo:dlrm:tiny")
PLANS = ("data_parallel", "megatron", "model_parallel")
OFFLOADED = ("data_parallel+offload", "zero1+offload", "fsdp+offload")
WAYS = (
    ["--autocast", "bfloat16"], ["--dtype", "bfloat16"], ["--accumulate", "2"], ["--optimizer", "adam"], ["--clip-norm", "1"],
    ["--compile"],
)  # fmt: skip
PIPELINED = ("gpipe", "1f1b", "interleaved:2")
MICROBATCHES = 2
COMPRESSED = ("rgc:0.1", "rgc+asq:0.1", "chunked", "powersgd", "int8", "bf16")
AT_ONCE = 4
"""Runs beside each other: nothing is timed."""
SUITES = ("test_kinds_plans", "test_complex", "test_architectures")
"""Of these the tests whose ranks are held against one process, on the GPU: ``SOAP_TESTS_DEVICE``."""
CHOICE = "a_kind_trains or random_programs_train or the_check_passes or (plans_train and (mixtral or qwen3_moe))"


def checked_plans(device: str, tiny: bool) -> list[dict[str, Any]]:
    """``soap-run --check`` of ranks over gloo that share the device, and of one over NCCL, by several strategies and ways to train."""
    gloo = ["--device", device, "--backend", "gloo"]
    runs = [(model, plan, 4, gloo) for model in MODELS for plan in PLANS]
    runs += [("zoo:gpt:tiny", "megatron", 2, [*gloo, *way]) for way in WAYS]
    runs += [("zoo:gpt:tiny", plan, 2, [*gloo, "--optimizer", "adam"]) for plan in OFFLOADED]
    if device == "cuda":
        runs += [(model, "single_device", 1, ["--backend", "nccl"]) for model in (*MODELS, "zoo:resnet50:tiny")]
    return run_all(runs[8:11] if tiny else runs)


def pipelines(device: str, tiny: bool) -> list[dict[str, Any]]:
    """The same of stages and micro-batches: by each schedule, with Adam, clipping and autocast."""
    gloo = ["--device", device, "--backend", "gloo"]
    deep = str(export_model("runtime-gpt-deep", Path(os.environ["XDG_CACHE_HOME"])))
    runs = [(deep, schedule, 2, [*gloo, "--optimizer", "adam", "--clip-norm", "1"]) for schedule in PIPELINED]
    runs += [(deep, "1f1b", 2, [*gloo, "--autocast", "bfloat16"])]
    return run_all(runs[1:2] if tiny else runs)


def compressed(device: str, tiny: bool) -> list[dict[str, Any]]:
    """The same of gradients that are compressed on the GPU, by each method."""
    gloo = ["--device", device, "--backend", "gloo"]
    runs = [(MODELS[0], method, 2, gloo) for method in COMPRESSED[: 1 if tiny else None]]
    return run_all(runs if tiny else [*runs, (MODELS[1], COMPRESSED[1], 2, gloo)])


def run_all(runs: Sequence[tuple[str, str, int, list[str]]], cluster: str = "") -> list[dict[str, Any]]:
    """``soap-run --check`` of (model, plan, ranks, options), some at a time. ``cluster``: other than so many local devices."""
    prepared = [_prepared(*run, cluster=cluster) for run in runs]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_run, prepared))


def beside_plain(device: str, tiny: bool) -> list[dict[str, Any]]:
    """``benchmarks.runtime``: a plan of one device and the plain module, in turns."""
    models = ["single-gpt"] if tiny else ["single-resnet50-large", "single-gpt-large"]
    words = ["-m", "benchmarks.runtime", "--device", device, "--rounds", "1" if tiny else "3", "--models", *models]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return [{"command": " ".join(words[1:]), "code": done.returncode, "said": [*done.stdout.splitlines(), *done.stderr.splitlines()][-12:]}]


def failures(device: str, tiny: bool) -> list[dict[str, Any]]:
    """What cannot run has to say so in one line: two ranks of NCCL on one GPU, and more memory than there is."""
    runs = [("zoo:gpt:tiny", "data_parallel", 2, ["--device", "cuda", *(["--backend", "nccl"] if device == "cuda" else [])])]
    runs += [("zoo:gpt@512", "single_device", 1, [])] if device == "cuda" else []
    return [_run(_prepared(*run, check=False)) for run in runs]


def suites(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Tests of the repository, with all of their ranks on the GPU."""
    words = ["-m", "pytest", "-q", "-n", str(AT_ONCE), "-p", "no:cacheprovider", *(f"tests/runtime/{suite}.py" for suite in SUITES)]
    words += ["-k", "a_kind_trains and masked" if tiny else CHOICE]
    environment = {**os.environ, "SOAP_TESTS_DEVICE": device}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    return [{"command": " ".join(words[1:]), "code": done.returncode, "said": done.stdout.splitlines()[-60:]}]


@dataclass(frozen=True)
class _Run:
    """One ``soap-run``. ``words``: its arguments."""

    model: str
    plan: str
    devices: int
    options: list[str]
    words: list[str]


def _prepared(model: str, plan: str, devices: int, options: list[str], check: bool = True, cluster: str = "") -> _Run:
    """Write the strategy. Models are read one after the other, as reading is not for threads."""
    autocast = "bfloat16" if "--autocast" in options else None
    cluster, graph = cluster or f"local:{devices}", soap.load(model, plan_only=True, autocast=autocast).graph
    path = Path(os.environ["XDG_CACHE_HOME"], "-".join([Path(model).stem.replace(":", "-"), plan, str(devices), *options]) + ".json")
    topology = soap.load_cluster(cluster)
    soap.save_strategy(path, _strategy(plan, graph, topology), graph, topology)
    words = [str(path), "--model", model, "--cluster", cluster, "--steps", "4", *options, *(["--check"] if check else [])]
    return _Run(model, plan, devices, options, words)


def _strategy(plan: str, graph: OperatorGraph, topology: Topology) -> Strategy:
    """A named one, a pipeline by its schedule, or data parallelism in which a method compresses every layer that it suits."""
    if plan in PIPELINED:
        return by_layers(graph, topology, stages=topology.device_count, microbatches=MICROBATCHES, schedule=plan)
    if plan in COMPRESSED:
        method, trained = compression.parse(plan), [one.name for one in graph.parameters if one.requires_grad]
        dense = [name for name in trained if name not in graph.sparse]
        found = {name: chosen(method, layer_of(graph, name), least_bytes=0) for name in dense}
        return data_parallel(graph, topology).with_changes(parameters={name: compressed_by(how) for name, how in found.items() if how})
    return named(plan, graph, topology)


def _run(run: _Run) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", SOAP_RUN, *run.words], capture_output=True, text=True)
    said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return {**asdict(run), "code": done.returncode, "said": said[-8:]}
