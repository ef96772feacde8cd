"""Passes as measured and as they would be said without that measurement; and how much quick measurements of links vary.

Those of a GPU come from the profiles that are kept in this repository, those of processors from ``measure``, which keeps them in
``benchmarks/spreads_cpu.json``: by model, a line for each pass, and what each quick measurement of links said.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from soap import api
from soap.cluster.overheads import Share
from soap.cluster.topology import Topology
from soap.errors import SoapError
from soap.files import cache_folder, write_text_atomically
from soap.measure.this_machine import measured_local_topology
from soap.measure.upkeep_timing import matrix_of, time_compression
from soap.plan.compression.seam import WORKS, layout_of
from soap.profiles.entries import UPDATE, Entry, decode
from soap.profiles.lookup import Profile, Source
from soap.profiles.roofline import RooflineCosts, runtime_seconds, work_seconds
from soap.simulator.communication.prices import Communication
from soap.strategy.compression import Bf16, Chunked, Int8, PowerSgd, Rgc, RgcAsq, said_settings, written_settings

ROOT = Path(__file__).parents[1]
CPU_PAIRS = ROOT / "benchmarks/spreads_cpu.json"
GPU_PROFILES = (
    ROOT / "soap/profiles/data/profile-nvidia-h200.json",
    ROOT / "benchmarks/gpu/results/profile-gpt-float32.json",
)
"""Those in bfloat16 were made when work under autocast was still counted as float32."""
GPU_CLUSTER, CPU_CLUSTER = "h200-8", "local:2"
LEAST_NS = 20_000
"""Shorter passes are not compared: they are a call and little else."""
INTERQUARTILE = 1.349
"""Interquartile range of a normal distribution in standard deviations."""
SAID = (Source.ESTIMATED, Source.INTERPOLATED, Source.CALIBRATED)
WAYS = ("forward", "backward")
QUICK_BYTES = (1024, 2 * 2**20)
RECORD: dict[str, Any] = {"models": {}, "quick": [], "compression": {}}
COMPRESSIONS = (Rgc(0.001, "trimmed"), Rgc(0.001, "search"), RgcAsq(0.001, "search"), Chunked(), PowerSgd(2), Bf16(), Int8())
COMPRESSED_ELEMENTS, PEERS = (2**16, 2**19, 2**22), 4


class Pair(NamedTuple):
    """One pass over a tile, nanoseconds as measured and as a source of costs would have said without this measurement. ``group``: which
    profile it stands in. ``apart``: how far repetitions were from each other, as a share."""

    group: str
    kind: str
    backward: bool
    source: str
    measured_ns: float
    predicted_ns: float
    apart: float = 0.0

    @property
    def error(self) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured_ns / self.predicted_ns)

    @property
    def weight(self) -> float:
        """How much it counts."""
        return math.sqrt(self.measured_ns)


def pairs_of(group: str, entries: Sequence[Entry], topology: Topology) -> Iterator[Pair]:
    """Every measurement beside what each source would have said without it; of updates the estimate alone, as kind ``update-STATES``."""
    device = topology.devices[0].type
    added_ns = 1e9 * runtime_seconds(device)
    for number, entry in enumerate(entries):
        if entry.kind == UPDATE:
            states = int(entry.key.family.strip("<>").rpartition("-")[2])
            estimated_ns = RooflineCosts(topology, states).update_ns(entry.points, device)
            yield Pair(group, f"{UPDATE}-{states}", False, Source.ESTIMATED.value, entry.forward.ns, estimated_ns)
            continue
        others = Profile(device, [*entries[:number], *entries[number + 1 :]])
        for backward, timing, work in ((False, entry.forward, entry.forward_work), (True, entry.backward, entry.backward_work)):
            if timing is None or not work or timing.ns < LEAST_NS:
                continue
            measured_ns, apart = timing.ns + added_ns, timing.spread_ns / INTERQUARTILE / timing.ns
            estimated_ns = 1e9 * work_seconds(work, device, entry.kind, backward=backward)
            said = {Source.ESTIMATED: estimated_ns}
            ns, source = others.tile(entry.key, entry.kind, work, backward)
            said.setdefault(source, ns)
            if source is Source.INTERPOLATED and (factor := others.factors.get((entry.kind, backward))) is not None:
                said[Source.CALIBRATED] = estimated_ns * factor
            for own, told_ns in said.items():
                yield Pair(group, entry.kind, backward, own.value, measured_ns, told_ns + added_ns, apart)


def gpu_pairs() -> list[Pair]:
    """Of the profiles of an H200."""
    topology = api.load_cluster(GPU_CLUSTER)
    return [pair for path in GPU_PROFILES for pair in pairs_of(path.stem, entries_of(path), topology)]


def entries_of(path: Path) -> list[Entry]:
    """Of an exported profile: computations whose work is known, and updates."""
    entries = [decode(entry) for profile in json.loads(path.read_text("utf-8"))["profiles"] for entry in profile["entries"]]
    return [entry for entry in entries if entry.forward_work or entry.kind == UPDATE]


def record() -> dict[str, Any]:
    """What ``measure`` has kept; nothing in it if it never ran."""
    if not CPU_PAIRS.exists():
        return json.loads(json.dumps(RECORD))  # type: ignore[no-any-return]
    return json.loads(CPU_PAIRS.read_text("utf-8"))  # type: ignore[no-any-return]


def cpu_pairs(kept: Mapping[str, Any]) -> list[Pair]:
    """Those of a record."""
    return [_decoded(model, line) for model, own in kept["models"].items() for line in own["passes"]]


def _line(pair: Pair) -> str:
    figures = f"{pair.measured_ns:.0f} {pair.predicted_ns:.0f} {pair.apart:.3f}"
    return f"{pair.source} {figures} {WAYS[pair.backward]} {pair.kind}"


def _decoded(group: str, line: str) -> Pair:
    source, measured, predicted, apart, way, kind = line.split(" ", 5)
    return Pair(group, kind, way == WAYS[True], source, float(measured), float(predicted), float(apart))


def compression_pairs(kept: Mapping[str, Any]) -> list[Pair]:
    """Works for compressed gradients; the kind is ``select``, ``combine`` or ``restore``."""
    found = []
    for line in kept.get("compression", {}).get("works", ()):
        work, measured, predicted, said = line.split(" ", 3)
        found.append(Pair(said, work, False, Source.ESTIMATED.value, float(measured), float(predicted)))
    return found


def measure_compression() -> None:
    """Time the works of every method of compression on one thread of this machine, and keep them beside what its figures say."""
    kept, lines, load = record(), [], round(os.getloadavg()[0], 1)
    torch.set_num_threads(1)
    with _own_cache():
        topology = api.load_cluster(CPU_CLUSTER)
        device, costs = topology.devices[0].type, RooflineCosts(topology)
        for how in tqdm(COMPRESSIONS, desc="measuring", unit="method", disable=None):
            for elements in COMPRESSED_ELEMENTS:
                layout = layout_of(how, matrix_of(elements), 4, PEERS)
                for work in WORKS if len(layout.exchanges) > 1 else (WORKS[0], WORKS[-1]):
                    found = time_compression(how, work, elements, PEERS, torch.device("cpu"))
                    predicted_ns = costs.compression_ns(how, layout, work, device)
                    lines.append(f"{work} {found.ns:.0f} {predicted_ns} {elements} {said_settings(written_settings(how))}")
    kept["compression"] = {"when": _today(), "device": device.name, "load": load, "works": lines}
    _write(kept)


def measure(models: Sequence[str], budget_s: float, repeat: int, *, again: bool = False) -> None:
    """Profile models on this machine, each in a store of its own, and measure its links quickly ``repeat`` times. Written after each, so
    that the same command goes on where it was stopped. ``again``: forget what is there already. SoapError if a model cannot be
    profiled."""
    kept = json.loads(json.dumps(RECORD)) if again else record()
    todo = [model for model in dict.fromkeys(models) if model not in kept["models"]]
    repeats = max(0, repeat - len(kept["quick"]))
    with tqdm(total=len(todo) + repeats, desc="measuring", unit="run", disable=None) as bar, _own_cache() as folder:
        topology = api.load_cluster(CPU_CLUSTER)
        for model in todo:
            bar.set_postfix_str(model)
            passes = [_line(pair) for pair in pairs_of(model, _profiled(model, budget_s, folder), topology)]
            device = topology.devices[0].type.name
            kept["models"][model] = {"when": _today(), "device": device, "budget_s": budget_s, "passes": passes}
            _write(kept)
            bar.update()
        for _ in range(repeats):
            bar.set_postfix_str("links")
            kept["quick"].append({"when": _today(), **quick_figures(measured_local_topology(topology.device_count, cache=False))})
            _write(kept)
            bar.update()


def _profiled(model: str, budget_s: float, folder: Path) -> list[Entry]:
    """``folder``: a cache that has the machine's rates, which are to be the same for all models."""
    with tempfile.TemporaryDirectory() as own:
        shutil.copytree(folder, Path(own) / "soap")
        out = Path(own) / "profile.json"
        for arguments in ([model, "--cluster", CPU_CLUSTER, "--budget", f"{budget_s:g}"], ["export", str(out)]):
            command = [sys.executable, "-m", "soap.cli.profile", *arguments]
            done = subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": own}, capture_output=True, text=True)
            if done.returncode:
                raise SoapError(f"soap-profile {' '.join(arguments)} failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        return entries_of(out)


@contextmanager
def _own_cache() -> Iterator[Path]:
    """A cache folder in which nothing is known but what is measured now."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            found = cache_folder()
            assert found is not None
            yield found
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def quick_figures(topology: Topology) -> dict[str, dict[str, int]]:
    """What a quick measurement of links says between two devices, ns by bytes: of a message and a sum the time, and for how long each
    keeps a processor busy. SoapError if it failed."""
    if topology.links_known != "quick":
        raise SoapError("links were not measured in training; expected a machine that is idle: try again")
    priced, port = Communication(topology), topology.ports[0]
    times = {"message": [priced.transfer_ns(size, 0, 1) for size in QUICK_BYTES]}
    times["sum"] = [priced.allreduce(size, (0, 1))[0] for size in QUICK_BYTES]
    works = {"message": Share(port.fixed_ns, port.permille), "sum": topology.cpu_overhead.of_all_reduce(2)}
    busy = {f"{name} busy": [share.busy_ns(held_ns) for held_ns in times[name]] for name, share in works.items()}
    return {name: dict(zip(map(str, QUICK_BYTES), own, strict=True)) for name, own in {**times, **busy}.items()}


def _today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def _write(kept: Mapping[str, Any]) -> None:
    write_text_atomically(CPU_PAIRS, json.dumps(kept, indent=1) + "\n")
