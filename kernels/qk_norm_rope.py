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
from ligermodels.kernels._launch import (
    cdiv,
    in_vectors,
    multiprocessors,
    no_second_derivative,
    on_device_of,
    power_of_two,
)
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


@triton.jit
def _tables(cos_ptr, sin_ptr, batch, position, batch_stride, seq_stride, col_stride, turned, BLOCK_HALF: tl.constexpr):
    table = batch * batch_stride + position * seq_stride + tl.arange(0, BLOCK_HALF).to(tl.int64) * col_stride
    cos = tl.load(cos_ptr + table, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=turned, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def _forward_heads(
    x_ptr, weight_ptr, out_ptr, head_stride, cos, sin, eps, offset,
    HEADS: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_H: tl.constexpr, ROUND: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The HEADS heads of one token."""
    first, second, rest = _columns(HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    turned = tl.arange(0, BLOCK_HALF) < HALF
    kept = rest < D
    weight_a = _load_weight(weight_ptr, first, turned, offset, HAS_WEIGHT)
    weight_b = _load_weight(weight_ptr, second, turned, offset, HAS_WEIGHT)
    weight_c = _load_weight(weight_ptr, rest, kept, offset, HAS_WEIGHT)
    dtype = x_ptr.dtype.element_ty
    for start in range(0, HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H).to(tl.int64)
        a = _load_heads(x_ptr, heads, head_stride, first, turned, HEADS)
        b = _load_heads(x_ptr, heads, head_stride, second, turned, HEADS)
        c = _load_heads(x_ptr, heads, head_stride, rest, kept, HEADS)
        rstd = _inverse_rms(a, b, c, eps, D)
        a = _scaled(a, rstd, weight_a, dtype, ROUND and HAS_WEIGHT)
        b = _scaled(b, rstd, weight_b, dtype, ROUND and HAS_WEIGHT)
        c = _scaled(c, rstd, weight_c, dtype, ROUND and HAS_WEIGHT)
        a, b = rotate_pairs(a, b, cos, sin)
        _store_heads(out_ptr, heads, first, turned, a, HEADS, D)
        _store_heads(out_ptr, heads, second, turned, b, HEADS, D)
        _store_heads(out_ptr, heads, rest, kept, c, HEADS, D)


@triton.jit(do_not_specialize=["seq"])
def _forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, seq,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, table_batch, table_seq, table_col, eps, offset, ROUND: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = token // seq
    position = token % seq
    turned = tl.arange(0, BLOCK_HALF) < HALF
    cos, sin = _tables(cos_ptr, sin_ptr, batch, position, table_batch, table_seq, table_col, turned, BLOCK_HALF)
    _forward_heads(
        q_ptr + batch * q_batch + position * q_seq, q_weight_ptr, q_out_ptr + token * Q_HEADS * D, q_head, cos, sin,
        eps, offset, Q_HEADS, Q_WEIGHT, BLOCK_Q, ROUND, D, HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    _forward_heads(
        k_ptr + batch * k_batch + position * k_seq, k_weight_ptr, k_out_ptr + token * K_HEADS * D, k_head, cos, sin,
        eps, offset, K_HEADS, K_WEIGHT, BLOCK_K, ROUND, D, HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


@triton.jit
def _backward_heads(
    first_token, step, tokens, seq, dout_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr, dout_batch, dout_seq, dout_head,
    x_batch, x_seq, x_head, cos_ptr, sin_ptr, table_batch, table_seq, table_col, eps, offset,
    HEADS: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_H: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The HEADS heads of every step-th token, and the sum of their weight gradients."""
    first, second, rest = _columns(HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST)
    turned = tl.arange(0, BLOCK_HALF) < HALF
    kept = rest < D
    weight_a = _load_weight(weight_ptr, first, turned, offset, HAS_WEIGHT)
    weight_b = _load_weight(weight_ptr, second, turned, offset, HAS_WEIGHT)
    weight_c = _load_weight(weight_ptr, rest, kept, offset, HAS_WEIGHT)
    dweight_a = tl.zeros([BLOCK_H, BLOCK_HALF], tl.float32)
    dweight_b = tl.zeros([BLOCK_H, BLOCK_HALF], tl.float32)
    dweight_c = tl.zeros([BLOCK_H, BLOCK_REST], tl.float32)
    for index in range(first_token, tokens, step):
        token = tl.zeros([], tl.int64) + index
        batch = token // seq
        position = token % seq
        cos, sin = _tables(cos_ptr, sin_ptr, batch, position, table_batch, table_seq, table_col, turned, BLOCK_HALF)
        x_token = x_ptr + batch * x_batch + position * x_seq
        dout_token = dout_ptr + batch * dout_batch + position * dout_seq
        dx_token = dx_ptr + token * HEADS * D
        for start in range(0, HEADS, BLOCK_H):
            heads = start + tl.arange(0, BLOCK_H).to(tl.int64)
            a = _load_heads(x_token, heads, x_head, first, turned, HEADS)
            b = _load_heads(x_token, heads, x_head, second, turned, HEADS)
            c = _load_heads(x_token, heads, x_head, rest, kept, HEADS)
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
        tl.store(partial_ptr + first, tl.sum(dweight_a, axis=0), mask=turned)
        tl.store(partial_ptr + second, tl.sum(dweight_b, axis=0), mask=turned)
        tl.store(partial_ptr + rest, tl.sum(dweight_c, axis=0), mask=kept)


@triton.jit(do_not_specialize=["seq", "tokens", "q_programs"])
def _backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, partial_ptr,
    seq, tokens, q_programs, dq_batch, dq_seq, dq_head, dk_batch, dk_seq, dk_head,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, table_batch, table_seq, table_col, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_WEIGHT: tl.constexpr, K_WEIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    partial_ptr += pid.to(tl.int64) * D
    if pid < q_programs:
        _backward_heads(
            pid, q_programs, tokens, seq, dq_out_ptr, q_ptr, q_weight_ptr, dq_ptr, partial_ptr,
            dq_batch, dq_seq, dq_head, q_batch, q_seq, q_head, cos_ptr, sin_ptr, table_batch, table_seq, table_col,
            eps, offset, Q_HEADS, Q_WEIGHT, BLOCK_Q, D, HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _backward_heads(
            pid - q_programs, tl.num_programs(0) - q_programs, tokens, seq, dk_out_ptr, k_ptr, k_weight_ptr, dk_ptr,
            partial_ptr, dk_batch, dk_seq, dk_head, k_batch, k_seq, k_head, cos_ptr, sin_ptr,
            table_batch, table_seq, table_col, eps, offset,
            K_HEADS, K_WEIGHT, BLOCK_K, D, HALF, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def _constants(q, k, q_weight, k_weight, cos, interleaved):
    dim, half = q.shape[3], cos.shape[-1]
    most = max(1, _MAX_TILE // power_of_two(dim))
    return {
        "Q_HEADS": q.shape[2], "K_HEADS": k.shape[2], "Q_WEIGHT": q_weight is not None,
        "K_WEIGHT": k_weight is not None, "BLOCK_Q": min(power_of_two(q.shape[2]), most),
        "BLOCK_K": min(power_of_two(k.shape[2]), most), "D": dim, "HALF": half, "INTERLEAVED": interleaved,
        "BLOCK_HALF": power_of_two(half), "BLOCK_REST": power_of_two(dim - 2 * half),
    }  # fmt: skip


def _qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float,
    llama: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q_out.numel() or k_out.numel():
        q, k = in_vectors(q), in_vectors(k)
        cos, sin, table_strides = tables(cos, sin)
        with on_device_of(q):
            _forward_kernel[(q.shape[0] * q.shape[1],)](
                q, k, q_weight if q_weight is not None else q, k_weight if k_weight is not None else k, cos, sin,
                q_out, k_out, q.shape[1], *q.stride()[:3], *k.stride()[:3], *table_strides, eps, offset, ROUND=llama,
                **_constants(q, k, q_weight, k_weight, cos, interleaved), num_warps=4,
            )  # fmt: skip
    return q_out, k_out


def _qk_norm_rope_backward(
    dq_out: torch.Tensor | None,
    dk_out: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq = torch.empty(q.shape if dq_out is not None else (0,), dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape if dk_out is not None else (0,), dtype=k.dtype, device=k.device)
    heads = [x.shape[2] if dx.numel() else 0 for x, dx in ((q, dq), (k, dk))]
    # what 170 registers a thread leave room for, shared out by the work
    tokens, programs = q.shape[0] * q.shape[1], 3 * multiprocessors(q.device)
    shares = [min(tokens, cdiv(programs * h, sum(heads))) if h else 0 for h in heads]
    partial = torch.empty(sum(shares), q.shape[3], dtype=torch.float32, device=q.device)
    with on_device_of(q):
        if sum(shares):
            q, k = in_vectors(q), in_vectors(k)
            dq_out = q if dq_out is None else in_vectors(dq_out)  # one that is missing is not read
            dk_out = k if dk_out is None else in_vectors(dk_out)
            cos, sin, table_strides = tables(cos, sin)
            _backward_kernel[(sum(shares),)](
                dq_out, dk_out, q, k, q_weight if q_weight is not None else q, k_weight if k_weight is not None else k,
                cos, sin, dq, dk, partial, q.shape[1], tokens, shares[0], *dq_out.stride()[:3], *dk_out.stride()[:3],
                *q.stride()[:3], *k.stride()[:3], *table_strides, eps, offset,
                **_constants(q, k, q_weight, k_weight, cos, interleaved), num_warps=4,
            )  # fmt: skip
        return (
            dq,
            dk,
            *(
                partial.new_empty(0) if w is None else sum_rows(part, w.dtype) if len(part) else torch.zeros_like(w)
                for w, part in zip((q_weight, k_weight), partial.split(shares), strict=True)
            ),
        )


def _setup(ctx, inputs, output):
    *tensors, ctx.eps, ctx.offset, _, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, dq_out, dk_out):
    if dq_out is None and dk_out is None:
        return (None,) * 10
    gradients = _backward_op(dq_out, dk_out, *ctx.saved_tensors, ctx.eps, ctx.offset, ctx.interleaved)
    wanted = [needed and (dq_out, dk_out)[i % 2] is not None for i, needed in enumerate(ctx.needs_input_grad[:4])]
    return *(g if w else None for g, w in zip(gradients, wanted, strict=True)), *(None,) * 6


def _fake_backward(dq_out, dk_out, q, k, q_weight, k_weight, *_):
    return (
        q.new_empty(q.shape if dq_out is not None else (0,)),
        k.new_empty(k.shape if dk_out is not None else (0,)),
        *(q.new_empty(0) if w is None else w.new_empty(w.shape) for w in (q_weight, k_weight)),
    )


_op = register(
    "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps,"
    " float offset, bool llama, bool interleaved) -> (Tensor, Tensor)",
    _qk_norm_rope,
    lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    setup_context=_setup,
    backward=_backward,
)
_backward_op = register(
    "qk_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight,"
    " Tensor cos, Tensor sin, float eps, float offset, bool interleaved) -> (Tensor, Tensor, Tensor, Tensor)",
    _qk_norm_rope_backward,
    _fake_backward,
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
        return _op(q, k, q_weight, k_weight, cos, sin, eps, offset, casting == "llama", interleaved)
    return qk_norm_rope_reference(
        q, k, q_weight, k_weight, cos, sin, eps, offset=offset, casting=casting, interleaved=interleaved
    )
