"""pyarrow, which Parquet alone needs: an extra, loaded when the first file is read or written."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from soap.preprocessing.container import PreprocessError
from soap.preprocessing.inputs import PARQUET, Unit

MISSING = "Parquet needs pyarrow: pip install 'soap-search[preprocess]', or leave Parquet out: parquet=False (--no-parquet)"


def parquet() -> Any:
    """The module ``pyarrow.parquet``. PreprocessError if pyarrow is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise PreprocessError(MISSING) from None
    return pyarrow.parquet


def require_arrow(units: Sequence[Unit], written: bool) -> None:
    """PreprocessError if pyarrow is needed and not installed: before hours of work, not at their end. ``written``: whether Parquet is."""
    if (written or any(unit.kind == PARQUET for unit in units)) and find_spec("pyarrow") is None:
        raise PreprocessError(MISSING)
