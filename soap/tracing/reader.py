"""From an ``ExportedProgram`` to a ``Program``: plain, functional calls with names that a person recognises."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from soap.errors import ModelError, SoapWarning
from soap.tracing.autocast import Caster
from soap.tracing.buffers import about, canonical_buffers, check_memory
from soap.tracing.calls import BufferRef, Call, Program, Ref
from soap.tracing.example import loss_position, outputs_of
from soap.tracing.naming import canonical_names
from soap.tracing.nodes import NodeReader
from soap.tracing.rules.state import keep_state, next_state

aten = torch.ops.aten


class Reader(NodeReader):
    """One pass over the exported graph. ``dtype`` replaces every floating-point dtype of the program, if given. ``caster``: finds
    the casts that ``torch.autocast`` would make, which are written as calls. ``local_statistics``: training batch norm normalises each tile
    by its own statistics."""

    def __init__(
        self,
        exported: ExportedProgram,
        dtype: torch.dtype | None,
        *,
        caster: Caster | None = None,
        local_statistics: bool = False,
    ) -> None:
        super().__init__(Program([], {}, [], {}, {}, {}, ""), dtype, caster=caster, local_statistics=local_statistics)
        self.exported = exported
        self._first: dict[torch.fx.Node, str] = {}  # placeholder -> its value
        self._frozen: dict[str, str] = {}  # value of a parameter that training does not change -> canonical name

    def read(self) -> Program:
        """The program; raises ModelError in one line for what cannot be planned."""
        self._check()
        self._placeholders()
        self.nodes(self.exported.graph, gradients=True)
        self.program.loss = self._loss()
        self._end_buffers()
        self._warn_of_unread_inputs()
        return self.program

    # Inputs, parameters, buffers

    def _check(self) -> None:
        if self.exported.range_constraints:
            symbol = next(iter(self.exported.range_constraints))
            raise ModelError(f"the program has a dynamic shape ({symbol}); expected whole numbers: see sizes.at_sizes")

        self._check_not_decomposed()

    def _check_not_decomposed(self) -> None:
        """Refuse programs in which ``run_decompositions`` has made plain results of what was detached, so that gradients flow there."""
        moved = next((spec.target for spec in self.exported.graph_signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION), None)
        if moved is None and self.exported.dialect == "TRAINING":
            return
        detached = next((node.name for node in self.exported.graph.nodes if node.target is aten.alias.default), None)
        found = f"buffer {moved!r} is moved" if moved is not None else f"{detached!r} was detached"
        if moved is not None or detached is not None:
            raise ModelError(
                f"the program was decomposed (run_decompositions): it no longer says where gradients stop ({found}); "
                "expected the program as torch.export.export returns it"
            )
        warnings.warn(
            "the program was decomposed (run_decompositions): gradients flow through what was computed under torch.no_grad, if any was; "
            "export it without that to be sure",
            SoapWarning,
            stacklevel=2,
        )

    def _placeholders(self) -> None:
        nodes = {n.name: n for n in self.exported.graph.nodes if n.op == "placeholder"}
        canonical = canonical_names(self.exported.state_dict) | canonical_buffers(self.exported)
        for spec in self.exported.graph_signature.input_specs:
            name, node = spec.arg.name, nodes.get(spec.arg.name)
            fake = node.meta.get("val") if node is not None else None
            if spec.kind is not InputKind.USER_INPUT and not isinstance(fake, torch.Tensor):
                raise ModelError(
                    f"forward uses a torch.Generator of its own, or another custom object ({name!r}), which a program does not have; "
                    "expected torch's global generator (drop generator=), and tensors alone"
                )
            if node is None or not isinstance(fake, torch.Tensor):
                continue
            self.at[node] = self.value(self.unique(name), fake.shape, self.convert(fake.dtype))
            self._first[node] = self.at[node]
            if spec.kind is InputKind.PARAMETER and not self.exported.state_dict[str(spec.target)].requires_grad:
                self.changes.nodes[node] = self._frozen[self.at[node]] = canonical[str(spec.target)]
            if spec.kind is InputKind.BUFFER:
                if not node.users:
                    continue  # of a buffer with several names, one is used
                self.changes.nodes[node] = canonical.get(str(spec.target), str(spec.target))
            self._place(spec.kind, self.at[node], str(spec.target), canonical)

    def _place(self, kind: InputKind, value: str, target: str, canonical: Mapping[str, str]) -> None:
        if kind is InputKind.USER_INPUT:
            self.program.inputs.append(value)
        elif kind is InputKind.PARAMETER:
            self.program.parameters[value] = canonical[target]
        elif kind is InputKind.BUFFER:
            self.buffers[value] = canonical.get(target, target)
        else:
            self.program.constants[value] = self._tensor(self.exported.constants[target])

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().resolve_conj().resolve_neg().to(self.convert(tensor.dtype))

    def buffer(self, name: str) -> torch.Tensor:
        """The first value of a buffer."""
        state = self.exported.state_dict
        return self._tensor(state[name] if name in state else self.exported.constants[name])

    # Outputs

    def _loss(self) -> str:
        """The scalar to minimise."""
        output = outputs_of(self.exported)[loss_position(self.exported)]
        node = output.node
        loss = self.now(node) if isinstance(node, torch.fx.Node) and node in self.at else None
        if not isinstance(loss, str):
            raise ModelError("the program returns no tensor; expected the scalar training loss as output")
        shape, dtype = self.shape(loss), self.dtype(loss)
        if shape not in ((), (1,)) or not dtype.is_floating_point:
            way = "return its real part or magnitude" if dtype.is_complex else "pass loss=… to soap.export, or return it first"
            raise ModelError(
                f"{f'output {output.path}' if output.path else 'the output'} has shape {list(shape)} and dtype "
                f"{str(dtype).removeprefix('torch.')}; expected a scalar floating-point loss: {way}"
            )
        if not any(loss in call.outputs for call in self.program.calls):
            raise ModelError("the loss is an input or a constant; expected a loss that the model computes")
        if shape == (1,):
            name = self.unique(f"{loss}_scalar")
            loss = self.emit(Call(name, aten.reshape.default, (Ref(loss), []), {}, (name,)), (), dtype)
        return loss

    def _end_buffers(self) -> None:
        """Decide what becomes of buffers: counters that nobody reads move behind the step, others that change are state, or constants."""
        moved = self._moved()
        check_memory(self.exported, {*moved, *self.program.buffers})
        counters = self.changes.counters(self.program, self.buffers | self._frozen)
        for value, name in self._frozen.items():
            if name in counters or name in moved:  # a teacher's weights, which follow the student's: buffers, whatever they are called
                self.buffers[value] = self.program.parameters.pop(value)
        self.program.end_step += [call for _, call in sorted((move for own in counters.values() for move in own), key=lambda m: m[0])]
        ending: dict[str, str] = {}
        for value, name in self.buffers.items():
            if name in self.program.buffers:
                self._check_statistics(value, name)
            elif name in counters:
                self.program.buffers[name] = self.buffer(name)
            elif name in moved:
                self.program.buffers[name], self.program.state[value] = self.buffer(name), name
                ending[name] = moved[name]
            else:
                self.program.constants[value] = self.buffer(name)
        if ending:
            self._keep(ending)

    def _moved(self) -> dict[str, str]:
        """Buffers that the program changes, with their values at its end."""
        found = {}
        for node, name in self.changes.nodes.items():
            with about(name):
                now = str(self.now(node))
            if now != self._first[node]:
                found[name] = now
        return found

    def _check_statistics(self, value: str, name: str) -> None:
        """Refuse programs that read the new values of running statistics, which change when the step is over."""
        found = [call.name for call in self.program.calls if value in call.operands]
        found += [self.changes.found[name].last] if name in self.changes.found else []
        if found:
            raise ModelError(
                f"buffer {name!r} holds running statistics of batch norm, which call {found[0]!r} reads or changes as well; "
                "expected that batch norm alone does: give that call a buffer of its own, which forward moves"
            )

    def _keep(self, ending: Mapping[str, str]) -> None:
        """The calls that end a program with state. ``ending``: by buffer, its last value."""
        for name, value in ending.items():
            shape = self.program.buffers[name].shape
            if self.shape(value) != tuple(shape):
                raise ModelError(f"buffer {name!r} is given shape {list(self.shape(value))}, but has {list(shape)}; expected one shape")
        last = self.unique("next_state")
        names = [self.unique(f"{last}:{i}") for i in range(len(ending))]
        for made, value in zip(names, ending.values(), strict=True):
            self.value(made, self.shape(value), self.dtype(value))
        self.program.calls.append(Call(last, next_state, tuple(map(Ref, ending.values())), {}, tuple(names)))
        kept = self.unique("keep_state")
        buffers = tuple(map(BufferRef, ending))
        self.emit(Call(kept, keep_state, tuple(map(Ref, names)), {"buffers": buffers}, (kept,)), (), torch.int32)
        self.program.kept = (kept,)

    def _warn_of_unread_inputs(self) -> None:
        read = {name for call in self.program.calls for name in call.operands}
        for name in self.program.inputs:
            if name not in read and name != self.program.loss:
                warnings.warn(
                    f"the program does not read input {name!r}: values given for it have no effect (torch.export joins inputs that are one "
                    "tensor; export with separate tensors)",
                    SoapWarning,
                    stacklevel=2,
                )
