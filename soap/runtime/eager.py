"""Comparing an exported program with eager PyTorch: loss, every gradient and every buffer of one step of both, on the example batch.

``torch.export`` records the forward pass only. Code that runs in the backward pass alone (``torch.autograd.Function``, hooks) is not in the
file, and what Python decides by its own numbers is fixed in it. With the module at hand both show: we compare its eager step with the calls
that SOAP executes. docs/internals/runtime.md (*Checks*) says how random numbers are made equal, and what is refused as Python's own state.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from soap.errors import ModelError, SoapError, SoapWarning, asked, first_line
from soap.runtime.check import TOLERANCES, Difference, difference, largest
from soap.tracing.calls import TileContext, is_random
from soap.tracing.example import Example
from soap.tracing.execute import TracedModel
from soap.tracing.export import Judge
from soap.tracing.naming import canonical_names
from soap.tracing.python_state import MODES, Memory, has_values, same_bits, same_generators, untouched
from soap.tracing.record import ExportRecord

FUNCTION = "write it as a torch.library.custom_op with register_autograd, or with detach (x.detach() * (1 + s) - x * s reverses a gradient)"
HOOK = "write what it does into forward (x.detach() * (1 - s) + x * s scales a gradient), or leave it to the optimizer and clip_norm"
UNKNOWN = "no autograd.Function, no hook and no moved state was found: look for what depends on Python values"
MOST_NAMED = 3


def find_causes(example: Example, names: Sequence[str] | None) -> str:
    """The likely causes in one line. ``names``: all names of the parameter whose gradient differs; None if something else differs."""
    try:
        hooks = _parameter_hooks(example.module, names or ())
        functions, tensor_hooks = _from_a_run(example, names)
        moved = _moved(example)
    except Exception:  # the cause only goes into a message: failing to find it must not hide that message
        return UNKNOWN
    hooks += tensor_hooks + _module_hooks(example.module)
    if not functions and not hooks:
        return f"likely cause: forward changed {', '.join(moved[:MOST_NAMED])}; {way_out(moved)}" if moved else UNKNOWN
    found = list(dict.fromkeys([*functions, *hooks]))
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    ways = [*([FUNCTION] if functions else []), *([HOOK] if hooks else [])]
    return f"likely cause: {', '.join(found[:MOST_NAMED])}{more}, whose backward code torch.export does not record: {'; '.join(ways)}"


def _parameter_hooks(module: nn.Module, names: Sequence[str]) -> list[str]:
    found = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in names:
            continue
        for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = (getattr(parameter, table, None) or {}).values()
            found += [f"a hook on parameter {name!r}{_defined(hook)}" for hook in hooks]
    return found


def _module_hooks(module: nn.Module) -> list[str]:
    found = []
    for name, one in module.named_modules():
        for hook in (*one._backward_hooks.values(), *one._backward_pre_hooks.values()):
            found.append(f"a backward hook on {_module(name, one)}{_defined(hook)}")
    for hook in (*nn_module._global_backward_hooks.values(), *nn_module._global_backward_pre_hooks.values()):
        found.append(f"a backward hook on all modules{_defined(hook)}")
    return found


def _from_a_run(example: Example, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """(autograd.Functions, hooks on tensors) of a forward pass; only those through which the parameter's gradient passes, if any."""
    module = example.module
    with untouched(module), _noted_hooks() as hooks, torch.enable_grad():
        owners = _Owners(example)
        with owners.watching():
            output = example.output()
            owners.take(output)
            if example.loss is not None:
                output = example.loss(output)
        owners.take(output, "the loss")
        suspects = [node for node in owners.nodes.values() if _is_custom(node)]
        own = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in (names or ())}
        concerned = [node for node in suspects if own & _leaves(node)]
        found = [f"autograd.Function {node._forward_cls.__qualname__} in {owners.names[id(node)]}" for node in concerned or suspects]
    return list(dict.fromkeys(found)), hooks


def _moved(example: Example) -> list[str]:
    """Names of Python's state that a forward pass changes; first what decides whether something is trained."""
    roots = {"self": example.model, "loss": example.loss}
    with untouched(example.module, beside=roots), torch.enable_grad():
        before = Memory(roots)
        output = example.output()
        if example.loss is not None:
            example.loss(output)
        found = before.moved(Memory(roots))
    return sorted(found, key=lambda name: not name.endswith(MODES))


