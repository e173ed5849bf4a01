"""Matrix products in groups: the rows of one tensor are sorted by group, every group has a weight of its own.

    rows i of group e:   y[i] = a[i] · w[e]ᵀ          dw[e] = Σ_i g[i]ᵀ · a[i]

``ends`` (E,) int32 on the device says where each group's rows end; the host never reads it. A program finds its tile's
group in there by itself, and there are at most M / BLOCK_M + E tiles, so a group without rows costs no product and no
byte of its weight. (In ``weight_grad`` its gradient is filled with zeros.)

FLOPs for M rows in all, N and K columns: 2·M·N·K each. Bytes for elements of s bytes: (M·K + M·N + busy·N·K)·s, where
busy counts the groups that have rows: with few rows (decoding) that is all there is to the time.

Whose product it is: torch's grouped product (CUTLASS, warp-specialised) where it is right and fast, which is bf16 on
compute capability 9 with rows enough; the Triton kernels below for all else: fp32 (exact, no TF32), fp16, other GPUs,
odd sizes, and few rows, where small tiles read each busy weight once. All accumulate in fp32, in one order, and round
once: the same bits in every run. In fp32 itself what each addition of 16 products loses is carried over to the next
(Kahan, 1965): the error does not grow with K, so it is no matter into how many partial sums cuBLAS would divide it.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ligermodels.kernels._dispatch import INTERPRETED, tl, triton
from ligermodels.kernels._launch import cdiv, on_device_of, power_of_two
from ligermodels.kernels.glu import _activation

_FEW = 32  # rows a group, on average, up to which torch's tiles (64 rows and more) would mostly multiply nothing


# fmt: off
def tile_config(rows: int, groups: int, itemsize: int, glu: bool) -> dict[str, int]:
    """Launch shape of ``_rows_kernel`` for so many rows over so many groups."""
    each = cdiv(rows, max(min(rows, groups), 1))
    if each <= 16 and itemsize == 4:  # in fp32 BLOCK_K is how many products are added before the error is looked at
        return dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, GROUP_M=1, num_warps=4, num_stages=8)
    if each <= 16:  # a few tokens: the weights' bytes decide, so narrow tiles that fill the device
        return dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=128, GROUP_M=1, num_warps=4, num_stages=4)
    if itemsize == 4:
        return dict(BLOCK_M=64, BLOCK_N=32 if glu else 64, BLOCK_K=16, GROUP_M=8, num_warps=4, num_stages=3)
    if each <= 64:
        return dict(BLOCK_M=64, BLOCK_N=64 if glu else 128, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=4)
    return dict(BLOCK_M=128, BLOCK_N=128 if glu else 256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)


def grad_config(itemsize: int) -> dict[str, int]:
    """Launch shape of ``_grad_kernel``."""
    if itemsize == 4:
        return dict(BLOCK_N=64, BLOCK_K=64, BLOCK_R=16, GROUP=8, num_warps=4, num_stages=3)
    return dict(BLOCK_N=128, BLOCK_K=256, BLOCK_R=64, GROUP=8, num_warps=8, num_stages=3)
# fmt: on


def rows_reference(a: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``rows_by_group`` in plain differentiable PyTorch; reads ``ends`` on the host."""
    parts, start = [], 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(a[start:end] @ weight[e].t())
        start = end
    return torch.cat(parts) if parts else a @ weight[0].t()


