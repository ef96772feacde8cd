"""The command line's optimizers: the same update as torch's usual ones."""

from __future__ import annotations

import pytest
import torch

from soap.runtime.optimizers import OPTIMIZERS, adam

USUAL = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_are_the_usual_ones(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (7,), (), (0, 2))]
    ours, usual = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    made, known = OPTIMIZERS[name](ours, 0.1), USUAL[name](usual, lr=0.1)
    for _ in range(4):
        for one, other in zip(ours, usual, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            other.grad = one.grad.clone()
        made.step()
        known.step()
    torch.testing.assert_close(ours, usual, rtol=1e-12, atol=1e-12)


def test_adam_goes_over_a_tensor_once_on_cpus_alone() -> None:
    assert adam([torch.zeros(2)], 0.1).defaults["fused"] is True
    assert adam([torch.zeros(2, device="meta")], 0.1).defaults["fused"] is None