def way_out(moved: Sequence[str]) -> str:
    """The end of a message about state that forward changes: how to write it."""
    if any(name.endswith(MODES) for name in moved):
        return "expected train(), eval() and requires_grad_() between steps, not in forward"
    return "expected a buffer (register_buffer) that forward changes or assigns, or an argument of forward"


class _Owners:
    """The module that made each node of the autograd graph: the innermost one that was running when the node was first seen."""

    def __init__(self, example: Example) -> None:
        self.nodes: dict[int, Any] = {}  # keeps them alive, so that their ids stay unique
        self.names: dict[int, str] = {}
        self._paths = {id(one): name for name, one in example.model.named_modules()}
        self._running = [type(example.model).__name__]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, hooks follow the calls of all modules."""
        handles = [nn_module.register_module_forward_pre_hook(self._before), nn_module.register_module_forward_hook(self._after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        self.take(args)
        self._running.append(_module(self._paths.get(id(module), ""), module))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.take(output)
        self._running.pop()

    def take(self, values: Any, name: str = "") -> None:
        """Note that the new nodes behind these values were made by the running module, or by ``name`` if it is given."""
        roots = [t.grad_fn for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        for node in _new_nodes(roots, self.nodes):
            self.names[id(node)] = name or self._running[-1]


def _module(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path else type(module).__name__


def _is_custom(node: Any) -> bool:
    kind = getattr(node, "_forward_cls", None)
    return kind is not None and not str(kind.__module__).startswith("torch.")


def _new_nodes(roots: Sequence[Any], kept: dict[int, Any]) -> list[Any]:
    """Nodes of the autograd graph behind ``roots`` that are not in ``kept``; adds them to it."""
    found, waiting = [], [node for node in roots if node is not None]
    while waiting:
        node = waiting.pop()
        if id(node) in kept:
            continue
        kept[id(node)] = node
        found.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _leaves(node: Any) -> set[int]:
    """Ids of the leaf tensors that a node passes gradients to."""
    reached: dict[int, Any] = {}
    return {id(leaf.variable) for leaf in _new_nodes([node], reached) if hasattr(leaf, "variable")}


@contextmanager
def _noted_hooks() -> Iterator[list[str]]:
    """Descriptions of hooks that are registered on tensors inside, with the line that does so."""
    found: list[str] = []
    original: Callable[..., Any] = torch.Tensor.register_hook

    @functools.wraps(original)
    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if not isinstance(self, nn.Parameter):
            found.append(f"a hook on a tensor{_place(sys._getframe(1))}")
        return original(self, hook)

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]


def _place(frame: FrameType) -> str:
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _defined(hook: Any) -> str:
    """Where a hook is defined, if it has code that tells."""
    code = getattr(hook, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if isinstance(code, CodeType) else ""


SEED = 20_111
"""Seed of both runs' random numbers."""
NO_VALUES = "its module has no values (meta device)"
NOT_FINITE = "the loss of its example batch was not finite"


def eager_judge(example: Example) -> Judge | None:
    """A function that compares an exported program with this module. None, with a warning, if the module or its inputs have no values."""
    tensors = [*example.module.parameters(), *example.module.buffers(), *example.tensors()]
    if any(t.device.type == "meta" or isinstance(t, torch._subclasses.FakeTensor) for t in tensors):
        warnings.warn(f"the program is not compared with eager PyTorch: {NO_VALUES}", SoapWarning, stacklevel=2)
        return None
    return lambda exported, model: compare_with_eager(example, exported, model)


def compare_with_eager(example: Example, exported: ExportedProgram, model: TracedModel) -> ExportRecord:
    """Compare one step of the module with one of its program on the example batch. The module's state and torch's generators do not change.

    Raises ModelError in one line, with the likely cause, if they differ by more than rounding, or if the module fails on its example.
    """
    name = type(example.model).__name__
    try:
        return _Comparison(example, exported, model).run()
    except SoapError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(f"no memory to compare {name} with eager PyTorch: {_said(error)}; verify=False leaves it out") from error
    except Exception as error:
        raise ModelError(
            f"one step of {name} cannot be compared with eager PyTorch, which computes it ({_said(error)}); verify=False leaves out the "
            "comparison: please report it with the model"
        ) from error


