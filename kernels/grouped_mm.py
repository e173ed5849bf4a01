"""Matrix products in groups: the rows of one tensor are sorted by group, every group has a weight of its own.

    rows i of group e:   y[i] = a[i] · w[e]ᵀ          dw[e] = Σ_i g[i]ᵀ · a[i]

``ends`` (E,) int32 on the device says where each group's rows end; the host never reads it. A program finds its tile's
group in there by itself, and there are at most M / BLOCK_M + E tiles, so a group without rows costs no product and no
byte of its weight. (In ``weight_grad`` its gradient is filled with zeros.)

FLOPs for M rows in all, N and K columns: 2·M·N·K each. Bytes for elements of s bytes: (M·K + M·N + busy·N·K)·s, where
busy counts the groups that have rows: with few rows (decoding) that is all there is to the time.

Whose product it is, for bf16 on Hopper: with many rows and sizes that its tiles divide ``tma_rows``, whose operands the
tensor memory accelerator fetches; else, and for the gradients of weights, torch's grouped product (CUTLASS,
warp-specialised) if there are rows enough. The plain Triton kernels do all else: fp32 (exact, no TF32), fp16, other
GPUs, odd sizes, and few rows, where small tiles read each busy weight once. On an H200 and for 16,384 tokens
``tma_rows`` needed 5 to 9 % less time than torch's for Qwen3-30B-A3B and 1.5 to 3 % less for Mixtral, and it can take
gather and swiglu in; for the gradients of weights no tile shape of ours gained 1 % of a layer's time.

All accumulate in fp32, in one order, and round once: the same bits in every run. In fp32 itself what each addition of
16 products loses is carried over to the next (Kahan, 1965): the error does not grow with K, so it is no matter into how
many partial sums cuBLAS would divide it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ligermodels.kernels._dispatch import INTERPRETED, tl, triton
from ligermodels.kernels._launch import cdiv, is_hopper, multiprocessors, on_device_of, power_of_two
from ligermodels.kernels.glu import _activation

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton on this system
    TensorDescriptor = None

TMA = True  # False: torch's grouped product wherever tma_rows would be taken
_MANY = 128  # rows a group, on average, from which on tma_rows pays: the rows of one of its tiles
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


def tma_config(n_k: int, glu: bool, gather: bool, keep: bool) -> dict[str, int]:
    """Launch shape of ``_tma_kernel``, as measured on an H200.

    Where programs persist, loads for the next tile overlap with the store of the last. Long sums gain nothing by that,
    and gathered rows whose gates are not stored gain more by a fourth stage, for which there is then room.
    """
    persist = (keep or not gather) if glu else n_k < 8192
    shape = dict(BLOCK_M=128, BLOCK_N=128 if glu else 256, BLOCK_K=64, GROUP_M=8, num_warps=8)
    return dict(shape, PERSIST=persist, num_stages=4 if glu and not persist else 3)
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
def _groups(ends_ptr, n_groups, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Of each group: its number, first row, row behind the last, and row tiles (none behind the last group)."""
    ids = tl.arange(0, BLOCK_E)
    known = ids < n_groups
    ends = tl.load(ends_ptr + ids, mask=known, other=0)
    starts = tl.load(ends_ptr + ids - 1, mask=known & (ids > 0), other=0)
    return ids, starts, ends, (ends - starts + BLOCK_M - 1) // BLOCK_M


