"""Gated linear units (Shazeer, 2020): SwiGLU and GeGLU, elementwise.

    swiglu: out = gate·σ(gate) · up                              geglu: out = gelu(gate) · up
    gelu, "none": x·Φ(x)        gelu, "tanh": x·σ(2u), u = √(2/π)·(x + 0.044715·x³)   (the same as ½·x·(1 + tanh u))

    dgate = dout · up · act'(gate)                               dup = dout · act(gate)

The arithmetic is fp32 with one rounding at the end. Saved for backward: gate and up. Bytes that must move for E
elements of s bytes: forward 3·E·s, backward 5·E·s. The backward kernel can also emit the product act(gate)·up (6·E·s in
all), so that a following Linear's input need not be kept for its weight gradient.

Contiguous tensors are one long row to the kernel; others (such as the halves of a packed projection) are rows with a
stride. Either way a program takes one tile of one row, so no row is padded to a power of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import INTERPRETED, register, tl, triton, use_triton
from ligermodels.kernels._launch import as_rows, cdiv, no_second_derivative, on_device_of, power_of_two

if INTERPRETED:
    libdevice = tl  # the interpreter computes with numpy, whose exponential is exact enough
else:
    try:
        from triton.language.extra import libdevice
    except ImportError:  # no triton: the kernels below are never run
        libdevice = None

_SILU, _GELU_TANH, _GELU_ERF = 0, 1, 2
_BLOCK = 2048


def _reference(gate: torch.Tensor, up: torch.Tensor, act: int) -> torch.Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    x = gate.to(wide)
    x = F.silu(x) if act == _SILU else F.gelu(x, approximate="tanh" if act == _GELU_TANH else "none")
    return (x * up.to(wide)).to(gate.dtype)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``swiglu`` in plain differentiable PyTorch."""
    return _reference(gate, up, _SILU)


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """``geglu`` in plain differentiable PyTorch."""
    return _reference(gate, up, _GELU_TANH if approximate == "tanh" else _GELU_ERF)


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    # the hardware's exponential is good to 2^-22: invisible in half precision, not in fp32
    if PRECISE:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _sigmoids(x, PRECISE: tl.constexpr):
    """σ(x) and σ(−x). The difference 1 − σ(x) has lost its digits where σ(x) is near 1: seen in fp32 only."""
    if PRECISE:
        small = libdevice.exp(-tl.abs(x))
        large = tl.div_rn(1.0, 1.0 + small)
        small *= large
        return tl.where(x < 0, small, large), tl.where(x < 0, large, small)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        return sigmoid, 1.0 - sigmoid


