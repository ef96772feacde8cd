"""In-place array functions for compiled code. numba takes many times longer to compile numpy's own."""

from __future__ import annotations

from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.jit import compiled


@compiled
def fill(array: Ints | Longs, first: int, last: int, value: int) -> None:
    """``array[first:last] = value``."""
    for i in range(first, last):
        array[i] = value


@compiled
def copy(target: Ints | Longs, at: int, source: Ints | Longs, first: int, last: int) -> None:
    """``target[at:at + last - first] = source[first:last]``; both are different arrays."""
    for i in range(last - first):
        target[at + i] = source[first + i]


@compiled
def sort(array: Ints | Longs, first: int, last: int) -> None:
    """``array[first:last].sort()``, by heapsort, which needs no extra memory. An array that is in order already is only read."""
    ascending = True
    for i in range(first + 1, last):
        ascending &= array[i - 1] <= array[i]
    if ascending:
        return
    count = last - first
    for step in range(count // 2 + count - 1):
        if step < count // 2:  # make a heap, the largest on top
            root, size = count // 2 - 1 - step, count
        else:  # move the largest to the end of the heap
            root, size = 0, count - 1 - (step - count // 2)
            array[first], array[first + size] = array[first + size], array[first]
        value = array[first + root]
        while 2 * root + 1 < size:
            child = 2 * root + 1
            if child + 1 < size and array[first + child + 1] > array[first + child]:
                child += 1
            if array[first + child] <= value:
                break
            array[first + root] = array[first + child]
            root = child
        array[first + root] = value
