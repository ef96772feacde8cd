"""``soap-preprocess`` as people meet it: its options, its errors in one line, and runs that are ended from outside."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from soap.cli.preprocess import Bars, main
from soap.preprocessing.container import PreprocessError
from soap.preprocessing.generate import generate
from soap.preprocessing.manager import Limits, Manager
from soap.preprocessing.spec import PRESETS
from soap.preprocessing.work import Done, Task
from tests.preprocessing.reference import reference
from tests.preprocessing.running import files_of, result, same

SMALL = "columns:\n- {name: y, kind: label}\n- {name: c, kind: hex}\n"


def _spec(folder: Path, text: str = SMALL) -> str:
    (folder / "spec.yaml").write_text(text)
    return str(folder / "spec.yaml")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 rows."""
    folder = tmp_path_factory.mktemp("raw") / "days"
    assert main(["--generate", "criteo-like", "--rows", "20000", "-o", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def whole(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What they become in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main(["criteo-kaggle", str(raw), "-o", str(out), "--no-parquet", "--mode", "index=serial,convert=serial"]) == 0
    return files_of(out)


def _error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_generates_the_same_for_the_same_seed_and_preprocesses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["--generate", "criteo-like", "--rows", "500", "--files", "2", "--seed", seed, "-o", str(tmp_path / name)]) == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") != files_of(tmp_path / "c")
    capsys.readouterr()
    argv = ["criteo-terabyte", str(tmp_path / "a"), "-o", str(tmp_path / "out"), "--no-parquet", "--mode", "index=serial,convert=serial"]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 500
    units = [path.read_bytes() for path in sorted((tmp_path / "a").iterdir())]
    same(result(tmp_path / "out", PRESETS["criteo-terabyte"]), reference(PRESETS["criteo-terabyte"], units))
    assert not (tmp_path / "out" / ".work").exists()
    assert main(argv) == 0
    assert "is complete already: 500 rows" in capsys.readouterr().out


class Terminal(io.StringIO):
    """A terminal, for all that a progress bar asks."""

    def isatty(self) -> bool:
        return True


def test_bar_says_rows_per_second_time_left_x_and_y(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    bars = Bars(hidden=False)
    bars.begin("index", 4, 4000)
    monkeypatch.setattr(bars._bar, "_time", lambda: bars._bar.start_t + 2.0)  # two seconds have passed
    bars.seen(Done(Task("index", 0, size=1000), rows=5000), Limits(2, 3, 6, "cores"))
    bars.seen(None, Limits(2, 1, 2, "memory"))
    bars.close()
    shown = sys.stderr.getvalue()
    assert "index:  25%" in shown
    assert "1.00k/4.00k" in shown
    assert re.search(r"\[00:0[12]<00:0[56], ", shown)  # a quarter took two seconds, the rest takes six; both are cut to whole ones
    assert re.search(r"2,(499|500) rows/s, X=2 Y=1", shown)


def test_interrupted_or_failed_generation_leaves_nothing(tmp_path: Path) -> None:
    def end(cause: BaseException) -> Callable[[int], None]:
        def wrote(count: int) -> None:
            assert list(tmp_path.glob("raw/*"))
            raise cause

        return wrote

    with pytest.raises(PreprocessError, match=r"cannot write .*raw.*: no space left on device; make room or give another -o$"):
        generate(tmp_path / "raw", 100, wrote=end(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "raw", 100, wrote=end(KeyboardInterrupt()))
    assert not list(tmp_path.glob("raw/*"))
    with pytest.raises(PreprocessError, match=r"seed 18446744073709551616: expected a whole number from 0 to 2\^64 - 1"):
        generate(tmp_path / "raw", 100, seed=2**64, wrote=lambda count: None)


@pytest.mark.slow
def test_processes_give_what_this_process_gives(tmp_path: Path) -> None:
    assert main(["--generate", "criteo-like", "--rows", "3000", "--files", "3", "-o", str(tmp_path / "raw"), "--quiet"]) == 0
    common = ["criteo-kaggle", str(tmp_path / "raw"), "--quiet", "--no-parquet", "-o"]
    assert main([*common, str(tmp_path / "one"), "--mode", "index=serial,convert=serial"]) == 0
    assert main([*common, str(tmp_path / "many"), "--chunk-bytes", "50000", "--workers", "2"]) == 0
    one, many = files_of(tmp_path / "one"), files_of(tmp_path / "many")
    assert one == many
    log = [json.loads(line) for line in (tmp_path / "many" / "decisions.jsonl").read_text().splitlines()]
    assert {"index", "unite", "merge", "convert"} <= {entry["step"] for entry in log}
    assert all(entry["tasks"] <= 2 for entry in log)


INTERRUPTED = "soap-preprocess: interrupted: what is done is kept in {}, and the same command goes on from there\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "everybody", "code", "said"),
    [
        pytest.param(signal.SIGKILL, False, -signal.SIGKILL, "", marks=pytest.mark.long),
        (signal.SIGINT, True, 130, INTERRUPTED),
        pytest.param(signal.SIGINT, False, 130, INTERRUPTED, marks=pytest.mark.long),
    ],
)
def test_ended_run_goes_on_from_its_chunks(
    tmp_path: Path, raw: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str],
    number: int, everybody: bool, code: int, said: str,
) -> None:  # fmt: skip
    """Ctrl-C in a terminal reaches every process; ``kill -INT`` and the killer of those that need memory only one."""
    out, work = tmp_path / "out", tmp_path / "out" / ".work"
    argv = ["criteo-kaggle", str(raw), "-o", str(out), "--no-parquet", "--chunk-bytes", "40000"]
    command = [sys.executable, "-m", "soap.cli.preprocess", *argv, "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and len(list(work.glob("index-*.json"))) < 5:
        time.sleep(0.01)
    assert process.poll() is None
    (os.killpg if everybody else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, said.format(work))
    kept = len(list(work.glob("index-*.json")))
    assert not (out / "meta.json").exists()
    if number == signal.SIGINT:
        assert not list(out.rglob(".*.tmp"))
    assert main([*argv, "--json", "--mode", "index=serial,convert=serial"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"] > found["kept"] >= kept >= 5
    assert files_of(out) == whole


def test_plan_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "day").write_bytes(b"1\ta\n" * 1000)
    argv = [_spec(tmp_path), str(tmp_path / "day"), "-o", str(tmp_path / "out"), "--plan", "--chunk-bytes", "1000", "--workers", "3"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["units"][0]["chunks"] == 4
    assert found["steps"]["index"]["mode"] == "adaptive"
    assert main([*argv, "--json", "--mode", "index=unit"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["units"][0]["chunks"] == 1
    fixed_bytes = Manager().task_bytes("index", 0)
    assert whole["steps"]["index"]["task_bytes"] - fixed_bytes == 4 * (found["steps"]["index"]["task_bytes"] - fixed_bytes)
    assert main(argv) == 0
    assert "chunks of each (Y)" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"1\tab\tc", "3 columns instead of 2; it begins '1\\\\tab\\\\tc'"),
        (b"1", "1 columns instead of 2; it begins '1'"),
        (b"1\txyz", "column 2 (c) is not at most 16 hexadecimal digits; it begins '1\\\\txyz'"),
        (b"one\ta", "column 1 (y) is not a whole number below 2^31"),
        (b"", "1 columns instead of 2; it begins ''"),
    ],
)
def test_wrong_line_is_named_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, what: str) -> None:
    data = b"1\ta\r\n" * 400 + line + b"\n" + b"0\tb\n"
    (tmp_path / "day").write_bytes(data)
    argv = [_spec(tmp_path), str(tmp_path / "day"), "-o", str(tmp_path / "out"), "--no-parquet", "--mode", "index=serial,convert=serial"]
    argv += ["--chunk-bytes", "77"]
    error = _error(capsys, *argv)
    assert f"{str(tmp_path / 'day')!r}, line 401: " in error
    assert what.replace("\\\\", "\\") in error
    assert not (tmp_path / "out" / "meta.json").exists()
    assert main([*argv, "--on-error", "skip", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["skipped"]) == (401, 1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("columns: 3", "columns: 3; expected a list of columns"),
        ("columns:\n- {name: y, kind: lable}", "columns[0].kind: 'lable'; expected one of label, integer, hex, string"),
        ("columns:\n- {name: y, kind: label, modulus: 3}", "columns[0]: unknown key 'modulus'; expected one of name, kind, count, missing"),
        ("columns:\n- {name: c, kind: hex, modulus: 0}", "columns[0].modulus: 0; expected a whole number from 1"),
        ("columns:\n- {name: c, kind: hex, missing: g}", "columns[0].missing: 'g'; expected 1 to 16 hexadecimal digits"),
        ("columns:\n- {name: c, kind: hex, missing: 0x10}", "columns[0].missing: 16; expected 1 to 16 hexadecimal digits in quotes"),
        ("columns:\n- {name: ../c, kind: hex}", "columns[0].name: '../c'; expected up to 100 letters"),
        ("columns:\n- {name: c, kind: hex, dictionary: ../c}", "columns[0].dictionary: '../c'"),
        ("columns:\n- {name: c, kind: hex}\n- {name: c, kind: hex}", "the name 'c' (column 2) is taken"),
        ("columns:\n- {name: n, kind: integer, log1p: 1}", "columns[0].log1p: 1; expected true or false"),
        ("columns:\n- {name: a, kind: hex, dictionary: d}\n- {name: b, kind: string, dictionary: d}", "shares dictionary 'd'"),
        ("columns:\n- {name: a, kind: hex, count: -1}", "columns[0].count: -1; expected a whole number from 1"),
        ("columns: [", "no valid YAML at line 1 (expected the node content, but found '<stream end>'); mend it there"),
        pytest.param(
            f"columns:\n- {{name: c, kind: 0x1{'0' * 6000}}}",
            "no valid YAML at line 2 (a number of over 4096 bits); mend it there",
            id="long",
        ),
        ("columns:\n- {name: c, kind: hex, name: d}", "no valid YAML at line 2 (key 'name' occurs twice); mend it there"),
        ("- 1", "a list; expected an object"),
    ],
)
def test_spec_errors_name_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, what: str) -> None:
    (tmp_path / "day").write_bytes(b"1\ta\n")
    assert what in _error(capsys, _spec(tmp_path, text), str(tmp_path / "day"), "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_other_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, out = _spec(tmp_path), str(tmp_path / "out")
    (tmp_path / "day").write_bytes(b"1\ta\n")
    (tmp_path / "short.gz").write_bytes(b"\x1f\x8b\x08\x00")
    serial = ["--mode", "index=serial,convert=serial", "--no-parquet"]
    assert "cannot be read: no such file" in _error(capsys, spec, str(tmp_path / "none"), "-o", out)
    assert "no such file; expected a YAML file or one of criteo-kaggle" in _error(capsys, "criteo", str(tmp_path / "day"), "-o", out)
    assert "cannot be uncompressed" in _error(capsys, spec, str(tmp_path / "short.gz"), "-o", out, *serial)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    assert "holds other files (mine)" in _error(capsys, spec, str(tmp_path / "day"), "-o", str(tmp_path / "full"), *serial)
    (tmp_path / "full" / "mine").rename(tmp_path / "full" / "labels.npy")
    (tmp_path / "full" / "meta.json").write_text('{"key": "of another program"}')
    assert "holds other files (" in _error(capsys, spec, str(tmp_path / "day"), "-o", str(tmp_path / "full"), *serial)
    assert (tmp_path / "full" / "labels.npy").read_text() == "x"
    assert "seems to be a text; expected a folder" in _error(capsys, spec, str(tmp_path / "day"), "-o", str(tmp_path / "day"), *serial)
    assert "expected SPEC and at least one INPUT" in _error(capsys, spec, "-o", out)
    assert "--rows without --generate" in _error(capsys, spec, str(tmp_path / "day"), "-o", out, "--rows", "5")
    with pytest.raises(SystemExit):
        main([spec, str(tmp_path / "day"), "-o", out, "--mode", "index=fast"])
    assert "'index=fast' is not allowed" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted, for which one has to be root")
def test_full_disk_is_told_and_the_run_goes_on_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(tmp_path / "disk")], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system of its own can be mounted here")
    try:
        (tmp_path / "day").write_bytes(b"1\ta\n" * 50_000)
        argv = [_spec(tmp_path), str(tmp_path / "day"), "-o", str(tmp_path / "disk" / "out"), "--no-parquet"]
        argv += ["--mode", "index=serial,convert=serial", "--chunk-bytes", "20000"]
        error = _error(capsys, *argv)
        assert "no space left on device; make room" in error
        assert not (tmp_path / "disk" / "out" / "meta.json").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", str(tmp_path / "disk")], check=True)
        assert main([*argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kept"] > 0
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)
