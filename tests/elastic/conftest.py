"""One Ray session of our own for the tests of a file: starting one takes seconds. Behind the file it is left: a process is in one cluster
at most, and commands that other tests call want theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from soap.elastic.session import Session, session


@pytest.fixture(scope="module")
def cluster() -> Iterator[Session]:
    pytest.importorskip("ray", reason="workers without state are started by Ray (the extra 'elastic')")
    with session(cpus=1) as own:
        yield own
