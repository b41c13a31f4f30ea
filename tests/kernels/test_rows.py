"""Norms, gates and heads: what comes in FP8 is what comes plain, brought to FP8. On a GPU `test_gpu.py` says more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.kernels.activation import sigmoid_and_mul, sigmoid_and_mul_quantised
from phalanx.kernels.fp8 import Form, InBoth, Quantised, plain
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_both, add_rms_norm_in
from phalanx.kernels.quantise import quantise
from tests.kernels.apart import run_apart


@pytest.mark.slow
def test_the_kernels_compute_what_they_are_defined_by() -> None:
    """In Triton's interpreter."""
    run_apart("interpreted_rows")


@pytest.mark.parametrize("width", [300, 256, 7])
def test_a_norm_may_leave_in_both_forms(width: int) -> None:
    x, residual, weight = torch.randn(3, width).bfloat16(), torch.randn(3, width).bfloat16(), torch.randn(width)
    twin = residual.clone()
    found, wanted = add_rms_norm_both(x, residual, weight, 1e-5), add_rms_norm(x, twin, weight, 1e-5)
    assert torch.equal(found.plain, wanted)
    assert torch.equal(plain(found), wanted)
    assert all(torch.equal(*pair) for pair in zip(found.in_fp8, quantise(wanted), strict=True))
    assert torch.equal(residual, twin)


@pytest.mark.parametrize(("form", "kind"), [(Form.PLAIN, Tensor), (Form.FP8, Quantised), (Form.BOTH, InBoth)])
def test_a_norm_leaves_in_the_form_that_is_asked_for(form: Form, kind: type) -> None:
    assert isinstance(add_rms_norm_in(form, torch.randn(2, 130), None, torch.ones(130), 1e-5), kind)


def test_a_gate_opens_by_its_sigmoid() -> None:
    x, gate = torch.randn(3, 300), torch.randn(3, 300)
    gated = sigmoid_and_mul(x, gate)
    torch.testing.assert_close(gated, x / (1 + torch.exp(-gate)))
    assert all(torch.equal(*pair) for pair in zip(sigmoid_and_mul_quantised(x, gate), quantise(gated), strict=True))
