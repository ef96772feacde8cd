"""Files: written whole or not at all, and one line for what goes wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soap import files
from soap.errors import SoapError, StrategyError, TopologyError
from soap.files import check_writable, read_text, write_bytes_atomically, write_text_atomically

NO_ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")


def test_text_and_bytes_are_written_as_given(tmp_path: Path):
    write_text_atomically(tmp_path / "a.txt", "häh\r\n")
    write_bytes_atomically(str(tmp_path / "b.bin"), b"\0\n\xff")
    assert (tmp_path / "a.txt").read_bytes() == b"h\xc3\xa4h\r\n"
    assert (tmp_path / "b.bin").read_bytes() == b"\0\n\xff"
    assert read_text(tmp_path / "a.txt") == "häh\r\n"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.bin"]


def test_replacing_keeps_permissions_and_new_files_get_the_usual_ones(tmp_path: Path):
    old, new, ordinary = tmp_path / "old", tmp_path / "new", tmp_path / "ordinary"
    old.write_text("1")
    old.chmod(0o640)
    ordinary.write_text("")
    write_text_atomically(old, "2")
    write_text_atomically(new, "2")
    assert old.read_text() == "2" and old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str):
    target = tmp_path / "s.json"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, broken, fail)
    with pytest.raises(StrategyError) as refused:
        write_text_atomically(target, "new", error=StrategyError)
    assert str(refused.value) == f"cannot write {str(target)!r}: no space left on device; choose another path"
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["s.json"]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "s.json"
    target.write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomically(target, "new")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["s.json"]


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("act", [check_writable, lambda path: write_text_atomically(path, "x")])
def test_unwritable_outputs_are_named_in_one_line(tmp_path: Path, act):
    with pytest.raises(SoapError) as missing:
        act(tmp_path / "none" / "s.json")
    folder = str(tmp_path / "none")
    assert str(missing.value) == (
        f"cannot write {str(tmp_path / 'none' / 's.json')!r}: folder {folder!r} does not exist; create the folder or choose another path"
    )
    with pytest.raises(SoapError) as is_folder:
        act(tmp_path)
    assert str(is_folder.value) == f"cannot write {str(tmp_path)!r}: it is a folder; choose another path"
    (tmp_path / "file").write_text("")
    with pytest.raises(SoapError) as below_file:
        act(tmp_path / "file" / "s.json")
    assert str(below_file.value) == f"cannot write {str(tmp_path / 'file' / 's.json')!r}: not a directory; choose another path"
    with pytest.raises(SoapError, match="it is no ordinary file"):
        act("/dev/zero")
    with pytest.raises(SoapError, match=r"cannot write '/proc/x\.log': no file can be made in folder '/proc'; choose another path"):
        act("/proc/x.log")
    act("/dev/null")  # takes everything
    with pytest.raises(SoapError, match="name too long"):
        act(tmp_path / ("x" * 300))
    with pytest.raises(SoapError, match="null byte"):
        act("a\0b")
    assert os.listdir(tmp_path) == ["file"]


@NO_ROOT
def test_protected_places_are_refused(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.write_text("old")
    kept.chmod(0o444)
    with pytest.raises(SoapError, match="it is read-only"):
        write_text_atomically(kept, "new")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(SoapError, match="permission denied"):
            check_writable(tmp_path / "s.json")
    finally:
        tmp_path.chmod(0o755)
    assert kept.read_text() == "old"


def test_check_writable_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "old").write_text("old")
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    check_writable("s.json")
    write_text_atomically("s.json", "x")
    assert read_text("s.json") == "x"


def test_unreadable_inputs_are_named_in_one_line(tmp_path: Path):
    path = tmp_path / "none.yaml"
    with pytest.raises(TopologyError) as missing:
        read_text(path, what="cluster file", error=TopologyError)
    assert str(missing.value) == f"cluster file {str(path)!r} cannot be read: no such file or directory; check the path"
    with pytest.raises(SoapError) as folder:
        read_text(tmp_path)
    assert str(folder.value) == f"file {str(tmp_path)!r} cannot be read: it is a folder; check the path"
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(SoapError) as binary:
        read_text(tmp_path / "binary")
    assert str(binary.value) == f"file {str(tmp_path / 'binary')!r} is no UTF-8 text (byte 2); expected a text file: check the path"
    (tmp_path / "long").write_text("12345")
    with pytest.raises(SoapError, match="is longer than 4 bytes"):
        read_text(tmp_path / "long", limit_bytes=4)
    with pytest.raises(SoapError, match="null byte"):
        read_text("a\0b")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfname: x")
    assert read_text(tmp_path / "a") == "name: x"


def test_names_whose_bytes_are_no_text_can_be_written_down(tmp_path: Path):
    write_text_atomically(tmp_path / "page.html", "of \udcff.json")
    assert read_text(tmp_path / "page.html") == "of \\udcff.json"
