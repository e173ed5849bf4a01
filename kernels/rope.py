"""Rotary position embedding (Su et al., 2021, RoFormer) of queries and keys in one launch.

With half = cos.shape[-1] and rotary_dim R = 2·half ≤ D, the pair (a, b) at angle θ becomes

    a' = a·cos θ − b·sin θ          b' = b·cos θ + a·sin θ

Pair i is (x[i], x[i + half]) in the half-split layout of Hugging Face and (x[2i], x[2i + 1]) in the interleaved one;
elements from R on are copied. The arithmetic is fp32 with one rounding at the end.

The backward pass is the same operation with −θ. Nothing but cos and sin is saved. Bytes that must move for T tokens:
2·T·(Hq + Hk)·D·s each way. Tables are read once a token, for all heads.
"""

from __future__ import annotations

import torch

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import on_device_of, power_of_two

_MAX_TILE = 8192  # elements of one head tile; more heads are walked in several tiles


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)  # (B or 1, S, 1, half)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rope`` in plain differentiable PyTorch."""
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


@triton.jit
def rotate_pairs(a, b, cos, sin):
    # fused by hand: which product the compiler leaves unrounded could otherwise change with the strides it is given
    return tl.fma(a, cos, b * -sin), tl.fma(b, cos, a * sin)


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, x_head, x_col, cos, sin,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate the HEADS heads of one token, BLOCK_H at a time; y is contiguous, (HEADS, D)."""
    pairs = tl.arange(0, BLOCK_HALF)
    for start in range(0, HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H).to(tl.int64)
        x_rows = x_ptr + (heads * x_head)[:, None]
        y_rows = y_ptr + (heads * D)[:, None]
        if INTERLEAVED:
            cols = tl.arange(0, 2 * BLOCK_HALF)
            mask = (heads < HEADS)[:, None] & (cols < 2 * HALF)[None, :]
            x = tl.load(x_rows + (cols.to(tl.int64) * x_col)[None, :], mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_HALF, 2)))
            first, second = rotate_pairs(a, b, cos[None, :], sin[None, :])
            y = tl.reshape(tl.join(first, second), (BLOCK_H, 2 * BLOCK_HALF))
            tl.store(y_rows + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
            low = (pairs.to(tl.int64) * x_col)[None, :]
            high = ((pairs.to(tl.int64) + HALF) * x_col)[None, :]
            a = tl.load(x_rows + low, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_rows + high, mask=mask, other=0.0).to(tl.float32)
            first, second = rotate_pairs(a, b, cos[None, :], sin[None, :])
            tl.store(y_rows + pairs[None, :], first.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_rows + (pairs + HALF)[None, :], second.to(y_ptr.dtype.element_ty), mask=mask)
        if 2 * HALF < D:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            mask = (heads < HEADS)[:, None] & (rest < D)[None, :]
            x = tl.load(x_rows + (rest.to(tl.int64) * x_col)[None, :], mask=mask)
            tl.store(y_rows + rest[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["seq"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, seq,
    q_batch, q_seq, q_head, q_col, k_batch, k_seq, k_head, k_col, table_batch, table_seq, table_col,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = token // seq
    position = token % seq
    pairs = tl.arange(0, BLOCK_HALF)
    table = batch * table_batch + position * table_seq + pairs.to(tl.int64) * table_col
    cos = tl.load(cos_ptr + table, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=pairs < HALF, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    _rotate_heads(
        q_ptr + batch * q_batch + position * q_seq, q_out_ptr + token * Q_HEADS * D, q_head, q_col, cos, sin,
        Q_HEADS, D, HALF, INTERLEAVED, BLOCK_Q, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + batch * k_batch + position * k_seq, k_out_ptr + token * K_HEADS * D, k_head, k_col, cos, sin,
        K_HEADS, D, HALF, INTERLEAVED, BLOCK_K, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


def tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """cos and sin with one set of strides for both; the batch stride is 0 where one table serves the whole batch."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1), cos.stride(2))


