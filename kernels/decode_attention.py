"""Attention of one new position a row over a cache of keys and values: the attention of decoding.

    out = softmax(cap(q·kᵀ·scale))·v          cap(s) = c·tanh(s / c), if there is a soft cap

The cache is a ring of R slots, position p in slot p mod R (a plain buffer is a ring that never comes round). Row b sees
the positions max(start[b], position − window + 1) … position. ``position`` and ``start`` are read on the device, so a
captured launch serves every length, and only visible keys are read: 2·n·K·D·s bytes a row of n of them.

A program holds the queries that share one key/value head and walks one of several chunks of the positions, for a row
and a head alone would leave most of the GPU idle. Each leaves a running maximum, sum and output in fp32; the chunk that
is finished last (an atomic counter tells) adds them up in the order of the chunks, so the bits do not depend on it.
After FlashDecoding (Dao, Haziza, Massa, Sizov 2023); the counter saves its second launch.

``append_and_attend`` also does what comes before: it normalises (Qwen3, Gemma 3) and rotates the new q and k and stores
k and v in their slot, in the same launch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import tl, triton, use_triton
from ligermodels.kernels._launch import cdiv, multiprocessors, on_device_of, power_of_two
from ligermodels.kernels.gemv import wait_for_earlier_kernels
from ligermodels.kernels.qk_norm_rope import qk_norm_rope_reference
from ligermodels.kernels.rope import rope_reference

_TILE_BYTES = 8192  # of one tile of keys: small, so that a short cache still makes many programs
_EVERYTHING = 2**31 - 1  # a window that hides nothing


def decode_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``decode_attention`` in plain PyTorch, over all slots."""
    B, _, A, D = q.shape
    room, K = keys.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    slot = torch.arange(room, device=q.device)
    held = position - (position - slot) % room  # (R,): the position that each slot holds; below 0 it holds none yet
    seen = (held >= 0)[None]
    if window is not None:
        seen = seen & (held > position - window)
    if start is not None:
        seen = seen & (held >= start[:, None])  # (B, R)
    scores = torch.einsum("bkgd,brkd->bkgr", q.to(wide).view(B, K, A // K, D), keys.to(wide)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("bkgr,brkd->bkgd", weights, values.to(wide)).reshape(q.shape).to(q.dtype)


def _on_cpu(q, keys, values, position, start, scale, window, softcap):
    """The same over the visible positions alone: through torch's attention where they lie in one piece."""
    last, room = int(position), keys.shape[1]
    if softcap is not None or last >= room or q.dtype == torch.float64:
        options = {"scale": scale, "window": window, "softcap": softcap}
        return decode_attention_reference(q, keys, values, position, start, **options)
    starts = [0] if start is None else start.tolist()
    first = max(min(starts), 0 if window is None else last - window + 1)
    mask = None
    if max(starts) > first:
        mask = (torch.arange(first, last + 1) >= start[:, None])[:, None, None]  # (B, 1, 1, T)
    q, k, v = q.transpose(1, 2), keys[:, first : last + 1].transpose(1, 2), values[:, first : last + 1]
    out = F.scaled_dot_product_attention(
        q, k, v.transpose(1, 2), mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


@triton.jit
def _heads(
    x_ptr, heads, mask, cos_ptr, sin_ptr, weight_ptr, eps, offset, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Heads (BLOCK, BLOCK_D) in fp32, normalised and rotated as asked; a column's partner is read a second time."""
    cols = tl.arange(0, BLOCK_D)
    dtype = x_ptr.dtype.element_ty
    rows = x_ptr + heads[:, None] * D
    x = tl.load(rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=1), D * 1.0) + eps))[:, None]
        x *= rstd
        if ROUND:
            x = x.to(dtype).to(tl.float32)
        x *= (tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32) + offset)[None, :]
    if TURN:
        turned = cols < 2 * HALF
        if INTERLEAVED:
            pair = cols // 2
            is_first = cols % 2 == 0
            partner = tl.where(is_first, cols + 1, cols - 1)
        else:
            is_first = cols < HALF
            pair = tl.where(is_first, cols, cols - HALF)
            partner = tl.where(is_first, cols + HALF, cols - HALF)
        partner = tl.where(turned, partner, cols)
        y = tl.load(rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            y *= rstd
            if ROUND:
                y = y.to(dtype).to(tl.float32)
            y *= (tl.load(weight_ptr + partner, mask=cols < D, other=0.0).to(tl.float32) + offset)[None, :]
        cos = tl.load(cos_ptr + pair, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + pair, mask=turned, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        x = tl.fma(x, tl.broadcast_to(cos[None, :], x.shape), y * sin[None, :])
    return x


@triton.jit(do_not_specialize=["window"])
def _kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, keys_ptr, values_ptr, position_ptr, start_ptr,
    out_ptr, partial_ptr, count_ptr, q_row, k_row, v_row, cache_row, cache_slot, room, window, scale, softcap, eps,
    offset, APPEND: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_START: tl.constexpr, HAS_CAP: tl.constexpr, PRECISE: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = BLOCK_G * (BLOCK_D + 2)  # of what a chunk leaves: out, maximum, sum
    wait_for_earlier_kernels(OVERLAP)
    chunk = tl.program_id(0) % CHUNKS
    pair = tl.program_id(0) // CHUNKS
    row = (pair // KV_HEADS).to(tl.int64)
    kv_head = pair % KV_HEADS
    position = tl.load(position_ptr).to(tl.int32)
    start = 0
    if HAS_START:
        start = tl.load(start_ptr + row).to(tl.int32)
    first = tl.maximum(tl.maximum(position - window + 1, start), 0)
    end = position + 1
    if APPEND:  # the newest key is not read from the cache: another program may be writing it just now
        end = position
    size = tl.maximum(tl.cdiv(tl.cdiv(end - first, CHUNKS), BLOCK_T), 1) * BLOCK_T
    active = tl.maximum(tl.cdiv(end - first, size), 1)
    if chunk < active:
        cols = tl.arange(0, BLOCK_D)
        inside_d = cols < D
        group = tl.arange(0, BLOCK_G)
        heads = kv_head * GROUP + group
        q_mask = (group < GROUP)[:, None] & inside_d[None, :]
        table = tl.maximum(position - start, 0).to(tl.int64) * HALF
        q = _heads(
            q_ptr + row * q_row, heads, q_mask, cos_ptr + table, sin_ptr + table, q_weight_ptr, eps, offset,
            D, HALF, INTERLEAVED, APPEND, NORM, ROUND, BLOCK_D,
        ).to(keys_ptr.dtype.element_ty)  # fmt: skip
        keys_ptr += row * cache_row + kv_head * D
        values_ptr += row * cache_row + kv_head * D
        highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        if APPEND:  # the first chunk stores the new key and value, and starts from their score
            one = tl.arange(0, 1) + kv_head
            k_new = _heads(
                k_ptr + row * k_row, one, inside_d[None, :], cos_ptr + table, sin_ptr + table, k_weight_ptr, eps,
                offset, D, HALF, INTERLEAVED, True, NORM, ROUND, BLOCK_D,
            ).to(keys_ptr.dtype.element_ty)  # fmt: skip
            v_new = tl.load(v_ptr + row * v_row + kv_head * D + cols[None, :], mask=inside_d[None, :], other=0.0)
            is_first = chunk == 0
            slot = (position % room).to(tl.int64) * cache_slot + cols[None, :]
            tl.store(keys_ptr + slot, k_new, mask=inside_d[None, :] & is_first)
            tl.store(values_ptr + slot, v_new.to(values_ptr.dtype.element_ty), mask=inside_d[None, :] & is_first)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
            if HAS_CAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            highest = tl.where(is_first, score, highest)
            total = tl.where(is_first, 1.0, total)
            out = tl.where(is_first, out + v_new.to(tl.float32), out)
        begin = first + chunk * size
        for t in range(begin, tl.minimum(begin + size, end), BLOCK_T):
            positions = t + tl.arange(0, BLOCK_T)
            inside = positions < end
            slots = (positions % room).to(tl.int64)[:, None] * cache_slot + cols[None, :]
            mask = inside[:, None] & inside_d[None, :]
            k = tl.load(keys_ptr + slots, mask=mask, other=0.0)
            v = tl.load(values_ptr + slots, mask=mask, other=0.0)
            if PRECISE:
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            else:
                scores = tl.dot(q, tl.trans(k)) * scale
            if HAS_CAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            shrink = tl.exp(highest - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            if PRECISE:
                out = out * shrink[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee")
            else:
                out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            highest = higher
        result = out_ptr + (row * KV_HEADS * GROUP + heads[:, None]) * D + cols[None, :]
        if CHUNKS == 1:
            tl.store(result, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            if active == 1:
                tl.store(result, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)
            else:
                own = partial_ptr + (pair * CHUNKS + chunk).to(tl.int64) * SIZE
                tl.store(own + group[:, None] * BLOCK_D + cols[None, :], out)
                tl.store(own + BLOCK_G * BLOCK_D + group, highest)
                tl.store(own + BLOCK_G * (BLOCK_D + 1) + group, total)
                tl.debug_barrier()  # all threads have stored before one of them counts
                if tl.atomic_add(count_ptr + pair, 1) == active - 1:
                    tl.store(count_ptr + pair, 0)  # for the next launch
                    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_G], tl.float32)
                    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
                    for other in range(active):
                        part = partial_ptr + (pair * CHUNKS + other).to(tl.int64) * SIZE
                        his = tl.load(part + BLOCK_G * BLOCK_D + group, cache_modifier=".cg")
                        his_total = tl.load(part + BLOCK_G * (BLOCK_D + 1) + group, cache_modifier=".cg")
                        his_out = tl.load(part + group[:, None] * BLOCK_D + cols[None, :], cache_modifier=".cg")
                        higher = tl.maximum(highest, his)
                        shrink = tl.exp(highest - higher)
                        his_shrink = tl.exp(his - higher)
                        total = total * shrink + his_total * his_shrink
                        out = out * shrink[:, None] + his_out * his_shrink[:, None]
                        highest = higher
                    tl.store(result, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


def _launch(q, k, v, cos, sin, q_weight, k_weight, keys, values, position, start, counters, scale, window, softcap, eps,
            offset, llama, interleaved, overlap):  # fmt: skip
    B, A, D = q.shape[0], q.shape[-2], q.shape[-1]
    room, K = keys.shape[1:3]
    append = k is not None
    out = torch.empty((B, 1, A, D), dtype=q.dtype, device=q.device)
    block_g, block_d = max(16, power_of_two(A // K)), max(16, power_of_two(D))
    block_t = min(128, max(32 if q.dtype != torch.float32 else 16, _TILE_BYTES // (block_d * keys.element_size())))
    # Twice as many programs as multiprocessors hide each other's waits; a chunk has at least a tile.
    chunks = max(1, min(cdiv(2 * multiprocessors(q.device), B * K), cdiv(room, block_t), 64))
    partial, count = out, out
    if chunks > 1:
        partial = torch.empty(B * K * chunks * block_g * (block_d + 2), dtype=torch.float32, device=q.device)
        count = torch.zeros(B * K, dtype=torch.int32, device=q.device) if counters is None else counters
    none = q
    with on_device_of(q):
        _kernel[(B * K * chunks,)](
            q, k if append else none, v if append else none, cos if append else none, sin if append else none,
            q_weight if q_weight is not None else none, k_weight if k_weight is not None else none, keys, values,
            position, start if start is not None else position, out, partial, count,
            q.stride(0), k.stride(0) if append else 0, v.stride(0) if append else 0, keys.stride(0), keys.stride(1),
            room, _EVERYTHING if window is None else window, scale, 1.0 if softcap is None else softcap, eps, offset,
            APPEND=append, NORM=q_weight is not None, ROUND=llama, HALF=cos.shape[-1] if append else 1,
            INTERLEAVED=interleaved, HAS_START=start is not None, HAS_CAP=softcap is not None,
            PRECISE=q.dtype == torch.float32, KV_HEADS=K, GROUP=A // K, D=D, CHUNKS=chunks,
            BLOCK_G=block_g, BLOCK_D=block_d, BLOCK_T=block_t, OVERLAP=overlap, num_warps=4, num_stages=2,
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out


def _check(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    if q.dim() != 4 or keys.dim() != 4 or keys.shape != values.shape or q.shape[1] != 1 or q.shape[0] != keys.shape[0]:
        raise LigerError(
            f"decode_attention: q has shape {tuple(q.shape)}, keys {tuple(keys.shape)} and values "
            f"{tuple(values.shape)}; expected (B, 1, A, D) and twice (B, R, K, D)"
        )
    if q.shape[3] != keys.shape[3] or q.shape[2] % keys.shape[2]:
        raise LigerError(
            f"decode_attention: {q.shape[2]} heads of {q.shape[3]} do not go with {keys.shape[2]} of {keys.shape[3]}"
        )
    if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
        raise LigerError("decode_attention: keys and values must have the same strides, heads and columns contiguous")


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one query a row to the cached keys that it sees, its own among them: (B, 1, A, D), q's dtype.

    q: (B, 1, A, D), already rotated; keys, values: (B, R, K, D), rings of R slots in q's dtype, A a multiple of K.
    position: (1,) integers on the device, the query's position, the same for all rows, whose key is already stored;
    start: (B,), the first position of each row that is not padding. ``window`` (at most R) counts the keys a query
    sees, itself included; ``softcap`` bounds the scores. ``counters``, B·K int32 zeros or more, are left as zeros: one
    such tensor for all launches of a stream saves filling one each time. No gradients. Raises LigerError for shapes
    that do not fit.
    """
    _check(q, keys, values)
    if not use_triton(q) or q.dtype == torch.float64:
        if not q.is_cuda:
            return _on_cpu(q, keys, values, position, start, scale, window, softcap)
        options = {"scale": scale, "window": window, "softcap": softcap}
        return decode_attention_reference(q, keys, values, position, start, **options)
    if q.stride()[2:] != (q.shape[3], 1):
        q = q.contiguous()
    return _launch(
        q, None, None, None, None, None, None, keys, values, position, start, counters, scale, window, softcap, 0.0,
        0.0, False, False, False,
    )  # fmt: skip


def append_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    interleaved: bool = False,
    counters: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Normalise and rotate the new heads, store k and v in the cache, attend: (B, 1, A, D). Writes keys and values.

    q (B, 1, A, D), k and v (B, 1, K, D), heads contiguous (views of one packed projection will do); cos and sin
    (positions, rotary_dim / 2) fp32: row b is rotated by line position − start[b]. q_weight and k_weight (D,): see
    ``qk_norm_rope``, as for the rest. Keys, values, position, start, window, softcap and counters as in
    ``decode_attention``; ``overlap`` as in gemv.py.
    """
    _check(q, keys, values)
    if k.shape != (q.shape[0], 1, *keys.shape[2:]) or v.shape != k.shape or cos.dim() != 2 or cos.shape != sin.shape:
        raise LigerError(
            f"append_and_attend: k has shape {tuple(k.shape)}, v {tuple(v.shape)}, cos {tuple(cos.shape)} and sin "
            f"{tuple(sin.shape)}; expected twice {(q.shape[0], 1, *keys.shape[2:])} and twice (positions, half)"
        )
    if not use_triton(q) or q.dtype == torch.float64:
        row = (position - start).clamp(min=0)
        tables = cos[row][:, None], sin[row][:, None]  # (B, 1, half)
        if q_weight is not None:
            options = {"offset": offset, "casting": casting, "interleaved": interleaved}
            q, k = qk_norm_rope_reference(q, k, q_weight, k_weight, *tables, eps, **options)
        elif interleaved or 2 * cos.shape[1] < q.shape[3] or q.dtype != torch.float32:
            q, k = rope_reference(q, k, *tables, interleaved=interleaved)
        else:  # the same in few calls: on a CPU a small model spends its time between them
            a, b = torch.cat((q, k), 2).chunk(2, -1)
            cos, sin = (t.unsqueeze(2) for t in tables)
            turned = torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), -1)
            q, k = turned.split([q.shape[2], k.shape[2]], 2)
        slot = position % keys.shape[1]
        keys.index_copy_(1, slot, k if k.dtype == keys.dtype else k.to(keys.dtype))
        values.index_copy_(1, slot, v if v.dtype == values.dtype else v.to(values.dtype))
        options = {"window": window, "softcap": softcap}
        return decode_attention(q, keys, values, position, start, scale=scale, **options)
    q, k, v = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (q, k, v))
    return _launch(
        q, k, v, cos, sin, q_weight, k_weight, keys, values, position, start, counters, scale, window, softcap, eps,
        offset, casting == "llama", interleaved, overlap,
    )  # fmt: skip
