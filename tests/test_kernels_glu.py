"""swiglu, swiglu_packed and geglu: facts of kernels/glu.py."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    CUDA,
    DEVICES,
    DTYPES,
    FUSED_DEVICES,
    check_captures,
    check_compiles,
    check_exact,
    check_repeatable,
    check_strides,
    check_tail,
    run,
    tensor,
)

from ligermodels import LigerError
from ligermodels.kernels import geglu, swiglu, swiglu_packed
from ligermodels.kernels.glu import glu_backward_into

FUNCTIONS = {
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up),
    "geglu tanh": (geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "geglu erf": (lambda gate, up: geglu(gate, up, "none"), lambda gate, up: F.gelu(gate) * up),
}


def formula(name):
    """The formula for float64: torch's tanh gelu loses all digits far below zero even there."""
    if name != "geglu tanh":
        return FUNCTIONS[name][1]
    return lambda x, up: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)) * up


NAMES = pytest.mark.parametrize("name", FUNCTIONS)


def pair(*shape, dtype, device, scale=1.0):
    gate = (tensor(*shape, grad=False) * scale).to(dtype=dtype, device=device).requires_grad_()
    return gate, tensor(*shape, like=(dtype, device), seed=1)


def pack(function):
    return lambda gate, up: function(torch.cat((gate, up), -1))


@NAMES
@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_results_and_gradients_are_as_exact_as_eager(device, dtype, scale, name):
    fused, eager = FUNCTIONS[name]
    for shape in ((1, 1), (2, 3, 33), (5, 300)):
        inputs = pair(*shape, dtype=dtype, device=device, scale=scale)
        check_exact(fused, eager, formula(name), inputs)
    if name == "swiglu":
        check_exact(pack(swiglu_packed), eager, eager, inputs)


@pytest.mark.gpu
@NAMES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_sizes_on_the_gpu(dtype, name):
    fused, eager = FUNCTIONS[name]
    for shape in ((1000, 14336), (333, 4099)):
        inputs = pair(*shape, dtype=dtype, device="cuda", scale=3.0)
        check_exact(fused, eager, formula(name), inputs)
        check_repeatable(fused, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_large_gates_stay_finite(device):
    gate = torch.tensor([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4], device=device, requires_grad=True)
    for fused, eager in FUNCTIONS.values():
        results = run(fused, (gate, torch.ones_like(gate).requires_grad_()))
        expected = run(eager, (gate, torch.ones_like(gate).requires_grad_()))
        for a, b in zip(results, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_strides(device, monkeypatch):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.glu"), "_BLOCK", 128)
    gate, up = pair(2, 3, 150, dtype=torch.float32, device=device)
    check_strides(swiglu, (gate, up))
    check_strides(swiglu_packed, (gate,))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_halves_of_a_packed_projection(device):
    gate_up = tensor(3, 66, like=(torch.float32, device))
    packed = run(swiglu_packed, (gate_up,))
    apart = run(lambda x: swiglu(*x.chunk(2, -1)), (gate_up,))
    assert all(map(torch.equal, packed, apart))


@pytest.mark.parametrize("device", DEVICES)
def test_backward_gives_the_product_again(device):
    gate, up = pair(4, 33, dtype=torch.float32, device=device)
    out, dgate, dup = run(swiglu, (gate, up))
    grad = tensor(4, 33, like=(torch.float32, device), seed=100, grad=False)
    with torch.no_grad():
        glu_backward_into(grad, gate, up, "silu", dgate=gate, dup=up, product=grad)  # over what it reads
    assert all(map(torch.equal, (gate, up, grad), (dgate, dup, out)))


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_only_wanted_gradients(device):
    gate, up = pair(0, 8, dtype=torch.float32, device=device)
    assert [t.shape for t in run(swiglu, (gate, up))] == [(0, 8)] * 3
    assert [t.shape for t in run(swiglu_packed, (gate,))] == [(0, 4), (0, 8)]
    gate, up = pair(3, 8, dtype=torch.float32, device=device)
    _, dgate, dup = run(swiglu, (gate, up))
    assert torch.equal(run(swiglu, (gate.detach(), up))[1], dup)
    assert torch.equal(run(swiglu, (gate, up.detach()))[1], dgate)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_compiles(device):
    def all_three(gate, up):
        return swiglu(gate, up), geglu(gate, up), swiglu_packed(gate)

    check_compiles(all_three, lambda n: pair(n, 8, dtype=torch.float32, device=device), device)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_a_second_derivative_is_refused(device):
    gate, up = pair(2, 8, dtype=torch.float32, device=device)
    (dgate,) = torch.autograd.grad(swiglu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(LigerError, match="second derivative"):
        dgate.sum().backward()


@pytest.mark.parametrize("device", [CUDA])
def test_captures(device):
    gate, up = pair(40, 100, dtype=torch.bfloat16, device=device)
    check_captures(lambda gate, up: (swiglu(gate, up), geglu(gate, up), swiglu_packed(gate)), (gate, up))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_2_31_elements(packed):
    gate = torch.empty(75_000, 28672, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    if packed:
        check_tail(swiglu_packed, (gate,))
    else:
        check_tail(swiglu, (gate, torch.empty_like(gate).normal_().requires_grad_()))


def test_errors_name_the_argument():
    with pytest.raises(LigerError, match="expected equal dtypes and shapes"):
        swiglu(torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(LigerError, match="approximate is 'fast'"):
        geglu(torch.ones(2), torch.ones(2), "fast")
    with pytest.raises(LigerError, match=r"\(\.\.\., 2I\), got \(2, 3\)"):
        swiglu_packed(torch.ones(2, 3))