@contextmanager
def _as_eager(name: str) -> Iterator[None]:
    """Within this context only the user's module runs: ModelError in one line if it fails."""
    try:
        yield
    except (SoapError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"one step of {name} on the example inputs fails in eager PyTorch ({_said(error)}); "
            f"expected inputs that it can be trained on: {asked('verify=False')} leaves out the comparison"
        ) from error


def _said(error: BaseException) -> str:
    """An error's class and its message, if it has one."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


@dataclass
class _Step:
    """The results of a step of eager PyTorch. ``gradients``: canonical name -> gradient, of parameters that have one. ``moving``: names of
    Python's state that moves by itself from call to call; ``left``: of that which a call leaves behind."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    moving: Sequence[str] = ()
    left: Sequence[str] = ()


class _Comparison:
    def __init__(self, example: Example, exported: ExportedProgram, model: TracedModel) -> None:
        self.example, self.exported, self.model = example, exported, model
        self.canonical = canonical_names(exported.state_dict)
        self.random = any(is_random(call) for call in model.program.calls)
        self.dtype = _coarsest(model)
        self.tolerance = TOLERANCES[self.dtype]
        self.left: Sequence[str] = ()

    def run(self) -> ExportRecord:
        """See ``compare_with_eager``."""
        with same_generators(self._devices()):
            found = self._found(nullcontext)
            if found is None:
                warnings.warn(
                    f"the program is not compared with eager PyTorch: {NOT_FINITE}; expected inputs on which training can begin",
                    SoapWarning,
                    stacklevel=4,
                )
                return ExportRecord(False, NOT_FINITE)
            if self.random and self._wrong(found):
                found = self._found(_ByShape) or found
            if wrong := self._wrong_after_all(found):
                raise ModelError(self._refusal(wrong))
        return ExportRecord(True, "")

    def _devices(self) -> list[torch.device]:
        """The GPUs that the step runs on."""
        tensors = [*self.example.module.parameters(), *self.example.module.buffers(), *self.example.tensors()]
        return list(dict.fromkeys(t.device for t in tensors if t.device.type == "cuda"))

    def _wrong(self, found: Sequence[Difference]) -> list[Difference]:
        return [d for d in found if not d.agrees(self.tolerance)]

    def _wrong_after_all(self, found: Sequence[Difference], *, follows: bool = True) -> list[Difference]:
        """The differences that are more than rounding. ``follows``: as for ``found``."""
        wrong = self._wrong(found)
        return self._wrong(self._judged(wrong, follows)) if wrong and not self.random else wrong

    def _found(self, drawing: Callable[[], AbstractContextManager[Any]], *, follows: bool = True) -> list[Difference] | None:
        """The differences, in the order of the module's parameters; None if eager's loss is not finite. To save memory, each pair of
        gradients is compared and dropped as soon as the program's backward pass has made it. ``follows``: see ``eager_step``."""
        with drawing():
            expected = eager_step(self.example, self.exported, follows=follows)
        if expected.moving:
            kept = "which a program keeps as it is in the first step"
            raise ModelError(f"{type(self.example.model).__name__} changes from step to step: {_told(expected.moving, kept)}")
        self.left = expected.left or self.left
        if not bool(expected.loss.isfinite()):
            return None
        scale = _scale(expected.gradients)
        found: dict[str, Difference] = {}

        def meet(name: str, gradient: torch.Tensor) -> None:
            other = expected.gradients.pop(name, None)
            other = torch.zeros_like(gradient) if other is None else other
            found[name] = difference("gradient of", name, gradient, other, self.dtype, scale)

        with drawing():
            loss, buffers = self._program_step(meet)
        result = [difference("loss", self.model.graph.loss, loss, expected.loss, self.dtype, 1.0)]
        for name, tensor in list(expected.gradients.items()):  # parameters without gradient in the program
            meet(name, torch.zeros_like(tensor))
        result += [found[name] for name in self.canonical if name in found]
        moved = _scale(expected.buffers)
        result += [difference("buffer", n, t, expected.buffers[n], self.dtype, moved) for n, t in buffers.items()]
        for name, tensor in self.example.module.named_buffers():
            if name not in buffers and has_values(tensor) and not same_bits(tensor, expected.buffers[name]):
                ways = "expected an assignment, or a call in place"
                raise ModelError(f"forward changes buffer {name!r}, of which its program has nothing; {ways}")
        return result

    def _program_step(self, meet: Callable[[str, torch.Tensor], None]) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Run the program's step. Returns loss and new buffers; calls ``meet(name, gradient)`` once for each gradient."""
        graph, model = self.model.graph, self.model
        leaves = {n: t.detach().requires_grad_(graph.tensors[n].requires_grad) for n, t in model.parameters.items()}
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                accumulated: Callable[..., None] = lambda found, name=name: self._met(name, found, meet)  # noqa: E731
                leaf.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        context = TileContext(SEED, 0, {n: t.clone() for n, t in model.buffers.items()}, drawn_by_torch=True)
        torch.manual_seed(SEED)
        with torch.enable_grad():
            loss = model.reference_loss([t.detach().clone() for t in model.example_inputs], leaves, context)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        model.end_step(context)
        return loss.detach(), context.buffers

    def _met(self, name: str, leaf: torch.Tensor, meet: Callable[[str, torch.Tensor], None]) -> None:
        assert leaf.grad is not None
        meet(name, _dense(leaf.grad))
        leaf.grad = None

    def _judged(self, wrong: Sequence[Difference], follows: bool) -> list[Difference]:
        """The same differences, with distances from eager PyTorch in float64 if the module can be copied to it."""
        try:
            wide = self.example.widened()
            with untouched(self.example.module):  # the copy may share parts with it
                truth = eager_step(wide, self.exported, follows=follows) if wide is not None else None
        except Exception:  # the module computes in dtypes of its own, or there is no memory for a copy
            truth = None
        if truth is None:
            return list(wrong)
        names = {d.name for d in wrong}
        mine: dict[str, torch.Tensor] = {}
        loss, buffers = self._program_step(lambda name, gradient: mine.update({name: gradient}) if name in names else None)
        alone = eager_step(self.example, self.exported, follows=follows)
        distances = [self._from(truth, loss, mine, buffers), self._from(truth, alone.loss, alone.gradients, alone.buffers)]
        keys = [(d, (d.kind, d.name)) for d in wrong]
        return [replace(d, from_float64=distances[0].get(key), alone_from_float64=distances[1].get(key)) for d, key in keys]

    def _from(
        self, truth: _Step, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[tuple[str, str], float]:
        scale = _scale(truth.gradients)
        moved = _scale(truth.buffers)
        found = [difference("loss", self.model.graph.loss, loss, truth.loss, self.dtype, 1.0)]
        for kind, mine, true, size in (("gradient of", gradients, truth.gradients, scale), ("buffer", buffers, truth.buffers, moved)):
            for name in mine.keys() & true.keys():
                found.append(difference(kind, name, mine[name], true[name], self.dtype, size))
        return {(d.kind, d.name): d.error for d in found}

    def _refusal(self, wrong: Sequence[Difference]) -> str:
        first = wrong[0]
        what = "loss" if first.kind == "loss" else f"{first.kind} {first.name!r}"
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        first_step = self._found(_ByShape if self.random else nullcontext, follows=False) if self.left else None
        if first_step is not None and not self._wrong_after_all(first_step, follows=False):
            said = f"on the example batch, the {what} of the second step is off by {_share(first.error)}{others}"
            kept = "of which a program has nothing"
            return f"{type(self.example.model).__name__} changes from step to step: {said}; {_told(self.left, kept)}"
        cause = find_causes(self.example, self._aliases(first.name) if first.kind == "gradient of" else None)
        return (
            f"the exported program of {type(self.example.model).__name__} does not train as eager PyTorch does: on the example batch, the "
            f"{what} is off by {_share(first.error)}{others}; {cause}; {asked('verify=False')} exports it as it is"
        )

    def _aliases(self, name: str) -> list[str]:
        return [alias for alias, canonical in self.canonical.items() if canonical == name]


def _share(error: float) -> str:
    """An error relative to a tensor's size, as text."""
    if not isfinite(error):
        return "all of its size: it is zero, or not finite, in one of the two only"
    return f"{error:.1%}" if 1e-3 <= error < 1e4 else f"{error:.1e} of its size"


def eager_step(example: Example, exported: ExportedProgram, *, follows: bool = False) -> _Step:
    """Loss, gradients and buffers of one step of the module, which stays as it is. ``follows``: as its second step, with Python's state."""
    module, canonical = example.module, canonical_names(exported.state_dict)
    beside, drawn, running = {"self": example.model, "loss": example.loss}, _drawn(), _as_eager(type(example.model).__name__)
    with untouched(module, changed_parameters(exported), beside) as put_state_back, torch.enable_grad(), running:
        before = Memory(beside) if follows else None
        if before is not None:
            _call_before(example, exported, before.restore)
            put_state_back()
        torch.manual_seed(SEED)
        loss = example.loss_of(example.output(), exported)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and parameter.requires_grad:
                own, gradient = canonical.get(name, name), _dense(parameter.grad)
                gradients[own] = gradients[own] + gradient if own in gradients else gradient
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
        result = _Step(loss.detach(), gradients, buffers)
        if loss.requires_grad and any(buffer.grad_fn is not None for buffer in module.buffers()):
            for parameter in module.parameters():
                parameter.grad = None
            example.loss_of(example.output(), exported).backward()  # type: ignore[no-untyped-call]  # through this step once more
        if before is not None:
            put_state_back()
            known = Memory(beside)
            torch.manual_seed(SEED)
            example.loss_of(example.output(), exported)
            put_state_back()
            moving = [*known.moved(Memory(beside)), *(kind for kind, state in _drawn().items() if state != drawn[kind])]
            result = replace(result, moving=moving, left=before.moved(known))
    return result


def _call_before(example: Example, exported: ExportedProgram, start_again: Callable[[], None]) -> None:
    """A call on other values, which must not matter to the one after it; on the example's own, if the module does not take others."""
    try:
        other = example.of_other_values()
        other.loss_of(other.output(), exported)
    except Exception:
        start_again()
        example.loss_of(example.output(), exported)


def _drawn() -> dict[str, Any]:
    """Generators outside of torch, by name, with their states."""
    numpy = sys.modules.get("numpy")
    found = {"Python's random": random.getstate()}
    return found if numpy is None else found | {"numpy.random": pickle.dumps(numpy.random.get_state())}


def _told(names: Sequence[str], kept: str) -> str:
    """State that is no tensor of the program, and what to do about it."""
    drawn = [name for name in names if name in _drawn()]
    changed = [name for name in names if name not in drawn]
    more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    said = [f"forward changed {', '.join(changed[:MOST_NAMED])}{more}, {kept}; {way_out(changed)}"] if changed else []
    said += [f"forward draws from {' and '.join(drawn)}, {kept}; expected torch's random numbers"] if drawn else []
    return "; ".join([*said, f"{asked('verify=False')} exports it as it is"])


def changed_parameters(exported: ExportedProgram) -> set[str]:
    """State-dict names of parameters that the forward pass itself changes in place (``embedding(max_norm=…)``)."""
    names = {s.arg.name: str(s.target) for s in exported.graph_signature.input_specs if s.kind is InputKind.PARAMETER}
    found = set()
    for node in exported.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        root = node
        while isinstance(root, torch.fx.Node) and root.args:  # a view's first argument is its base
            root = root.args[0]
        if isinstance(root, torch.fx.Node) and root.name in names:
            found.add(names[root.name])
    return found


class _ByShape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the numbers of a random call depend on its kind and the shapes of its operands alone, not on earlier draws."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims"):
            leaves = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in torch.utils._pytree.tree_leaves(args)]
            sizes = [x for x in leaves if isinstance(x, (int, float, tuple))]
            torch.manual_seed(zlib.crc32(f"{func}{sizes}".encode()))
        return func(*args, **(kwargs or {}))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _scale(tensors: Mapping[str, torch.Tensor]) -> float:
    """The largest finite element of all tensors."""
    sizes = (largest(tensor) for tensor in tensors.values())
    return max((size for size in sizes if isfinite(size)), default=0.0)


def _coarsest(model: TracedModel) -> torch.dtype:
    """The dtype with the largest rounding among the program's values; float32 if none is a floating-point type."""
    known = {value.dtype for value in model.program.values.values()} & TOLERANCES.keys()
    return max(known, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
