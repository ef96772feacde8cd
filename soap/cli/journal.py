"""What a training has done so far, step by step, in a file that outlives its ranks: rank 0 appends, the process that starts ranks reads."""

from __future__ import annotations

from pathlib import Path


def append(path: str, step: int, loss: float) -> None:
    """Note a step's loss. It is with the operating system when this returns."""
    with open(path, "a", encoding="ascii") as stream:
        stream.write(f"{step} {loss!r}\n")


def size(path: Path) -> int:
    """Bytes of the file: it grows with each step that is done, also again."""
    return path.stat().st_size if path.exists() else 0


def losses(path: Path) -> dict[int, float]:
    """The loss of each step, of steps that were done again the last; a line that a killed rank has left unfinished is left out."""
    if not path.exists():
        return {}
    *lines, _ = path.read_text(encoding="ascii").split("\n")
    return {int(step): float(loss) for step, loss in (line.split(" ") for line in lines)}
