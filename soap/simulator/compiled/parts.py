"""How numba compiles functions that only compiled code calls: to LLVM's intermediate language and no further.

Usually numba optimizes each function together with everything that it calls, and makes machine code of both, so a function ten calls deep
is optimized ten times. Here this happens once, for the function that Python calls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import NativeLowering


class _Part(JITCodeLibrary):
    """A function with everything that it calls, for its callers to link in."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=False)
class _Offer(LoweringPass):
    """Makes the function known to its callers. numba looks implementations up by the address that Python would call; the library takes its
    place."""

    _name = "offer_part"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        state["cr"] = state["cr"]._replace(cfunc=state.library)
        state.targetctx.insert_user_function(state.library, state["cr"].fndesc, [state.library])
        return True


class _SharedFlags(Flags):
    """Flags that are compared by identity; functions with equal flags share one object. numba compares flags for each implementation of
    each operator that it looks up; comparing them option by option takes a fifth of the compile time."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def copy(self) -> Flags:
        return self


_shared = cache(_SharedFlags)


class PartCompiler(CompilerBase):
    """A dispatcher's ``pipeline_class``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state.flags.no_compile = True
        self.state.flags = _shared(self.state.flags)

    def define_pipelines(self) -> list[Any]:
        """numba's usual passes, without the last step."""
        self.state.library = _Part(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_Offer, NativeLowering)
        passes.finalize()
        return [passes]
