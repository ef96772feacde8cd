from __future__ import annotations

import os
from pathlib import Path

import pytest

from soap.errors import CheckpointError, RuntimeFailure
from soap.runtime.checkpoint.manifest import MANIFEST, begin, check_place, complete, discard, publish, resolve


def save(folder: Path, step: int, keep: int | None = None) -> Path:
    temporary = begin(folder, step)
    (temporary / MANIFEST).write_text(str(step))
    return publish(temporary, step, keep)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    for step in (1, 9, 10):
        save(tmp_path, step)
    (tmp_path / "step-00000011").mkdir()  # a copy under way: no manifest yet
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-12" / MANIFEST).touch()  # not a name of ours
    begin(tmp_path, 13)
    assert [entry.step for entry in complete(tmp_path)] == [1, 9, 10]
    assert resolve(tmp_path) == tmp_path / "step-00000010"
    assert resolve(tmp_path / "step-00000001") == tmp_path / "step-00000001"


def test_keep_removes_the_oldest(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step)
    (tmp_path / "notes.txt").write_text("mine")
    assert save(tmp_path, 10, keep=2) == tmp_path / "step-00000010"
    assert names(tmp_path) == ["notes.txt", "step-00000008", "step-00000010"]
    save(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["notes.txt", "step-00000012"]


def test_a_step_that_is_saved_again_replaces_its_checkpoint_when_it_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 5)
    temporary = begin(tmp_path, 5)
    assert resolve(tmp_path) == tmp_path / "step-00000005"
    (temporary / MANIFEST).write_text("again")
    assert publish(temporary, 5, None) == tmp_path / "step-00000005-1"
    assert names(tmp_path) == ["step-00000005-1"]
    assert save(tmp_path, 5).name == "step-00000005-2"
    assert (resolve(tmp_path) / MANIFEST).read_text() == "5"


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    left = begin(tmp_path, 3)
    (left / "__0_0.distcp").write_bytes(b"half")
    others = [".step-00000003.tmp", ".step-00000003.0123456789abcdef.tmp.mine", "data"]
    for name in others:
        (tmp_path / name).mkdir()
    temporary = begin(tmp_path, 4)
    assert names(tmp_path) == sorted([*others, temporary.name])
    discard(temporary)
    assert names(tmp_path) == sorted(others)


def test_a_run_does_not_save_beside_a_later_one(tmp_path: Path) -> None:
    save(tmp_path, 7)
    check_place(tmp_path, 7)
    with pytest.raises(CheckpointError, match=r"has a checkpoint of step 7, later than step 6 of this run; resume from it, or save to ano"):
        begin(tmp_path, 6)
    assert names(tmp_path) == ["step-00000007"]


def test_folders_are_made_and_probed_without_a_trace(tmp_path: Path) -> None:
    check_place(tmp_path / "a" / "b", 0)
    assert names(tmp_path / "a" / "b") == []


def test_one_line_for_what_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeFailure, match=r"^checkpoint folder '.*file' cannot be read: not a directory; check the path$"):
        check_place(tmp_path / "file", 0)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"^cannot write a checkpoint to '.*link': file exists; earlier checkpoints are as"):
        check_place(tmp_path / "link", 0)
    with pytest.raises(CheckpointError, match=r"^'.*nowhere' is no folder; expected a checkpoint or the folder that checkpoints"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"^'.*' has no complete checkpoint; expected"):
        resolve(tmp_path)