@triton.jit
def _group_of_tile(ends_ptr, tile, n_groups, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(group, first row, row behind the group's last) of a tile; group ≥ n_groups for a tile that there is not."""
    ids = tl.arange(0, BLOCK_E)
    known = ids < n_groups
    ends = tl.load(ends_ptr + ids, mask=known, other=0)
    starts = tl.load(ends_ptr + ids - 1, mask=known & (ids > 0), other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    group = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = ids == group
    first = tl.sum(tl.where(mine, starts + (tile - upto + tiles) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return group, first, end


@triton.jit
def _swizzle(pid, n_m, n_n, GROUP_M: tl.constexpr):
    """Neighbouring programs share GROUP_M row tiles and walk the columns together, so both stay in the L2 cache."""
    width = GROUP_M * n_n
    first = pid // width * GROUP_M
    size = tl.minimum(n_m - first, GROUP_M)
    return first + pid % width % size, pid % width // size


@triton.jit
def _add_product(left, right, total, lost, PRECISION: tl.constexpr):
    """(total + lost + left·right, what rounding lost of it). Tensor cores, half precision: all one sum, none lost."""
    if PRECISION == "ieee":
        part = tl.dot(left, right, lost, input_precision=PRECISION)
        after = total + part
        # an infinite total stays infinite: ∞ − ∞ is not carried over
        lost = tl.where(tl.abs(after) < float("inf"), part - (after - total), 0.0)
        return after, lost
    else:
        return tl.dot(left, right, total, input_precision=PRECISION), lost


@triton.jit(do_not_specialize=["n_m"])
def _rows_kernel(
    a_ptr, w_ptr, y_ptr, order_ptr, ends_ptr, n_m, n_groups, n_cols, n_k, a_row, w_group, w_col, w_k,
    GATHER: tl.constexpr, GLU: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    tile, column = _swizzle(tl.program_id(0), n_m, tl.cdiv(n_cols, BLOCK_N), GROUP_M)
    group, first, end = _group_of_tile(ends_ptr, tile, n_groups, BLOCK_M, BLOCK_E)
    if group < n_groups:
        rows = first + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        source = tl.minimum(rows, end - 1)  # rows beyond the group's last are read from within and not stored
        if GATHER > 0:  # row i of the sorted rows is row order[i] // GATHER of a
            source = tl.load(order_ptr + source) // GATHER
        ks = tl.arange(0, BLOCK_K)
        a = a_ptr + source.to(tl.int64)[:, None] * a_row + ks[None, :]
        w = w_ptr + group.to(tl.int64) * w_group
        w += cols.to(tl.int64)[None, :] * w_col + ks.to(tl.int64)[:, None] * w_k
        inside = (cols < n_cols)[None, :]
        apart = tl.full([], 1, tl.int64) * n_cols * w_col  # from a column of gate to the same of up
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total_up, lost, lost_up = total, total, total
        for k in range(0, n_k, BLOCK_K):
            if EVEN_K:
                left = tl.load(a)
                mask = inside
            else:
                left = tl.load(a, mask=(ks < n_k - k)[None, :], other=0.0)
                mask = inside & (ks < n_k - k)[:, None]
            total, lost = _add_product(left, tl.load(w, mask=mask, other=0.0), total, lost, PRECISION)
            if GLU:
                up = tl.load(w + apart, mask=mask, other=0.0)
                total_up, lost_up = _add_product(left, up, total_up, lost_up, PRECISION)
            a += BLOCK_K
            w += BLOCK_K * w_k
        dtype = y_ptr.dtype.element_ty
        if GLU:
            # rounded as if gate and up had been stored, so that both ways give the same bits
            value, _ = _activation(total.to(dtype).to(tl.float32), 0, PRECISION == "ieee")
            total = value * total_up.to(dtype).to(tl.float32)
        y = y_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        tl.store(y, total.to(dtype), mask=(rows < end)[:, None] & (cols < n_cols)[None, :])


@triton.jit
def _grad_kernel(
    g_ptr, a_ptr, dw_ptr, ends_ptr, n_cols, n_k, g_row, a_row,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n_n, n_kt = tl.cdiv(n_cols, BLOCK_N), tl.cdiv(n_k, BLOCK_K)
    group = tl.program_id(0) // (n_n * n_kt)
    tile_n, tile_k = _swizzle(tl.program_id(0) % (n_n * n_kt), n_n, n_kt, GROUP)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    steps = tl.arange(0, BLOCK_R)
    at = (start + steps).to(tl.int64)
    g = g_ptr + at[:, None] * g_row + cols[None, :]
    a = a_ptr + at[:, None] * a_row + ks[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    lost = total
    for row in range(start, end, BLOCK_R):
        mask = (steps < end - row)[:, None]  # on both: what lies beyond belongs to the next group, and may be infinite
        left = tl.load(g, mask=mask & (cols < n_cols)[None, :], other=0.0)
        right = tl.load(a, mask=mask & (ks < n_k)[None, :], other=0.0)
        total, lost = _add_product(tl.trans(left), right, total, lost, PRECISION)
        g += BLOCK_R * g_row
        a += BLOCK_R * a_row
    dw = dw_ptr + group.to(tl.int64) * n_cols * n_k + cols.to(tl.int64)[:, None] * n_k + ks[None, :]
    tl.store(dw, total.to(dw_ptr.dtype.element_ty), mask=(cols < n_cols)[:, None] & (ks < n_k)[None, :])


@functools.cache
def _has_torch_kernel(index: int) -> bool:
    # On other GPUs than Hopper torch loops over the groups and waits for the host, or has been reported wrong for
    # empty groups (Blackwell, pytorch issue 172439).
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(index)[0] == 9


def use_torch(rows: int, weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes it; ``weight`` (E, N, K) or its transpose."""
    groups, n, k = weight.shape
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and rows > _FEW * groups
        and n % 8 == 0
        and k % 8 == 0
        and weight.data_ptr() % 16 == 0
        and _has_torch_kernel(weight.get_device())
    )


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def rows_by_group(
    a: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    times: int = 0,
    glu: bool = False,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """(M, N): each row of ``a`` times the weight of its group, transposed. Not differentiable.

    a (M, K), rows sorted by group, contiguous in K; weight (E, N, K), any strides; ends (E,) int32. With ``order`` (M,)
    and ``times`` the sorted row i is row order[i] // times of ``a``. With ``glu`` the weight is (E, 2N, K) and the
    result is silu(first N)·(last N). ``config``: a launch shape in place of the chosen one (or of torch's product).
    """
    rows = a.shape[0] if order is None else order.shape[0]
    groups, n, k = weight.shape
    if config is None and order is None and not glu and use_torch(rows, weight):
        return F.grouped_mm(a, weight.transpose(1, 2), offs=ends)
    n //= 1 + glu
    y = torch.empty(rows, n, dtype=a.dtype, device=a.device)
    if y.numel() == 0:
        return y
    c = config or tile_config(rows, groups, a.element_size(), glu)
    if INTERPRETED:
        c = dict(c, BLOCK_N=min(c["BLOCK_N"], 32), BLOCK_K=32)
    # every group with rows may have one tile that is not full
    tiles = (rows + min(rows, groups) * (c["BLOCK_M"] - 1)) // c["BLOCK_M"]
    with on_device_of(a):
        _rows_kernel[(tiles * cdiv(n, c["BLOCK_N"]),)](
            a, weight, y, ends if order is None else order, ends, tiles, groups, n, k, a.stride(0), *weight.stride(),
            GATHER=0 if order is None else times, GLU=glu, EVEN_K=k % c["BLOCK_K"] == 0,
            PRECISION=_precision(a.dtype), BLOCK_E=power_of_two(max(groups, 2)), **c,
        )  # fmt: skip
    return y


def weight_grad(
    g: torch.Tensor, a: torch.Tensor, ends: torch.Tensor, config: dict[str, int] | None = None
) -> torch.Tensor:
    """(E, N, K): for each group g[rows]ᵀ · a[rows]; zeros for a group without rows. Not differentiable.

    g (M, N), a (M, K), rows sorted by group, contiguous in the last dimension; ends (E,) int32.
    """
    groups, n, k = ends.shape[0], g.shape[1], a.shape[1]
    dw = torch.empty(groups, n, k, dtype=g.dtype, device=g.device)
    if config is None and use_torch(g.shape[0], dw):
        del dw
        return F.grouped_mm(g.t(), a, offs=ends)
    c = config or grad_config(g.element_size())
    if INTERPRETED:
        c = dict(c, BLOCK_N=32, BLOCK_K=32, BLOCK_R=16)
    with on_device_of(g):
        _grad_kernel[(groups * cdiv(n, c["BLOCK_N"]) * cdiv(k, c["BLOCK_K"]),)](
            g, a, dw, ends, n, k, g.stride(0), a.stride(0), PRECISION=_precision(g.dtype), **c
        )
    return dw
