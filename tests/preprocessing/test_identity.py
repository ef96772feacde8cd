"""The result is byte for byte what plain Python makes of the whole input, however the work is cut, spread, ordered and interrupted."""

from __future__ import annotations

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.preprocessing.container import PreprocessError
from soap.preprocessing.engine import Options, run
from soap.preprocessing.inputs import find_units
from soap.preprocessing.manager import Manager
from soap.preprocessing.node import InProcess, Node, NodesTogether
from soap.preprocessing.spec import PRESETS, Spec, from_document
from soap.preprocessing.work import Work
from tests.preprocessing.reference import reference
from tests.preprocessing.running import Cut, Fixed, files_of, preprocess, result, same

SPEC = from_document({
    "columns": [
        {"name": "click", "kind": "label"},
        {"name": "n", "kind": "integer", "count": 2, "missing": 7},
        {"name": "id", "kind": "hex"},
        {"name": "mod", "kind": "hex", "modulus": 5, "missing": "b"},
        {"name": "a", "kind": "hex", "dictionary": "both", "min_count": 2},
        {"name": "b", "kind": "hex", "dictionary": "both", "min_count": 2},
        {"name": "word", "kind": "string", "missing": "none"},
        {"name": "left", "kind": "string", "dictionary": "words"},
        {"name": "right", "kind": "string", "dictionary": "words"},
    ]
})  # fmt: skip
WHOLE = st.sampled_from([b"", b"0", b"1", b"-3", b"2147483647", b"-2147483647", b"007"])
HEX = st.sampled_from([b"", b"0", b"1", b"01", b"a", b"A", b"ffffffff", b"80000000", b"7fffffff", b"deadbeefdeadbeef"])
TEXT = st.one_of(st.sampled_from([b"", b"none", b"x", b"\xff\xfe", b'"q"', b"a\xc3"]), st.binary(max_size=3).map(
    lambda text: text.translate(None, b"\t\r\n")))  # fmt: skip
FIELDS = {"label": WHOLE, "integer": WHOLE, "hex": HEX, "string": TEXT}
LINE = st.tuples(*(FIELDS[column.kind] for column in SPEC.columns)).map(b"\t".join)
WRONG_LINES = (
    b"", b"1", b"1\t2", b"\t" * 12, b"x\t1\t1\t1\t1\t1\t1\t1\t1\t1", b"1\t1\t2147483648\t1\t1\t1\t1\t1\t1\t1",
    b"1\t1\t1\tg\t1\t1\t1\t1\t1\t1", b"1\t1\t-\t1\t1\t1\t1\t1\t1\t1", b"1\t1\t1\t" + b"0" * 17 + b"\t1\t1\t1\t1\t1\t1",
)  # fmt: skip
WRONG = st.sampled_from(WRONG_LINES)
LINES = st.lists(st.tuples(st.one_of(LINE, LINE, LINE, WRONG), st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])), max_size=8)


def _file(lines: list[tuple[bytes, bytes]], closed: bool) -> bytes:
    whole = b"".join(line + end for line, end in lines)
    return whole if closed or not lines else whole[: -len(lines[-1][1])]


FILE = st.builds(_file, LINES, st.booleans())


