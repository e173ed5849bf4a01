"""Linear layers over few rows, with what stands before and after them in one launch: the products of decoding.

    y = act(n·Gᵀ)·(n·Uᵀ)   or   n·Wᵀ + b + residual          n = x, or x / sqrt(mean(x²) + eps) · (weight + offset)

With few rows a product takes as long as its weights take to arrive: N·K·s bytes. Everything else would be launches of
a few microseconds each, so the norm before it, several weights with the same input, the gate and the residual stream
are computed on the way. The norm's scale is one number a row: it multiplies y at the end, and x is read once.

Two kernels. ``row``: one row; products and sums on the ordinary cores, straight from the weights' loads in registers.
``tile``: up to 64 rows, through the tensor cores; long sums over K are split among programs (the last to finish, by an
atomic counter, adds the parts in their order, so the bits do not depend on who it is). Sums are fp32, rounded once at
the end; ``tile`` also rounds x · (weight + offset) to the weights' dtype, so fp16 can overflow there.

``overlap`` launches a kernel while the one before it in the stream still runs (programmatic dependent launch, sm_90):
it fetches its first weights, and waits before it touches anything that an earlier kernel wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import INTERPRETED, tl, triton, use_triton
from ligermodels.kernels._launch import cdiv, multiprocessors, on_device_of, power_of_two
from ligermodels.kernels.glu import _activation, geglu, swiglu
from ligermodels.kernels.rms_norm import rms_norm, unrounded_norm

MAX_ROWS = 64
_ACTS = {None: -1, "silu": 0, "gelu_tanh": 1}

if INTERPRETED:

    @triton.jit
    def wait_for_earlier_kernels(OVERLAP: tl.constexpr):
        """Nothing to wait for: the interpreter runs one kernel after the other."""

else:
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    except ImportError:  # no triton: the kernels below are never run
        gdc_launch_dependents = gdc_wait = None

    @triton.jit
    def wait_for_earlier_kernels(OVERLAP: tl.constexpr):
        """From here on what earlier kernels wrote may be read and overwritten, and the next kernel may start."""
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()


class Tile(NamedTuple):
    """How ``tile`` is cut: rows of the weight and columns a step, parts of the sum over K, warps, loads in flight."""

    n: int
    k: int
    splits: int
    warps: int
    stages: int


def few_rows_linear_reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``few_rows_linear`` in plain PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) if norm_weight is None else unrounded_norm(x, norm_weight, eps, offset, "none")
    biases = biases or [None] * len(weights)
    parts = [F.linear(h, w.to(wide), None if b is None else b.to(wide)) for w, b in zip(weights, biases, strict=True)]
    if gate is None:
        y = torch.cat(parts, -1)
    else:
        y = (F.silu(parts[0]) if gate == "silu" else F.gelu(parts[0], approximate="tanh")) * parts[1]
    return (y if residual is None else y + residual).to(out_dtype or x.dtype)


@triton.jit
def _rows_of_weight(
    x_ptr, norm_ptr, w_ptr, u_ptr, b_ptr, residual_ptr, out_ptr, tile, N, eps, offset, K: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISE: tl.constexpr,
    OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row x, from the same rows of w (and of u, if gated)."""
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)
    # Rows beyond the end are read as the last one and not stored: loads without a mask are wide ones.
    line = tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K
    first = tl.load(w_ptr + line + cols[None, :], mask=(cols < K)[None, :], other=0.0, eviction_policy="evict_first")
    if ACT >= 0:
        first_up = tl.load(u_ptr + line + cols[None, :], mask=(cols < K)[None, :], other=0.0,
                           eviction_policy="evict_first")  # fmt: skip
    wait_for_earlier_kernels(OVERLAP)
    squares = tl.zeros([BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + cols
        if start == 0:
            w = first
            if ACT >= 0:
                up = first_up
        elif start + BLOCK_K <= K:
            w = tl.load(w_ptr + line + k[None, :], eviction_policy="evict_first")
            if ACT >= 0:
                up = tl.load(u_ptr + line + k[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(w_ptr + line + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            if ACT >= 0:
                up = tl.load(u_ptr + line + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + offset
        total += w.to(tl.float32) * x[None, :]
        if ACT >= 0:
            total_up += up.to(tl.float32) * x[None, :]
    y = tl.sum(total, axis=1)
    inside = rows < N
    if NORM:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, axis=0), K * 1.0) + eps))
        y *= rstd
    if BIAS:
        y += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if ACT >= 0:
        z = tl.sum(total_up, axis=1)
        if NORM:
            z *= rstd
        value, _ = _activation(y, ACT, PRECISE)
        y = value * z
    if RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _row_kernel(
    x_ptr, norm_ptr, w_ptr, v_ptr, u_ptr, b_ptr, c_ptr, d_ptr, residual_ptr, out_ptr, N, N2, N3, eps, offset,
    K: tl.constexpr, WEIGHTS: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PRECISE: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles = tl.cdiv(N, BLOCK_N)
    if WEIGHTS == 1:
        _rows_of_weight(x_ptr, norm_ptr, w_ptr, v_ptr, b_ptr, residual_ptr, out_ptr, tile, N, eps, offset, K,
                        NORM, ACT, BIAS, RESIDUAL, PRECISE, OVERLAP, BLOCK_N, BLOCK_K)  # fmt: skip
    else:
        tiles2 = tl.cdiv(N2, BLOCK_N)
        if tile < tiles:
            _rows_of_weight(x_ptr, norm_ptr, w_ptr, w_ptr, b_ptr, residual_ptr, out_ptr, tile, N, eps, offset, K,
                            NORM, ACT, BIAS, RESIDUAL, PRECISE, OVERLAP, BLOCK_N, BLOCK_K)  # fmt: skip
        elif tile < tiles + tiles2:
            _rows_of_weight(x_ptr, norm_ptr, v_ptr, v_ptr, c_ptr, residual_ptr, out_ptr + N, tile - tiles, N2, eps,
                            offset, K, NORM, ACT, BIAS, RESIDUAL, PRECISE, OVERLAP, BLOCK_N, BLOCK_K)  # fmt: skip
        else:
            _rows_of_weight(x_ptr, norm_ptr, u_ptr, u_ptr, d_ptr, residual_ptr, out_ptr + N + N2, tile - tiles - tiles2,
                            N3, eps, offset, K, NORM, ACT, BIAS, RESIDUAL, PRECISE, OVERLAP, BLOCK_N,
                            BLOCK_K)  # fmt: skip


@triton.jit
def _tile_of_weight(
    x_ptr, norm_ptr, w_ptr, u_ptr, b_ptr, residual_ptr, out_ptr, partial_ptr, count_ptr, tile, split, M, N, x_row,
    residual_row, out_row, eps, offset, K: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PRECISE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) outputs: rows of w (and of u, if gated) by all rows of x, over one part of K."""
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    w_line = w_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K
    u_line = u_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K
    x_line = x_ptr + tl.minimum(batch, M - 1)[:, None] * x_row
    squares = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    share: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    for step in range(split * share, tl.minimum(split * share + share, STEPS)):
        k = step * BLOCK_K + cols
        if EVEN:
            w = tl.load(w_line + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_line + k[None, :])
        else:
            w = tl.load(w_line + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_line + k[None, :], mask=(k < K)[None, :], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + offset
            x = (wide * norm[None, :]).to(x.dtype)
        if PRECISE:
            total += tl.dot(w, tl.trans(x), input_precision="ieee")
        else:
            total += tl.dot(w, tl.trans(x))
        if ACT >= 0:
            if EVEN:
                up = tl.load(u_line + k[None, :], eviction_policy="evict_first")
            else:
                up = tl.load(u_line + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            if PRECISE:
                total_up += tl.dot(up, tl.trans(x), input_precision="ieee")
            else:
                total_up += tl.dot(up, tl.trans(x))
    is_last = True
    if SPLITS > 1:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + batch[None, :]
        parts = partial_ptr + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M) + inner
        tl.store(parts + split * (BLOCK_N * BLOCK_M), total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        is_last = tl.atomic_add(count_ptr + tile, 1) == SPLITS - 1
        if is_last:
            tl.store(count_ptr + tile, 0)  # for the next launch
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in range(SPLITS):
                total += tl.load(parts + part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    y = total
    mask = (rows < N)[:, None] & (batch < M)[None, :] & is_last
    if NORM:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, K * 1.0) + eps))
        y *= rstd[None, :]
    if BIAS:
        y += tl.load(b_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if ACT >= 0:
        z = total_up
        if NORM:
            z *= rstd[None, :]
        value, _ = _activation(y, ACT, PRECISE)
        y = value * z
    if RESIDUAL:
        y += tl.load(residual_ptr + batch[None, :] * residual_row + rows[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + batch[None, :] * out_row + rows[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_kernel(
    x_ptr, norm_ptr, w_ptr, v_ptr, u_ptr, b_ptr, c_ptr, d_ptr, residual_ptr, out_ptr, partial_ptr, count_ptr,
    M, N, N2, N3, x_row, residual_row, out_row, eps, offset, K: tl.constexpr, WEIGHTS: tl.constexpr,
    NORM: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISE: tl.constexpr,
    OVERLAP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    tiles = tl.cdiv(N, BLOCK_N)
    wait_for_earlier_kernels(OVERLAP)
    if WEIGHTS == 1:
        _tile_of_weight(x_ptr, norm_ptr, w_ptr, v_ptr, b_ptr, residual_ptr, out_ptr, partial_ptr, count_ptr, tile,
                        split, M, N, x_row, residual_row, out_row, eps, offset, K, NORM, ACT, BIAS, RESIDUAL, PRECISE,
                        SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    else:
        tiles2 = tl.cdiv(N2, BLOCK_N)
        if tile < tiles:
            _tile_of_weight(x_ptr, norm_ptr, w_ptr, w_ptr, b_ptr, residual_ptr, out_ptr, partial_ptr, count_ptr, tile,
                            split, M, N, x_row, residual_row, out_row, eps, offset, K, NORM, ACT, BIAS, RESIDUAL,
                            PRECISE, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        elif tile < tiles + tiles2:
            _tile_of_weight(x_ptr, norm_ptr, v_ptr, v_ptr, c_ptr, residual_ptr, out_ptr + N, partial_ptr, count_ptr,
                            tile - tiles, split, M, N2, x_row, residual_row, out_row, eps, offset, K, NORM, ACT, BIAS,
                            RESIDUAL, PRECISE, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        else:
            _tile_of_weight(x_ptr, norm_ptr, u_ptr, u_ptr, d_ptr, residual_ptr, out_ptr + N + N2, partial_ptr,
                            count_ptr, tile - tiles - tiles2, split, M, N3, x_row, residual_row, out_row, eps, offset,
                            K, NORM, ACT, BIAS, RESIDUAL, PRECISE, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip


def row_shape(n: int, k: int, *, gated: bool) -> tuple[int, int, int]:
    """(rows of the weight, columns a step, warps) of a program of ``row``: about 16 KiB in flight, few idle columns."""
    fitting = (b for b in (2048, 1024, 512) if cdiv(k, b) * b <= 1.15 * k)
    block_k = next(fitting, min(power_of_two(k), 1024))
    return (2 if gated or k > 4096 else 4), block_k, 4


def tile_shape(n: int, k: int, m: int, *, several: bool, wide: bool, device: torch.device) -> Tile:
    """The cut for n outputs in all, k inputs and m rows. ``several``: a norm, a gate or several weights, not split;
    ``wide``: fp32, whose products are not the tensor cores'."""
    programs = 2 * multiprocessors(device)
    block_n = next((b for b in (64, 32) if n >= b * programs), 16) if not wide else 16
    block_k = 64 if wide else 128 if block_n == 64 or m > 32 else 256
    block_k = min(block_k, max(16, power_of_two(k)))
    splits = 1
    if not several:
        while cdiv(n, block_n) * splits < programs and splits < 8 and k // (2 * splits * block_k) >= 2:
            splits *= 2
    return Tile(block_n, block_k, splits, 4, 4 if m <= 32 else 3)


def _by_row(x, weights, biases, norm_weight, eps, offset, act, residual, out, overlap, shape):
    k, gated = x.shape[1], act >= 0
    block_n, block_k, warps = shape or row_shape(sum(w.shape[0] for w in weights), k, gated=gated)
    parts = weights if not gated else weights[:1]
    ends = [w.shape[0] for w in parts] + [0] * (3 - len(parts))
    pointers = [*weights, *[weights[0]] * (3 - len(weights))]
    b = [x if t is None else t for t in (*biases, *[None] * (3 - len(biases)))]
    with on_device_of(x):
        _row_kernel[(sum(cdiv(end, block_n) for end in ends),)](
            x, x if norm_weight is None else norm_weight, *pointers, *b, x if residual is None else residual, out,
            *ends, eps, offset, K=k, WEIGHTS=len(parts), NORM=norm_weight is not None, ACT=act,
            BIAS=biases[0] is not None, RESIDUAL=residual is not None, PRECISE=x.dtype == torch.float32,
            OVERLAP=overlap, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip


def _by_tile(x, weights, biases, norm_weight, eps, offset, act, residual, out, overlap, shape, counters):
    m, (n, k) = x.shape[0], weights[0].shape
    parts = weights if act < 0 else weights[:1]
    several = len(weights) > 1 or norm_weight is not None
    wide = x.dtype == torch.float32
    shape = shape or tile_shape(sum(w.shape[0] for w in weights), k, m, several=several, wide=wide, device=x.device)
    if several and shape.splits > 1:
        raise LigerError("few_rows_linear: a norm, a gate or several weights cannot be split over K")
    ends = [w.shape[0] for w in parts] + [0] * (3 - len(parts))
    pointers = [*weights, *[weights[0]] * (3 - len(weights))]
    b = [x if t is None else t for t in (*biases, *[None] * (3 - len(biases)))]
    block_m = max(16, power_of_two(m))
    partial = count = out
    if shape.splits > 1:
        tiles = cdiv(n, shape.n)
        partial = torch.empty(tiles * shape.splits * shape.n * block_m, dtype=torch.float32, device=x.device)
        enough = counters is not None and counters.numel() >= tiles
        count = counters if enough else torch.zeros(tiles, dtype=torch.int32, device=x.device)
    with on_device_of(x):
        _tile_kernel[(sum(cdiv(end, shape.n) for end in ends) * shape.splits,)](
            x, x if norm_weight is None else norm_weight, *pointers, *b, x if residual is None else residual, out,
            partial, count, m, *ends, x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), eps,
            offset, K=k, WEIGHTS=len(parts), NORM=norm_weight is not None, ACT=act, BIAS=biases[0] is not None,
            RESIDUAL=residual is not None, PRECISE=wide, OVERLAP=overlap, SPLITS=shape.splits,
            BLOCK_M=block_m, BLOCK_N=shape.n, BLOCK_K=shape.k, num_warps=shape.warps, num_stages=shape.stages,
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip


def _by_torch(x, weights, biases, norm_weight, eps, offset, gate, residual, out):
    """The same through cuBLAS, with the norm and the gate as kernels of their own."""
    h = x if norm_weight is None else rms_norm(x, norm_weight, eps, offset=offset, casting="none")
    if gate is not None:
        y = [F.linear(h, w, b) for w, b in zip(weights, biases, strict=True)]
        out.copy_(swiglu(*y) if gate == "silu" else geglu(*y))
        return
    start = 0
    for w, b in zip(weights, biases, strict=True):
        part = out[:, start : start + w.shape[0]]
        part.copy_(F.linear(h, w, b))
        start += w.shape[0]
    if residual is not None:
        out += residual


def _on_cpu(x, weights, biases, norm_weight, eps, offset, gate, residual):
    """The reference in fp32 in fewer calls: a small model spends its time between them."""
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[-1:], norm_weight if offset == 0 else norm_weight + offset, eps)
    parts = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    if gate is not None:
        return (F.silu(parts[0]) if gate == "silu" else F.gelu(parts[0], approximate="tanh")).mul_(parts[1])
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return y if residual is None else y.add_(residual)


def few_rows_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    method: str | None = None,
    shape: tuple[int, ...] | None = None,
    counters: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Products of a few rows with one to three weights, the norm before and the sum after them included. No gradients.

    x: (M, K), fp32, bf16 or fp16, rows contiguous; weights: contiguous (N, K) each, in x's dtype; biases: (N,) or None
    each, all or none. norm_weight (K,): x is RMS-normalised first, by ``eps`` and ``offset``. Without ``gate`` the
    products stand side by side, (M, ΣN), plus ``residual`` (M, N) if given (one weight then). With ``gate`` "silu" or
    "gelu_tanh" there are two weights, (gate, up), and the result is act(gate)·up, (M, N). ``out_dtype``: x's if None.

    ``method`` "row" (M = 1), "tile" (M up to 64) or "torch" (cuBLAS); None picks. ``shape`` overrides how the kernel is
    cut, for tuning. ``counters``: int32 zeros, one for each 16 outputs, left as zeros, which saves filling them anew.
    ``overlap``: see the head of this file. Raises LigerError for what does not fit.
    """
    if gate not in _ACTS:
        raise LigerError(f"few_rows_linear: gate must be one of {', '.join(map(str, _ACTS))}, found {gate!r}")
    fits = x.dim() == 2 and all(w.dim() == 2 and w.shape[1] == x.shape[1] and w.dtype == x.dtype for w in weights)
    most = 1 if residual is not None else 3
    if not fits or not 1 <= len(weights) <= most or (gate is not None and len(weights) != 2):
        raise LigerError(
            f"few_rows_linear: x is {tuple(x.shape)} {x.dtype}, the weights {[tuple(w.shape) for w in weights]} "
            f"{weights[0].dtype if weights else ''}; expected (M, K) and one to three (N, K) of the same dtype (two "
            "with a gate, one with a residual)"
        )
    biases = [None] * len(weights) if biases is None else list(biases)
    if any((b is None) != (biases[0] is None) for b in biases):
        raise LigerError("few_rows_linear: expected a bias for each weight, or none")
    options = {"norm_weight": norm_weight, "eps": eps, "offset": offset, "gate": gate, "residual": residual}
    if not use_triton(x) or x.dtype == torch.float64:
        if x.dtype == torch.float32 and out_dtype in (None, torch.float32):
            return _on_cpu(x, weights, biases, norm_weight, eps, offset, gate, residual)
        return few_rows_linear_reference(x, weights, biases, **options, out_dtype=out_dtype)
    if method is None:
        method = "row" if x.shape[0] == 1 else "tile" if x.shape[0] <= MAX_ROWS else "torch"
    if (method == "row" and x.shape[0] != 1) or (method == "tile" and x.shape[0] > MAX_ROWS):
        raise LigerError(f"few_rows_linear: {x.shape[0]} rows are too many for method {method!r}")
    width = weights[0].shape[0] if gate else sum(w.shape[0] for w in weights)
    out = torch.empty(x.shape[0], width, dtype=out_dtype or x.dtype, device=x.device)
    if method == "torch":
        _by_torch(x, weights, biases, norm_weight, eps, offset, gate, residual, out)
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    weights = [w if w.is_contiguous() else w.contiguous() for w in weights]
    arguments = (x, weights, biases, norm_weight, eps, offset, _ACTS[gate], residual, out, overlap)
    if method == "row":
        _by_row(*arguments, shape)
    else:
        _by_tile(*arguments, None if shape is None else Tile(*shape), counters)
    return out