def head_blocks(q_heads: int, k_heads: int, dim: int, half: int) -> dict[str, int]:
    """Tile sizes of a program that holds all heads of a token, as kernel arguments."""
    most = max(1, _MAX_TILE // power_of_two(dim))
    return {
        "BLOCK_Q": min(power_of_two(q_heads), most),
        "BLOCK_K": min(power_of_two(k_heads), most),
        "BLOCK_HALF": power_of_two(half),
        "BLOCK_REST": power_of_two(dim - 2 * half),
    }


def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q_out.numel() == 0 and k_out.numel() == 0:
        return q_out, k_out
    batch, seq, q_heads, dim = q.shape
    k_heads, half = k.shape[2], cos.shape[-1]
    cos, sin, table_strides = tables(cos, sin)
    blocks = head_blocks(q_heads, k_heads, dim, half)
    elements = blocks["BLOCK_Q"] * power_of_two(dim)
    with on_device_of(q):
        _rope_kernel[(batch * seq,)](
            q, k, cos, sin, q_out, k_out, seq, *q.stride(), *k.stride(), *table_strides,
            Q_HEADS=q_heads, K_HEADS=k_heads, D=dim, HALF=half, INTERLEAVED=interleaved, INVERSE=inverse, **blocks,
            num_warps=min(max(elements // 1024, 1), 8),
        )  # fmt: skip
    return q_out, k_out


def _setup(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)
    ctx.shapes = inputs[0].shape, inputs[1].shape


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    need_q, need_k = dq is not None and ctx.needs_input_grad[0], dk is not None and ctx.needs_input_grad[1]
    some = dq if dq is not None else dk
    if some is None or not (need_q or need_k):
        return (None,) * 6
    none = some.new_empty(*some.shape[:2], 0, some.shape[3])  # a side without heads costs nothing
    dq, dk = _rope_op(dq if need_q else none, dk if need_k else none, cos, sin, ctx.interleaved, not ctx.inverse)
    return dq if need_q else None, dk if need_k else None, None, None, None, None


_rope_op = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> (Tensor, Tensor)",
    _rope,
    lambda q, k, cos, sin, interleaved, inverse: (q.new_empty(q.shape), k.new_empty(k.shape)),
    setup_context=_setup,
    backward=_backward,
)


def check_rope(name: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise LigerError unless q, k are (B, S, H, D) and cos, sin (B or 1, S, at most D/2)."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise LigerError(
            f"{name}: q has shape {tuple(q.shape)} and k {tuple(k.shape)}; expected (B, S, H, D) with equal B, S and D"
        )
    batch, seq, _, dim = q.shape
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[0] not in (1, batch) or cos.shape[1] != seq:
        raise LigerError(
            f"{name}: cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; "
            f"expected ({batch} or 1, {seq}, rotary_dim / 2) for q of shape {tuple(q.shape)}"
        )
    if 2 * cos.shape[2] > dim:
        raise LigerError(f"{name}: cos and sin turn {2 * cos.shape[2]} dimensions, but the heads have {dim}")


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions' angles.

    q: (B, S, Hq, D), k: (B, S, Hk, D), fp32, bf16 or fp16, any strides, such as views of one packed projection.
    cos, sin: (B or 1, S, rotary_dim / 2), best fp32, rotary_dim ≤ D; they get no gradient on CUDA. interleaved: pairs
    are neighbours (GLM) and not half a head apart (Llama). Returns contiguous tensors of the shapes and dtypes of q
    and k. Raises LigerError for shapes that do not fit.
    """
    check_rope("rope", q, k, cos, sin)
    if use_triton(q) and q.dtype != torch.float64:
        return _rope_op(q, k, cos, sin, interleaved, False)
    return rope_reference(q, k, cos, sin, interleaved=interleaved)
