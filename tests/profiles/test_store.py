"""The store of measurements: kept as they were put, by several processes at once; what is foreign or damaged is no answer."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.errors import ProfileError
from soap.profiles import store as store_module
from soap.profiles.corrections import Correction
from soap.profiles.entries import Entry, Timing, copy_key, decode, encode, update_family, update_key
from soap.profiles.exchange import export_profiles, import_profiles, shipped_profiles
from soap.profiles.keys import Environment, TileKey
from soap.profiles.store import Store, default_path
from soap.profiles.work import Kernel

HERE = Environment("a cpu", "cpu", "2.13.0", 1, 1)
ELSEWHERE = replace(HERE, torch="2.12.0")
LINEAR = Entry(
    "linear", TileKey("0123456789abcdef", (8, 16), (8, 16, 16), False), Timing(1500.5, 20.0), Timing(3000.0, 50.0), 12,
    (Kernel("float32", 1e6, 4096, 1),), (Kernel("float32", 2e6, 4096, 1), Kernel("float32", 1e6, 2048, 1, 3)), "2026-01-02T03:04:05+00:00",
)  # fmt: skip
SLOW = Correction("linear", False, 1.25, 40, "gpt", "aa", "2026-01-02T03:04:05+00:00")
SLOW_BACKWARD, SLOW_UPDATE = replace(SLOW, backward=True, factor=0.5), replace(SLOW, kind=update_family(0), factor=2.0)
UPDATE = Entry("update", update_key(2, 4096), Timing(900.0, 1.0), None, 9)

sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
kernels = st.builds(Kernel, st.sampled_from(["float32", "bfloat16"]), st.floats(0, 1e18), *[st.integers(0, 2**40)] * 3)
timings = st.builds(Timing, st.floats(1e-3, 1e15), st.floats(0, 1e15))
entries = st.builds(
    Entry, st.sampled_from(["linear", "conv2d"]), st.builds(TileKey, st.text("0123456789abcdef", min_size=16, max_size=16), sizes, sizes,
    st.booleans()), timings, st.none() | timings, st.integers(1, 300), *[st.lists(kernels, max_size=2).map(tuple)] * 2, st.just("now"),
    st.none() | st.tuples(st.floats(0, 1e15), st.floats(0, 1e15)),
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "folder" / "profile.sqlite")


@given(entries)
def test_an_entry_is_the_same_after_json(entry: Entry) -> None:
    assert decode(json.loads(json.dumps(encode(entry)))) == entry


def test_keeps_what_was_put(store: Store) -> None:
    assert store.entries(HERE) == [] and store.environments() == {} and not store.path.exists()
    store.put(HERE, [UPDATE, LINEAR])
    again = replace(LINEAR, forward=Timing(1.0, 0.0))
    store.put(HERE, [again])
    assert Store(store.path).entries(HERE) == sorted([UPDATE, again], key=lambda entry: entry.key.text)


def test_a_correction_is_the_same_after_json() -> None:
    assert Correction(**json.loads(json.dumps(asdict(SLOW)))) == SLOW
    assert [one.name for one in (SLOW, SLOW_BACKWARD, SLOW_UPDATE)] == [
        "linear forward", "linear backward", "update of optimizers with 0 states",
    ]  # fmt: skip


def test_corrections_are_one_of_each_kind_and_direction_in_each_environment(store: Store) -> None:
    assert store.corrections(HERE) == [] and not store.path.exists()
    store.put_corrections(HERE, [SLOW, SLOW_UPDATE, SLOW_BACKWARD])
    again = replace(SLOW, factor=1.5, tasks=8)
    store.put_corrections(HERE, [again])
    assert Store(store.path).corrections(HERE) == [SLOW_BACKWARD, again, SLOW_UPDATE]
    assert store.corrections(ELSEWHERE) == [] and store.entries(HERE) == [] and store.environments() == {HERE: 0}


def test_new_measurements_drop_the_corrections_that_were_made_without_them(store: Store) -> None:
    for place in (HERE, ELSEWHERE):
        store.put_corrections(place, [SLOW])
    store.put(HERE, [])
    assert store.corrections(HERE) == [SLOW]
    store.put(HERE, [LINEAR])
    assert store.corrections(HERE) == [] and store.corrections(ELSEWHERE) == [SLOW]


def test_a_store_from_before_there_were_corrections(store: Store) -> None:
    store.put(HERE, [LINEAR])
    with closing(sqlite3.connect(store.path)) as base, base:
        base.execute("DROP TABLE corrections")
    assert store.corrections(HERE) == [] and store.entries(HERE) == [LINEAR]
    store.put_corrections(HERE, [SLOW])
    assert store.corrections(HERE) == [SLOW] and store.entries(HERE) == [LINEAR]


@pytest.mark.parametrize(
    "change", [{"torch": "2.12.0"}, {"device": "another"}, {"threads": 2}, {"neighbours": 0}, {"version": 1}, {"kind": "cuda"}], ids=str
)
def test_what_was_measured_elsewhere_is_no_answer(store: Store, change: dict[str, Any]) -> None:
    store.put(replace(HERE, **change), [LINEAR])
    assert store.entries(HERE) == []
    assert store.environments() == {replace(HERE, **change): 1}


WRITER = """
import sys
from dataclasses import asdict, replace
from pathlib import Path
from soap.profiles.store import Store
from tests.profiles.test_store import HERE, LINEAR
store, mark = Store(Path(sys.argv[1])), int(sys.argv[2])
for i in range(40):
    store.put(HERE, [replace(LINEAR, key=replace(LINEAR.key, lengths=(mark, i)), repetitions=mark)])