@given(
    files=st.lists(FILE, min_size=1, max_size=4),
    zipped=st.integers(0, 15),
    chunk=st.integers(1, 200),
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_result_is_the_reference_s(files: list[bytes], zipped: int, chunk: int, seed: int, nodes: int, cuts: list[int]) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        inputs = []
        for i, data in enumerate(files):
            inputs.append(root / f"{i}.tsv")
            inputs[-1].write_bytes(gzip.compress(data) if zipped >> i & 1 else data)
        options = Options(on_error="skip", chunk_bytes=chunk, parquet=False)
        for number, tasks in enumerate(cuts):
            try:
                preprocess(SPEC, inputs, root / "out", options, seed=seed + number, nodes=nodes, tasks=tasks)
            except Cut:
                continue
        preprocess(SPEC, inputs, root / "out", options, seed=seed, nodes=nodes)
        same(result(root / "out", SPEC), reference(SPEC, files))


@pytest.mark.slow
def test_all_files_are_the_same_whatever_the_cut(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    row = b"1\t\t-4\tff\t3\ta\tb\tw\tl\tr\n"
    rows = [row.replace(b"ff", b"%x" % draw.integers(2**40)).replace(b"w", b"w%d" % draw.integers(9)) for _ in range(300)]
    data = [b"".join(rows[:120]), b"", b"".join(rows[120:])]
    inputs = [tmp_path / f"{i}.tsv" for i in range(3)]
    for path, own in zip(inputs, data, strict=True):
        path.write_bytes(own)
    pytest.importorskip("pyarrow", reason="Parquet is written by pyarrow")
    found = []
    for number, (chunk, nodes) in enumerate([(10**6, 1), (64, 3), (1000, 2)]):
        left = tmp_path / f"out{number}" / ".work" / "out" / "parquet" / ".part-000000.parquet.elsewhere-1.tmp"  # of a killed run
        left.parent.mkdir(parents=True)
        left.write_bytes(b"PAR1")
        preprocess(SPEC, inputs, tmp_path / f"out{number}", Options(chunk_bytes=chunk), seed=number, nodes=nodes)
        found.append(files_of(tmp_path / f"out{number}"))
    assert found[0] == found[1] == found[2]
    assert "parquet/part-000000.parquet" in found[0]
    assert not any(name.startswith(".work") for name in found[0])


def test_parquet_gives_what_lines_give(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [(i % 2, None if i % 5 == 0 else i - 3, i, f"{i * 2654435761 % 2**32:x}" if i % 7 else "", "%x" % (i % 11), "a", "b",
             b"\xff" if i % 3 else b"", b"l", b"r%d" % (i % 4)) for i in range(100)]  # fmt: skip
    table = pa.table({column.name: [row[i] for row in rows] for i, column in enumerate(SPEC.columns)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=17)
    texts = [[b"" if value is None else value if isinstance(value, bytes) else str(value).encode() for value in row] for row in rows]
    data = b"".join(b"\t".join(row) + b"\n" for row in texts)
    preprocess(SPEC, [tmp_path / "in.parquet"], tmp_path / "out", Options(chunk_bytes=500, parquet=False), seed=3)
    same(result(tmp_path / "out", SPEC), reference(SPEC, [data]))


@pytest.mark.parametrize(
    ("column", "values", "what"),
    [
        ("n1", [1, 2**31], r"row 1 from row group 0 on: column n1 is not a whole number below 2\^31 but 2147483648"),
        ("n1", ["1", "2"], "column 'n1' has type string; expected integers"),
        ("id", ["a", "xyz"], "row 1 from row group 0 on: column id is not at most 16 hexadecimal digits but 'xyz'"),
        ("id", [1, -1], "column id has negative ids"),
        ("word", [1, 2], "column 'word' has type int64; expected texts"),
        ("word", None, "has no column 'word' but click, "),
    ],
)
def test_parquet_that_does_not_fit_is_named_or_left_out(tmp_path: Path, column: str, values: list[object] | None, what: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    fields = {own.name: [b"w", b"w"] if own.kind == "string" else [1, 1] for own in SPEC.columns}
    fields = {name: own for name, own in {**fields, column: values}.items() if own is not None}
    pq.write_table(pa.table(fields), tmp_path / "in.parquet")
    with pytest.raises(PreprocessError, match=what) as error:
        preprocess(SPEC, [tmp_path / "in.parquet"], tmp_path / "out", Options(parquet=False))
    assert str(tmp_path / "in.parquet") in str(error.value)
    if "row 1" in what:
        done = preprocess(SPEC, [tmp_path / "in.parquet"], tmp_path / "out", Options(on_error="skip", parquet=False))
        assert (done.rows, done.skipped) == (1, 1)


@pytest.mark.parametrize("zipped", [False, True])
def test_input_that_is_gone_meanwhile_is_one_line(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "day"
    path.write_bytes(gzip.compress(b"a\n") if zipped else b"a\n")
    spec, options = from_document({"columns": [{"name": "c", "kind": "hex"}]}), Options(parquet=False)

    def gone(work: Work) -> NodesTogether:
        path.unlink()
        return NodesTogether([Node(InProcess(work), Manager(), Fixed(work.path))])

    with pytest.raises(PreprocessError, match=f"{str(path)!r} cannot be read: no such file or directory; check "):
        run(spec, [path], tmp_path / "out", options, gone)


def test_files_of_a_folder_follow_each_other_by_number(tmp_path: Path) -> None:
    names = ["day_10", "day_2", "day_0", "day_2b", "day_01", "other", ".hidden"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert [unit.name for unit in find_units([tmp_path])] == ["day_0", "day_01", "day_2", "day_2b", "day_10", "other"]


def test_negative_numbers_are_zero_and_ids_have_64_bits(tmp_path: Path) -> None:
    spec: Spec = PRESETS["criteo-kaggle"]
    row = [b"1", *[b"-5"] * 13, b"ffffffff", *[b"80000000"] * 25]
    (tmp_path / "day").write_bytes(b"\t".join(row) + b"\r\n" + b"\t".join([b"0"] + [b""] * 39))
    preprocess(spec, [tmp_path / "day"], tmp_path / "out", Options(parquet=False))
    found = result(tmp_path / "out", spec)
    assert found["numbers"].max() == 0
    assert found["values"]["C1"] == [0xFFFFFFFF, 0]
    assert found["categories"].tolist() == [[0] * 26, [1] * 26]


def test_changed_input_is_never_taken_for_the_old_one(tmp_path: Path) -> None:
    spec = from_document({"columns": [{"name": "c", "kind": "hex"}]})
    path = tmp_path / "day"
    path.write_bytes(b"a\nb\nc\nd\n")
    options = Options(chunk_bytes=2, parquet=False)
    with pytest.raises(Cut):
        preprocess(spec, [path], tmp_path / "out", options, tasks=6)
    path.write_bytes(b"a\nX\nc\nd\n".replace(b"X", b"e"))
    done = preprocess(spec, [path], tmp_path / "out", options)
    assert 0 < done.kept < done.tasks
    same(result(tmp_path / "out", spec), reference(spec, [path.read_bytes()]))


def test_damaged_files_of_an_earlier_run_are_made_again(tmp_path: Path) -> None:
    spec = from_document({"columns": [{"name": "c", "kind": "hex"}]})
    path = tmp_path / "day"
    path.write_bytes(b"a\nb\nc\nd\n")
    options = Options(chunk_bytes=2, parquet=False)
    with pytest.raises(Cut):
        preprocess(spec, [path], tmp_path / "out", options, tasks=7)
    for file in (tmp_path / "out" / ".work").glob("*.arrays"):
        data = bytearray(file.read_bytes())
        data[-64] ^= 1
        file.write_bytes(data)
    preprocess(spec, [path], tmp_path / "out", options)
    same(result(tmp_path / "out", spec), reference(spec, [path.read_bytes()]))


def test_finished_work_is_not_done_again_and_other_results_are_left_alone(tmp_path: Path) -> None:
    spec = from_document({"columns": [{"name": "c", "kind": "hex"}]})
    path = tmp_path / "day"
    path.write_bytes(b"a\nb\n")
    preprocess(spec, [path], tmp_path / "out", Options(parquet=False))
    assert preprocess(spec, [path], tmp_path / "out", Options(parquet=False), tasks=0).tasks == 0
    other = from_document({"columns": [{"name": "c", "kind": "string"}]})
    with pytest.raises(PreprocessError, match="holds the result of another SPEC or other input"):
        preprocess(other, [path], tmp_path / "out", Options(parquet=False))
