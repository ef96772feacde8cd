"""The targets by name."""

from __future__ import annotations

from soap.errors import StrategyError, one_of
from soap.exported_plans import deepspeed, fsdp2, megatron_lm, torchtitan
from soap.exported_plans.contract import Target

TARGETS: tuple[Target, ...] = (torchtitan.TARGET, fsdp2.TARGET, megatron_lm.TARGET, deepspeed.TARGET)


def target_named(name: str) -> Target:
    """The target of this name. StrategyError in one line if there is none."""
    found = next((target for target in TARGETS if target.name == name), None)
    if found is None:
        raise StrategyError(f"no target is named {name[:80]!r}; expected {one_of(name, [target.name for target in TARGETS])}")
    return found
