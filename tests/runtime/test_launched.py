"""Who started this process: a launcher's ranks are told from variables that were left behind, by which nobody waits."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from soap.errors import RuntimeFailure
from soap.measure.link_probe import _environment
from soap.runtime.comm import rank_processes
from soap.runtime.comm.launched import all_here, inherited, local_numbers, own_rank, under_launcher, world_size
from soap.runtime.comm.rank_processes import LONGEST_FOLDER, start_method

LEFT = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "23467", "LOCAL_RANK": "0"}
TWO = {"RANK": "1", "WORLD_SIZE": "2"}
TORCHRUN = {**TWO, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN,
        {**TWO, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {**TWO, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {**TWO, "PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
)
def test_ranks_of_launchers(environment: Mapping[str, str]) -> None:
    assert (under_launcher(environment), own_rank(environment), world_size(environment)) == (True, 1, 2)


@pytest.mark.parametrize("environment", [{}, {"RANK": "3"}, {"WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": ""}, {"LOCAL_RANK": "5"}])
def test_a_process_of_nobody(environment: Mapping[str, str]) -> None:
    assert (under_launcher(environment), own_rank(environment), world_size(environment)) == (False, 0, 1)
    assert local_numbers({**environment, "LOCAL_WORLD_SIZE": "1"}, 4) == (0, 4)
    assert all_here(environment)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (LEFT, "this process would be one of 8, but neither torchrun nor Slurm nor MPI has started it"),
        ({**LEFT, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "neither torchrun nor Slurm"),  # a batch script is no task of srun
        ({**LEFT, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, "neither torchrun nor Slurm"),
        ({**LEFT, "WORLD_SIZE": "eight"}, "no numbers"),
        ({**LEFT, "RANK": "-1"}, "no numbers"),
    ],
)
def test_what_was_left_behind_is_named(environment: Mapping[str, str], why: str) -> None:
    for ask in (under_launcher, own_rank, world_size, all_here):
        with pytest.raises(RuntimeFailure, match=why) as caught:
            ask(environment)
        said = str(caught.value)
        assert said.startswith(f"RANK={environment['RANK']}, WORLD_SIZE={environment['WORLD_SIZE']}, MASTER_ADDR=localhost, ")
        assert "unset LOCAL_RANK MASTER_ADDR MASTER_PORT RANK WORLD_SIZE;" in said and "\n" not in said


def test_a_torchrun_that_is_gone_is_told_from_one_that_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = str(agent.getsockname()[1])
        there = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert under_launcher(there)
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        gone = {**there, "MASTER_PORT": str(taken.getsockname()[1])}
        said = r"the torchrun that has set them is gone: nobody listens at 127\.0\.0\.1:\d+; .* unset .*TORCH"
        with pytest.raises(RuntimeFailure, match=said):
            under_launcher(gone)


@pytest.mark.parametrize("numbers", [("x", "2"), ("2", "2"), ("0", "-1")])
def test_local_numbers_must_be_numbers(numbers: tuple[str, str]) -> None:
    with pytest.raises(RuntimeFailure, match="expected a number below the second one: unset both"):
        local_numbers({**TORCHRUN, "LOCAL_RANK": numbers[0], "LOCAL_WORLD_SIZE": numbers[1]}, 2)


def test_processes_that_we_start_have_none_of_it() -> None:
    found = _environment({**LEFT, "TORCHELASTIC_RUN_ID": "x", "HOME": "/home"}, 2)
    assert not {name for name in found if not inherited(name)} and found["HOME"] == "/home" and found["OMP_NUM_THREADS"] == "2"


@pytest.mark.skipif(sys.platform != "linux", reason="sockets of processes that are copied")
def test_deep_temporary_files_leave_room_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slurm's folders for a job's temporary files have paths that are longer than a socket's may be."""
    from multiprocessing import process, util

    deep = tmp_path / ("d" * 140)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setitem(process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    made: list[str] = []
    monkeypatch.setattr(util, "Finalize", lambda *args, **options: made.append(args[2][1] if len(args) > 2 else ""))
    assert start_method() == "forkserver"
    folder = Path(util.get_temp_dir())
    try:
        assert len(str(folder)) <= LONGEST_FOLDER and folder.stat().st_mode & 0o077 == 0 and folder.stat().st_uid == os.getuid()
        assert tempfile.gettempdir() == str(deep) and not list(deep.iterdir()), "only sockets are elsewhere"
        assert made, "it is removed at the end"
        monkeypatch.setattr(util, "get_temp_dir", lambda: str(deep))  # somebody has made it there before
        assert rank_processes.start_method() == "spawn"
    finally:
        folder.rmdir()