@triton.jit
def _activation(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    """act(x) and act'(x), fp32. The compiler drops what is not used."""
    if ACT == 0:
        sigmoid, complement = _sigmoids(x, PRECISE)
        value = x * sigmoid
        slope = sigmoid + value * complement
    elif ACT == 1:
        sigmoid, complement = _sigmoids(1.5957691216057308 * (x + 0.044715 * x * x * x), PRECISE)  # 2·√(2/π)
        value = x * sigmoid
        slope = sigmoid + value * complement * (1.5957691216057308 + 0.21406447300642 * x * x)
    else:
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * phi
        slope = phi + x * 0.3989422804014327 * _exp(-0.5 * x * x, PRECISE)
    return value, slope


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, out_ptr, n_cols, gate_row, gate_col, up_row, up_col,
    ACT: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_cols, BLOCK)
    # divided as 32-bit numbers: in 64 bits it takes a microsecond, as long as small inputs themselves
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    gate = tl.load(gate_ptr + row * gate_row + cols * gate_col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + cols * up_col, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activation(gate, ACT, PRECISE)
    tl.store(out_ptr + row * n_cols + cols, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, product_ptr, n_cols,
    dout_row, dout_col, gate_row, gate_col, up_row, up_col, d_row,
    ACT: tl.constexpr, PRECISE: tl.constexpr, EMIT_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_cols, BLOCK)
    # divided as 32-bit numbers: in 64 bits it takes a microsecond, as long as small inputs themselves
    row = (tl.program_id(0) // tiles).to(tl.int64)
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    dout = tl.load(dout_ptr + row * dout_row + cols * dout_col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + cols * gate_col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + cols * up_col, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation(gate, ACT, PRECISE)
    dtype = dgate_ptr.dtype.element_ty
    tl.store(dgate_ptr + row * d_row + cols, (dout * up * slope).to(dtype), mask=mask)
    tl.store(dup_ptr + row * d_row + cols, (dout * value).to(dtype), mask=mask)
    if EMIT_PRODUCT:
        tl.store(product_ptr + row * n_cols + cols, (value * up).to(dtype), mask=mask)


def _view(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All tensors as (rows, columns): one long row when all are contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]


def _launch(kernel, rows: torch.Tensor, *arguments, **flags) -> None:
    block = min(_BLOCK, max(power_of_two(rows.shape[1]), 128))
    with on_device_of(rows):
        kernel[(rows.shape[0] * cdiv(rows.shape[1], block),)](
            *arguments, **flags, PRECISE=rows.dtype == torch.float32, BLOCK=block,
            num_warps=max(block // 512, 1),
        )  # fmt: skip


def _glu(gate: torch.Tensor, up: torch.Tensor, act: int) -> torch.Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate, up = _view(gate, up)
        _launch(_forward_kernel, gate, gate, up, out, gate.shape[1], *gate.stride(), *up.stride(), ACT=act)
    return out


def _glu_backward_into(grad, gate, up, act, dgate, dup, product) -> None:
    if gate.numel():
        views = _view(grad, gate, up, dgate, dup)
        _launch(
            _backward_kernel, views[1], *views, dgate if product is None else product, views[1].shape[1],
            *views[0].stride(), *views[1].stride(), *views[2].stride(), views[3].stride(0),
            ACT=act, EMIT_PRODUCT=product is not None,
        )  # fmt: skip


def _glu_backward(
    dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, act: int
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty_like(dgate)
    _glu_backward_into(dout, gate, up, act, dgate, dup, None)
    return dgate, dup


def _glu_packed_backward(dout: torch.Tensor, gate_up: torch.Tensor, act: int) -> torch.Tensor:
    d = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    _glu_backward_into(dout, *gate_up.chunk(2, -1), act, *d.chunk(2, -1), None)
    return d


def _setup(ctx, inputs, output):
    *tensors, ctx.act = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    dgate, dup = _backward_op(dout, *ctx.saved_tensors, ctx.act)
    return dgate if ctx.needs_input_grad[0] else None, dup if ctx.needs_input_grad[1] else None, None


def _backward_packed(ctx, dout):
    return _packed_backward_op(dout, *ctx.saved_tensors, ctx.act), None


_glu_op = register(
    "glu(Tensor gate, Tensor up, int act) -> Tensor",
    _glu,
    lambda gate, up, act: gate.new_empty(gate.shape),
    setup_context=_setup,
    backward=_backward,
)
_packed_op = register(
    "glu_packed(Tensor gate_up, int act) -> Tensor",
    lambda gate_up, act: _glu(*gate_up.chunk(2, -1), act),
    lambda gate_up, act: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    setup_context=_setup,
    backward=_backward_packed,
)
_backward_op = register(
    "glu_backward(Tensor dout, Tensor gate, Tensor up, int act) -> (Tensor, Tensor)",
    _glu_backward,
    lambda dout, gate, up, act: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    backward=no_second_derivative,
)
_backward_into_op = register(
    "glu_backward_into(Tensor grad, Tensor gate, Tensor up, int act, Tensor(a!) dgate, Tensor(b!) dup, "
    "Tensor(c!)? product) -> ()",
    _glu_backward_into,
    lambda *_: None,
)
_packed_backward_op = register(
    "glu_packed_backward(Tensor dout, Tensor gate_up, int act) -> Tensor",
    _glu_packed_backward,
    lambda dout, gate_up, act: gate_up.new_empty(gate_up.shape),
    backward=no_second_derivative,
)


def _glu_of(name: str, gate: torch.Tensor, up: torch.Tensor, act: int) -> torch.Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() == 0:
        raise LigerError(
            f"{name}: gate is {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)}; "
            "expected equal dtypes and shapes (..., I)"
        )
    if use_triton(gate) and gate.dtype != torch.float64:
        return _glu_op(gate, up, act)
    return _reference(gate, up, act)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``, elementwise.

    gate, up: (..., I), one of fp32, bf16, fp16 for both, any strides. Returns a contiguous tensor of the same shape and
    dtype. Differentiable once. Raises LigerError where shapes or dtypes differ.
    """
    return _glu_of("swiglu", gate, up, _SILU)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(gate) · up``, elementwise, with gelu's "tanh" approximation or exactly ("none").

    Otherwise as ``swiglu``; also raises LigerError for another ``approximate``.
    """
    if approximate not in ("tanh", "none"):
        raise LigerError(f"geglu: approximate is {approximate!r}; expected 'tanh' or 'none'")
    return _glu_of("geglu", gate, up, _GELU_TANH if approximate == "tanh" else _GELU_ERF)


def swiglu_packed(gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu`` of the two halves of the last dimension: (..., 2I), gate first, to (..., I).

    The gradient comes as one (..., 2I) tensor, so nothing is concatenated. Raises LigerError for an odd last dimension.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise LigerError(f"swiglu_packed: expected gate and up side by side, (..., 2I), got {tuple(gate_up.shape)}")
    if use_triton(gate_up) and gate_up.dtype != torch.float64:
        return _packed_op(gate_up, _SILU)
    return swiglu_reference(*gate_up.chunk(2, -1))


_ACTIVATIONS = {"silu": _SILU, "gelu_tanh": _GELU_TANH, "gelu": _GELU_ERF}


def glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``swiglu`` (activation "silu") or ``geglu`` ("gelu_tanh", "gelu"): the same shapes, dtypes and errors."""
    return _glu_of("glu", gate, up, _ACTIVATIONS[activation])


def glu_backward_into(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    product: torch.Tensor | None = None,
) -> None:
    """The gradients of ``glu`` and, on request, its result again, in one pass into given buffers. Not differentiable.

    All (N, I); dgate and dup with one row stride for both and neighbouring columns, product contiguous. Elements are
    read before they are written, each by one program: dgate may be gate's own memory, dup up's and product grad's.
    """
    act = _ACTIVATIONS[activation]
    if use_triton(gate) and gate.dtype != torch.float64:
        _backward_into_op(grad, gate, up, act, dgate, dup, product)
        return
    with torch.enable_grad():
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        again = _reference(*leaves, act)
        found = torch.autograd.grad(again, leaves, grad)
    for buffer, value in zip((dgate, dup, product), (*found, again.detach()), strict=True):
        if buffer is not None:
            buffer.copy_(value)
