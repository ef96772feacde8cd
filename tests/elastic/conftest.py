"""One Ray session of our own for all tests of a process: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from soap.elastic.session import Session, session


@pytest.fixture(scope="session")
def cluster() -> Iterator[Session]:
    pytest.importorskip("ray", reason="workers without state are started by Ray (the extra 'elastic')")
    with session(cpus=1) as own:
        yield own
