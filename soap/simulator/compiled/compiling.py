"""Making a library's machine code (``machine_code``): ``python -m soap.simulator.compiled.compiling MODULE...`` writes it to its output.

numba makes LLVM's intermediate language of each function, once, and optimizes nothing: usually it would optimize a function together with
all that it calls, for each of its callers. LLVM then optimizes the whole. A wheel brings the optimized whole along (``shipped``), for any
processor of its kind; there only the last step is left, and numba is not needed.
"""

from __future__ import annotations

import ctypes
import lzma
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from soap.simulator.compiled.machine_code import KINDS, LIBRARIES, PACKAGE, Library

SHIPPED = PACKAGE / "machine_code"
NUMBA = {"NUMBA_OPT": "0", "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_SLP_VECTORIZE": "0", "NUMBA_CPU_NAME": "generic"}
"""Environment of numba: LLVM optimizes what it makes."""
FASTEST = 3
"""LLVM's level of optimization."""


def intermediate(library: Library) -> Any:
    """All of a library as one module of LLVM's, not optimized. Imports numba."""
    os.environ |= NUMBA
    from numba import types

    from soap.simulator.compiled.numba_types import handle_type

    numbers = {int: types.int64, float: types.float64, bool: types.boolean}
    whole = llvm.parse_assembly("")
    for own in library.entries:
        *given, _ = own.hints.values()
        signature = tuple(numbers[kind] if kind in KINDS else handle_type(kind) for kind in given)
        own.dispatcher.compile(signature)
        text = own.dispatcher.inspect_llvm(signature)
        text = text.replace(str(PACKAGE), "soap".ljust(len(str(PACKAGE)), "/"))  # exceptions say in which file they are raised
        part = llvm.parse_assembly(text)
        (function,) = (found for found in part.functions if not found.is_declaration and found.linkage == llvm.Linkage.external)
        function.name = own.name
        whole.link_in(part)
    names = {own.name for own in library.entries}
    for function in whole.functions:
        if not function.is_declaration and function.name not in names:
            function.linkage = llvm.Linkage.internal
    return whole


def machine(name: str = "", features: str = "") -> Any:
    """A processor for LLVM, with its features; any of this machine's kind without a name."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=name, features=features, opt=FASTEST, reloc="pic", codemodel="default", jit=True)


def optimized(library: Library, processor: Any) -> Any:
    """All of a library as one module of LLVM's, optimized for a processor. Imports numba."""
    module = intermediate(library)
    builder = llvm.create_pass_builder(processor, llvm.create_pipeline_tuning_options(FASTEST))
    builder.getModulePassManager().run(module, builder)
    return module


def shipped(library: Library) -> Path:
    """Where a wheel has a library, optimized; it is there only if it was made of the very same sources, for this kind of processor."""
    return SHIPPED / f"{llvm.get_process_triple().partition('-')[0]}-{library.sources}.xz"


def ship(library: Library) -> Path:
    """Write the file that a wheel takes along."""
    path = shipped(library)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(optimized(library, machine()).as_bitcode()))
    return path


def _brought_along(library: Library) -> Any:
    """What the package brings along; None if that is nothing, or of a later LLVM."""
    try:
        return llvm.parse_bitcode(lzma.decompress(shipped(library).read_bytes()))
    except (OSError, RuntimeError, lzma.LZMAError):
        return None


def _emit_nothing() -> None:
    """Let numba, which is not imported yet, make no machine code of the functions that it compiles from now on: it would, of each with all
    that it calls, so that Python can call it, for a third of the time that all of it takes. It only notes an address of each."""
    noted = ctypes.create_string_buffer(8)  # as large as a pointer, which numba writes there
    llvm.ExecutionEngine.finalize_object = lambda self: None
    llvm.ExecutionEngine.get_global_value_address = lambda self, name: ctypes.addressof(noted)


def main(*modules: str) -> None:
    """Write the machine code of the library of these modules. For a process that does nothing else."""
    _emit_nothing()
    processor = machine(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    module = _brought_along(LIBRARIES[modules]) if modules in LIBRARIES else None
    if module is None:
        for name in modules:
            import_module(name)
        module = optimized(LIBRARIES[modules], processor)
    sys.stdout.buffer.write(processor.emit_object(module))


if __name__ == "__main__":
    main(*sys.argv[1:])
