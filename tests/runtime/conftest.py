from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three ranks."""
    pool = Pool(3)
    yield pool
    pool.close()