@triton.jit
def _group_of_tile(ends_ptr, tile, n_groups, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(group, first row, row behind the group's last) of a tile; group ≥ n_groups for a tile that there is not."""
    ids, starts, ends, tiles = _groups(ends_ptr, n_groups, BLOCK_M, BLOCK_E)
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


@triton.jit
def _tiles_kernel(ends_ptr, table_ptr, n_groups, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr):
    """How many row tiles there are, then of each: group, first row, row behind the group's last. A program a group."""
    group = tl.program_id(0)
    ids, starts, ends, tiles = _groups(ends_ptr, n_groups, BLOCK_M, BLOCK_E)
    before = tl.sum(tl.where(ids < group, tiles, 0), 0)
    own = tl.sum(tl.where(ids == group, tiles, 0), 0)
    start = tl.sum(tl.where(ids == group, starts, 0), 0)
    end = tl.sum(tl.where(ids == group, ends, 0), 0)
    for tile in range(0, own, BLOCK_T):
        at = tile + tl.arange(0, BLOCK_T)
        entry = table_ptr + 1 + 3 * (before + at)
        tl.store(entry, group, mask=at < own)
        tl.store(entry + 1, start + at * BLOCK_M, mask=at < own)
        tl.store(entry + 2, end, mask=at < own)
    if group == 0:
        tl.store(table_ptr, tl.sum(tiles, 0))


@triton.jit
def _tma_tile(
    a, w, y_ptr, both_ptr, order_ptr, table_ptr, tile, n_m, n_cols, n_k, a_row,
    GATHER: tl.constexpr, GLU: tl.constexpr, KEEP: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    row_tile, column = _swizzle(tile, n_m, n_cols // BLOCK_N, GROUP_M)
    entry = table_ptr + 1 + 3 * row_tile
    group, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    rows = first + tl.arange(0, BLOCK_M)
    col = column * BLOCK_N
    if GATHER > 0:
        source = tl.load(order_ptr + tl.minimum(rows, end - 1)) // GATHER
        at = a + source.to(tl.int64)[:, None] * a_row + tl.arange(0, BLOCK_K)[None, :]
    WIDTH: tl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for k in range(0, n_k, BLOCK_K):
        # without GATHER also rows of the next group: each row is a sum of its own, and theirs are not stored
        left = tl.load(at + k) if GATHER > 0 else a.load([first, k])
        if GLU:  # the same columns of gate and of up
            right = w.load([2 * group, col, k]).reshape(WIDTH, BLOCK_K).T
        elif TRANSPOSED:
            right = w.load([group * n_k + k, col])
        else:
            right = w.load([group * n_cols + col, k]).T
        total = tl.dot(left, right, total)
    dtype = y_ptr.dtype.element_ty
    cols = (col + tl.arange(0, BLOCK_N))[None, :]
    at_row = rows.to(tl.int64)[:, None]
    mask = (rows < end)[:, None]
    if GLU:
        gate, up = tl.split(total.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        gate, up = gate.to(dtype), up.to(dtype)
        if KEEP:
            both = both_ptr + at_row * (2 * n_cols) + cols
            tl.store(both, gate, mask=mask)
            tl.store(both + n_cols, up, mask=mask)
        value, _ = _activation(gate.to(tl.float32), 0, False)
        total = value * up.to(tl.float32)
    tl.store(y_ptr + at_row * n_cols + cols, total.to(dtype), mask=mask)


@triton.jit
def _tma_kernel(
    a, w, y_ptr, both_ptr, order_ptr, table_ptr, n_cols, n_k, a_row,
    GATHER: tl.constexpr, GLU: tl.constexpr, KEEP: tl.constexpr, TRANSPOSED: tl.constexpr, PERSIST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    n_m = tl.load(table_ptr)
    tiles = n_m * (n_cols // BLOCK_N)
    if PERSIST:
        tl.assume(n_k > 0)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tma_tile(
                a, w, y_ptr, both_ptr, order_ptr, table_ptr, tile, n_m, n_cols, n_k, a_row,
                GATHER, GLU, KEEP, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            )  # fmt: skip
    elif tl.program_id(0) < tiles:
        _tma_tile(
            a, w, y_ptr, both_ptr, order_ptr, table_ptr, tl.program_id(0), n_m, n_cols, n_k, a_row,
            GATHER, GLU, KEEP, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        )  # fmt: skip


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
        and hasattr(F, "grouped_mm")
        # On other GPUs torch loops over the groups and waits for the host, or has been reported wrong for empty groups
        # (Blackwell, pytorch issue 172439).
        and is_hopper(weight.get_device())
    )


def use_tma(rows: int, weight: torch.Tensor, *, glu: bool = False) -> bool:
    """Whether ``tma_rows`` takes it; ``weight`` (E, N, K), contiguous or the transpose of one that is."""
    groups, n, k = weight.shape
    return (
        TMA
        and TensorDescriptor is not None
        and weight.is_cuda
        and weight.dtype == torch.bfloat16
        and rows >= _MANY * groups
        and n % 256 == 0  # glu: the tile's 128 columns of gate and of up
        and k % 64 == 0
        and k > 0
        and weight.data_ptr() % 16 == 0
        and (weight.is_contiguous() or (not glu and weight.transpose(1, 2).is_contiguous()))
        and is_hopper(weight.get_device())
    )


def _most_tiles(rows: int, groups: int, block_m: int) -> int:
    """How many row tiles there can be: every group with rows may have one that is not full."""
    return (rows + min(rows, groups) * (block_m - 1)) // block_m


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
    if config is None and order is None and not glu:
        if use_tma(rows, weight):
            return tma_rows(a, weight, ends)[0]
        if use_torch(rows, weight):
            return F.grouped_mm(a, weight.transpose(1, 2), offs=ends)
    n //= 1 + glu
    y = torch.empty(rows, n, dtype=a.dtype, device=a.device)
    if y.numel() == 0:
        return y
    c = config or tile_config(rows, groups, a.element_size(), glu)
    if INTERPRETED:
        c = dict(c, BLOCK_N=min(c["BLOCK_N"], 32), BLOCK_K=32)
    tiles = _most_tiles(rows, groups, c["BLOCK_M"])
    with on_device_of(a):
        _rows_kernel[(tiles * cdiv(n, c["BLOCK_N"]),)](
            a, weight, y, ends if order is None else order, ends, tiles, groups, n, k, a.stride(0), *weight.stride(),
            GATHER=0 if order is None else times, GLU=glu, EVEN_K=k % c["BLOCK_K"] == 0,
            PRECISION=_precision(a.dtype), BLOCK_E=power_of_two(max(groups, 2)), **c,
        )  # fmt: skip
    return y


def tma_rows(
    a: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    times: int = 0,
    glu: bool = False,
    keep: bool = False,
    config: dict[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows_by_group`` where ``use_tma`` says so; with ``glu`` and ``keep`` also the (M, 2N) gate and up, else empty.

    ``a`` starts at a multiple of 16 bytes. ``config``: a launch shape in place of the chosen one.
    """
    gather = order is not None
    a = a if a.stride(1) == 1 and (gather or a.is_contiguous()) else a.contiguous()
    rows = order.shape[0] if gather else a.shape[0]
    groups, n, k = weight.shape
    n //= 1 + glu
    transposed = not weight.is_contiguous()
    y = torch.empty(rows, n, dtype=a.dtype, device=a.device)
    both = torch.empty(rows if keep else 0, 2 * n, dtype=a.dtype, device=a.device)
    if y.numel() == 0:
        return y, both
    c = config or tma_config(k, glu, gather, keep)
    if INTERPRETED:
        c = dict(c, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    block_m, block_n, block_k = c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"]
    if glu:
        w = _descriptor(weight.view(2 * groups, n, k), 2, block_n, block_k)
    elif transposed:
        w = _descriptor(weight.transpose(1, 2).view(-1, n), block_k, block_n)
    else:
        w = _descriptor(weight.view(-1, k), block_n, block_k)
    tiles = _most_tiles(rows, groups, block_m)
    table = torch.empty(1 + 3 * tiles, dtype=torch.int32, device=a.device)
    programs = tiles * (n // block_n)
    if c["PERSIST"]:
        programs = min(programs, multiprocessors(a.device))
    with on_device_of(a):
        _tiles_kernel[(groups,)](
            ends, table, groups, BLOCK_M=block_m, BLOCK_E=power_of_two(max(groups, 2)), BLOCK_T=32, num_warps=1
        )
        _tma_kernel[(programs,)](
            a if gather else _descriptor(a, block_m, block_k), w, y, both if keep else y, order if gather else ends,
            table, n, k, a.stride(0), GATHER=times, GLU=glu, KEEP=keep, TRANSPOSED=transposed, **c,
        )  # fmt: skip
    return y, both


def _descriptor(tensor: torch.Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


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
