"""RMSNorm, alone, after the addition to the residual stream, or where that stream forks off.

    x̂ = x / sqrt(mean(x², -1) + eps)          y = x̂ · (weight + offset)

``casting`` says where the result is rounded to x's dtype; everything before is fp32:
    "llama"  x̂ is rounded, then the product (two roundings: bit-equal to Hugging Face's LlamaRMSNorm for weights of
             x's dtype)
    "gemma"  the product is rounded once (Hugging Face's GemmaRMSNorm with offset=1.0)
    "none"   the same arithmetic as "gemma"; the rule of torch.nn.functional.rms_norm

Gradients, with g = dy · (weight + offset) and r = 1 / sqrt(mean(x²) + eps), in fp32 (the rounding of "llama" counts as
the identity):
    dx = r · (g − x̂ · mean(g · x̂))            dweight = Σ_rows dy · x̂

Bytes that must move for N rows of D elements of s bytes: forward 2·N·D·s, backward 3·N·D·s; with the addition
4·N·D·s each; with the fork 2·N·D·s and 4·N·D·s, where a separate sum of the two gradients of x would move 6·N·D·s.
Saved for backward: x (or the sum) and r, fp32, N values.

The weight gradient is summed in fp32 in a fixed order, so it is the same bits in every run: a fixed number of programs
walks the rows, each keeps a partial sum in registers, and a second kernel adds the partial sums.
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

_CASTINGS = ("llama", "gemma", "none")
_MAX_BLOCK = 16384  # longer rows are walked in blocks of this size


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting: str = "llama"
) -> torch.Tensor:
    """``rms_norm`` in plain differentiable PyTorch."""
    return unrounded_norm(x, weight, eps, offset, casting).to(x.dtype)


def unrounded_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> torch.Tensor:
    """``rms_norm_reference`` before its last rounding, in fp32 (float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide)
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed
    if casting == "llama":
        normed = normed.to(x.dtype).to(wide)
    return normed * (weight.to(wide) + offset)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` in plain differentiable PyTorch."""
    total = residual + x
    return rms_norm_reference(total, weight, eps, offset=offset, casting=casting), total


@triton.jit
def row_mean(total, n_cols):
    return tl.div_rn(total, n_cols * 1.0)  # `/` is off by up to two units in the last place


@triton.jit
def inverse_rms(sum_of_squares, n_cols, eps):
    # correctly rounded, unlike rsqrt: one value a row, so it costs nothing and every element profits
    return tl.div_rn(1.0, tl.sqrt_rn(row_mean(sum_of_squares, n_cols) + eps))


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr,
    n_rows, n_cols, x_row, residual_row, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    out = rows[:, None] * n_cols + cols[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_row + cols[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = residual_ptr + rows[:, None] * residual_row + cols[None, :]
        x = (x.to(tl.float32) + tl.load(residual, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + out, x, mask=mask)
    x = x.to(tl.float32)
    rstd = inverse_rms(tl.sum(x * x, axis=1), n_cols, eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols[None, :], mask=(cols < n_cols)[None, :], other=0.0)
        if ROUND:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        y = y * (weight.to(tl.float32) + offset)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_long_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr,
    n_cols, x_row, residual_row, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        x = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_row + cols, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + row * n_cols + cols, x, mask=mask)
        squares += x.to(tl.float32) * x.to(tl.float32)
    rstd = inverse_rms(tl.sum(squares, axis=0), n_cols, eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        x = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0)
        if HAS_RESIDUAL:  # added again: what this program stored above need not be visible to all its threads yet
            residual = tl.load(residual_ptr + row * residual_row + cols, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        y = x.to(tl.float32) * rstd
        if HAS_WEIGHT:
            if ROUND:
                y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
            y = y * (tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inside(rows, n_rows, col_mask, FULL: tl.constexpr):
    if FULL:  # no masked columns: one predicate a row
        return (rows < n_rows)[:, None]
    else:
        return (rows < n_rows)[:, None] & col_mask[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr, x_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr, partial_ptr,
    n_rows, n_cols, dy_row, x_row, dtotal_row, offset,
    HAS_WEIGHT: tl.constexpr, HAS_DTOTAL: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr,
    PREFETCH: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    dy_ptr += cols[None, :]
    x_ptr += cols[None, :]
    dtotal_ptr += cols[None, :]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols[None, :], mask=col_mask[None, :], other=0.0)

    rows = pid.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if PREFETCH:  # the next rows are on their way while these are computed
        mask = _inside(rows, n_rows, col_mask, FULL)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row, mask=mask, other=0.0)
        x = tl.load(x_ptr + rows[:, None] * x_row, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        if HAS_DTOTAL:
            dtotal = tl.load(dtotal_ptr + rows[:, None] * dtotal_row, mask=mask, other=0.0)
    for _ in range(pid, tl.cdiv(n_rows, ROWS), step):
        next_rows = rows + step * ROWS
        mask = _inside(rows, n_rows, col_mask, FULL)
        if PREFETCH:
            next_mask = _inside(next_rows, n_rows, col_mask, FULL)
            next_dy = tl.load(dy_ptr + next_rows[:, None] * dy_row, mask=next_mask, other=0.0)
            next_x = tl.load(x_ptr + next_rows[:, None] * x_row, mask=next_mask, other=0.0)
            next_rstd = tl.load(rstd_ptr + next_rows, mask=next_rows < n_rows, other=0.0)
            if HAS_DTOTAL:
                next_dtotal = tl.load(dtotal_ptr + next_rows[:, None] * dtotal_row, mask=next_mask, other=0.0)
        else:
            dy = tl.load(dy_ptr + rows[:, None] * dy_row, mask=mask, other=0.0)
            x = tl.load(x_ptr + rows[:, None] * x_row, mask=mask, other=0.0)
            rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
            if HAS_DTOTAL:
                dtotal = tl.load(dtotal_ptr + rows[:, None] * dtotal_row, mask=mask, other=0.0)
        normed = x.to(tl.float32) * rstd[:, None]
        grad = dy.to(tl.float32)
        if NEED_DW:
            dweight += grad * normed
        if NEED_DX:
            if HAS_WEIGHT:
                grad *= weight.to(tl.float32) + offset
            projection = row_mean(tl.sum(grad * normed, axis=1), n_cols)
            dx = (grad - normed * projection[:, None]) * rstd[:, None]
            if HAS_DTOTAL:
                dx += dtotal.to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        rows = next_rows
        if PREFETCH:
            dy = next_dy
            x = next_x
            rstd = next_rstd
            if HAS_DTOTAL:
                dtotal = next_dtotal
    if NEED_DW:
        tl.store(partial_ptr + pid.to(tl.int64) * n_cols + cols, tl.sum(dweight, axis=0), mask=col_mask)


@triton.jit
def _backward_long_dx_kernel(
    dy_ptr, x_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr,
    n_cols, dy_row, x_row, dtotal_row, offset,
    HAS_WEIGHT: tl.constexpr, HAS_DTOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        grad = tl.load(dy_ptr + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0).to(tl.float32) * rstd
        if HAS_WEIGHT:
            grad *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        products += grad * normed
    projection = row_mean(tl.sum(products, axis=0), n_cols)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = cols < n_cols
        grad = tl.load(dy_ptr + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0).to(tl.float32) * rstd
        if HAS_WEIGHT:
            grad *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        dx = (grad - normed * projection) * rstd
        if HAS_DTOTAL:
            dtotal = tl.load(dtotal_ptr + row * dtotal_row + cols, mask=mask, other=0.0)
            dx += dtotal.to(tl.float32)
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_long_dw_kernel(
    dy_ptr, x_ptr, rstd_ptr, partial_ptr, n_rows, n_cols, dy_row, x_row,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # program (chunk, tile) sums the tiles of rows chunk, chunk + CHUNKS, … of one strip of columns
    chunk = tl.program_id(0) % CHUNKS
    cols = (tl.program_id(0) // CHUNKS).to(tl.int64) * COLS + tl.arange(0, COLS)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    for tile in range(chunk, tl.cdiv(n_rows, ROWS), CHUNKS):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)
        dweight += dy * (x * rstd[:, None])
    tl.store(partial_ptr + chunk * n_cols + cols, tl.sum(dweight, axis=0), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows"])
def _sum_rows_kernel(partial_ptr, out_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(partial_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def sum_rows(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum a contiguous fp32 (P, D) over P in a fixed order, rounded once to dtype; the caller has set the device."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    _sum_rows_kernel[(cdiv(partial.shape[1], 16),)](partial, out, *partial.shape, ROWS=128, COLS=16, num_warps=4)
    return out


def _tile(block: int, elements: int) -> int:
    return max(1, elements // block)


def _launch_forward(x, residual, weight, eps, offset, llama):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else None
    n_cols = x.shape[-1]
    n_rows = x.numel() // max(n_cols, 1)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y, total, rstd
    x = in_vectors(as_rows(x))
    residual_rows = x if residual is None else in_vectors(as_rows(residual))
    tensors = (x, residual_rows, weight if weight is not None else x, y, total if total is not None else y, rstd)
    scalars = (n_cols, x.stride(0), residual_rows.stride(0), eps, offset)
    flags = {"HAS_RESIDUAL": residual is not None, "HAS_WEIGHT": weight is not None, "ROUND": llama}
    block = power_of_two(n_cols)
    with on_device_of(x):
        if block > _MAX_BLOCK:
            _forward_long_kernel[(n_rows,)](*tensors, *scalars, **flags, BLOCK=_MAX_BLOCK, num_warps=16)
        else:
            rows = _tile(block, 4096)
            warps = min(max(rows * block // 512, 1), 16)
            _forward_kernel[(cdiv(n_rows, rows),)](
                *tensors, n_rows, *scalars, **flags, ROWS=rows, BLOCK=block, num_warps=warps
            )
    return y, total, rstd


def _backward_shape(block: int) -> tuple[int, int, int]:
    """(rows a tile, warps, programs a multiprocessor) of the backward kernel for rows of ``block`` elements.

    A thread holds 16 elements and up to 128 registers, so 16 warps are resident at once. More programs than that would
    only start when the others have ended.
    """
    rows = _tile(block, 2048)
    warps = min(max(rows * block // 512, 1), 32)
    return rows, warps, max(1, 16 // warps)


def _rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    n_cols, n_rows = x.shape[-1], rstd.shape[0]
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    if n_rows == 0 or n_cols == 0:
        dw = torch.zeros(n_cols, dtype=weight.dtype, device=x.device) if need_dw else dx.new_empty(0)
        return dx, dw
    dy, x = in_vectors(as_rows(dy)), in_vectors(as_rows(x))
    dtotal_rows = dy if dtotal is None else in_vectors(as_rows(dtotal))
    weight_or_x = weight if weight is not None else x
    flags = {"HAS_WEIGHT": weight is not None, "HAS_DTOTAL": dtotal is not None}
    block = power_of_two(n_cols)
    with on_device_of(x):
        if block > _MAX_BLOCK:
            if need_dx:
                _backward_long_dx_kernel[(n_rows,)](
                    dy, x, rstd, weight_or_x, dtotal_rows, dx, n_cols,
                    dy.stride(0), x.stride(0), dtotal_rows.stride(0), offset, **flags, BLOCK=_MAX_BLOCK, num_warps=16,
                )  # fmt: skip
            if need_dw:
                partial = torch.empty(32, n_cols, dtype=torch.float32, device=x.device)
                _backward_long_dw_kernel[(32 * cdiv(n_cols, 128),)](
                    dy, x, rstd, partial, n_rows, n_cols, dy.stride(0), x.stride(0), CHUNKS=32, ROWS=32, COLS=128
                )
        else:
            rows, warps, per_multiprocessor = _backward_shape(block)
            programs = min(cdiv(n_rows, rows), multiprocessors(x.device) * per_multiprocessor)
            partial = torch.empty(programs if need_dw else 0, n_cols, dtype=torch.float32, device=x.device)
            _backward_kernel[(programs,)](
                dy, x, rstd, weight_or_x, dtotal_rows, dx, partial, n_rows, n_cols,
                dy.stride(0), x.stride(0), dtotal_rows.stride(0), offset, **flags, NEED_DX=need_dx, NEED_DW=need_dw,
                PREFETCH=warps <= 16 and x.element_size() == 2, FULL=block == n_cols, ROWS=rows, BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
        dw = sum_rows(partial, weight.dtype) if need_dw else dx.new_empty(0)
    return dx, dw


def _fake_forward(x):
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _fake_backward(dy, x, rstd, weight, dtotal, offset, need_dx, need_dw):
    return x.new_empty(x.shape if need_dx else (0,)), weight.new_empty(weight.shape) if need_dw else x.new_empty(0)


def _gradients(ctx, dy, dtotal, need_dx, need_dw):
    x, weight, rstd = ctx.saved_tensors
    dx, dw = _backward_op(dy, x, rstd, weight, dtotal, ctx.offset, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None


def _setup_norm(ctx, inputs, output):
    x, weight, _, ctx.offset, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_norm(ctx, dy, _):
    if dy is None:
        return (None,) * 5
    return *_gradients(ctx, dy, None, *ctx.needs_input_grad[:2]), None, None, None


def _setup_add_norm(ctx, inputs, output):
    _, _, weight, _, ctx.offset, _ = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward_add_norm(ctx, dy, dtotal, _):
    need_x, need_residual, need_w = ctx.needs_input_grad[:3]
    if dy is None:  # the norm was not used: as for a plain sum
        dx, dw = dtotal, None
    else:
        dx, dw = _gradients(ctx, dy, dtotal, need_x or need_residual, need_w)
    return dx if need_x else None, dx if need_residual else None, dw, None, None, None


class _ForkNorm(torch.autograd.Function):
    """(rms_norm(x), x) as one node. No operator: those of torch.library must not give out what they were given."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, llama):
        y, rstd = _norm_op(x, weight, eps, offset, llama)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, dy, dx):
        if dy is None:  # the norm was not used
            return dx, None, None, None, None
        return *_gradients(ctx, dy, dx, *ctx.needs_input_grad[:2]), None, None, None


_norm_op = register(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool llama) -> (Tensor, Tensor)",
    lambda x, weight, eps, offset, llama: _launch_forward(x, None, weight, eps, offset, llama)[::2],
    lambda x, weight, eps, offset, llama: _fake_forward(x),
    setup_context=_setup_norm,
    backward=_backward_norm,
)
_add_norm_op = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool llama)"
    " -> (Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda x, residual, weight, eps, offset, llama: (x.new_empty(x.shape), *_fake_forward(x)),
    setup_context=_setup_add_norm,
    backward=_backward_add_norm,
)
_backward_op = register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dtotal, float offset, bool need_dx,"
    " bool need_dw) -> (Tensor, Tensor)",
    _rms_norm_backward,
    _fake_backward,
    backward=no_second_derivative,
)


def check_norm(name: str, x: torch.Tensor, weight: torch.Tensor | None, casting: str) -> None:
    """Raise LigerError unless weight fits the last dimension of x and casting is known."""
    if casting not in _CASTINGS:
        raise LigerError(f"{name}: casting is {casting!r}; expected one of {', '.join(map(repr, _CASTINGS))}")
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise LigerError(f"{name}: expected a floating point tensor of shape (..., D), got {x.dtype} {tuple(x.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise LigerError(
            f"{name}: weight has shape {tuple(weight.shape)}; expected ({x.shape[-1]},), the last dimension of x"
        )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """Divide every row by its root mean square and scale it: ``x / sqrt(mean(x²) + eps) · (weight + offset)``.

    x: (..., D), fp32, bf16 or fp16, any strides. weight: (D,), any of these dtypes, or None for no scaling (offset is
    then unused). Returns a contiguous tensor of x's shape and dtype. casting: "llama", "gemma" or "none", see the top
    of this file. Differentiable once, in x and weight. Raises LigerError for a weight that does not fit or an unknown
    casting.
    """
    check_norm("rms_norm", x, weight, casting)
    if use_triton(x) and x.dtype != torch.float64:
        return _norm_op(x, weight, eps, offset, casting == "llama")[0]
    return rms_norm_reference(x, weight, eps, offset=offset, casting=casting)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and norm the sum, in one pass: ``(rms_norm(residual + x), residual + x)``.

    The sum is rounded to its dtype before it is normed, so that both results equal the unfused ones. x and residual
    have one shape (..., D); differing dtypes are promoted as by ``+``. Everything else as ``rms_norm``.
    """
    check_norm("add_rms_norm", x, weight, casting)
    if x.shape != residual.shape:
        raise LigerError(
            f"add_rms_norm: x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}; expected equal shapes"
        )
    if x.dtype != residual.dtype:
        wide = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wide), residual.to(wide)
    if use_triton(x) and x.dtype != torch.float64:
        return _add_norm_op(x, residual, weight, eps, offset, casting == "llama")[:2]
    return add_rms_norm_reference(x, residual, weight, eps, offset=offset, casting=casting)


def fork_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm x where the residual stream forks off: ``(rms_norm(x), x)``, whose gradients are added in one pass.

    The second result is x or a view of it, never a copy. Used in place of x from here on, it brings its gradient into
    the norm's backward, which adds the two in fp32 and rounds once. Everything else as ``rms_norm``.
    """
    check_norm("fork_rms_norm", x, weight, casting)
    if use_triton(x) and x.dtype != torch.float64 and torch.is_grad_enabled() and x.requires_grad:
        return _ForkNorm.apply(x, weight, eps, offset, casting == "llama")
    return rms_norm(x, weight, eps, offset=offset, casting=casting), x