"""


@pytest.mark.slow
def test_two_processes_write_at_once(store: Store) -> None:
    root = Path(__file__).resolve().parents[2]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(store.path), str(mark)], cwd=root) for mark in (1, 2, 3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = {(entry.key.lengths, entry.repetitions) for entry in store.entries(HERE)}
    assert found == {((mark, i), mark) for mark in (1, 2, 3) for i in range(40)}


def test_a_writer_waits_for_another_that_begins_the_store(store: Store) -> None:
    store.path.parent.mkdir()
    with closing(sqlite3.connect(store.path, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = threading.Timer(0.3, other.rollback)
        waiting.start()
        store.put(HERE, [LINEAR])
        waiting.join()
    assert store.entries(HERE) == [LINEAR]


def damage_text(path: Path) -> None:
    path.write_text("no database at all, but long enough to be looked at" * 100)


def damage_entry(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("UPDATE entries SET entry = ?", (json.dumps({**encode(LINEAR), "forward_ns": [-1, 0]}),))


def damage_json(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("UPDATE entries SET entry = '{'")


def other_layout(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("PRAGMA user_version = 77")


@pytest.mark.parametrize(
    ("harm", "words"),
    [(damage_text, "not a database"), (damage_entry, "not as it should be"), (damage_json, "no JSON"), (other_layout, "has layout 77")],
)
def test_a_damaged_or_foreign_store_is_one_line(store: Store, harm: Callable[[Path], None], words: str) -> None:
    store.put(HERE, [LINEAR])
    harm(store.path)
    with pytest.raises(ProfileError, match=words) as error:
        store.entries(HERE)
    assert str(store.path) in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_correction_is_one_line(store: Store) -> None:
    store.put_corrections(HERE, [replace(SLOW, factor=-1.0)])
    with pytest.raises(ProfileError, match="not as it should be"):
        store.corrections(HERE)


def test_a_damaged_store_is_not_overwritten(store: Store) -> None:
    store.path.parent.mkdir()
    damage_text(store.path)
    before = store.path.read_bytes()
    with pytest.raises(ProfileError):
        store.put(HERE, [LINEAR])
    assert store.path.read_bytes() == before


def test_a_store_in_use_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(HERE, [LINEAR])
    monkeypatch.setattr(store_module, "PATIENCE_S", 0.01)
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(ProfileError, match="in use"):
            store.put(HERE, [UPDATE])
    finally:
        holder.close()
    assert store.entries(HERE) == [LINEAR]


def test_the_place_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "soap" / "profile.sqlite"


def test_a_place_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be kept"):
        Store(tmp_path / "file" / "profile.sqlite").put(HERE, [LINEAR])


def test_json_takes_all_of_it_to_another_store(store: Store, tmp_path: Path) -> None:
    store.put(HERE, [LINEAR, UPDATE])
    store.put(ELSEWHERE, [replace(LINEAR, key=copy_key(64))])
    store.put_corrections(HERE, [SLOW, SLOW_UPDATE])
    assert export_profiles(store, tmp_path / "a.json") == 5
    other = Store(tmp_path / "other.sqlite")
    other.put_corrections(HERE, [SLOW_BACKWARD])
    assert import_profiles(other, tmp_path / "a.json") == 5
    assert other.corrections(HERE) == store.corrections(HERE) == [SLOW, SLOW_UPDATE] and other.corrections(ELSEWHERE) == []
    assert other.entries(HERE) == store.entries(HERE) and other.entries(ELSEWHERE) == store.entries(ELSEWHERE)
    export_profiles(other, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_file_from_before_there_were_corrections(store: Store, tmp_path: Path) -> None:
    store.put(HERE, [LINEAR])
    export_profiles(store, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["profiles"][0].pop("corrections") == []
    (tmp_path / "a.json").write_text(json.dumps(document))
    other = Store(tmp_path / "other.sqlite")
    assert import_profiles(other, tmp_path / "a.json") == 1 and other.entries(HERE) == [LINEAR]


def spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], str]:
    def make(document: dict[str, Any]) -> str:
        change(document)
        return json.dumps(document)

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: "{", "no JSON"),
        (lambda d: json.dumps(d).replace("1500.5", "NaN"), "NaN"),
        (lambda d: "[" * 100_000, "no JSON"),
        (lambda d: "[]", "expected what soap-profile export wrote"),
        (spoiled(lambda d: d.update(version=9)), "version 9"),
        (spoiled(lambda d: d.update(more=1)), "more"),
        (spoiled(lambda d: d["profiles"][0]["environment"].update(version=0)), "measured in version 0"),
        (spoiled(lambda d: d["profiles"][0]["environment"].pop("torch")), "torch"),
        (spoiled(lambda d: d["profiles"][0]["entries"][0].update(forward_ns=[0, 1])), "forward_ns"),
        (spoiled(lambda d: d["profiles"][0]["entries"][0].update(lengths=[1.5])), "lengths"),
        (spoiled(lambda d: d["profiles"][0]["entries"][0].update(family="x" * 500)), "family"),
        (spoiled(lambda d: d["profiles"][0]["corrections"][0].update(factor=0)), "factor"),
        (spoiled(lambda d: d["profiles"][0]["corrections"][0].pop("model")), "model"),
    ],
)
def test_bad_json_is_one_line_and_changes_nothing(make: Callable[[dict[str, Any]], str], words: str, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    store.put(HERE, [LINEAR])
    store.put_corrections(HERE, [SLOW])
    export_profiles(store, path)
    path.write_text(make(json.loads(path.read_text())))
    other = Store(tmp_path / "other.sqlite")
    with pytest.raises(ProfileError, match=words) as error:
        import_profiles(other, path)
    assert "\n" not in str(error.value)
    assert not other.path.exists()


def test_measurements_that_come_with_the_package_are_taken_and_say_where_they_are_from(store: Store) -> None:
    shipped = shipped_profiles()
    assert "nvidia-h200" in shipped
    for path in shipped.values():
        document = json.loads(path.read_text())
        assert {"what", "command", "machine", "date"} <= set(document["provenance"])
        assert import_profiles(store, path) == sum(len(own["entries"]) for own in document["profiles"]) > 0
    (gpu,) = [place for place in store.environments() if place.device == "NVIDIA H200"]
    assert gpu.kind == "cuda" and any(entry.launch_ns is not None for entry in store.entries(gpu))
