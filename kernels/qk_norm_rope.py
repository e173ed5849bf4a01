"""RMSNorm of every query and key head, then rotary position embedding, in one pass (Qwen3, Gemma 3).

    out = rope(x̂ · (weight + offset))          x̂ = x / sqrt(mean(x², over D) + eps), per head

See rms_norm.py for ``casting`` and rope.py for the pairs. The normed heads stay in fp32 on their way into the rotation,
where the two separate operations would round them: one rounding less than unfused.

Gradients: the incoming gradient is rotated by −θ, then goes through the norm; the weight gradients are summed over all
heads and tokens in fp32, in a fixed order. Saved for backward: q, k and the tables; the root mean square of a head is
computed again, since the head is read anyway. Bytes that must move for T tokens: forward 2·T·(Hq + Hk)·D·s, backward
3·T·(Hq + Hk)·D·s.
"""

from __future__ import annotations

import torch

from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import in_vectors, multiprocessors, no_second_derivative, on_device_of, power_of_two
from ligermodels.kernels.rms_norm import check_norm, sum_rows, unrounded_norm
from ligermodels.kernels.rope import check_rope, rope_reference, rotate_pairs, tables

_MAX_TILE = 4096  # elements of one tile of heads


def qk_norm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``qk_norm_rope`` in plain differentiable PyTorch: the two operations one after the other."""
    q_normed = unrounded_norm(q, q_weight, eps, offset, casting)
    k_normed = unrounded_norm(k, k_weight, eps, offset, casting)
    q_out, k_out = rope_reference(q_normed, k_normed, cos, sin, interleaved=interleaved)
    return q_out.to(q.dtype), k_out.to(k.dtype)


# A head is held as its first and second members of the pairs (a, b) and the rest c that is not turned. That makes the
# rotation elementwise; the columns of the three parts differ between the two layouts, the arithmetic does not.
@triton.jit
def _columns(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr):
    pairs = tl.arange(0, BLOCK_HALF)
    first = pairs * 2 if INTERLEAVED else pairs
    second = pairs * 2 + 1 if INTERLEAVED else pairs + HALF
    return first, second, 2 * HALF + tl.arange(0, BLOCK_REST)


@triton.jit
def _load_heads(ptr, heads, head_stride, cols, inside, HEADS: tl.constexpr):
    mask = (heads < HEADS)[:, None] & inside[None, :]
    return tl.load(ptr + (heads * head_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(ptr, heads, cols, inside, values, HEADS: tl.constexpr, D: tl.constexpr):
    mask = (heads < HEADS)[:, None] & inside[None, :]
    tl.store(ptr + (heads * D)[:, None] + cols[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weight(ptr, cols, inside, offset, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        return tl.load(ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    else:
        return tl.full(cols.shape, 1.0, tl.float32)


@triton.jit
def _inverse_rms(a, b, c, eps, D: tl.constexpr):
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, D * 1.0) + eps))[:, None]


@triton.jit
def _scaled(x, rstd, weight, dtype: tl.constexpr, ROUND: tl.constexpr):
    x = x * rstd
    if ROUND:
        x = x.to(dtype).to(tl.float32)
    return x * weight[None, :]


@triton.jit(do_not_specialize=["seq"])
def _forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, seq, batch_stride, seq_stride, head_stride,
    table_batch, table_seq, table_col, eps, offset,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROUND: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = token // seq
    position = token % seq
    first, second, rest = _columns(HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    pairs = tl.arange(0, BLOCK_HALF)
    turned = pairs < HALF
    kept = rest < D
    table = batch * table_batch + position * table_seq + pairs.to(tl.int64) * table_col
    cos = tl.load(cos_ptr + table, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + table, mask=turned, other=0.0).to(tl.float32)[None, :]
    weight_a = _load_weight(weight_ptr, first, turned, offset, HAS_WEIGHT)
    weight_b = _load_weight(weight_ptr, second, turned, offset, HAS_WEIGHT)
    weight_c = _load_weight(weight_ptr, rest, kept, offset, HAS_WEIGHT)
    x_ptr += batch * batch_stride + position * seq_stride
    out_ptr += token * HEADS * D
    dtype = x_ptr.dtype.element_ty
    for start in range(0, HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H).to(tl.int64)
        a = _load_heads(x_ptr, heads, head_stride, first, turned, HEADS)
        b = _load_heads(x_ptr, heads, head_stride, second, turned, HEADS)
        c = _load_heads(x_ptr, heads, head_stride, rest, kept, HEADS)
        rstd = _inverse_rms(a, b, c, eps, D)
        a = _scaled(a, rstd, weight_a, dtype, ROUND)
        b = _scaled(b, rstd, weight_b, dtype, ROUND)
        c = _scaled(c, rstd, weight_c, dtype, ROUND)
        a, b = rotate_pairs(a, b, cos, sin)
        _store_heads(out_ptr, heads, first, turned, a, HEADS, D)
        _store_heads(out_ptr, heads, second, turned, b, HEADS, D)
        _store_heads(out_ptr, heads, rest, kept, c, HEADS, D)


@triton.jit(do_not_specialize=["seq", "tokens"])
def _backward_kernel(
    dout_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, seq, tokens,
    dout_batch, dout_seq, dout_head, batch_stride, seq_stride, head_stride,
    table_batch, table_seq, table_col, eps, offset,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first, second, rest = _columns(HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    pairs = tl.arange(0, BLOCK_HALF)
    turned = pairs < HALF
    kept = rest < D
    weight_a = _load_weight(weight_ptr, first, turned, offset, HAS_WEIGHT)
    weight_b = _load_weight(weight_ptr, second, turned, offset, HAS_WEIGHT)
    weight_c = _load_weight(weight_ptr, rest, kept, offset, HAS_WEIGHT)
    dweight_a = tl.zeros([BLOCK_H, BLOCK_HALF], tl.float32)
    dweight_b = tl.zeros([BLOCK_H, BLOCK_HALF], tl.float32)
    dweight_c = tl.zeros([BLOCK_H, BLOCK_REST], tl.float32)
    for index in range(pid, tokens, tl.num_programs(0)):
        token = tl.zeros([], tl.int64) + index
        batch = token // seq
        position = token % seq
        table = batch * table_batch + position * table_seq + pairs.to(tl.int64) * table_col
        cos = tl.load(cos_ptr + table, mask=turned, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + table, mask=turned, other=0.0).to(tl.float32)[None, :]
        x_token = x_ptr + batch * batch_stride + position * seq_stride
        dout_token = dout_ptr + batch * dout_batch + position * dout_seq
        dx_token = dx_ptr + token * HEADS * D
        for start in range(0, HEADS, BLOCK_H):
            heads = start + tl.arange(0, BLOCK_H).to(tl.int64)
            a = _load_heads(x_token, heads, head_stride, first, turned, HEADS)
            b = _load_heads(x_token, heads, head_stride, second, turned, HEADS)
            c = _load_heads(x_token, heads, head_stride, rest, kept, HEADS)
            da = _load_heads(dout_token, heads, dout_head, first, turned, HEADS)
            db = _load_heads(dout_token, heads, dout_head, second, turned, HEADS)
            dc = _load_heads(dout_token, heads, dout_head, rest, kept, HEADS)
            rstd = _inverse_rms(a, b, c, eps, D)
            a *= rstd
            b *= rstd
            c *= rstd
            back_a, back_b = rotate_pairs(da, db, cos, -sin)
            dweight_a += back_a * a
            dweight_b += back_b * b
            dweight_c += dc * c
            back_a *= weight_a[None, :]
            back_b *= weight_b[None, :]
            back_c = dc * weight_c[None, :]
            products = tl.sum(back_a * a, axis=1) + tl.sum(back_b * b, axis=1) + tl.sum(back_c * c, axis=1)
            projection = tl.div_rn(products, D * 1.0)[:, None]
            _store_heads(dx_token, heads, first, turned, (back_a - a * projection) * rstd, HEADS, D)
            _store_heads(dx_token, heads, second, turned, (back_b - b * projection) * rstd, HEADS, D)
            _store_heads(dx_token, heads, rest, kept, (back_c - c * projection) * rstd, HEADS, D)
    if HAS_WEIGHT:
        partial_ptr += pid.to(tl.int64) * D
        tl.store(partial_ptr + first, tl.sum(dweight_a, axis=0), mask=turned)
        tl.store(partial_ptr + second, tl.sum(dweight_b, axis=0), mask=turned)
        tl.store(partial_ptr + rest, tl.sum(dweight_c, axis=0), mask=kept)


def _constants(x, cos, weight, interleaved):
    dim, half = x.shape[3], cos.shape[-1]
    return {
        "HEADS": x.shape[2], "D": dim, "HALF": half, "INTERLEAVED": interleaved, "HAS_WEIGHT": weight is not None,
        "BLOCK_H": min(power_of_two(x.shape[2]), max(1, _MAX_TILE // power_of_two(dim))),
        "BLOCK_HALF": power_of_two(half), "BLOCK_REST": power_of_two(dim - 2 * half),
    }  # fmt: skip


def _head_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float,
    llama: bool,
    interleaved: bool,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = in_vectors(x)
        cos, sin, table_strides = tables(cos, sin)
        with on_device_of(x):
            _forward_kernel[(x.shape[0] * x.shape[1],)](
                x, weight if weight is not None else x, cos, sin, out, x.shape[1], *x.stride()[:3], *table_strides,
                eps, offset, ROUND=llama and weight is not None, **_constants(x, cos, weight, interleaved), num_warps=4,
            )  # fmt: skip
    return out


def _head_norm_rope_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, dx.new_empty(0) if weight is None else torch.zeros_like(weight)
    dout, x = in_vectors(dout), in_vectors(x)
    cos, sin, table_strides = tables(cos, sin)
    tokens = x.shape[0] * x.shape[1]
    programs = min(tokens, 3 * multiprocessors(x.device))  # what 170 registers a thread leave room for
    partial = torch.empty(programs if weight is not None else 0, x.shape[3], dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward_kernel[(programs,)](
            dout, x, weight if weight is not None else x, cos, sin, dx, partial, x.shape[1], tokens,
            *dout.stride()[:3], *x.stride()[:3], *table_strides, eps, offset, **_constants(x, cos, weight, interleaved),
            num_warps=4,
        )  # fmt: skip
        return dx, dx.new_empty(0) if weight is None else sum_rows(partial, weight.dtype)


def _setup(ctx, inputs, output):
    *tensors, ctx.eps, ctx.offset, _, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    dx, dweight = _backward_op(dout, *ctx.saved_tensors, ctx.eps, ctx.offset, ctx.interleaved)
    need_x, need_weight = ctx.needs_input_grad[:2]
    return dx if need_x else None, dweight if need_weight else None, *(None,) * 6


_op = register(
    "head_norm_rope(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, float offset, bool llama,"
    " bool interleaved) -> Tensor",
    _head_norm_rope,
    lambda x, *_: x.new_empty(x.shape),
    setup_context=_setup,
    backward=_backward,
)
_backward_op = register(
    "head_norm_rope_backward(Tensor dout, Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, float offset,"
    " bool interleaved) -> (Tensor, Tensor)",
    _head_norm_rope_backward,
    lambda dout, x, weight, *_: (
        x.new_empty(x.shape),
        x.new_empty(0) if weight is None else weight.new_empty(weight.shape),
    ),
    backward=no_second_derivative,
)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm every head over D, then rotate it: ``rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)``.

    q: (B, S, Hq, D), k: (B, S, Hk, D), any strides; q_weight, k_weight: (D,) or None; cos, sin: as ``rope``; eps,
    offset, casting: as ``rms_norm``. Returns contiguous tensors of the shapes and dtypes of q and k. Differentiable
    once, in q, k and the weights. Raises LigerError for shapes that do not fit.
    """
    check_rope("qk_norm_rope", q, k, cos, sin)
    check_norm("qk_norm_rope", q, q_weight, casting)
    check_norm("qk_norm_rope", k, k_weight, casting)
    if use_triton(q) and q.dtype != torch.float64:
        llama = casting == "llama"
        return (
            _op(q, q_weight, cos, sin, eps, offset, llama, interleaved),
            _op(k, k_weight, cos, sin, eps, offset, llama, interleaved),
        )
    return qk_norm_rope_reference(
        q, k, q_weight, k_weight, cos, sin, eps, offset=offset, casting=casting, interleaved=interleaved
    )
