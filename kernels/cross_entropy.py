"""Cross-entropy over a large vocabulary, and the row steps that linear_cross_entropy shares.

For one row of logits x with label t, V classes, class weights w (1 without), smoothing e, z-loss factor a:

    z    = cap * tanh(x / cap) / T                   (z = x / T without a soft cap; T = 1 but in linear_logprob)
    lse  = log sum_v exp(z_v)
    loss = (1 - e) * w_t * (lse - z_t) + e / V * sum_v w_v * (lse - z_v) + a * lse**2
    dx_v = (A * p_v - e / V * w_v - [v = t] * (1 - e) * w_t) * dz_v / dx_v
    p_v  = exp(z_v - lse),  A = (1 - e) * w_t + e / V * sum_v w_v + 2 * a * lse

Ignored rows give 0 and no gradient. The forward reads the N * V logits once (online softmax) and saves per row the
maximum m and s = sum exp(z - m), 8 bytes; the backward reads the logits once more and writes a fresh gradient:
3 * N * V elements in all. p is exp(z - m) / s, never exp(z - lse): at |z| = 100 the rounding of lse alone would be
0.4 % of 1 - p at p = 0.999. Everything is fp32 inside, rounded once when stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import INTERPRETED, register, tl, triton, use_triton
from ligermodels.kernels._launch import multiprocessors, no_second_derivative, on_device_of, power_of_two

__all__ = ["cross_entropy"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Terms(NamedTuple):
    """The run-time constants of a row: softcap 0.0 means none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    classes: int
    heat: float = 1.0  # 1 / temperature

    @property
    def shape(self) -> int:
        """Which kernels to compile: bit 1 for a soft cap, bit 2 for a temperature."""
        return (self.softcap != 0.0) + 2 * (self.heat != 1.0)


class Scales(NamedTuple):
    """fp32 device scalars: what multiplies the likelihood and the z-loss of each row, and the sum of class weights."""

    likelihood: torch.Tensor
    z_loss: torch.Tensor
    weight_sum: torch.Tensor


class Extras(NamedTuple):
    """What the row steps also write on request, (N,): the loss of reduction "none" and logsumexp (fp32), argmax."""

    loss: torch.Tensor
    logsumexp: torch.Tensor
    argmax: torch.Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device) -> Extras:
        return cls(*(torch.empty(n, dtype=t, device=device) for t in (torch.float32, torch.float32, torch.int64)))

    def part(self, tokens: slice) -> Extras:
        return Extras(*(t[tokens] for t in self))


