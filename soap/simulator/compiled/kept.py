"""Machine code on disk: what entries keep of what they have compiled, beside what the package brings along (``shipped``)."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator
from numba.core.registry import CPUDispatcher

from soap.simulator.compiled import shipped
from soap.simulator.compiled.stamps import stamp


class _Nowhere(_CacheLocator):
    """Where no folder can be written: nothing is kept, but what is shipped is read."""

    def __init__(self, line: int) -> None:
        self._line = line

    @classmethod
    def from_function(cls, py_func: Any, _py_file: str) -> _Nowhere:
        """It takes any function."""
        return cls(py_func.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        """No folder."""
        return ""

    def ensure_cache_path(self) -> None:
        """Nothing to do."""

    def get_source_stamp(self) -> str:
        """Unused: ``MachineCode`` has its own."""
        return ""

    def get_disambiguator(self) -> str:
        """As numba's locators."""
        return str(self._line)


class _Kinds(CompileResultCacheImpl):
    """What is written of a compiled function: all but the listing of its types, which is for people, long, and names files of this
    machine."""

    _locator_classes = [*CompileResultCacheImpl._locator_classes, _Nowhere]  # type: ignore[list-item]  # noqa: RUF012 - as numba has it

    def reduce(self, cres: Any) -> Any:
        """As a tuple that can be pickled."""
        return cres._replace(type_annotation="")._reduce()

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """The function that Python calls. What compiled code links in, if it calls the function too, is read only then: to read it takes
        several times as long as to load the machine code."""
        (name, kind, (machine_code, for_linking)), described, *rest = payload
        target_context.codegen()._engine._defined_symbols |= {described.llvm_func_name, described.llvm_cpython_wrapper_name}
        made = super().rebuild(target_context, ((name, kind, (machine_code, _nothing())), described, *rest))
        made.library._get_module_for_linking = cache(partial(llvm.parse_bitcode, for_linking))
        return made


@cache
def _nothing() -> bytes:
    """A module without anything."""
    found: bytes = llvm.parse_assembly("").as_bitcode()
    return found


class KeptCode(FunctionCache):
    """numba's cache of one entry, in a ``MachineCode``."""

    _impl_class = _Kinds

    def __init__(self, function: CPUDispatcher) -> None:
        super().__init__(function.py_func)
        self.file = self._cache_file = MachineCode(function, self._cache_path, self._impl.filename_base)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """A version for arguments of these types from disk; None if there is none. numba's own would first import all that it can compile,
        which takes longer than the rest: machine code needs nothing of that, and the compiler imports it by itself."""
        found = None
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        return found


class MachineCode(IndexDataCacheFile):
    """An entry's machine code on disk. Its ``stamp`` is computed at the first call, when all modules are loaded."""

    def __init__(self, function: CPUDispatcher, cache_path: str, filename_base: str) -> None:
        self._function = function
        super().__init__(cache_path, filename_base, None)

    @property
    def claim(self) -> str | None:
        """The path of the file that stands for the right to compile it (``claims``); None if nothing can be written."""
        return f"{self._index_path}.claim" if self._cache_path else None

    @property
    def versions(self) -> dict[Any, str]:
        """What is kept and valid, without what is shipped: numba's key, whose first part are the arguments' types -> path of the file."""
        return {key: self._data_path(name) for key, name in self._load_index().items()} if self._cache_path else {}

    @property
    def is_there(self) -> bool:
        """Whether something is kept or shipped, and valid."""
        return shipped.has(self._function) or bool(self.versions)

    def load(self, key: Any) -> Any:
        """A version by numba's key; None if it is neither shipped nor kept."""
        found = shipped.load(self._function, key[0])
        return super().load(key) if found is None and self._cache_path else found

    def save(self, key: Any, data: Any) -> None:
        """Keep a version, if there is where."""
        if self._cache_path:
            super().save(key, data)

    def _load_index(self) -> dict[Any, str]:
        """What is kept; nothing if that names types of an earlier version that are no longer there."""
        try:
            return super()._load_index()
        except (ImportError, AttributeError):
            return {}

    @property
    def _source_stamp(self) -> str:
        return stamp(self._function)

    @_source_stamp.setter
    def _source_stamp(self, value: object) -> None:
        """Ignored: numba's own stamp covers only the entry's file."""
