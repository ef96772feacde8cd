"""Write the reference predictions anew: ``python -m tests.predictions.write``. What a change moves are lines of its diff."""

from __future__ import annotations

import sys

from tqdm import tqdm

from tests.predictions.rows import REFERENCE, ROWS, predicted_ms, text


def main() -> int:
    """Also says which rows moved by how much."""
    from tests.predictions.rows import stored

    before = stored() if REFERENCE.exists() else {}
    now = {row: predicted_ms(row) for row in tqdm(ROWS, disable=None)}
    REFERENCE.write_text(text(now), "utf-8")
    for row, ms in now.items():
        if row in before and round(ms, 3) != before[row]:
            print(f"{' '.join(row)}: {before[row]} -> {ms:.3f} ms ({ms / before[row] - 1:+.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