def cross_entropy_reference(
    input, target, *, weight=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"
):
    """The formula above in plain differentiable torch operations, in the dtype of ``input``: for tests and reading."""
    classes = input.shape[-1]
    z = input if softcap is None else softcap * torch.tanh(input / softcap)
    lse = torch.logsumexp(z, dim=-1)
    valid = target != ignore_index
    label = torch.where(valid, target, 0).long()
    w = torch.ones(classes, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    hard = w[label] * (lse - z.gather(-1, label.unsqueeze(-1)).squeeze(-1))
    smooth = (w * (lse.unsqueeze(-1) - z)).sum(-1) / classes
    nll = torch.where(valid, (1 - label_smoothing) * hard + label_smoothing * smooth, 0)
    square = torch.where(valid, z_loss * lse.square(), 0)
    if reduction == "none":
        return nll + square
    if reduction == "sum":
        return (nll + square).sum()
    total = torch.where(valid, w[label], 0).sum()
    return nll.sum() / torch.where(total == 0, 1, total) + square.sum() / valid.sum().clamp(min=1)


# --- Triton ---------------------------------------------------------------------------------------------------------
# A block of columns is viewed as (block / 8, 8): one thread holds 8 neighbours, keeps its own running maximum and
# sum, and meets the other threads only once a row. The loops run unmasked; the last, partial block is apart, so that
# an odd vocabulary does not cost vector loads everywhere.


@triton.jit
def _tanh(u):
    # 1 - tanh**2 comes from the exponential, as the difference cancels where tanh saturates; near 0 a polynomial
    # replaces the quotient, which cancels there.
    a = tl.abs(u)
    t = tl.exp(-2.0 * a)
    far = (1.0 - t) / (1.0 + t)
    q = u * u
    near = u * (1.0 + q * (-0.33333333 + q * (0.13333333 + q * (-0.05396825 + q * 0.02186949))))
    return tl.where(a < 0.25, near, tl.where(u < 0, -far, far)), 4.0 * t / ((1.0 + t) * (1.0 + t))


@triton.jit
def _shaped(x, softcap, heat, SHAPE: tl.constexpr):
    """z and dz / dx (the latter only if SHAPE is not 0)."""
    if SHAPE == 0:
        return x, x
    elif SHAPE == 2:
        return x * heat, tl.zeros_like(x) + heat
    else:
        tanh, slope = _tanh(x / softcap)
        if SHAPE == 1:
            return softcap * tanh, slope
        else:
            return softcap * heat * tanh, heat * slope


@triton.jit
def _columns(start, col_stride, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    if UNIT:
        return cols, cols
    else:
        return cols, cols.to(tl.int64) * col_stride


@triton.jit
def _load(row, start, end, col_stride, BLOCK: tl.constexpr, UNIT: tl.constexpr, KEEP: tl.constexpr):
    """Logits of the columns from ``start``, in their dtype. Both ends are multiples of BLOCK: all are there, or none.

    The loops over a row read a block ahead: otherwise its latency and its arithmetic would add up.
    """
    _, offsets = _columns(start, col_stride, BLOCK, UNIT)
    if KEEP:  # the row is read again soon
        return tl.load(row + offsets, mask=start < end, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(row + offsets, mask=start < end, other=0.0, eviction_policy="evict_first")


@triton.jit
def _accumulate(
    x, m, s, dot, best, row, col_stride, start, width, weight, softcap, heat,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
    SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    cols, offsets = _columns(start, col_stride, BLOCK, UNIT)
    if TAIL:
        keep = cols < width
        x = tl.load(row + offsets, mask=keep, other=0.0, eviction_policy="evict_last")
        z, _ = _shaped(x.to(tl.float32), softcap, heat, SHAPE)
        term = tl.where(keep, z, 0.0)
        z = tl.where(keep, z, float("-inf"))
    else:
        z, _ = _shaped(x.to(tl.float32), softcap, heat, SHAPE)
        term = z
    grouped = tl.reshape(z, (BLOCK // 8, 8))
    if ARGMAX:
        high, where = tl.max(grouped, 1, return_indices=True)
        place = start + tl.arange(0, BLOCK // 8) * 8 + where
        best = tl.where(high > m, place, best)
    else:
        high = tl.max(grouped, 1)
    top = tl.maximum(m, high)
    scale = tl.exp(m - top)
    below = grouped - top[:, None]
    if ENTROPY:  # dot is the sum of exp(z - m) * (z - m); the bound keeps 0 * -inf out
        dot = scale * (dot + (m - top) * s) + tl.sum(tl.exp(below) * tl.maximum(below, -1e4), 1)
    s = s * scale + tl.sum(tl.exp(below), 1)
    if SMOOTH:
        if WEIGHT:
            term = term * tl.load(weight + cols, mask=cols < width, other=0.0)
        dot += tl.sum(tl.reshape(term, (BLOCK // 8, 8)), 1)
    return top, s, dot, best


@triton.jit
def _statistics(
    row, col_stride, width, weight, softcap, heat,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
    SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """One row's maximum m, sum s of exp(z - m), sum of w * z (of exp(z - m) * (z - m) for ENTROPY), place of m."""
    LANES: tl.constexpr = BLOCK // 8
    m = tl.full((LANES,), -3.0e38, tl.float32)  # finite: -inf - -inf would be NaN
    s = tl.zeros((LANES,), tl.float32)
    dot = tl.zeros((LANES,), tl.float32)
    best = tl.zeros((LANES,), tl.int32)
    whole = width // BLOCK * BLOCK
    x = _load(row, 0, whole, col_stride, BLOCK, UNIT, True)
    for start in range(0, whole, BLOCK):
        ahead = _load(row, start + BLOCK, whole, col_stride, BLOCK, UNIT, True)
        m, s, dot, best = _accumulate(
            x, m, s, dot, best, row, col_stride, start, width, weight, softcap, heat,
            BLOCK, UNIT, False, SHAPE, SMOOTH, WEIGHT, ARGMAX, ENTROPY,
        )  # fmt: skip
        x = ahead
    if whole < width:
        m, s, dot, best = _accumulate(
            x, m, s, dot, best, row, col_stride, whole, width, weight, softcap, heat,
            BLOCK, UNIT, True, SHAPE, SMOOTH, WEIGHT, ARGMAX, ENTROPY,
        )  # fmt: skip
    top = tl.max(m, 0)
    first = tl.min(tl.where(m == top, best, 2147483647), 0)
    scale = tl.exp(m - top)
    if ENTROPY:
        dot = scale * (dot + (m - top) * s)
    return top, tl.sum(s * scale, 0), tl.sum(dot, 0), first


@triton.jit
def _label(target, index, weight, ignore_index, classes, WEIGHT: tl.constexpr):
    """The label, whether it counts, whether it is a class at all (nothing is read outside), and its weight."""
    t = tl.load(target + index).to(tl.int64)
    valid = t != ignore_index
    known = (t >= 0) & (t < classes)
    w = 1.0
    if WEIGHT:
        w = tl.load(weight + t, mask=valid & known, other=0.0)
    return t, valid, known, w


@triton.jit
def _row_loss(m, s, dot, z_t, w_t, valid, known, ce, zs, weight_sum, smoothing, z_loss, classes):
    log_s = tl.log(s)
    lse = m + log_s
    nll = (1.0 - smoothing) * w_t * (log_s - (z_t - m)) + smoothing / classes * (weight_sum * lse - dot)
    loss = ce * nll + zs * z_loss * lse * lse
    return tl.where(valid, tl.where(known, loss, float("nan")), 0.0)


@triton.jit
def _write_gradient(
    x, row, col_stride, out, width, weight, softcap, heat, m, slope_p, slope_z, slope_all, slope_t, t,
    start, BLOCK: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
    SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    cols, offsets = _columns(start, col_stride, BLOCK, UNIT)
    if TAIL:
        x = tl.load(row + offsets, mask=cols < width, other=0.0, eviction_policy="evict_first")
    z, slope = _shaped(x.to(tl.float32), softcap, heat, SHAPE)
    if ENTROPY:
        slope_p += slope_z * tl.maximum(z - m, -1e4)
    g = slope_p * tl.exp(z - m)
    if SMOOTH:
        if WEIGHT:
            g -= slope_all * tl.load(weight + cols, mask=cols < width, other=0.0)
        else:
            g -= slope_all
    g = tl.where(cols == t, g - slope_t, g)
    if SHAPE != 0:
        g *= slope
    if TAIL:
        tl.store(out + cols, g.to(out.dtype.element_ty), mask=cols < width)
    else:
        tl.store(out + cols, g.to(out.dtype.element_ty))


@triton.jit
def _gradient(
    row, col_stride, out, width, weight, softcap, heat, m, s, t, w_t, valid, known, ce, zs, weight_sum,
    smoothing, z_loss, classes, first, dot, entropy,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
    SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Write one row's dx; ``first`` is the class of column 0, ``entropy`` the gradient of the row's entropy."""
    whole = width // BLOCK * BLOCK
    if valid:
        inverse = 1.0 / s
        slope_p = ce * ((1.0 - smoothing) * w_t + smoothing / classes * weight_sum)
        slope_p += zs * 2.0 * z_loss * (m + tl.log(s))
        if ENTROPY:  # the entropy is log(s) - dot / s; its gradient -p * (z - m - dot / s)
            slope_p += entropy * dot * inverse
        slope_p = tl.where(known, slope_p, float("nan")) * inverse
        slope_all = ce * smoothing / classes
        slope_t = ce * (1.0 - smoothing) * w_t
        slope_z = -entropy * inverse
        local = (t - first).to(tl.int32)
        x = _load(row, 0, whole, col_stride, BLOCK, UNIT, False)
        for start in range(0, whole, BLOCK):
            # in place, too: the block ahead is read before its own gradient is written, and by the same threads
            ahead = _load(row, start + BLOCK, whole, col_stride, BLOCK, UNIT, False)
            _write_gradient(
                x, row, col_stride, out, width, weight, softcap, heat, m, slope_p, slope_z, slope_all,
                slope_t, local, start, BLOCK, UNIT, False, SHAPE, SMOOTH, WEIGHT, ENTROPY,
            )  # fmt: skip
            x = ahead
        if whole < width:
            _write_gradient(
                x, row, col_stride, out, width, weight, softcap, heat, m, slope_p, slope_z, slope_all,
                slope_t, local, whole, BLOCK, UNIT, True, SHAPE, SMOOTH, WEIGHT, ENTROPY,
            )  # fmt: skip
    else:
        for start in range(0, width, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            tl.store(out + cols, tl.zeros((BLOCK,), out.dtype.element_ty), mask=cols < width)


@triton.jit(do_not_specialize=["ignore_index", "first", "state_stride"])
def _forward_kernel(
    logits, inner, outer_stride, row_stride, col_stride, width, first, target, weight, ce, zs, weight_sum,
    state, loss, each, logsumexp, argmax, state_stride, ignore_index, smoothing, z_loss, softcap, heat, classes,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, CARRY: tl.constexpr,
    SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, EXTRAS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Statistics and loss of one row of ``width`` columns, classes ``first`` on; CARRY continues earlier columns."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + (index // inner) * outer_stride + (index % inner) * row_stride
    m, s, dot, best = _statistics(
        row, col_stride, width, weight + first, softcap, heat, BLOCK, UNIT, SHAPE, SMOOTH, WEIGHT, EXTRAS, ENTROPY
    )
    # Only now: before the row, waiting for the label would delay its first loads, which shows where rows are short.
    t, valid, known, w_t = _label(target, index, weight, ignore_index, classes, WEIGHT)
    local = t - first
    here = (local >= 0) & (local < width) & valid
    z_t, _ = _shaped(tl.load(row + local * col_stride, mask=here, other=0.0).to(tl.float32), softcap, heat, SHAPE)
    best += first
    place = state + index
    if CARRY:
        before = tl.load(place)
        s_before = tl.load(place + state_stride)
        dot_before = tl.load(place + 2 * state_stride)
        if EXTRAS:
            best = tl.where(m > before, best, tl.load(argmax + index).to(tl.int32))
        top = tl.maximum(m, before)
        if ENTROPY:
            dot = tl.exp(m - top) * (dot + (m - top) * s)
            dot_before = tl.exp(before - top) * (dot_before + (before - top) * s_before)
        s = s * tl.exp(m - top) + s_before * tl.exp(before - top)
        m = top
        dot += dot_before
        z_t = tl.where(here, z_t, tl.load(place + 3 * state_stride))
    tl.store(place, m)
    tl.store(place + state_stride, s)
    tl.store(place + 2 * state_stride, dot)
    tl.store(place + 3 * state_stride, z_t)
    total = tl.load(weight_sum)
    if EXTRAS:
        value = _row_loss(m, s, dot, z_t, w_t, valid, known, 1.0, 1.0, total, smoothing, z_loss, classes)
        tl.store(each + index, value)
        tl.store(logsumexp + index, m + tl.log(s))
        tl.store(argmax + index, best.to(tl.int64))
    value = _row_loss(m, s, dot, z_t, w_t, valid, known, tl.load(ce), tl.load(zs), total, smoothing, z_loss, classes)
    tl.store(loss + index, value)


@triton.jit(do_not_specialize=["ignore_index", "first", "state_stride"])
def _backward_kernel(
    logits, inner, outer_stride, row_stride, col_stride, out, out_stride, width, first, target, weight,
    ce, zs, weight_sum, state, state_stride, upstream, upstream_stride, entropy, entropy_stride,
    ignore_index, smoothing, z_loss, softcap, heat, classes,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
    SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + (index // inner) * outer_stride + (index % inner) * row_stride
    t, valid, known, w_t = _label(target, index, weight, ignore_index, classes, WEIGHT)
    g = tl.load(upstream + index * upstream_stride).to(tl.float32)
    _gradient(
        row, col_stride, out + index * out_stride, width, weight + first, softcap, heat,
        tl.load(state + index), tl.load(state + state_stride + index), t, w_t, valid, known,
        tl.load(ce) * g, tl.load(zs) * g, tl.load(weight_sum), smoothing, z_loss, classes, first,
        tl.load(state + 2 * state_stride + index), tl.load(entropy + index * entropy_stride).to(tl.float32),
        BLOCK, UNIT, SHAPE, SMOOTH, WEIGHT, ENTROPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ignore_index", "state_stride"])
def _fused_kernel(
    logits, row_stride, rows, width, target, weight, ce, zs, weight_sum, loss, upstream, upstream_stride,
    each, logsumexp, argmax, ignore_index, smoothing, z_loss, softcap, heat,
    BLOCK: tl.constexpr, SHAPE: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, UPSTREAM: tl.constexpr,
    EXTRAS: tl.constexpr,
):  # fmt: skip
    """Loss of whole rows, whose logits (a buffer of ours) become their gradient.

    Few programs run through many rows, so that the rows in flight fit the L2 cache, which serves the second read.
    """
    ce_all = tl.load(ce)
    z_all = tl.load(zs)
    total = tl.load(weight_sum)
    own = tl.program_id(0).to(tl.int64)
    for earlier in range(0, rows - tl.program_id(0), tl.num_programs(0)):
        index = own + earlier
        row = logits + index * row_stride
        t, valid, known, w_t = _label(target, index, weight, ignore_index, width, WEIGHT)
        z_t, _ = _shaped(tl.load(row + t, mask=valid & known, other=0.0).to(tl.float32), softcap, heat, SHAPE)
        m, s, dot, best = _statistics(
            row, 1, width, weight, softcap, heat, BLOCK, True, SHAPE, SMOOTH, WEIGHT, EXTRAS, False
        )
        ce_scale = ce_all
        z_scale = z_all
        if UPSTREAM:
            g = tl.load(upstream + index * upstream_stride).to(tl.float32)
            ce_scale *= g
            z_scale *= g
        value = _row_loss(m, s, dot, z_t, w_t, valid, known, ce_all, z_all, total, smoothing, z_loss, width)
        tl.store(loss + index, value)
        if EXTRAS:
            value = _row_loss(m, s, dot, z_t, w_t, valid, known, 1.0, 1.0, total, smoothing, z_loss, width)
            tl.store(each + index, value)
            tl.store(logsumexp + index, m + tl.log(s))
            tl.store(argmax + index, best.to(tl.int64))
        _gradient(
            row, 1, row, width, weight, softcap, heat, m, s, t, w_t, valid, known, ce_scale, z_scale, total,
            smoothing, z_loss, width, 0, 0.0, 0.0, BLOCK, True, SHAPE, SMOOTH, WEIGHT, False,
        )  # fmt: skip


# --- The row steps: Triton, or the same in torch --------------------------------------------------------------------


def _launch(width: int, rows: int, device: torch.device) -> dict:
    """Block and warps for ``rows`` rows of ``width`` columns (small in the interpreter: its loops must loop).

    Measured on an H200: slices of 4,096 columns are read at 2.9 TB/s in blocks of 1,024 and at 1.8 in blocks of 4,096.
    A few rows, up to four a multiprocessor, need more threads each: 256 x 128,256 takes 88 µs in place of 100.
    """
    if rows <= 4 * multiprocessors(device) and width > 16384 and not INTERPRETED:
        return {"BLOCK": 4096 if width < 65536 else 8192, "num_warps": 16}
    block = 64 if INTERPRETED else min(1024 if width <= 16384 else 4096, max(256, power_of_two(width)))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def fused_launch(rows: int, row_bytes: int, processors: int) -> tuple[int, dict]:
    """Programs, and block and warps, of ``_fused_kernel``: as many rows at once as about 40 MB of L2 hold.

    Tried and slower (H200, 2.85 TB/s counting one read and one write): a row shared by several programs that keep it in
    registers and wait for each other's statistics, 1.5 to 1.9 TB/s; more rows at once, 1.7 to 2.2; this step on 16 to
    48 multiprocessors of a second stream while the others work on the product of the chunk before.
    """
    each = 1 if INTERPRETED else max(1, min(4, 40 * 10**6 // (processors * row_bytes)))
    warps = {1: 32, 2: 16}.get(each, 8)
    block = 64 if INTERPRETED else min(512 * warps, max(256, power_of_two(row_bytes // 2)))
    return min(rows, processors * each), {"BLOCK": block, "num_warps": max(1, min(warps, block // 512))}


def _layout(logits: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """``logits`` (a copy only if its leading dimensions do not fold into two), rows per outer step, and both strides.

    Folding two dimensions rather than one lets shifted logits, ``x[:, :-1]``, be read where they are.
    """
    folded: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    if len(folded) > 2:
        return _layout(logits.contiguous())
    if len(folded) < 2:
        size, stride = folded[0] if folded else (1, 0)
        return logits, size, 0, stride
    return logits, folded[1][0], folded[0][1], folded[1][1]


def _shaped_torch(x: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    if terms.softcap == 0.0:
        return (x, None) if terms.heat == 1.0 else (x * terms.heat, terms.heat)
    t = torch.exp(-2 * (x / terms.softcap).abs())
    return terms.softcap * terms.heat * torch.tanh(x / terms.softcap), 4 * terms.heat * t / (1 + t).square()


def row_forward(
    logits, target, weight, scales: Scales, terms: Terms, state, loss,
    *, first=0, carry=False, extras: Extras | None = None, entropy=False,
) -> None:  # fmt: skip
    """Fill ``state`` (4, N: m, s, sum of w z, z of the label), ``loss`` (N) and ``extras`` from ``logits``.

    ``logits`` (..., width) are the columns of classes ``first``..; ``carry`` continues with the earlier columns' state.
    With ``entropy`` (not with label smoothing), state[2] is the sum of exp(z - m) * (z - m) instead.
    """
    n, width = target.numel(), logits.shape[-1]
    if n == 0:
        return
    if use_triton(logits):
        logits, inner, outer_stride, row_stride = _layout(logits)
        none = loss  # a pointer that the kernel does not read
        with on_device_of(logits):
            _forward_kernel[(n,)](
                logits, inner, outer_stride, row_stride, logits.stride(-1), width, first, target,
                none if weight is None else weight, *scales, state, loss, *(extras or (none, none, none)),
                state.stride(0), terms.ignore_index, terms.label_smoothing, terms.z_loss, terms.softcap, terms.heat,
                terms.classes,
                UNIT=logits.stride(-1) == 1, CARRY=carry, SHAPE=terms.shape,
                SMOOTH=terms.label_smoothing != 0.0, WEIGHT=weight is not None, EXTRAS=extras is not None,
                ENTROPY=entropy, **_launch(width, n, logits.device),
            )  # fmt: skip
        return
    z, _ = _shaped_torch(logits.reshape(n, width).float(), terms)
    top, place = z.max(1)
    below = z - top[:, None]
    total = torch.exp(below).sum(1)
    if entropy:
        dot = (torch.exp(below) * below.clamp(min=-1e4)).sum(1)
    else:
        dot = z.sum(1) if weight is None else z @ weight[first : first + width]
    valid = target != terms.ignore_index
    local = target.long() - first
    here = valid & (local >= 0) & (local < width)
    z_t = z.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
    place = place + first
    if carry:
        before, total_before, dot_before, z_before = state
        if extras is not None:
            place = torch.where(top > before, place, extras.argmax)
        high = torch.maximum(top, before)
        up, up_before = torch.exp(top - high), torch.exp(before - high)
        if entropy:
            dot = up * (dot + (top - high) * total)
            dot_before = up_before * (dot_before + (before - high) * total_before)
        total = total * up + total_before * up_before
        top = high
        dot = dot + dot_before
        z_t = torch.where(here, z_t, z_before)
    state.copy_(torch.stack((top, total, dot, z_t)))
    smoothing = terms.label_smoothing
    w_t = 1.0 if weight is None else weight[torch.where(valid, target, 0).long()]
    lse = top + total.log()
    nll = (1 - smoothing) * w_t * (total.log() - (z_t - top))
    nll += smoothing / terms.classes * (scales.weight_sum * lse - dot)
    square = terms.z_loss * lse.square()
    loss.copy_(torch.where(valid, scales.likelihood * nll + scales.z_loss * square, 0.0))
    if extras is not None:
        for tensor, value in zip(extras, (torch.where(valid, nll + square, 0.0), lse, place), strict=True):
            tensor.copy_(value)


def row_backward(
    logits, out, target, weight, scales: Scales, terms: Terms, state, upstream, *, first=0, entropy=None
) -> None:
    """Write the gradient of ``logits`` (..., width) into ``out`` (N, width), which may be ``logits`` itself.

    ``upstream`` (N, any stride) is the gradient of each row's loss, ``entropy`` that of its entropy.
    """
    n, width = target.numel(), logits.shape[-1]
    if n == 0:
        return
    if use_triton(logits):
        logits, inner, outer_stride, row_stride = _layout(logits)
        with on_device_of(logits):
            _backward_kernel[(n,)](
                logits, inner, outer_stride, row_stride, logits.stride(-1), out, out.stride(0), width, first, target,
                state if weight is None else weight, *scales, state, state.stride(0), upstream, upstream.stride(0),
                upstream if entropy is None else entropy, 0 if entropy is None else entropy.stride(0),
                terms.ignore_index, terms.label_smoothing, terms.z_loss, terms.softcap, terms.heat, terms.classes,
                UNIT=logits.stride(-1) == 1, SHAPE=terms.shape, SMOOTH=terms.label_smoothing != 0.0,
                WEIGHT=weight is not None, ENTROPY=entropy is not None,
                **_launch(width, n, logits.device),
            )  # fmt: skip
        return
    z, slope = _shaped_torch(logits.reshape(n, width).float(), terms)
    smoothing = terms.label_smoothing
    ce, zs = scales.likelihood * upstream, scales.z_loss * upstream
    valid = target != terms.ignore_index
    w_t = 1.0 if weight is None else weight[torch.where(valid, target, 0).long()]
    slope_p = ce * ((1 - smoothing) * w_t + smoothing / terms.classes * scales.weight_sum)
    slope_p = slope_p + zs * 2 * terms.z_loss * (state[0] + state[1].log())
    below = z - state[0][:, None]
    g = slope_p[:, None]
    if entropy is not None:
        g = g - entropy[:, None] * (below.clamp(min=-1e4) - (state[2] / state[1])[:, None])
    g = g * torch.exp(below) / state[1][:, None]
    if smoothing:
        share = (ce * smoothing / terms.classes)[:, None]
        g -= share if weight is None else share * weight[first : first + width]
    local = target.long() - first
    here = valid & (local >= 0) & (local < width)
    column = torch.where(here, local, 0)[:, None]
    g.scatter_add_(1, column, torch.where(here, -ce * (1 - smoothing) * w_t, 0.0)[:, None])
    if slope is not None:
        g *= slope
    out.copy_(g.masked_fill_(~valid[:, None], 0.0))


def row_fused(
    logits, target, weight, scales: Scales, terms: Terms, loss, upstream=None, extras: Extras | None = None
) -> None:
    """Fill ``loss`` (N), ``extras``, and turn ``logits`` (N, V; inner stride 1, in place) into their gradient."""
    n, width = logits.shape
    if n == 0:
        return
    if use_triton(logits):
        programs, launch = fused_launch(n, width * logits.element_size(), multiprocessors(logits.device))
        with on_device_of(logits):
            _fused_kernel[(programs,)](
                logits, logits.stride(0), n, width, target, loss if weight is None else weight, *scales, loss,
                loss if upstream is None else upstream, 0 if upstream is None else upstream.stride(0),
                *(extras or (loss, loss, loss)),
                terms.ignore_index, terms.label_smoothing, terms.z_loss, terms.softcap, terms.heat,
                SHAPE=terms.shape, SMOOTH=terms.label_smoothing != 0.0, WEIGHT=weight is not None,
                UPSTREAM=upstream is not None, EXTRAS=extras is not None, **launch,
            )  # fmt: skip
        return
    state = torch.empty(4, n, dtype=torch.float32, device=logits.device)
    row_forward(logits, target, weight, scales, terms, state, loss, extras=extras)
    ones = scales.likelihood.new_ones(()).expand(n)
    row_backward(logits, logits, target, weight, scales, terms, state, ones if upstream is None else upstream)


# --- What both public functions check and prepare --------------------------------------------------------------------


def check_labels(target: torch.Tensor, terms: Terms) -> None:
    """On CPU, raise LigerError for a label that is no class; CUDA does not wait for the answer and gives NaN rows."""
    if target.is_cuda:
        return
    bad = (target != terms.ignore_index) & ((target < 0) | (target >= terms.classes))
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise LigerError(
            f"target holds label {target[tuple(place)].item()} at position {tuple(place)}, but there are "
            f"{terms.classes} classes: labels must be in [0, {terms.classes}) or ignore_index ({terms.ignore_index})"
        )


def check_terms(
    classes, device, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction
) -> tuple[Terms, torch.Tensor | None]:
    """Validate the options that both losses share; return them and the fp32 class weights."""
    if target.dtype not in (torch.int64, torch.int32):
        raise LigerError(f"target must hold int64 or int32 labels, got {target.dtype}")
    if target.device != device:
        raise LigerError(f"target is on {target.device}, input on {device}: move one of them")
    if reduction not in ("mean", "sum", "none"):
        raise LigerError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise LigerError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0.0:
        raise LigerError(f"softcap must be positive or None, got {softcap}")
    if classes == 0:
        raise LigerError("there are 0 classes: the vocabulary is empty")
    if weight is not None:
        if weight.shape != (classes,):
            raise LigerError(f"weight must have one entry a class, shape ({classes},), got {tuple(weight.shape)}")
        if weight.device != device or not weight.is_floating_point():
            raise LigerError(f"weight must be a floating tensor on {device}, got {weight.dtype} on {weight.device}")
        weight = weight.detach().float().contiguous()
    return Terms(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), classes), weight


def make_scales(target: torch.Tensor, weight: torch.Tensor | None, terms: Terms, reduction: str) -> Scales:
    """Normalisers as device scalars, so that nothing waits for the count of valid tokens (0 valid: loss 0)."""
    one = torch.ones((), dtype=torch.float32, device=target.device)
    total = one * terms.classes if weight is None else weight.sum()
    if reduction != "mean":
        return Scales(one, one, total)
    valid = target != terms.ignore_index
    by_count = 1.0 / valid.sum().clamp(min=1).to(torch.float32)
    if weight is None:
        return Scales(by_count, by_count, total)
    chosen = torch.where(valid, weight[target.clamp(0, terms.classes - 1).long()], 0.0).sum()
    return Scales(1.0 / torch.where(chosen == 0, 1.0, chosen), by_count, total)


# --- The operator ----------------------------------------------------------------------------------------------------


def _forward(input, target, weight, ce, zs, weight_sum, ignore_index, label_smoothing, z_loss, softcap):
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, input.shape[-1])
    check_labels(target, terms)
    loss = torch.empty(target.shape, dtype=torch.float32, device=input.device)
    state = torch.empty(4, target.numel(), dtype=torch.float32, device=input.device)
    scales = Scales(ce, zs, weight_sum)
    row_forward(input, target.reshape(-1).contiguous(), weight, scales, terms, state, loss.view(-1))
    return loss, state


def _forward_fake(input, target, weight, ce, zs, weight_sum, ignore_index, label_smoothing, z_loss, softcap):
    return (
        target.new_empty(target.shape, dtype=torch.float32),
        target.new_empty((4, target.numel()), dtype=torch.float32),
    )


def _backward(grad, input, target, weight, ce, zs, weight_sum, state, ignore_index, label_smoothing, z_loss, softcap):
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, input.shape[-1])
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    labels, scales = target.reshape(-1).contiguous(), Scales(ce, zs, weight_sum)
    row_backward(input, out.view(labels.numel(), terms.classes), labels, weight, scales, terms, state, grad.reshape(-1))
    return out


def _backward_fake(grad, input, *_):
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


_backward_op = register(
    "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor ce, Tensor zs, "
    "Tensor weight_sum, Tensor state, int ignore_index, float label_smoothing, float z_loss, float softcap) -> Tensor",
    _backward,
    _backward_fake,
    backward=no_second_derivative,
)


def _setup(ctx, inputs, output):
    *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.z_loss, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _state):
    if grad is None or not ctx.needs_input_grad[0]:
        return (None,) * 10
    *tensors, state = ctx.saved_tensors
    terms = (ctx.ignore_index, ctx.label_smoothing, ctx.z_loss, ctx.softcap)
    return (_backward_op(grad, *tensors, state, *terms), *(None,) * 9)


_forward_op = register(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, Tensor ce, Tensor zs, Tensor weight_sum, "
    "int ignore_index, float label_smoothing, float z_loss, float softcap) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup,
    backward=_autograd,
)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy of logits with integer labels, by the formula at the head of this file.

    Args:
        input: logits (..., V), fp32, bf16 or fp16, any strides. Never written to.
        target: labels (...), int64 or int32, in [0, V) or ``ignore_index``.
        weight: class weights (V,); they get no gradient.
        label_smoothing: mixed with the uniform distribution over the V classes, as torch does.
        z_loss: factor of logsumexp² of each valid row, differentiable.
        softcap: logits become softcap * tanh(logits / softcap) before everything else.
        reduction: "mean" divides by the sum of the valid labels' weights (the z-loss by their count; without valid
            labels the loss is 0), "sum", or "none".

    Returns:
        fp32 loss, () or, for "none", the shape of ``target``.

    Raises:
        LigerError (a ValueError): shapes, dtypes or options that do not fit; on CPU also a label that is no class. On
            CUDA such a label makes its row's loss and gradient NaN, as looking for it would wait for the device.
    """
    if input.dim() == 0 or input.shape[:-1] != target.shape:
        raise LigerError(
            f"input must be (..., V) and target (...) with equal leading shape, got input {tuple(input.shape)} and "
            f"target {tuple(target.shape)}"
        )
    if input.dtype not in FLOATS:
        raise LigerError(f"input must be float32, bfloat16 or float16, got {input.dtype}")
    terms, weight = check_terms(
        input.shape[-1], input.device, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction
    )
    scales = make_scales(target, weight, terms, reduction)
    loss, _ = _forward_op(input, target, weight, *scales, *terms[:4])
    return loss if reduction == "none" else loss.sum()
