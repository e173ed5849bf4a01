"""rms_norm, add_rms_norm and fork_rms_norm: facts of kernels/rms_norm.py."""

from __future__ import annotations

import importlib

import pytest
import torch
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
from ligermodels.kernels import add_rms_norm, fork_rms_norm, rms_norm
from ligermodels.kernels._dispatch import use_triton

EPS = 1e-5


def norm(offset=0.0, casting="llama"):
    return lambda x, w: rms_norm(x, w, EPS, offset=offset, casting=casting)


def add_norm(x, residual, w):
    return add_rms_norm(x, residual, w, EPS)


def fork(x, w):
    return fork_rms_norm(x, w, EPS)


def llama(x, w):
    h = x.float()
    return (w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)).to(x.dtype)


def gemma(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).type_as(x)


def exact(offset):
    return lambda x, w: x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (w + offset)


def unfused(norm):
    return lambda x, r, w: (norm(r + x, w), r + x)


def set_block(monkeypatch, most):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.rms_norm"), "_MAX_BLOCK", most)


@pytest.fixture(params=["one block", "several blocks"])
def blocks(request, monkeypatch):
    if request.param == "several blocks":
        set_block(monkeypatch, 16)


# a few values; rows longer than a block; rows that fill it and keep several programs busy; several chunks of long rows
@pytest.mark.parametrize(("shape", "most"), [((1, 7), 64), ((2, 3, 33), 16), ((70, 64), 64), ((40, 9), 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_and_its_gradients_are_as_exact_as_eager(device, dtype, shape, most, monkeypatch):
    set_block(monkeypatch, most)
    x, w = tensor(*shape, like=(dtype, device)), tensor(shape[-1], like=(dtype, device))
    check_exact(norm(), llama, exact(0.0), (x, w))
    check_exact(norm(1.0, "gemma"), gemma, exact(1.0), (x, w))
    check_exact(norm(0.0, "none"), lambda x, w: gemma(x, w - 1.0), exact(0.0), (x, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_add_rms_norm_and_its_gradients_are_as_exact_as_eager(device, dtype, blocks):
    x, r = tensor(2, 3, 33, like=(dtype, device)), tensor(2, 3, 33, like=(dtype, device), seed=1)
    w = tensor(33, like=(dtype, device))
    # the truth norms the sum as it was rounded: that is what flows on in the residual stream
    rounded = (r + x).detach().double()
    check_exact(
        add_norm, unfused(llama),
        lambda x, r, w: (exact(0.0)(r + x + (rounded - r - x).detach(), w), r + x), (x, r, w),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_fork_rms_norm_and_its_gradients_are_as_exact_as_eager(device, dtype, blocks):
    x, w = tensor(2, 3, 33, like=(dtype, device)), tensor(33, like=(dtype, device))
    check_exact(fork, lambda x, w: (llama(x, w), x), lambda x, w: (exact(0.0)(x, w), x), (x, w))
    check_exact(
        lambda x, w: fork_rms_norm(x, w, EPS, offset=1.0, casting="gemma"),
        lambda x, w: (gemma(x, w), x), lambda x, w: (exact(1.0)(x, w), x), (x, w),
    )  # fmt: skip
    check_repeatable(fork, (x, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_fork_rms_norm_rounds_the_sum_of_the_gradients_once(device, dtype, blocks):
    """As add_rms_norm does, whose sum with zeros is x."""
    x, w = tensor(5, 33, like=(dtype, device)), tensor(33, like=(dtype, device))
    _, _, dx, dw = run(fork, (x, w))
    _, _, expected_dx, _, expected_dw = run(add_norm, (x, torch.zeros_like(x).requires_grad_(), w))
    assert torch.equal(dx, expected_dx) and torch.equal(dw, expected_dw)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4099, 896), (1000, 4096), (300, 5001), (70, 16384), (133, 20001)], ids=str)
def test_real_sizes_on_the_gpu(shape, dtype):
    x, w = tensor(*shape, like=(dtype, "cuda")), tensor(shape[-1], like=(dtype, "cuda"))
    check_exact(norm(), llama, exact(0.0), (x, w))
    check_repeatable(norm(), (x, w))
    check_exact(fork, lambda x, w: (llama(x, w), x), lambda x, w: (exact(0.0)(x, w), x), (x, w))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 3e2, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_scales_and_outliers(device, dtype, scale):
    x = tensor(7, 48, grad=False) * scale
    x[3, 5] = 3e4 if scale else 0.0
    w = tensor(48, like=(dtype, device))
    y, dx, _ = run(norm(), (x.to(dtype).to(device).requires_grad_(), w))
    assert y.isfinite().all() and dx.isfinite().all()
    assert scale or not y.any()
    check_exact(norm(), llama, exact(0.0), (x.to(dtype).to(device), w))


def test_cpu_gives_the_bits_of_hugging_face():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, w = tensor(50, 100, like=(torch.bfloat16, "cpu")), tensor(100, like=(torch.bfloat16, "cpu"))
    for theirs, ours in ((LlamaRMSNorm, norm()), (GemmaRMSNorm, norm(1.0, "gemma"))):
        module = theirs(100, eps=EPS)
        module.weight.data = w.detach()
        same = (module(x) == (rms_norm(x, w, EPS) if theirs is LlamaRMSNorm else ours(x, w))).float().mean()
        assert same >= 0.999


@pytest.mark.parametrize("device", DEVICES)
def test_no_weight(device):
    x = tensor(4, 33, like=(torch.float32, device))
    check_exact(
        lambda x: rms_norm(x, None, EPS), lambda x: llama(x, torch.ones(33, device=device)),
        lambda x: exact(0.0)(x, torch.ones(33, dtype=torch.double, device=device)), (x,),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_output_keeps_the_dtype_of_x_whatever_the_weight(device):
    for dtypes in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        x, w = tensor(4, 8, like=(dtypes[0], device)), tensor(8, like=(dtypes[1], device))
        y, dx, dw = run(norm(), (x, w))
        assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, w.dtype)
        check_exact(norm(), llama, exact(0.0), (x, w))


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_column_becomes_its_sign(device):
    y, dx = run(lambda x: rms_norm(x, None, 0.0), (tensor(9, 1, like=(torch.float32, device)),))
    assert torch.allclose(y.abs(), torch.ones_like(y)) and dx.abs().max() < 1e-5


@pytest.mark.parametrize("dim", [33, 48])
@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_strides(device, blocks, dim):
    x, w = tensor(2, 3, dim, like=(torch.float32, device)), tensor(dim, like=(torch.float32, device), grad=False)
    check_strides(lambda x: norm()(x, w), (x,))
    check_strides(lambda x, r: add_norm(x, r, w), (x, tensor(2, 3, dim, like=(x.dtype, device), seed=1)))
    check_strides(lambda x: fork(x, w), (x,))


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    x, w = tensor(2, 0, 8, like=(torch.float32, device)), tensor(8, like=(torch.float32, device))
    y, dx, dw = run(norm(), (x, w))
    assert y.shape == dx.shape == x.shape and torch.equal(dw, torch.zeros_like(w))
    assert [t.shape for t in run(add_norm, (x, x.detach(), w))][:3] == [x.shape] * 3
    assert [t.shape for t in run(fork, (x, w))] == [x.shape] * 3 + [w.shape]


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_gradients_are_computed(device, blocks):
    x, w = tensor(5, 33, like=(torch.float32, device)), tensor(33, like=(torch.float32, device))
    _, dx, dw = run(norm(), (x, w))
    assert torch.equal(run(norm(), (x, w.detach()))[1], dx)
    assert torch.equal(run(norm(), (x.detach(), w))[1], dw)
    _, _, dx, _ = run(fork, (x, w))
    assert torch.equal(run(fork, (x, w.detach()))[2], dx)
    bare, ones = run(lambda x: fork_rms_norm(x, None, EPS), (x,))[2], run(fork, (x, torch.ones_like(w)))[2]
    torch.testing.assert_close(bare, ones)  # other kernels: a compiler may contract other products and sums


@pytest.mark.parametrize("device", DEVICES)
def test_add_rms_norm_with_one_of_its_results_unused(device, blocks):
    x, r = tensor(5, 33, like=(torch.float32, device)), tensor(5, 33, like=(torch.float32, device), seed=1)
    w = tensor(33, like=(torch.float32, device))
    normed, dx, dr, dw = run(lambda *t: add_norm(*t)[0], (x, r, w))
    plain = run(norm(), ((x + r).detach().requires_grad_(), w))
    assert all(map(torch.equal, (normed, dx, dr, dw), (plain[0], plain[1], *plain[1:])))
    total, dx, dr, dw = run(lambda *t: add_norm(*t)[1], (x, r, w))
    assert torch.equal(total, x + r) and torch.equal(dx, dr) and dw is None


@pytest.mark.parametrize("device", DEVICES)
def test_fork_rms_norm_with_one_of_its_results_unused(device, blocks):
    x, w = tensor(5, 33, like=(torch.float32, device)), tensor(33, like=(torch.float32, device))
    assert all(map(torch.equal, run(lambda *t: fork(*t)[0], (x, w)), run(norm(), (x, w))))
    grad = tensor(5, 33, like=(torch.float32, device), seed=2, grad=False)
    same, dx, dw = run(lambda *t: fork(*t)[1], (x, w), [grad])
    assert torch.equal(same, x) and torch.equal(dx, grad) and dw is None


@pytest.mark.parametrize("device", DEVICES)
def test_fork_rms_norm_copies_and_keeps_nothing_of_x(device):
    """x, the second result and what is saved of x are one storage."""
    x, w = tensor(5, 33, like=(torch.float32, device)), tensor(33, like=(torch.float32, device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, same = fork(x * 1, w)
    storages = {t.untyped_storage().data_ptr() for t in saved if t.shape == x.shape}
    assert same.untyped_storage().data_ptr() in storages
    assert len(storages) == 1 or not use_triton(x)  # the reference keeps what its operations keep


@pytest.mark.parametrize("device", DEVICES)
def test_fork_rms_norm_records_nothing_that_nobody_wants(device):
    x, w = tensor(5, 33, like=(torch.float32, device)), tensor(33, like=(torch.float32, device))
    with torch.no_grad():
        y, same = fork(x, w)
    assert same is x and not y.requires_grad and torch.equal(y, norm()(x, w))
    y, same = fork(x.detach(), w)
    assert y.requires_grad and not same.requires_grad
    grads = [torch.autograd.grad(f, w, torch.ones_like(y))[0] for f in (y, norm()(x, w))]
    assert torch.equal(*grads)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_compiles(device):
    def both(x, r, w):
        y, total = add_rms_norm(x, r, w, EPS)
        y, total = fork_rms_norm(norm()(y, w) + total, w, EPS)
        return y + total

    w = tensor(16, like=(torch.float32, device))
    make = lambda n: (tensor(n, 16, like=(w.dtype, device)), tensor(n, 16, like=(w.dtype, device), seed=1), w)  # noqa: E731
    check_compiles(both, make, device)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_a_second_derivative_is_refused(device):
    x = tensor(2, 8, like=(torch.float32, device))
    (dx,) = torch.autograd.grad(rms_norm(x, None).sum(), x, create_graph=True)
    with pytest.raises(LigerError, match="second derivative"):
        dx.sum().backward()
    (dx,) = torch.autograd.grad(sum(t.sum() for t in fork_rms_norm(x, None)), x, create_graph=True)
    with pytest.raises(LigerError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("device", [CUDA])
def test_captures(device):
    x, w = tensor(40, 100, like=(torch.bfloat16, device)), tensor(100, like=(torch.bfloat16, device))
    check_captures(add_norm, (x, x.detach().clone().requires_grad_(), w))
    check_captures(fork, (x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(600_000, 4096), (70_000, 3)], ids=str)
def test_more_than_2_31_elements_and_more_than_65535_rows(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    check_tail(lambda x: rms_norm(x, torch.ones(shape[-1], device="cuda"), EPS), (x,))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_offsets_beyond_2_to_the_31(device):
    # four gigabytes, of which only the pages of three rows are ever touched
    x = torch.empty(2**31 + 64, dtype=torch.float16, device=device).as_strided((3, 16), (2**30 + 16, 1))
    x.copy_(tensor(3, 16, grad=False))
    assert torch.equal(rms_norm(x, None), rms_norm(x.contiguous(), None))


def test_errors_name_the_argument():
    x = torch.ones(2, 8)
    with pytest.raises(LigerError, match=r"weight has shape \(7,\); expected \(8,\)"):
        rms_norm(x, torch.ones(7))
    with pytest.raises(LigerError, match="casting is 'hf'"):
        rms_norm(x, None, casting="hf")
    with pytest.raises(LigerError, match="residual"):
        add_rms_norm(x, torch.ones(1, 8), None)
    with pytest.raises(LigerError, match="fork_rms_norm: weight has shape"):
        fork_rms_norm(x, torch.ones(7))
