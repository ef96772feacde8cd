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


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four ranks, which keep the models that they have traced."""
    pool = Pool(4)
    yield pool
    pool.close()
