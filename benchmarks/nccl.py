"""All-reduces as predicted beside published outputs of nccl-tests (and AMD's rccl-tests).

    python -m benchmarks.nccl
    python -m benchmarks.nccl --write docs/results/nccl.md

The tables stand in ``nccl_tables.json`` with their sources. No figure of the model comes from them: NCCL's and RCCL's own figures and what
maintainers say are its inputs (``soap/profiles/data/nccl.json``). Errors are shown as they come.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from soap.cluster.build import build_cluster
from soap.cluster.presets import device_types, preset
from soap.cluster.topology import Topology
from soap.files import write_text_atomically
from soap.simulator.communication.prices import Communication
from soap.units import format_bytes

DATA = Path(__file__).with_name("nccl_tables.json")
SHOWN = (2**10, 2**15, 2**20, 2**23, 2**26, 2**30)
"""Sizes of the page's tables, if published."""

BANDS = (("up to 64 KiB", 0, 2**16), ("128 KiB to 8 MiB", 2**16, 2**23), ("16 MiB and more", 2**23, 2**63))

HEAD = """# All-reduces, predicted and published

What `all_reduce_perf` of [nccl-tests](https://github.com/NVIDIA/nccl-tests) measured for others, beside what SOAP reckons an all-reduce
costs. The tables with their sources are in [benchmarks/nccl_tables.json](../../benchmarks/nccl_tables.json).

**Inputs** are the figures in [soap/profiles/data/nccl.json](../../soap/profiles/data/nccl.json): NCCL's own model (latencies of calls and
steps, shares of protocols, what of a link it reaches), RCCL's, and one maintainer's statement (480 GB/s through NVLink SHARP on eight
H100). **Held out** are all tables below: no input comes from them, and nothing is fitted to them. Clusters are presets, or those described
beside the tables; what was assumed of them stands there. Errors are as they come: predicted / published time less 1.

"""

NOTES = """
What the errors say:

- The largest sums, bound by bandwidth, are met best, with two exceptions. `rtx4090-2` copies through the main memory of a virtual machine,
  at a tenth of what PCI Express carries, which no sheet tells: measure such links (`soap-profile links`). `v100-2x8-efa` is NCCL 2.4.8 of
  2019 on the first EFA, which did not write to GPU memory.
- Small sums take longer than NCCL's model says, and so than predicted: by a third with a process for each GPU (`a100-2x8`), by more where
  one process drives all eight (`v100-8`, `a100-8`), which launches one after the other.
- In between, protocols and trees do worse than lines of latency and bandwidth. NCCL corrects its own model there, trees by as much as 0.4;
  that is no line in the bytes, and is left out. Sums of 25 MB, as buckets of gradients have, are predicted up to a third too fast.
- `h100-2x8` is erratic in the middle of the published table. Cloud networks' latencies (`h100-2x8-tcpxo`) are assumptions.
- RCCL has faster ways for small sums on `mi300x-8` than its own model knows, and is predicted too slow there.
"""


@dataclass(frozen=True)
class Row:
    """Bytes, published and predicted seconds, and how it is done as predicted."""

    size_bytes: int
    published: float
    predicted: float
    way: str

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Table:
    """A published table. ``cluster``: a preset, or one of the data file. ``devices``: all of the cluster's."""

    id: str
    source: str
    quote: str
    cluster: str
    devices: int
    version: str
    assumed: tuple[str, ...]
    rows: tuple[tuple[int, float], ...]

    def bus_bandwidth(self, size_bytes: int, seconds: float) -> float:
        """In GB/s, as nccl-tests reckons it."""
        return 2 * (self.devices - 1) / self.devices * size_bytes / seconds / 1e9


def read() -> list[Table]:
    """All tables of the data file."""
    found = json.loads(DATA.read_text("utf-8"))["tables"]
    return [Table(**{**one, "assumed": tuple(one["assumed"]), "rows": tuple(map(tuple, one["rows"]))}) for one in found]


def topology_of(table: Table) -> Topology:
    """The table's cluster."""
    own = json.loads(DATA.read_text("utf-8"))["clusters"].get(table.cluster)
    return preset(table.cluster) if own is None else build_cluster(own, device_types(), table.cluster)


def predict(table: Table) -> list[Row]:
    """The table's rows with predictions."""
    communication = Communication(topology_of(table))
    devices = tuple(range(communication.topology.device_count))
    found = []
    for size, published_us in table.rows:
        option = communication.allreduce_option(size, devices)
        way = f"{option.algorithm}, {option.protocol}"
        found.append(Row(size, published_us / 1e6, option.duration_ns(size) / 1e9, way))
    return found


def page(tables: Sequence[Table]) -> str:
    """The page of results."""
    rows = {table.id: predict(table) for table in tables}
    return HEAD + _summary(tables, rows) + NOTES + "".join(_table(table, rows[table.id]) for table in tables)


def _summary(tables: Sequence[Table], rows: dict[str, list[Row]]) -> str:
    lines = [f"| table | {' | '.join(name for name, _, _ in BANDS)} | largest: published, predicted bus bandwidth |", "|---" * 5 + "|"]
    for table in tables:
        cells = [_median_error(one for one in rows[table.id] if low < one.size_bytes <= high) for _, low, high in BANDS]
        last = rows[table.id][-1]
        both = (table.bus_bandwidth(last.size_bytes, seconds) for seconds in (last.published, last.predicted))
        lines.append(f"| {table.id} | {' | '.join(cells)} | {' and '.join(f'{one:.0f}' for one in both)} GB/s ({last.error:+.0%}) |")
    cells = [_median_error(one for own in rows.values() for one in own if low < one.size_bytes <= high) for _, low, high in BANDS]
    largest = median(abs(own[-1].error) for own in rows.values())
    lines.append(f"| all | {' | '.join(cells)} | median size of error {largest:.0%} |")
    return "Median errors of time by size (in brackets the median of their sizes):\n\n" + "\n".join(lines) + "\n"


def _median_error(rows: object) -> str:
    errors = [one.error for one in rows]  # type: ignore[attr-defined]
    return f"{median(errors):+.0%} ({median(map(abs, errors)):.0%})" if errors else ""


def _table(table: Table, rows: Sequence[Row]) -> str:
    shown = [one for one in rows if one.size_bytes in SHOWN] or list(rows)
    shown += rows[-1:] if rows[-1] not in shown else []
    lines = ["| bytes | published | predicted | error | bus bandwidth, GB/s | as predicted |", "|---" * 6 + "|"]
    for one in shown:
        both = [table.bus_bandwidth(one.size_bytes, seconds) for seconds in (one.published, one.predicted)]
        times = f"{one.published * 1e6:.1f} us | {one.predicted * 1e6:.1f} us"
        lines.append(f"| {format_bytes(one.size_bytes)} | {times} | {one.error:+.0%} | {both[0]:.1f} and {both[1]:.1f} | {one.way} |")
    assumed = "".join(f" {one}." for one in table.assumed)
    told = f"{table.devices} devices, {len(table.rows)} sizes, NCCL {table.version}; cluster `{table.cluster}`.{assumed}"
    return f"\n## {table.id}\n\n{told}\n\n" + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, help="write the page to this file")
    chosen = parser.parse_args(arguments)
    text = page(read())
    if chosen.write is None:
        print(text, end="")
    else:
        write_text_atomically(chosen.write, text)


if __name__ == "__main__":
    main()
