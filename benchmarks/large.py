"""Large models on many devices: what planning them costs, in processor time and memory of our process.

    python -m benchmarks.large --models FOLDER --write docs/results/large.md
    python -m benchmarks.large --models FOLDER --only named --model llama3-70b

Models are exported from configurations of the ``transformers`` library, without weights, into the folder, unless they are there. Each cell
is a process of its own. *Seconds* are processor time of what is named, without reading the model (but for ``reading`` and ``again``);
*peak* is the most that the process held, with everything.

``reading``: the model's file. ``again``: the same once more, by a process that comes later. ``named``: the strategy of a name, with its
time and memory. ``fits``: the ways that fit. ``search``: a plan, with a budget of proposals.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.pages import give
from soap import api
from soap.api.fitting import fits
from soap.api.large_plans import large_prediction
from soap.api.models import planned_graph
from soap.errors import SoapError
from soap.search.options import SearchOptions
from soap.simulator.simulate import MANY_TILES, Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.units import format_bytes

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_key_value_heads": 8,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_key_value_heads": 8,
    "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True,
}  # fmt: skip


def _sized(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**base, **sizes, "bos_token_id": 0, "eos_token_id": 1}


MODELS = {
    "llama3-8b": (_sized(LLAMA, 4096, 14336, 32, 32), 128),
    "mixtral-8x7b": (_sized(MIXTRAL, 4096, 14336, 32, 32), 128),
    "llama3-70b": (_sized(LLAMA, 8192, 28672, 80, 64), 128),
    "llama3-405b": (_sized(LLAMA, 16384, 53248, 126, 128), 2048),
}
"""Configuration, and samples of a step."""
SEQUENCE = 8192
BUDGET = 300

CELLS = (
    *(("llama3-8b", kind, "h100-8", "fsdp+recompute") for kind in ("reading", "again", "named", "fits", "search")),
    *(("mixtral-8x7b", kind, "h100-2x8", "fsdp+recompute") for kind in ("reading", "again", "named", "fits", "search")),
    *(("llama3-70b", kind, "h100-8x8", "fsdp+recompute") for kind in ("reading", "again", "named", "fits", "search")),
    *((model, "search", cluster, "") for model in ("llama3-8b", "mixtral-8x7b") for cluster in ("h100-8x8", "a100-80gb-4x8")),
    ("llama3-70b", "named", "h100-8x8", "megatron:8+fsdp+recompute+microbatches:16"),
    ("llama3-70b", "named", "h100-8x8", "megatron:8x4+recompute+microbatches:16"),
    ("llama3-70b", "named", "h100-128x8", "megatron:8x4+recompute+microbatches:4"),
    ("llama3-70b", "named", "h100-256x8", "fsdp+recompute"),
    ("llama3-405b", "reading", "", ""),
    ("llama3-405b", "named", "h100-128x8", "megatron:8x16+recompute+microbatches:16"),
    ("llama3-405b", "named", "h100-2048x8", "megatron:8x16+recompute+microbatches:16"),
)
"""(model, what is done, cluster, name of a strategy)."""


@dataclass(frozen=True)
class Cell:
    """A line of the table. ``said``: what came out, in words."""

    model: str
    kind: str
    cluster: str
    name: str
    said: str
    seconds: float
    peak_bytes: int


def exported(model: str, folder: Path) -> Path:
    """A model's file, made if it is not there."""
    path, (config, batch) = folder / f"{model}.pt2", MODELS[model]
    if not path.exists():
        own = folder / model
        own.mkdir(parents=True, exist_ok=True)
        (own / "config.json").write_text(json.dumps(config))
        command = ["-m", "soap.cli.export", f"hf:{own}", "--batch", str(batch), "--sequence", str(SEQUENCE), "-o", str(path)]
        subprocess.run([sys.executable, *command], check=True)
    return path


def measured(path: Path, model: str, kind: str, cluster: str, name: str) -> Cell:
    """One cell, in this process."""
    begin = time.process_time()
    graph = planned_graph(path)
    said = f"{len(graph.operators)} operators"
    if kind not in ("reading", "again"):
        topology = api.load_cluster(cluster)
        begin = time.process_time()
        try:
            said = {"named": _named, "fits": _fits, "search": _search}[kind](graph, topology, name)
        except SoapError as error:
            said = str(error)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cell(model, kind, cluster, name, said, time.process_time() - begin, peak_bytes)


def priced(simulator: Simulator, strategy: Strategy) -> tuple[int, int, int]:
    """A plan's time in ns; of the device that is filled most the expected peak, and its memory, in bytes."""
    large = large_prediction(simulator, strategy, tiles=MANY_TILES)
    if large is not None:
        return large.makespan_ns, large.peak_bytes, large.available_bytes
    found, limits = simulator.predict(strategy), simulator.topology.memory_limits
    fullest = max(range(len(limits)), key=lambda device: found.peak_bytes[device] / limits[device])
    return found.makespan_ns, found.peak_bytes[fullest], limits[fullest]


def _named(graph: Any, topology: Any, name: str) -> str:
    makespan_ns, peak_bytes, _ = priced(api.simulator_for(graph, topology, costs="estimate"), named(name, graph, topology))
    return f"{makespan_ns / 1e9:,.2f} s, {format_bytes(peak_bytes)}"


def _fits(graph: Any, topology: Any, name: str) -> str:
    ways = fits(graph, topology, costs="estimate").ways
    return "; ".join(f"{way.name} {way.time_ns / 1e9:,.2f} s" for way in ways) or "nothing"


def _search(graph: Any, topology: Any, name: str) -> str:
    found = api.find(graph, topology, SearchOptions(budget=BUDGET, costs="estimate"))
    return f"{found.time_ns / 1e9:,.2f} s"


def page(cells: Sequence[Cell], command: str) -> str:
    """The page."""
    rows = [
        f"| {own.model} | {own.kind} | {own.cluster or '-'} | {f'`{own.name}`' if own.kind == 'named' else '-'} | {own.said} "
        f"| {own.seconds:.1f} | {own.peak_bytes / 2**30:.2f} |"
        for own in cells
    ]
    told = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    head = ["| model | what | cluster | strategy | found | seconds | peak, GiB |", "|---|---|---|---|---|---|---|"]
    return "\n".join(["# Large models on many devices", "", told, f"`{command}`, {datetime.now(UTC):%Y-%m-%d}.", "", *head, *rows, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="large", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where exported models are, or are put")
    parser.add_argument("--only", nargs="+", metavar="WHAT", choices=sorted({kind for _, kind, *_ in CELLS}), help="these cells")
    parser.add_argument("--model", nargs="+", metavar="MODEL", choices=list(MODELS), default=list(MODELS), help="these models")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page here instead of printing it")
    args = parser.parse_args(argv)
    cells = []
    for model, kind, cluster, name in CELLS:
        if model in args.model and kind in (args.only or (kind,)):
            path = exported(model, args.models)
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                cells.append(pool.submit(measured, path, model, kind, cluster, name).result())
            print(page(cells[-1:], "").splitlines()[-1], file=sys.stderr, flush=True)
    give(page(cells, "python -m benchmarks.large"), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
