"""LayerNorm over the last dimension, as vision towers use it (Ba et al. 2016).

    μ = mean(x)      r = 1 / sqrt(mean((x − μ)²) + eps)      x̂ = (x − μ)·r          y = x̂ · weight + bias

Everything is fp32 and rounded once, as in torch.nn.functional.layer_norm. The variance is taken from x − μ in a second
pass over registers, not from mean(x²) − μ², which loses all digits where the mean is large.

Gradients, with g = dy · weight:
    dx = r · (g − mean(g) − x̂ · mean(g · x̂))      dweight = Σ_rows dy · x̂      dbias = Σ_rows dy

Bytes that must move for N rows of D elements of s bytes: forward 2·N·D·s, backward 3·N·D·s. Saved for backward: x, and
μ and r, fp32, N values each.

The gradients of weight and bias are summed in fp32 in a fixed order, as in rms_norm.py: the same bits in every run.
"""

from __future__ import annotations

import torch

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import (
    as_rows,
    cdiv,
    in_vectors,
    multiprocessors,
    no_second_derivative,
    on_device_of,
    power_of_two,
)
from ligermodels.kernels.rms_norm import inverse_rms, row_mean, sum_rows

_MAX_BLOCK = 16384  # longer rows are walked in blocks of this size


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> torch.Tensor:
    """``layer_norm`` in plain differentiable PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, n_rows, n_cols, x_row, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = row_mean(tl.sum(x, axis=1), n_cols)
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = inverse_rms(tl.sum(centred * centred, axis=1), n_cols, eps)
    tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_long_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, n_cols, x_row, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(x_ptr + row * x_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    mean = row_mean(tl.sum(total, axis=0), n_cols)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        centred = tl.where(cols < n_cols, x - mean, 0.0)
        squares += centred * centred
    rstd = inverse_rms(tl.sum(squares, axis=0), n_cols, eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        y = (tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, n_rows, n_cols, dy_row, x_row,
    HAS_WEIGHT: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Each program walks every so many tiles of rows and keeps its share of the two column sums in registers.
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    for tile in range(pid, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < n_rows)[:, None] & col_mask[None, :]
        # Outside the mask dy is 0, and with it every term of the sums below.
        dy = tl.load(dy_ptr + rows[:, None] * dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        normed = (x - mean) * rstd
        if NEED_DW:
            dweight += dy * normed
        if NEED_DB:
            dbias += dy
        if NEED_DX:
            grad = dy
            if HAS_WEIGHT:
                grad = dy * weight
            average = row_mean(tl.sum(grad, axis=1), n_cols)[:, None]
            projection = row_mean(tl.sum(grad * normed, axis=1), n_cols)[:, None]
            dx = (grad - average - normed * projection) * rstd
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    out = pid.to(tl.int64) * n_cols + cols
    if NEED_DW:
        tl.store(dweight_ptr + out, tl.sum(dweight, axis=0), mask=col_mask)
    if NEED_DB:
        tl.store(dbias_ptr + out, tl.sum(dbias, axis=0), mask=col_mask)


@triton.jit
def _backward_long_dx_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, n_cols, dy_row, x_row,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    grads = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        grad = tl.load(dy_ptr + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        normed = (tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            grad *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        grads += grad
        products += grad * normed
    average, projection = row_mean(tl.sum(grads, axis=0), n_cols), row_mean(tl.sum(products, axis=0), n_cols)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        grad = tl.load(dy_ptr + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        normed = (tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            grad *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        dx = (grad - average - normed * projection) * rstd
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_long_sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, n_rows, n_cols, dy_row, x_row,
    NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # program (chunk, strip) sums the tiles of rows chunk, chunk + CHUNKS, … of one strip of columns
    chunk = tl.program_id(0) % CHUNKS
    cols = (tl.program_id(0) // CHUNKS).to(tl.int64) * COLS + tl.arange(0, COLS)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    for tile in range(chunk, tl.cdiv(n_rows, ROWS), CHUNKS):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        dweight += dy * ((x - mean) * rstd)
        dbias += dy
    out = chunk * n_cols + cols
    if NEED_DW:
        tl.store(dweight_ptr + out, tl.sum(dweight, axis=0), mask=cols < n_cols)
    if NEED_DB:
        tl.store(dbias_ptr + out, tl.sum(dbias, axis=0), mask=cols < n_cols)


def _tile(block: int, elements: int) -> tuple[int, int]:
    """(rows, warps) of a tile of about ``elements`` values, 16 a thread."""
    rows = max(1, elements // block)
    return rows, min(max(rows * block // 512, 1), 16)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_cols = x.shape[-1]
    n_rows = x.numel() // max(n_cols, 1)
    mean, rstd = (torch.empty(n_rows, dtype=torch.float32, device=x.device) for _ in "mr")
    if y.numel() == 0:
        return y, mean, rstd
    x = in_vectors(as_rows(x))
    tensors = (x, weight if weight is not None else x, bias if bias is not None else x, y, mean, rstd)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    block = power_of_two(n_cols)
    with on_device_of(x):
        if block > _MAX_BLOCK:
            _forward_long_kernel[(n_rows,)](*tensors, n_cols, x.stride(0), eps, **flags, BLOCK=_MAX_BLOCK, num_warps=16)
        else:
            rows, warps = _tile(block, 4096)
            _forward_kernel[(cdiv(n_rows, rows),)](
                *tensors, n_rows, n_cols, x.stride(0), eps, **flags, ROWS=rows, BLOCK=block, num_warps=warps
            )
    return y, mean, rstd


def _layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_cols, n_rows = x.shape[-1], rstd.shape[0]
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    if n_rows == 0 or n_cols == 0:
        sums = [torch.zeros_like(p) if need else dx.new_empty(0) for p, need in ((weight, need_dw), (bias, need_db))]
        return dx, *sums
    dy, x = in_vectors(as_rows(dy)), in_vectors(as_rows(x))
    weight_or_x = weight if weight is not None else x
    flags = {"NEED_DW": need_dw, "NEED_DB": need_db}
    block = power_of_two(n_cols)
    long = block > _MAX_BLOCK
    rows, warps = _tile(block, 2048)
    # More programs than can be resident at once (16 warps a multiprocessor) would only start when others have ended.
    programs = 32 if long else min(cdiv(n_rows, rows), multiprocessors(x.device) * max(1, 16 // warps))
    dweight, dbias = (
        torch.empty(programs if need else 0, n_cols, dtype=torch.float32, device=x.device)
        for need in (need_dw, need_db)
    )
    with on_device_of(x):
        if not long:
            _backward_kernel[(programs,)](
                dy, x, mean, rstd, weight_or_x, dx, dweight, dbias, n_rows, n_cols, dy.stride(0), x.stride(0),
                HAS_WEIGHT=weight is not None, NEED_DX=need_dx, **flags, ROWS=rows, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        if long and need_dx:
            _backward_long_dx_kernel[(n_rows,)](
                dy, x, mean, rstd, weight_or_x, dx, n_cols, dy.stride(0), x.stride(0),
                HAS_WEIGHT=weight is not None, BLOCK=_MAX_BLOCK, num_warps=16,
            )  # fmt: skip
        if long and (need_dw or need_db):
            _backward_long_sums_kernel[(programs * cdiv(n_cols, 128),)](
                dy, x, mean, rstd, dweight, dbias, n_rows, n_cols, dy.stride(0), x.stride(0),
                **flags, CHUNKS=programs, ROWS=32, COLS=128,
            )  # fmt: skip
        dw = sum_rows(dweight, weight.dtype) if need_dw else dx.new_empty(0)
        db = sum_rows(dbias, bias.dtype) if need_db else dx.new_empty(0)
    return dx, dw, db


def _fake(x, weight, bias, eps):
    rows = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape), rows, torch.empty_like(rows)


def _fake_backward(dy, x, mean, rstd, weight, bias, need_dx, need_dw, need_db):
    empty = x.new_empty(0)
    dw, db = (p.new_empty(p.shape) if need else empty.clone() for p, need in ((weight, need_dw), (bias, need_db)))
    return x.new_empty(x.shape if need_dx else (0,)), dw, db


def _setup(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 4
    x, weight, bias, mean, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = _backward_op(dy, x, mean, rstd, weight, bias, *needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


_op = register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    _fake,
    setup_context=_setup,
    backward=_backward,
)
_backward_op = register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool need_dx,"
    " bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward,
    _fake_backward,
    backward=no_second_derivative,
)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Centre every row, divide it by its deviation, scale and shift: ``(x − mean) / sqrt(var + eps) · weight + bias``.

    x: (..., D), fp32, bf16 or fp16, any strides. weight, bias: (D,), any of these dtypes, or None. The variance is the
    biased one (over D). Returns a contiguous tensor of x's shape and dtype. Differentiable once, in all three. Raises
    LigerError for a weight or bias that does not fit.
    """
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise LigerError(
            f"layer_norm: expected a floating point tensor of shape (..., D), got {x.dtype} {tuple(x.shape)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != x.shape[-1:]:
            raise LigerError(
                f"layer_norm: {name} has shape {tuple(value.shape)}; expected ({x.shape[-1]},), the last dimension of x"
            )
    if use_triton(x) and x.dtype != torch.float64:
        return _op(x, weight, bias, eps)[0]
    return layer_norm_reference(x, weight, bias, eps)
