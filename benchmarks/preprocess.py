"""``python -m benchmarks.preprocess [--rows N]``: rows per second of ``soap-preprocess`` beside other ways to do the same, and what reading
and writing alone take. Needs polars and pyarrow; takes minutes. Results: docs/results/preprocess.md.

All contenders read the same generated files and leave labels, numbers and first-appearance indices as ``.npy``; each runs in a process of
its own, its input in the page cache, the disk at rest. The plain loop, which is much slower, has the first rows only. A round is one run of
each, in another order every time; ratios are those of the same round, and their median counts. Where others use the machine, too, processor
seconds say what work a way is, and the clock what it got done. ``small`` is the adaptive run on one core
in a control group of 1 GB (version 1; root).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quiet import Watch
from soap.preprocessing.generate import generate
from soap.preprocessing.inputs import find_units
from soap.preprocessing.local import preprocess

PLAIN_ROWS = 100_000
SMALL_BYTES = 10**9
NUMBERS, CATEGORIES = 13, 26
COLUMNS = ("y", *(f"I{i}" for i in range(NUMBERS)), *(f"C{i}" for i in range(CATEGORIES)))


def _ours(mode: str) -> Callable[[list[Path], Path], None]:
    def run(files: list[Path], out: Path) -> None:
        modes = {"index": mode, "convert": mode}
        preprocess("criteo-kaggle", files, out, modes=modes, parquet=False)

    return run


def plain(files: list[Path], out: Path) -> None:
    """One value at a time, as the public DLRM script does: text to numbers by line, dictionaries by row and column."""
    labels, numbers, ids = [], [], []
    dictionaries: list[dict[int, int]] = [{} for _ in range(CATEGORIES)]
    for path in files:
        with path.open() as stream:
            for line in stream:
                fields = line.rstrip("\n").split("\t")
                for i, field in enumerate(fields):
                    if field == "":
                        fields[i] = "0"
                labels.append(np.int32(fields[0]))
                numbers.append(np.array(fields[1:14], dtype=np.int32))
                own = np.array([int(field, 16) for field in fields[14:]], dtype=np.int64)
                for j in range(CATEGORIES):
                    dictionaries[j].setdefault(int(own[j]), len(dictionaries[j]))
                ids.append(own)
    categories = np.empty((len(ids), CATEGORIES), np.int32)
    for i, own in enumerate(ids):
        for j in range(CATEGORIES):
            categories[i, j] = dictionaries[j][int(own[j])]
    _save(out, np.array(labels, np.int32)[:, None], np.maximum(np.array(numbers), 0), categories)


def arrow(files: list[Path], out: Path) -> None:
    """pyarrow in one process, with its threads."""
    import pyarrow as pa
    from pyarrow import csv

    kinds = {name: pa.binary() if name[0] == "C" else pa.int32() for name in COLUMNS}
    tables = [
        csv.read_csv(
            path,
            csv.ReadOptions(column_names=COLUMNS),
            csv.ParseOptions(delimiter="\t", quote_char=False),
            csv.ConvertOptions(check_utf8=False, column_types=kinds, null_values=[""], strings_can_be_null=False),
        )
        for path in files
    ]
    table = pa.concat_tables(tables)
    del tables
    numbers = [np.maximum(table.column(f"I{i}").fill_null(0).to_numpy(), 0) for i in range(NUMBERS)]
    codes = []
    for i in range(CATEGORIES):
        codes.append(table.column(f"C{i}").combine_chunks().dictionary_encode().indices.to_numpy())
    _save(out, table.column("y").to_numpy()[:, None], np.stack(numbers, 1), np.stack(codes, 1))


def polars(files: list[Path], out: Path) -> None:
    """polars in one process, with its threads. Indices of equal texts are equal; their order is that of the physical categories."""
    import polars as pl

    schema = {name: pl.String if name[0] == "C" else pl.Int32 for name in COLUMNS}
    frame = pl.scan_csv(files, separator="\t", has_header=False, quote_char=None, schema=schema)
    numbers = [pl.col(f"I{i}").fill_null(0).clip(0) for i in range(NUMBERS)]
    codes = [pl.col(f"C{i}").fill_null("").cast(pl.Categorical).to_physical() for i in range(CATEGORIES)]
    found = frame.select([pl.col("y"), *numbers, *codes]).collect()
    order = [name for name in COLUMNS if name[0] == "C"]
    _save(out, found["y"].to_numpy()[:, None], found.select(COLUMNS[1:14]).to_numpy(), found.select(order).to_numpy())


def copy(files: list[Path], out: Path) -> None:
    """Reading all bytes, and writing as many as the final arrays have: no work."""
    out.mkdir(parents=True, exist_ok=True)
    rows = 0
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(2**24):
                rows += block.count(b"\n")
    with (out / "all").open("wb") as target:
        block = bytes(2**24)
        for begin in range(0, rows * 160, len(block)):
            target.write(block[: min(len(block), rows * 160 - begin)])


def _save(out: Path, labels: np.ndarray, numbers: np.ndarray, categories: np.ndarray) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, array in (("labels", labels), ("numbers", numbers), ("categories", categories)):
        np.save(out / f"{name}.npy", np.ascontiguousarray(array, np.int32))


def small(files: list[Path], out: Path) -> None:
    """The adaptive run on a small machine."""
    group = Path("/sys/fs/cgroup/memory") / f"soap-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(SMALL_BYTES))
        words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), "taskset", "-c", "0", sys.executable]
        command = ["-m", "soap.cli.preprocess", "criteo-kaggle", *map(str, files), "-o", str(out), "--no-parquet", "--quiet"]
        subprocess.run([*words, *command], check=True, stdout=subprocess.DEVNULL)
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        print(f"small: at most {peak / 1e6:.0f} MB of {SMALL_BYTES / 1e6:.0f}", file=sys.stderr)
    finally:
        group.rmdir()


CONTENDERS: dict[str, Callable[[list[Path], Path], None]] = {
    "adaptive": _ours("adaptive"),
    "serial": _ours("serial"),
    "unit": _ours("unit"),
    "chunk": _ours("chunk"),
    "plain": plain,
    "pyarrow": arrow,
    "polars": polars,
    "copy": copy,
    "small": small,
}


def measure(name: str, files: list[Path], out: Path) -> tuple[float, float]:
    """Seconds of one contender in a process of its own: on the clock, and of processors."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()  # what the last one wrote is not to be written meanwhile
    command = [sys.executable, "-m", "benchmarks.preprocess", "--one", name, "--out", str(out), *map(str, files)]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        print(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return float("nan"), float("nan")
    print(done.stderr, end="", file=sys.stderr)
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return float(done.stdout.split()[-1]), used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("preprocess-benchmark"), help="for data, results and rounds; all are kept")
    parser.add_argument("--only", nargs="*", default=[*CONTENDERS])
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("files_given", nargs="*", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        begin = time.perf_counter()
        CONTENDERS[args.one](args.files_given, args.out)
        print(time.perf_counter() - begin)
        return
    root: Path = args.folder
    for name, rows, count in (("raw", args.rows, args.files), ("few", PLAIN_ROWS, 1)):
        if not (root / name).exists():
            generate(root / name, rows, files=count, wrote=lambda count: None)
    files = [Path(unit.path) for unit in find_units([root / "raw"])]
    draw, order = random.Random(), [*args.only]
    for _ in range(args.rounds):
        watch, found = Watch(), {}
        draw.shuffle(order)
        for name in order:
            found[name] = measure(name, find_few(root) if name == "plain" else files, root / "out")
            print(f"{name}: {found[name][0]:.2f} s, of processors {found[name][1]:.2f} s", file=sys.stderr, flush=True)
        with (root / "rounds.jsonl").open("a") as stream:
            stream.write(json.dumps({"others": watch.others_share(), "seconds": found}) + "\n")
    show([json.loads(line) for line in (root / "rounds.jsonl").read_text().splitlines()], args.rows, sum(p.stat().st_size for p in files))


def find_few(root: Path) -> list[Path]:
    return [Path(unit.path) for unit in find_units([root / "few"])]


def show(rounds: list[dict[str, Any]], rows: int, size: int) -> None:
    """The table of all rounds so far."""
    others = " ".join(f"{one['others']:.0%}" for one in rounds)
    print(f"{rows} rows, {size / 1e9:.2f} GB, {os.cpu_count()} cores, {len(rounds)} rounds; others used {others} of the cores")
    print("| contender | rows/s | MB/s | adaptive ÷ it | least to most | rows per processor second | adaptive ÷ it |")
    print("|---|---:|---:|---:|---|---:|---:|")
    for name in CONTENDERS:
        own = [one["seconds"] for one in rounds if name in one["seconds"] and "adaptive" in one["seconds"]]
        if not own:
            continue
        count = PLAIN_ROWS if name == "plain" else rows
        rates = [statistics.median(count / one[name][i] for one in own) for i in range(2)]
        ratios = [[rows / one["adaptive"][i] * one[name][i] / count for one in own] for i in range(2)]
        clock, used = (statistics.median(ratio) for ratio in ratios)
        span = f"{min(ratios[0]):.2f} to {max(ratios[0]):.2f}"
        print(f"| {name} | {rates[0]:,.0f} | {rates[0] * size / rows / 1e6:.0f} | {clock:.2f} | {span} | {rates[1]:,.0f} | {used:.2f} |")


if __name__ == "__main__":
    main()
