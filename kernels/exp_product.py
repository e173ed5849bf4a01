"""The steps of linear_cross_entropy in which the logits never reach memory: they leave the product as exponentials.

    E[n, v] = exp(x[n] . weight[v] - m[n]) in bf16,  sums[j, n] = sum of E[n, v], not rounded, v in [256 j, 256 (j + 1))

The pass over the logits that finds the row maxima is what this saves, so m[n] is the logit of the token's own label.
Then s = sum_v E = exp(loss): for all but hopeless tokens a moderate number, and dividing by it, once it is known, is a
factor of the row, which the two products of the gradients take in their other operand or in their result:

    dz = scale[n] * (E - [v = t] * s)          scale = ce * w_t / s, or 0 for an ignored token
    dx = scale * (E @ weight),  dW = E^T @ (scale * x)

so that one element a row is patched and E is read by nothing but these products. Of each token's gradient the label's
element is the largest by far, and here it would be rounded twice, in E and in scale * x. So the scale takes up what
rounding the patch has left, and what rounding scale * x has left of this one element is added to dW in fp32, by
sorted labels: both gradients are then nearer to the truth than with logits and their gradient in bf16.

2 N D V FLOP and 2 N V bytes written at the rate of the plain product (an H200 takes 1.00 to 1.05 of cuBLAS' time for
the same product); the pass that is left out would read 2 N V bytes twice, once from L2, and write them once.

The label's own exponential E_t comes from fp32 and in the order of the big product, as 1 - E_t / s cancels for a
confident token. A row whose s is no moderate number is listed on the device; a second pair of products, over the
listed rows and with their true maxima, puts it right. Its loops end at the list's length, which the host never learns.
"""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import torch

from ligermodels.kernels._dispatch import tl, triton
from ligermodels.kernels._launch import cdiv, is_hopper, multiprocessors, on_device_of, power_of_two
from ligermodels.kernels.cross_entropy import Scales, Terms

FEWEST_LOGITS = 2**27  # tokens * V from which it pays: below, the small kernels around the product cost what it saves
TILE = 256  # columns of a partial sum
_ROWS = 128  # of a tile: per-row buffers are padded to a multiple
_TRIED = ("3.6.", "3.7.")  # versions of Triton whose Gluon compiles the kernel: it is experimental, and may change


