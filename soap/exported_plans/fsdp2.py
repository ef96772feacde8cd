"""PyTorch's ``fully_shard`` over a device mesh: a Python module with two functions."""

from __future__ import annotations

from textwrap import dedent, indent

from soap.exported_plans.contract import Target, Written
from soap.strategy.wrapped import Wrapped

CHECKPOINTING = {
    "none": "",
    "full": '''        layers = {model.get_submodule(name) for name in LAYERS}
        checkpoint_wrapper.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper.checkpoint_wrapper, check_fn=lambda module: module in layers
        )
''',
    "selective": '''        layers = {model.get_submodule(name) for name in LAYERS}
        contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
        wrap = partial(checkpoint_wrapper.checkpoint_wrapper, context_fn=contexts)
        checkpoint_wrapper.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in layers)
''',
}
PREFETCHING = '''    for order, prefetch in (
        ([model, *modules], FSDPModule.set_modules_to_forward_prefetch),
        ([model, *reversed(modules)], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for place, module in enumerate(order, 1):
            prefetch(module, order[place : place + PREFETCH])
'''
"""A module's gathers begin once those before it are there: ``FSDPModule`` of torch.distributed.fsdp."""
AT_LAST = {
    "none": ("set_requires_gradient_sync",),
    "zero1": ("set_requires_gradient_sync", "set_reshard_after_backward"),
    "fsdp": (),
    "hsdp": ("set_requires_all_reduce",),
}
"""By sharing: what only the last micro-batch of a step does."""
PRODUCTS = '''
PRODUCTS = [  # what these make is kept, everything else of a layer is computed again
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
'''


def write(written: Written) -> str:
    """The module."""
    own = written.configuration
    shard = {"none": 1, "hsdp": max(1, written.devices_each)}.get(own.sharing, own.world)
    reshard = own.sharing in ("fsdp", "hsdp")
    policy = ""
    if written.autocast is not None:
        policy = f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{written.autocast}, reduce_dtype=torch.float32), "
    imports = ["from torch.distributed.device_mesh import init_device_mesh"]
    fsdp = ["FSDPModule"] * (own.sharing != "none") + ["MixedPrecisionPolicy"] * bool(policy) + ["fully_shard"]
    imports.append(f"from torch.distributed.fsdp import {', '.join(fsdp)}")
    first = ["import torch", "from torch import nn"]
    if own.recompute != "none":
        imports.insert(0, "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper")
    if own.recompute == "selective":
        first.insert(0, "from functools import partial\n")
        imports.append("from torch.utils.checkpoint import create_selective_checkpoint_contexts")
    replicate = own.world // shard
    mesh = '(REPLICATE, SHARD), mesh_dim_names=("replicate", "shard")' if replicate > 1 else "(SHARD,)"
    layers = written.layers
    names = ", ".join(repr(name) for name in layers.names)
    around = [*map(repr, layers.before), "*LAYERS", *map(repr, layers.after)]
    gathers = own.sharing != "none"
    wrapping, depth = (PREFETCHING, f"PREFETCH = {own.prefetch}  # modules that are gathered ahead\n") if gathers else ("", "")
    at_last = "".join(f"        model.{method}(number == MICRO_BATCHES)\n" for method in AT_LAST[own.sharing])
    checkpointing = dedent(CHECKPOINTING[own.recompute])
    head = "\n\n".join(written.facts)
    return f'''"""{head}
"""

{chr(10).join((*first, *imports))}

REPLICATE, SHARD = {replicate}, {shard}  # copies of all parameters; parts of each copy
MICRO_BATCHES = {own.microbatches}  # of {own.micro_batch} samples on each device, {own.samples} in a step
LAYERS = ({names}{"," * (len(layers.names) == 1)})
MODULES = ({", ".join(around)}{"," * (len(around) == 1)})  # each is gathered at once, in this order; the model itself has the rest
{depth}{PRODUCTS if own.recompute == "selective" else ""}

def parallelize(model: nn.Module, device_type: str = "cuda") -> nn.Module:
    """Call this on all ranks, behind init_process_group and before the optimizer is made."""
    mesh = init_device_mesh(device_type, {mesh})
    options = dict({policy}mesh=mesh)
{indent(checkpointing, "    ")}    modules = [model.get_submodule(name) for name in MODULES]
    for module in modules[:-1]:
        fully_shard(module, **options, reshard_after_forward={reshard})
    for module in (*modules[-1:], model):  # the backward pass begins with these
        fully_shard(module, **options, reshard_after_forward=False)
{wrapping}    return model


def backward(model: nn.Module, batches) -> None:
    """One step's backward passes. batches: the arguments of MICRO_BATCHES calls of the model, which returns its loss."""
    for number, batch in enumerate(batches, 1):
{at_last}        (model(*batch) / MICRO_BATCHES).backward()
'''


TARGET = Target(
    "fsdp2", "PyTorch's fully_shard", "torch 2.13", ".py", ("data", "single"), ("fsdp", "hsdp", "zero1", "none"),
    ("none", "selective", "full"), False, write, lambda _: "", {},
    ("the loss of micro-batches is the mean of theirs", "with no sharing, fully_shard over a mesh of one part replicates"),
    lambda own, layers: Wrapped(layers.wrapped(layers.alone), layers.kept(layers.alone, own), once=own.sharing == "zero1"), (1, 2, 3, 4),
)  # fmt: skip
