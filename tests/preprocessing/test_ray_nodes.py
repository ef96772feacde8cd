"""Nodes of a Ray cluster: the result is the serial reference's, also where a node is lost; what goes wrong is one line."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import soap
from soap.cli.preprocess import main
from soap.elastic.session import session
from soap.preprocessing.container import PreprocessError
from soap.preprocessing.engine import Options, run
from soap.preprocessing.ray_nodes import RayNodes
from soap.preprocessing.work import INDEX, Done, Task, Work
from tests.preprocessing.reference import reference
from tests.preprocessing.running import result, same
from tests.preprocessing.test_identity import SPEC

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of our own, on which several nodes are emulated; not whichever Ray finds on this machine, which may be another test's."""
    module = pytest.importorskip("ray", reason="nodes of a cluster are served by Ray (the extra 'elastic')")
    with session(cpus=2):
        yield module


def _days(folder: Path, files: int, rows: int, seed: int) -> tuple[list[Path], list[bytes]]:
    """Files, every second one compressed, and what is in them."""
    draw = np.random.default_rng(seed)
    paths, contents = [], []
    for i in range(files):
        lines = []
        for _ in range(rows * (i != 1)):  # the second is empty
            numbers = draw.integers(0, 9, 2)
            ids = [b"%x" % value for value in draw.integers(0, 2**40, 2) >> draw.integers(0, 40, 2)]
            words = [b"w%d" % value if value else b"" for value in draw.integers(0, 6, 5)]
            both = [b"%x" % value for value in draw.integers(0, 30, 2)]
            lines.append(b"\t".join([b"1", b"%d" % numbers[0], b"", *ids, *both, *words[:3]]))
        contents.append(b"\r\n".join(lines))
        paths.append(folder / f"{i}.tsv")
        paths[-1].write_bytes(gzip.compress(contents[-1]) if i % 2 else contents[-1])
    return paths, contents


@pytest.mark.parametrize(("nodes", "files", "chunk_bytes"), [(1, 3, 3000), (2, 4, 1000), (3, 5, 10**6)])
def test_result_is_the_reference_s(ray: Any, tmp_path: Path, nodes: int, files: int, chunk_bytes: int) -> None:
    paths, contents = _days(tmp_path, files, 200, seed=nodes)
    options = Options(chunk_bytes=chunk_bytes, workers=2, parquet=False)
    told: list[dict[str, Any]] = []
    seen: list[Done] = []

    def see(done: Done | None, _: Any) -> None:
        seen.extend([done] if done is not None else [])

    done = run(SPEC, paths, tmp_path / "out", options, lambda work: RayNodes(work, options, count=nodes, told=told.append, seen=see))
    same(result(tmp_path / "out", SPEC), reference(SPEC, contents))
    assert done.kept == 0
    assert len(seen) == done.tasks
    assert {facts["node"] for facts in told} == set(range(nodes))
    assert {one.task.node for one in seen if one.task.step == INDEX} == set(range(nodes))


def test_address_where_nobody_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="nodes of a cluster are served by Ray (the extra 'elastic')")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    paths, _ = _days(tmp_path, 1, 5, seed=0)
    said = r"no Ray cluster at '127\.0\.0\.1:\d+': .*refused; start one by 'ray start"
    with socket.socket() as unused, pytest.raises(PreprocessError, match=said):
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        run(SPEC, paths, tmp_path / "out", Options(workers=1), lambda work: RayNodes(work, Options(workers=1), address))


class Losing(RayNodes):
    """Loses a node while the chunks are indexed."""

    def run(self, tasks: Sequence[Sequence[Task]]) -> list[Done]:
        if tasks[0] and tasks[0][0].step == INDEX:
            self._ray.kill(self._members[0])
        return super().run(tasks)


def test_lost_node_s_tasks_are_done_by_another(ray: Any, tmp_path: Path) -> None:
    paths, contents = _days(tmp_path, 3, 200, seed=9)
    options = Options(chunk_bytes=1000, workers=1, parquet=False)
    run(SPEC, paths, tmp_path / "out", options, lambda work: Losing(work, options, count=2))
    same(result(tmp_path / "out", SPEC), reference(SPEC, contents))
    with pytest.raises(PreprocessError, match=r"all nodes of the Ray cluster are lost: .*; the same command goes on from what is done"):
        run(SPEC, paths, tmp_path / "other", options, lambda work: Losing(work, options, count=1))


def test_command_and_python_use_the_cluster(ray: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--generate", "criteo-like", "--rows", "300", "--files", "2", "-o", str(tmp_path / "raw"), "--quiet"]) == 0
    argv = ["criteo-kaggle", str(tmp_path / "raw"), "--no-parquet", "--quiet", "--workers", "1", "-o"]
    assert main([*argv, str(tmp_path / "a"), "--ray", "auto"]) == 0
    soap.preprocess("criteo-kaggle", [tmp_path / "raw"], tmp_path / "b", parquet=False, workers=1, ray="auto")
    assert main([*argv, str(tmp_path / "c"), "--mode", "index=serial,convert=serial"]) == 0
    names = ("labels.npy", "numbers.npy", "categories.npy", "meta.json")
    found = [[(tmp_path / folder / name).read_bytes() for name in names] for folder in "abc"]
    assert found[0] == found[1] == found[2]
    assert ray.is_initialized(), "a cluster that was joined before is not left"


def test_what_goes_wrong_is_one_line(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, _ = _days(tmp_path, 2, 20, seed=1)
    options = Options(workers=1, parquet=False)
    paths[0].write_bytes(b"1\t2\n")
    with pytest.raises(PreprocessError, match=r"line 1: 2 columns instead of 10"):
        run(SPEC, paths, tmp_path / "out", options, lambda work: RayNodes(work, options, count=2))

    def elsewhere(work: Work) -> RayNodes:
        paths[0].unlink()
        return RayNodes(work, options, count=1)

    with pytest.raises(PreprocessError, match=r"does not see the input .*; expected all nodes to share inputs and output"):
        run(SPEC, paths, tmp_path / "gone", options, elsewhere)