def exp_product_reference(x: torch.Tensor, weight: torch.Tensor, m2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E (N, V) in x's dtype, sums (ceil(V / 256), N) fp32) by the formula above, with m = m2 * ln 2."""
    e = torch.exp2(x.float() @ weight.float().t() * 1.4426950408889634 - m2[:, None])
    sums = torch.stack([part.sum(1) for part in e.split(TILE, 1)])
    return e.to(x.dtype), sums


def exp_product(x: torch.Tensor, weight: torch.Tensor, m2: torch.Tensor, e: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill ``e`` and ``sums`` from x (N, D) and weight (V, D), both bf16 and contiguous.

    m2: fp32, N padded to a multiple of 128; the maximum of each row, or a number near it, times log2(e).
    e: (N, V), bf16, rows of a stride that is a multiple of 8. sums: fp32 (ceil(V / 256), N padded as m2).
    CPU tensors take the reference.
    """
    if x.is_cuda:
        _hopper().launch(x, weight, m2, e, sums)
        return
    n = x.shape[0]
    found, partial = exp_product_reference(x, weight, m2[:n])
    e.copy_(found)
    sums[:, :n] = partial


@functools.cache
def _hopper():
    """The module of the kernel, or None where this Triton has no Gluon that can compile it."""
    try:
        if triton.__version__.startswith(_TRIED):
            return importlib.import_module("ligermodels.kernels._exp_product_hopper")
    except (AttributeError, ImportError):
        pass
    return None


def can_use(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether exp_product takes these contiguous operands (N, D) and (V, D), and pays."""
    (n, dim), classes = x.shape, weight.shape[0]
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.bfloat16
        and n * classes >= FEWEST_LOGITS
        and dim >= 128  # two steps of 64 at least
        and dim % 8 == x.data_ptr() % 16 == weight.data_ptr() % 16 == 0  # TMA
        and is_hopper(x.get_device())
        and _hopper() is not None
    )


# --- Triton: what is done for each row --------------------------------------------------------------------------------


@triton.jit
def _labels(target, lines, rows, ignore_index, classes):
    """Of these rows: the label, whether it is not ignored, and whether there is anything to learn from it."""
    t = tl.load(target + lines, mask=lines < rows, other=ignore_index).to(tl.int64)
    valid = (lines < rows) & (t != ignore_index)
    return t, valid, valid & (t >= 0) & (t < classes)


@triton.jit
def _tile(x, x_rows, x_mask, w, w_rows, w_mask, dim, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of the given rows of x and of the weight, fp32, added up in the order of the big product."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, dim, BK):
        cols = k + tl.arange(0, BK)
        inside = cols[None, :] < dim
        a = tl.load(x + x_rows.to(tl.int64)[:, None] * dim + cols[None, :], mask=x_mask[:, None] & inside, other=0.0)
        b = tl.load(w + w_rows.to(tl.int64)[:, None] * dim + cols[None, :], mask=w_mask[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit(do_not_specialize=["rows", "ignore_index", "classes"])
def _label_kernel(
    x, w, target, z_t, m2, top, count, rows, dim, ignore_index, classes, BLOCK: tl.constexpr, BK: tl.constexpr
):
    """Each row's logit of its label, m2 of it (inf where there is nothing to learn: E is 0), and an empty list."""
    if tl.program_id(0) == 0:
        tl.store(count, 0)
    places = tl.arange(0, BLOCK)
    lines = tl.program_id(0) * BLOCK + places
    t, _, active = _labels(target, lines, rows, ignore_index, classes)
    z = _tile(x, lines, lines < rows, w, t, active, dim, BLOCK, BLOCK, BK)
    z = tl.sum(tl.where(places[:, None] == places[None, :], z, 0.0), 1)
    tl.store(z_t + lines, z)
    tl.store(m2 + lines, tl.where(active, z * 1.4426950408889634, float("inf")))
    tl.store(top + lines, tl.zeros((BLOCK,), tl.float32) - 3.0e38)  # finite: -inf - -inf would be NaN


@triton.jit
def _total(sums, stride, tiles, lines, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, PARTS):
        parts = start + tl.arange(0, PARTS)
        places = parts.to(tl.int64)[:, None] * stride + lines[None, :]
        total += tl.sum(tl.load(sums + places, mask=(parts < tiles)[:, None], other=0.0), 0)
    return total


@triton.jit
def _is_bad(s, lines, rows, active):
    """Whether the row's E cannot be used: too large for sums and products, or not 0 where it is never looked at."""
    good = tl.where(active, (s >= 0.5) & (s <= 18446744073709551616.0), s == 0.0)  # NaN is not good
    return (lines < rows) & (good == 0)


@triton.jit(do_not_specialize=["rows", "ignore_index", "classes", "stride", "tiles"])
def _total_kernel(
    sums, stride, tiles, target, total, listed, count, rows, ignore_index, classes,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """s of each row; the rows to be done again are listed. In which order differs, but no result depends on it."""
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, _, active = _labels(target, lines, rows, ignore_index, classes)
    s = _total(sums, stride, tiles, lines, BLOCK, PARTS)
    tl.store(total + lines, s)
    bad = _is_bad(s, lines, rows, active)
    found = bad.to(tl.int32)
    many = tl.sum(found, 0)
    if many > 0:
        first = tl.atomic_add(count, many)
        tl.store(listed + first + tl.cumsum(found, 0) - 1, lines, mask=bad)


@triton.jit(do_not_specialize=["rows", "ignore_index", "classes", "stride"])
def _again_kernel(
    x, w, target, listed, count, top, e, e_stride, sums, stride, rows, dim, ignore_index, classes,
    MAXIMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The listed rows again: their maxima into ``top``, or, with these, E and its sums. Without any, nothing."""
    many = tl.load(count)
    blocks = tl.cdiv(many, BM)
    for index in range(tl.program_id(0), blocks * tl.cdiv(classes, BN), tl.num_programs(0)):
        places = (index % blocks) * BM + tl.arange(0, BM)
        here = places < many
        lines = tl.load(listed + places, mask=here, other=0)
        tile = index // blocks
        cols = tile * BN + tl.arange(0, BN)
        inside = cols < classes
        z = _tile(x, lines, here, w, cols, inside, dim, BM, BN, BK)
        if MAXIMA:
            tl.atomic_max(top + lines, tl.max(tl.where(inside[None, :], z, -3.0e38), 1), mask=here)
        else:
            _, _, active = _labels(target, lines, rows, ignore_index, classes)
            m = tl.load(top + lines, mask=here, other=0.0)
            keep = active[:, None] & inside[None, :]
            value = tl.where(keep, tl.exp2((z - m[:, None]) * 1.4426950408889634), 0.0)
            to = e + lines.to(tl.int64)[:, None] * e_stride + cols[None, :]
            tl.store(to, value.to(e.dtype.element_ty), mask=here[:, None] & inside[None, :])
            tl.store(sums + tile.to(tl.int64) * stride + lines, tl.sum(value, 1), mask=here)


@triton.jit(do_not_specialize=["rows", "ignore_index", "classes", "e_stride", "stride", "tiles", "upstream_stride"])
def _finish_kernel(
    sums, stride, tiles, target, weight, ce, zs, upstream, upstream_stride, z_t, top, total, e, e_stride,
    loss, scale, label, rows, ignore_index, z_loss, classes,
    WEIGHT: tl.constexpr, Z_LOSS: tl.constexpr, UPSTREAM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Loss and scale of each row, and the label's element of E, in E and in ``label``."""
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t, valid, active = _labels(target, lines, rows, ignore_index, classes)
    s = tl.load(total + lines)
    z = tl.load(z_t + lines)
    log2e = tl.zeros((BLOCK,), tl.float32) + 1.4426950408889634
    m2 = z * log2e
    below = tl.fma(z, log2e, -m2)  # what rounding m2 left, as in the product
    bad = _is_bad(s, lines, rows, active)
    if tl.sum(bad.to(tl.int32), 0) > 0:  # it was done again, with its maximum
        s = tl.where(bad, _total(sums, stride, tiles, lines, BLOCK, PARTS), s)
        m = tl.load(top + lines)
        m2 = tl.where(bad, m * log2e, m2)
        below = tl.where(bad, (z - m) * log2e, below)
    log2s = tl.log2(s)
    nll = (log2s - below) * 0.6931471805599453
    nll = tl.where(nll < 0.0, 0.0, nll)  # where s is 1 but for rounding; NaN stays
    likelihood = tl.load(ce)
    if WEIGHT:
        likelihood *= tl.load(weight + t, mask=active, other=0.0)
    value = likelihood * nll
    slope = likelihood + tl.zeros((BLOCK,), tl.float32)
    share = tl.zeros((BLOCK,), tl.float32) + 1.0
    if Z_LOSS:
        lse = (m2 + log2s) * 0.6931471805599453
        factor = tl.load(zs) * z_loss
        value += factor * lse * lse
        slope += 2.0 * factor * lse
        # where both parts cancel, the share of the label would be infinite: 2^-20 is in the order of their rounding
        least = tl.abs(likelihood) * 9.5367431640625e-07
        slope = tl.where(tl.abs(slope) < least, least, slope)
        share = tl.where(slope == 0.0, 0.0, likelihood / slope)
    unknown = valid & (active == 0)
    value = tl.where(unknown, float("nan"), tl.where(valid, value, 0.0))
    tl.store(loss + lines, value, mask=lines < rows)
    slope = slope / s
    if UPSTREAM:
        slope *= tl.load(upstream + lines.to(tl.int64) * upstream_stride, mask=lines < rows, other=0.0).to(tl.float32)
    patched = tl.exp2(below) - s * share
    stored = patched.to(e.dtype.element_ty)
    tl.store(e + lines.to(tl.int64) * e_stride + t, stored, mask=active)
    stored = stored.to(tl.float32)
    tl.store(label + lines, stored, mask=lines < rows)
    slope = tl.where(stored == 0.0, slope, slope * (patched / stored))
    tl.store(scale + lines, tl.where(unknown, float("nan"), tl.where(valid, slope, 0.0)), mask=lines < rows)


@triton.jit
def _scale_rows_kernel(source, scale, out, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + row * dim + cols, mask=cols < dim, other=0.0).to(tl.float32)
    value = tl.where(factor == 0.0, 0.0, value * factor)  # nothing of an ignored token, be it inf
    tl.store(out + row * dim + cols, value.to(out.dtype.element_ty), mask=cols < dim)


def scale_rows(source: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """out (N, D) = source (N, D) * scale[:N, None], both contiguous; 0 where the scale is 0."""
    rows, dim = source.shape
    with on_device_of(source):
        _scale_rows_kernel[(rows, cdiv(dim, 1024))](source, scale, out, dim, BLOCK=1024, num_warps=4)


@triton.jit
def _rest_of_rows(x, keys, order, scale, label, key, at, n, dim, cols, ROWS: tl.constexpr):
    """What ROWS places from ``at`` on add, and whether all of them have the label ``key``."""
    places = at + tl.arange(0, ROWS)
    same = tl.load(keys + places, mask=places < n, other=-1) == key
    token = tl.load(order + places, mask=same, other=0)
    factor = tl.load(scale + token, mask=same, other=0.0)
    inside = same[:, None] & (cols < dim)[None, :]
    value = tl.load(x + token[:, None] * dim + cols[None, :], mask=inside, other=0.0)
    exact = value.to(tl.float32) * factor[:, None]
    rest = exact - exact.to(x.dtype.element_ty).to(tl.float32)
    rest *= tl.load(label + token, mask=same, other=0.0)[:, None]
    return tl.sum(rest, 0), tl.sum(same.to(tl.int32), 0) == ROWS


@triton.jit(do_not_specialize=["n", "classes"])
def _label_rest_kernel(
    x, keys, order, scale, label, dw, n, dim, classes, FEW: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr
):
    """One label's row of dW: the tokens that have it add what rounding scale * x has left of their largest element.

    Most labels have few tokens, some have thousands: the first FEW by themselves, the others MANY at a time.
    """
    first = tl.program_id(0)
    key = tl.load(keys + first)
    before = tl.load(keys + first - 1, mask=first > 0, other=-1)
    if (key != before) & (key < classes):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total, more = _rest_of_rows(x, keys, order, scale, label, key, first, n, dim, cols, FEW)
        at = first + FEW
        while more:
            rest, more = _rest_of_rows(x, keys, order, scale, label, key, at, n, dim, cols, MANY)
            total += rest
            at += MANY
        to = dw + key.to(tl.int64) * dim + cols
        mask = cols < dim
        tl.store(to, tl.load(to, mask=mask, other=0.0) + total, mask=mask)


def add_label_rest(
    x: torch.Tensor, target: torch.Tensor, factors: torch.Tensor, dw: torch.Tensor, terms: Terms
) -> None:
    """Add to ``dw`` (V, D) fp32, the sum of all chunks, what is left of each token's label; see the head of this file.

    x (N, D), target (N) and factors (2, N) are those of exp_step, of all tokens. The order is fixed: no atomics.
    """
    n, dim = x.shape
    known = (target != terms.ignore_index) & (target >= 0) & (target < terms.classes)
    keys, order = torch.sort(torch.where(known, target, terms.classes).to(torch.int32), stable=True)
    block = min(power_of_two(dim), 512)
    with on_device_of(x):
        _label_rest_kernel[(n, cdiv(dim, block))](
            x, keys, order, *factors, dw, n, dim, terms.classes,
            FEW=2, MANY=16, BLOCK=block, num_warps=max(block // 128, 1),
        )  # fmt: skip


# --- One chunk --------------------------------------------------------------------------------------------------------


class Workspace(NamedTuple):
    """Buffers of one chunk of N tokens beside E, padded to whole tiles, and reused by the next chunk."""

    sums: torch.Tensor  # (ceil(V / 256), N) fp32
    rows: torch.Tensor  # (4, N) fp32: the label's logit, m2, maximum, sum of E
    listed: torch.Tensor  # (1 + N,) int32: how many rows are to be done again, and which
    wide: torch.Tensor  # (N, D) fp32: the gradient of x before its scale, then x times the scale

    @classmethod
    def empty(cls, rows: int, dim: int, classes: int, device: torch.device) -> Workspace:
        padded = cdiv(rows, _ROWS) * _ROWS
        f32 = {"dtype": torch.float32, "device": device}
        return cls(
            torch.empty(cdiv(classes, TILE), padded, **f32),
            torch.empty(4, padded, **f32),
            torch.empty(1 + padded, dtype=torch.int32, device=device),
            torch.empty(rows, dim, **f32),
        )


def bytes_a_token(dim: int, classes: int) -> int:
    """What E and the workspace take for each token of a chunk."""
    return 2 * classes + 4 * cdiv(classes, TILE) + 4 * dim + 4 * 5


def exp_step(
    x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, scales: Scales, terms: Terms,
    e: torch.Tensor, space: Workspace, loss: torch.Tensor, factors: torch.Tensor, upstream: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fill ``loss`` (N), ``e`` (N, V) as the gradients' products take it, and ``factors``: scale and e[n, t] (2, N).

    The arguments are those of row_fused; x (N, D) and w (V, D) take the place of the logits. No softcap, no label
    smoothing, no temperature. An ignored row of ``e`` is 0, and so is its scale; a label that is no class gives NaN.
    """
    (n, dim), classes = x.shape, terms.classes
    z_t, m2, top, total = space.rows
    scale, label = factors
    sums, stride, tiles = space.sums, space.sums.stride(0), space.sums.shape[0]
    count, listed = space.listed[:1], space.listed[1:]
    labels = (n, terms.ignore_index, classes)
    blocks, block = cdiv(n, _ROWS), {"BLOCK": 32, "PARTS": 128, "num_warps": 8}
    with on_device_of(x):
        _label_kernel[(2 * blocks,)](
            x, w, target, z_t, m2, top, count, n, dim, *labels[1:], BLOCK=64, BK=64, num_warps=4, num_stages=3
        )
        exp_product(x, w, m2, e, sums)
        _total_kernel[(4 * blocks,)](sums, stride, tiles, target, total, listed, count, *labels, **block)
        for maxima in (True, False):
            _again_kernel[(multiprocessors(x.device),)](
                x, w, target, listed, count, top, e, e.stride(0), sums, stride, n, dim, *labels[1:],
                MAXIMA=maxima, BM=64, BN=TILE, BK=64, num_warps=8, num_stages=3,
            )  # fmt: skip
        _finish_kernel[(4 * blocks,)](
            sums, stride, tiles, target, loss if weight is None else weight, scales.likelihood, scales.z_loss,
            loss if upstream is None else upstream, 0 if upstream is None else upstream.stride(0), z_t, top, total,
            e, e.stride(0), loss, scale, label, n, terms.ignore_index, terms.z_loss, classes,
            WEIGHT=weight is not None, Z_LOSS=terms.z_loss != 0.0, UPSTREAM=upstream is not None, **block,
        )  # fmt: skip
