"""Writing a ``Program``: values under names of their own, calls that make them, and the options that change what is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from soap.errors import ModelError
from soap.tracing.autocast import Caster
from soap.tracing.calls import BufferRef, Call, Program, Ref
from soap.tracing.forms import value_of
from soap.tracing.types import TypeMap


class ProgramWriter:
    """Writes to ``program``; a ``forms.Writer``. ``dtype`` replaces every floating-point dtype, if given; see ``Reader`` for the rest."""

    def __init__(
        self, program: Program, dtype: torch.dtype | None, *, caster: Caster | None = None, local_statistics: bool = False
    ) -> None:
        self.program = program
        self.buffers: dict[str, str] = {}  # value -> state-dict name
        self.local_statistics = local_statistics
        self.caster = caster
        self.types = TypeMap(dtype)
        self._used_names: set[str] = set(program.values)

    # What ``forms.Writer`` asks for

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return self.program.values[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a value."""
        return self.program.values[name].dtype

    def emit(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Write a call with one output, named as the call, and return that name."""
        self.program.calls.append(call)
        return self.value(call.outputs[0], shape, dtype)

    def updated_buffer(self, leaf: Any) -> BufferRef | None:
        """The buffer behind an argument, which the program changes; None for None."""
        if leaf is None:
            return None
        if not isinstance(leaf, Ref) or leaf.name not in self.buffers:
            raise ModelError(f"running statistics are {leaf}; expected buffers of the module")
        name = self.buffers[leaf.name]
        self.program.buffers.setdefault(name, self.buffer(name))
        return BufferRef(name)

    def buffer(self, name: str) -> torch.Tensor:
        """The first value of a buffer."""
        raise ModelError(f"buffer {name!r} is changed where none is known")

    # Values

    def convert(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that is used in place of this one."""
        return self.types.of(dtype)

    def value(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """A new value of the program."""
        self.program.values[name] = value_of(name, shape, dtype)
        return name

    def unique(self, name: str) -> str:
        """The name, or a similar one if an inlined part of the graph uses it too."""
        candidate, number = name, 1
        while candidate in self._used_names:
            candidate, number = f"{name}_{number}", number + 1
        self._used_names.add(candidate)
        return candidate
