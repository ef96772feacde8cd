"""Weights in safetensors files: what is written is what is read, by the library as well; wrong files are refused in one line."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soap.cli.checkpoints import fill_weights
from soap.errors import ModelError, SoapError, SoapWarning
from soap.weights.fitting import Kind
from soap.weights.safetensors_files import DTYPES, INDEX, SINGLE, SafetensorsFiles, check_place_of_weights, require_writable, write_weights

safetensors = pytest.importorskip("safetensors.torch")


def tensors(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}.weight": torch.randn(n + 2, 3, generator=generator) for n in range(count)}


def written(folder: Path, values: dict[str, torch.Tensor], file_bytes: int = 10**9) -> None:
    kinds = {name: Kind(tuple(value.shape), value.dtype) for name, value in values.items()}
    write_weights(folder, kinds, values.values(), file_bytes)


@given(st.lists(st.tuples(st.sampled_from([*DTYPES.values()]), st.lists(st.integers(0, 4), max_size=3)), max_size=6), st.integers(1, 200))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]], size: int) -> None:
    folder = tmp_path_factory.mktemp("weights")
    values = {f"t{n}": torch.randint(0, 2, shape).to(dtype) for n, (dtype, shape) in enumerate(kinds)}
    written(folder, values, size)
    found = SafetensorsFiles(folder)
    assert found.kinds == {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
    assert all(torch.equal(found.tensor(name), value) for name, value in values.items())


def test_the_library_reads_it_and_files_have_no_more_than_they_may(tmp_path: Path) -> None:
    values = tensors()
    written(tmp_path, values, 60)  # of 24 to 72 bytes
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [*places.values()] == [f"model-{n:05}-of-00004.safetensors" for n in (1, 1, 2, 3, 4)]
    read = {name: safetensors.load_file(tmp_path / file)[name] for name, file in places.items()}
    assert all(torch.equal(read[name], value) for name, value in values.items())


def test_a_tensor_is_the_file_and_what_is_done_to_it_stays_here(tmp_path: Path) -> None:
    written(tmp_path, tensors())
    before = (tmp_path / SINGLE).read_bytes()
    tensor = SafetensorsFiles(tmp_path / SINGLE).tensor("layer.0.weight")
    assert mapped_file(tensor) == str(tmp_path / SINGLE)
    tensor.zero_()
    assert (tmp_path / SINGLE).read_bytes() == before


def mapped_file(tensor: torch.Tensor) -> str:
    """The file that a tensor's memory is a map of; empty if there is none."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= at < end:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


def test_the_index_decides_where_files_contradict_each_other(tmp_path: Path) -> None:
    """A stale copy of a tensor in a file that comes later is told, and not read."""
    new, old = torch.ones(2), torch.zeros(2)
    safetensors.save_file({"a": new}, tmp_path / "one.safetensors")
    safetensors.save_file({"a": old, "b": new, "c": old + 1}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.warns(SoapWarning, match="'a' in two.safetensors and 1 more not read, because model.safetensors.index.json does not"):
        found = SafetensorsFiles(tmp_path)
    assert found.kinds.keys() == {"a", "b"} and torch.equal(found.tensor("a"), new)


def test_ranks_do_not_repeat_warnings_of_the_command(tmp_path: Path) -> None:
    for name in "ab":
        safetensors.save_file({"a": torch.ones(2), name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    job: Any = SimpleNamespace(weights=str(tmp_path))
    trainer: Any = SimpleNamespace(model=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill_weights(job, trainer)


def test_a_single_file_beside_an_index_that_does_not_name_it_is_told(tmp_path: Path) -> None:
    written(tmp_path, tensors(), 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SafetensorsFiles(tmp_path)
    safetensors.save_file({name: torch.zeros_like(value) for name, value in tensors().items()}, tmp_path / SINGLE)
    with pytest.warns(SoapWarning, match="model.safetensors not read, because"):
        found = SafetensorsFiles(tmp_path)
    assert all(torch.equal(found.tensor(name), value) for name, value in tensors().items())


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelError) as error:
        SafetensorsFiles(path)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_wrong_files_are_one_line(tmp_path: Path) -> None:
    written(tmp_path, tensors())
    whole = (tmp_path / SINGLE).read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        refused(tmp_path / "cut.safetensors", "cannot be read", "expected a whole safetensors file")
    (tmp_path / "long.safetensors").write_bytes(struct.pack("<Q", 2**62) + whole)
    refused(tmp_path / "long.safetensors", "cannot be read")
    refused(tmp_path / "nowhere", "does not exist", "expected")
    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "0 .safetensors files")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "../model.safetensors"}}', "the name of a file in its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "the name of a file in its folder"),
        ('{"weight_map": {"a": "model.bin"}}', "the name of a file in its folder"),
        ('{"weight_map": {"a": 3}}', "is no index"),
        ('{"weight_map": ["a"]}', "is no index"),
        ("[]", "is no index"),
        ("{", "is no index"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "key 'a' occurs twice"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', "cannot be read"),
        ('{"weight_map": {"a": "model.safetensors"}}', "lacks 'a'"),
    ],
)
def test_wrong_indices_are_one_line(tmp_path: Path, index: str, words: str) -> None:
    written(tmp_path, tensors())
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, words)


def test_two_sets_of_weights_are_not_put_together(tmp_path: Path) -> None:
    check_place_of_weights(tmp_path / "new" / "folder")
    written(tmp_path, tensors())
    with pytest.raises(SoapError, match=r"has weights already \(model.safetensors\); choose another folder"):
        check_place_of_weights(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SoapError, match="choose another folder"):
        check_place_of_weights(tmp_path / "file")


def test_a_type_that_the_format_lacks_is_one_line() -> None:
    require_writable({"a": Kind((2,), torch.float32)})
    with pytest.raises(SoapError, match=r"'a' has type torch.complex128, .* expected F64"):
        require_writable({"a": Kind((2,), torch.complex128)})
