"""``python -m benchmarks.preprocess_engines FILE``: processor seconds of parsing a file in Criteo's format and indexing its categories, by
our compiled parser and dictionaries, by pyarrow and by polars. Nothing is written. Results: docs/results/preprocess.md.

Processor seconds are those of all threads, so a busy machine changes them little. Each way runs twice, the second time counts: the first
one loads code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.preprocess import CATEGORIES, COLUMNS, NUMBERS
from soap.preprocessing.inputs import cut_lines, find_units, read_lines
from soap.preprocessing.manager import CHUNK_BYTES
from soap.preprocessing.parsing import Layout, parse_lines
from soap.preprocessing.spec import PRESETS
from soap.preprocessing.steps import encoded

Parts = dict[str, float]


def ours(path: Path) -> Parts:
    layout, (unit,) = Layout(PRESETS["criteo-kaggle"]), find_units([path])
    found = {"read": 0.0, "parse": 0.0, "index": 0.0}
    for chunk in cut_lines(0, unit.size, CHUNK_BYTES):
        begin = time.process_time()
        data, size = read_lines(unit.path, chunk.begin, chunk.end, layout.spare)
        read = time.process_time()
        parsed = parse_lines(layout, data, size, unit, chunk, unit.path, stop=True)
        parse = time.process_time()
        encoded(layout, parsed)
        found["read"] += read - begin
        found["parse"] += parse - read
        found["index"] += time.process_time() - parse
    return found


def pyarrow(path: Path) -> Parts:
    import pyarrow as pa
    from pyarrow import csv

    kinds = {name: pa.binary() if name[0] == "C" else pa.int32() for name in COLUMNS}
    options = csv.ConvertOptions(check_utf8=False, column_types=kinds, null_values=[""], strings_can_be_null=False)
    begin = time.process_time()
    lines = csv.ParseOptions(delimiter="\t", quote_char=False)
    table = csv.read_csv(path, csv.ReadOptions(column_names=COLUMNS, use_threads=False), lines, options)
    read = time.process_time()
    for i in range(CATEGORIES):
        table.column(f"C{i}").combine_chunks().dictionary_encode()  # 17 s if every block is encoded by itself
    return {"read and parse": read - begin, "index": time.process_time() - read}


def polars(path: Path) -> Parts:
    import polars as pl

    schema = {name: pl.String if name[0] == "C" else pl.Int32 for name in COLUMNS}
    begin = time.process_time()
    frame = pl.read_csv(path, separator="\t", has_header=False, quote_char=None, schema=schema)
    read = time.process_time()
    frame.select([pl.col(f"C{i}").fill_null("").cast(pl.Categorical).to_physical() for i in range(CATEGORIES)])
    return {"read and parse": read - begin, "index": time.process_time() - read}


WAYS: dict[str, Callable[[Path], Parts]] = {"ours": ours, "pyarrow": pyarrow, "polars": polars}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    print(f"{path.stat().st_size / 1e6:.0f} MB, {NUMBERS} numbers and {CATEGORIES} categories in a row")
    for name, way in WAYS.items():
        way(path)
        found = way(path)
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in found.items())
        print(f"{name}: {sum(found.values()):.2f} s ({parts})")


if __name__ == "__main__":
    main()
