"""Machine code of the functions that Python calls, and how Python calls them.

A library is all entries of some modules with everything that they call, in one object file below the user's cache folder. The file's name
is a hash of the sources, of this processor and of LLVM. It is made when an entry is first called (``compiling``, in a process of its own
that can be interrupted at any time), and again after a change. Nothing of numba is needed to call it.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import pickletools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast, get_type_hints

import llvmlite
import llvmlite.binding as llvm

from soap.errors import SoapError
from soap.files import cache_folder, write_bytes_atomically
from soap.simulator.compiled.handles import structures
from soap.simulator.compiled.jit import Compiled

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

Function = TypeVar("Function", bound=Callable[..., Any])

PACKAGE = Path(__file__).parents[2]
KINDS: dict[Any, Any] = {int: ctypes.c_int64, float: ctypes.c_double, bool: ctypes.c_uint8}
"""What entries take beside handles, and return."""

COMPILED = re.compile(r"^@(\w+\.)?(compiled|inlined|entry)$", re.MULTILINE)
"""Stands before functions that are compiled."""
HOW = ("compiling.py", "handles.py", "jit.py", "machine_code.py", "numba_types.py", "world.py")
"""Files beside this one that decide what compiled code is like."""

RETURNED = 0
"""What compiled functions return by numba's convention if they raise nothing."""

LIBRARIES: dict[tuple[str, ...], Library] = {}
"""All libraries by their modules."""


class _Raised(ctypes.Structure):
    """An exception as compiled code has it, as numba writes it: a pickle of its class, its message and where it was raised."""

    _fields_ = [("pickle", ctypes.c_void_p), ("size", ctypes.c_int32)]

    def exception(self) -> BaseException:
        """The exception. The pickle is a constant of the library; it is only read, not executed."""
        texts = [text for _, text, _ in pickletools.genops(ctypes.string_at(self.pickle, self.size)) if isinstance(text, str)]
        module, kind, message = texts[:3]
        assert module == "builtins"
        return cast(BaseException, getattr(builtins, kind)(message))


class Library:
    """The entries of some modules, which must all be imported before the first is called."""

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        LIBRARIES[modules] = self
        self.entries: list[Entry] = []
        self._lock = Lock()
        self._loaded: Any = None

    def entry(self, function: Function) -> Function:
        """For functions that Python calls, with handles and numbers: they return a number, whether something holds, or nothing. Other
        Python threads run meanwhile. Compiled code may call them as well."""
        self.entries.append(made := Entry(function, self))
        return cast(Function, made)

    @cached_property
    def sources(self) -> str:
        """A hash of all that is compiled in: files of compiled functions in these modules and in this package, what these import from this
        package (constants), and what says how to compile."""
        known = {*PACKAGE.glob("*/compiled/**/*.py"), *(Path(str(spec.origin)) for name in self.modules if (spec := find_spec(name)))}
        files = {path for path in known if COMPILED.search(path.read_text(encoding="utf-8"))}
        files |= {path for own in list(files) for path in _imported(own)} | {Path(__file__).with_name(name) for name in HOW}
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(files))).hexdigest()

    @cached_property
    def path(self) -> Path | None:
        """Where its machine code for this processor is kept; None if this user has no folder for that."""
        machine = (llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), llvmlite.__version__)
        name = hashlib.sha256(repr((self.modules, self.sources, machine)).encode()).hexdigest()[:32]
        folder = cache_folder()
        return None if folder is None else folder / "machine_code" / f"{name}.o"

    @property
    def is_made(self) -> bool:
        """Whether its machine code is kept, so that calls begin at once."""
        return self._loaded is not None or (self.path is not None and self.path.exists())

    def load(self) -> Any:
        """What knows the addresses of entries by their names. Makes and loads the machine code first if need be."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> Any:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        code = self._kept()
        if code is None:
            with _alone(self.path):
                code = self._kept() or self._make()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine

    def _kept(self) -> bytes | None:
        with suppress(OSError):
            return None if self.path is None else self.path.read_bytes()
        return None

    def _make(self) -> bytes:
        command = [sys.executable, "-m", "soap.simulator.compiled.compiling", *self.modules]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)  # we end it
        if done.returncode:
            raise SoapError(f"the simulator cannot be compiled: {done.stderr.decode(errors='replace').strip()[-2000:]}")
        if self.path is not None:
            with suppress(SoapError):
                write_bytes_atomically(self.path, done.stdout)
        return done.stdout


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Within this context no other process makes this file: who comes later waits. Where files cannot be locked, each makes its own."""
    with ExitStack() as held:
        with suppress(OSError):
            if path is not None and fcntl is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(path.with_suffix(".lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _imported(path: Path) -> Iterable[Path]:
    """Files of this package's modules from which a module takes something by name."""
    for module in re.findall(r"^from soap\.([\w.]+) import", path.read_text(encoding="utf-8"), re.MULTILINE):
        file = PACKAGE.joinpath(*module.split("."))
        yield from (found for found in (file.with_suffix(".py"), file / "__init__.py") if found.exists())


class Entry(Compiled):
    """A function of a library that Python calls. ``name``: the library's own."""

    def __init__(self, function: Callable[..., Any], library: Library) -> None:
        super().__init__(function)
        self.library, self.name = library, f"{function.__module__}.{function.__qualname__}"

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Types of arguments and, as ``return``, of the result."""
        return get_type_hints(self.py_func, localns=structures())

    @cached_property
    def _native(self) -> tuple[Any, Any]:
        """(the function, what it returns)."""
        *given, returned = self.hints.values()
        result = KINDS.get(returned, ctypes.c_void_p)
        own = [KINDS.get(kind, ctypes.c_void_p) for kind in given]
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(result), ctypes.POINTER(ctypes.POINTER(_Raised)), *own)
        return kind(self.library.load().get_function_address(self.name)), result

    def __call__(self, *arguments: Any) -> Any:
        """Call it, by position. What it raises, as numba has it: any exception of Python's own with a text."""
        native, kind = self._native
        result, raised = kind(), ctypes.POINTER(_Raised)()
        status = native(ctypes.byref(result), ctypes.byref(raised), *[getattr(own, "address", own) for own in arguments])
        if status == RETURNED:
            return None if kind is ctypes.c_void_p else bool(result.value) if kind is ctypes.c_uint8 else result.value
        raise raised.contents.exception()


ENGINE = Library("soap.simulator.memory.memory_sum", "soap.search.compiled.runner", "soap.search.compiled.transfers")
"""The simulator and the search."""

entry = ENGINE.entry
