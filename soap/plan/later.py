"""Sequences that are made when something of them is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class Later(Sequence[T]):
    """A sequence of known length, made when one of its items is first asked for. Equal to any other one, or a tuple, with equal items."""

    def __init__(self, length: int, make: Callable[[], Iterable[T]]) -> None:
        self._length, self._make = length, make
        self._made: tuple[T, ...] | None = None

    def _items(self) -> tuple[T, ...]:
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return iter(self._items())

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...

    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        return self._items()[place]

    def __eq__(self, other: object) -> bool:
        return self._items() == tuple(other) if isinstance(other, (Later, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items())

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._items(),)
