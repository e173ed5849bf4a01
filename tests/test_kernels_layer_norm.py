"""layer_norm: facts of kernels/layer_norm.py."""

from __future__ import annotations

import importlib

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
from ligermodels.kernels import layer_norm

EPS = 1e-5


def norm(x, w, b):
    return layer_norm(x, w, b, EPS)


def eager(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def exact(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * w + b


def inputs(*shape, like):
    return tensor(*shape, like=like), tensor(shape[-1], like=like), tensor(shape[-1], like=like, seed=1)


def set_block(monkeypatch, most):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.layer_norm"), "_MAX_BLOCK", most)


@pytest.fixture(params=["one block", "several blocks"])
def blocks(request, monkeypatch):
    if request.param == "several blocks":
        set_block(monkeypatch, 16)


# a few values; rows longer than a block; rows that fill it and keep several programs busy; several chunks of long rows
@pytest.mark.parametrize(("shape", "most"), [((1, 7), 64), ((2, 3, 33), 16), ((70, 64), 64), ((40, 9), 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_and_its_gradients_are_as_exact_as_eager(device, dtype, shape, most, monkeypatch):
    set_block(monkeypatch, most)
    check_exact(norm, eager, exact, inputs(*shape, like=(dtype, device)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4616, 1024), (8192, 1152), (300, 40000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_sizes(dtype, shape):
    given = inputs(*shape, like=(dtype, "cuda"))
    check_exact(norm, eager, exact, given)
    check_repeatable(norm, given)


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("device", DEVICES)
def test_a_large_mean_costs_no_digits_beyond_those_of_the_mean(device, mean):
    x, w, b = inputs(7, 48, like=(torch.float32, device))
    x = (x.detach() + mean).requires_grad_()
    y = run(norm, (x, w, b))[0]
    truth = exact(x.double(), w.double(), b.double())
    assert (y - truth).abs().max() <= 1e-6 * max(mean, 3.0)  # x − mean itself is only that exact


@pytest.mark.parametrize("device", DEVICES)
def test_a_constant_row_becomes_the_bias(device, blocks):
    _, w, b = inputs(3, 33, like=(torch.float32, device))
    y, dx, dw, db = run(norm, (torch.full((3, 33), 2.5, device=device, requires_grad=True), w, b))
    assert torch.equal(y, b.expand(3, 33)) and dx.isfinite().all() and not dw.any() and db.any()


@pytest.mark.parametrize("given", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_weight_and_bias_may_be_left_out(device, blocks, given):
    x, *rest = inputs(5, 33, like=(torch.float32, device))
    rest = [p if g else None for p, g in zip(rest, given, strict=True)]

    def with_rest(function):
        def call(x, *found):
            found = iter(found)
            return function(x, *(None if p is None else next(found) for p in rest))

        return call

    def truth(x, w, b):
        return exact(x, 1.0 if w is None else w, 0.0 if b is None else b)

    check_exact(with_rest(norm), with_rest(eager), with_rest(truth), (x, *(p for p in rest if p is not None)))


@pytest.mark.parametrize("device", DEVICES)
def test_output_keeps_the_dtype_of_x_and_gradients_those_of_their_tensors(device, blocks):
    x, w, b = inputs(4, 33, like=(torch.float16, device))
    y, dx, dw, db = run(norm, (x, w.detach().float().requires_grad_(), b))
    assert [t.dtype for t in (y, dx, dw, db)] == [torch.float16, torch.float16, torch.float32, torch.float16]


@pytest.mark.parametrize("dim", [33, 48])
@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_strides(device, blocks, dim):
    check_strides(lambda x: norm(x, *inputs(2, dim, like=(torch.float32, device))[1:]),
                  (tensor(2, 3, dim, like=(torch.float32, device)),))  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    x, w, b = inputs(2, 0, 8, like=(torch.float32, device))
    y, dx, dw, db = run(norm, (x, w, b))
    assert y.shape == dx.shape == x.shape and not dw.any() and not db.any()


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_gradients_are_computed(device, blocks):
    given = inputs(5, 33, like=(torch.float32, device))
    gradients = run(norm, given)[1:]
    for i in range(3):
        alone = run(norm, tuple(x if i == j else x.detach() for j, x in enumerate(given)))[1]
        assert torch.equal(alone, gradients[i])


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_compiles(device):
    _, w, b = inputs(2, 16, like=(torch.float32, device))
    check_compiles(norm, lambda n: (tensor(n, 16, like=(torch.float32, device)), w, b), device)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_a_second_derivative_is_refused(device):
    x = tensor(2, 8, like=(torch.float32, device))
    (dx,) = torch.autograd.grad(layer_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(LigerError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("device", [CUDA])
def test_captures(device):
    check_captures(norm, inputs(40, 100, like=(torch.bfloat16, device)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(600_000, 4096), (70_000, 3)], ids=str)
def test_more_than_2_31_elements_and_more_than_65535_rows(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    check_tail(lambda x: layer_norm(x, torch.ones(shape[-1], device="cuda"), None, EPS), (x,))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_offsets_beyond_2_to_the_31(device):
    # four gigabytes, of which only the pages of three rows are ever touched
    x = torch.empty(2**31 + 64, dtype=torch.float16, device=device).as_strided((3, 16), (2**30 + 16, 1))
    x.copy_(tensor(3, 16, grad=False))
    assert torch.equal(layer_norm(x), layer_norm(x.contiguous()))


def test_errors_name_the_argument():
    x = torch.ones(2, 8)
    with pytest.raises(LigerError, match=r"weight has shape \(7,\); expected \(8,\)"):
        layer_norm(x, torch.ones(7))
    with pytest.raises(LigerError, match=r"bias has shape \(1, 8\)"):
        layer_norm(x, None, torch.ones(1, 8))
    with pytest.raises(LigerError, match="floating point"):
        layer_norm(x.long())
