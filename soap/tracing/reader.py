"""From an ``ExportedProgram`` to a ``Program``: plain, functional calls with names that a person recognises."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from soap.errors import ModelError, SoapWarning
from soap.tracing.calls import Call, Program, Ref, walk
from soap.tracing.naming import canonical_names
from soap.tracing.nodes import NodeReader, plain

aten = torch.ops.aten


class Reader(NodeReader):
    """One pass over the exported graph. ``dtype`` replaces every floating-point dtype of the program, if given.

    ``autocast``: the casts that ``torch.autocast`` to this type would make are written as calls. ``local_statistics``: training batch norm
    normalises each tile by its own statistics.
    """

    def __init__(
        self,
        exported: ExportedProgram,
        dtype: torch.dtype | None,
        *,
        autocast: torch.dtype | None = None,
        local_statistics: bool = False,
    ) -> None:
        super().__init__(Program([], {}, [], {}, {}, {}, ""), dtype, autocast=autocast, local_statistics=local_statistics)
        self.exported = exported

    def read(self) -> Program:
        """The program; raises ModelError in one line for what cannot be planned."""
        self._check()
        self._placeholders()
        self.nodes(self.exported.graph, gradients=True)
        self.program.loss = self._loss()
        self._freeze_buffers()
        self._warn_of_unread_inputs()
        return self.program

    # Inputs, parameters, buffers

    def _check(self) -> None:
        if self.exported.range_constraints:
            symbol = next(iter(self.exported.range_constraints))
            raise ModelError(f"the program has a dynamic shape ({symbol}); expected whole numbers: see sizes.at_sizes")

    def _placeholders(self) -> None:
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        canonical = canonical_names(self.exported.state_dict)
        for spec in self.exported.graph_signature.input_specs:
            name, node = spec.arg.name, nodes.get(spec.arg.name)
            fake = node.meta.get("val") if node is not None else None
            if spec.kind is not InputKind.USER_INPUT and not isinstance(fake, torch.Tensor):
                raise ModelError(f"input {name!r} is a {type(fake).__name__}, not a tensor; export without custom objects")
            if node is None or not isinstance(fake, torch.Tensor):
                continue
            self.at[node] = self.value(self.unique(name), fake.shape, self.convert(fake.dtype))
            self._place(spec.kind, self.at[node], str(spec.target), canonical)

    def _place(self, kind: InputKind, value: str, target: str, canonical: Mapping[str, str]) -> None:
        if kind is InputKind.USER_INPUT:
            self.program.inputs.append(value)
        elif kind is InputKind.PARAMETER:
            self.program.parameters[value] = canonical[target]
        elif kind is InputKind.BUFFER:
            self.buffers[value] = target
        else:
            self.program.constants[value] = self._tensor(self.exported.constants[target])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.convert(tensor.dtype))

    def buffer(self, name: str) -> torch.Tensor:
        """The first value of a buffer."""
        state = self.exported.state_dict
        return self._tensor(state[name] if name in state else self.exported.constants[name])

    # Outputs

    def _loss(self) -> str:
        """The scalar to minimise: the output called ``loss``, else the first output."""
        leaves = list(walk(plain(next(n for n in self.exported.graph.nodes if n.op == "output").args)))
        index = loss_position(self.exported)
        node = leaves[index or 0] if leaves else None
        loss = self.now(node) if isinstance(node, torch.fx.Node) and node in self.at else None
        if not isinstance(loss, str):
            raise ModelError("the program returns no tensor; expected the scalar training loss as output")
        shape, dtype = self.shape(loss), self.dtype(loss)
        if shape not in ((), (1,)) or not dtype.is_floating_point:
            raise ModelError(
                f"{'the first output' if index is None else 'output loss'} has shape {list(shape)} and dtype "
                f"{str(dtype).removeprefix('torch.')}; "
                "expected a scalar floating-point loss: pass loss=… to soap.export, or return it first"
            )
        if not any(loss in call.outputs for call in self.program.calls):
            raise ModelError("the loss is an input or a constant; expected a loss that the model computes")
        if shape == (1,):
            name = self.unique(f"{loss}_scalar")
            loss = self.emit(Call(name, aten.reshape.default, (Ref(loss), []), {}, (name,)), (), dtype)
        return loss

    def _freeze_buffers(self) -> None:
        """Buffers that nothing updates are constants."""
        for value, name in self.buffers.items():
            if name not in self.program.buffers:
                self.program.constants[value] = self.buffer(name)
                continue
            reader = next((call for call in self.program.calls if value in call.operands), None)
            if reader is not None:
                raise ModelError(
                    f"call {reader.name!r} reads buffer {name!r}, which the program also updates; expected that no call does both"
                )

    def _warn_of_unread_inputs(self) -> None:
        read = {name for call in self.program.calls for name in call.operands}
        for name in self.program.inputs:
            if name not in read and name != self.program.loss:
                warnings.warn(
                    f"the program does not read input {name!r}: what is given for it has no effect (torch.export joins inputs that are one "
                    "tensor; export with separate tensors)",
                    SoapWarning,
                    stacklevel=2,
                )


def loss_position(exported: ExportedProgram) -> int | None:
    """Which flat output is called ``loss``, if the outputs have names."""
    signature = exported.module_call_graph[0].signature
    spec = signature.out_spec if signature is not None else None
    keys = getattr(spec, "context", None)
    if spec is None or not isinstance(keys, (list, tuple)) or "loss" not in keys:
        return None
    before = spec.children()[: list(keys).index("loss")]
    return int(sum(child.num_leaves for child in before))
