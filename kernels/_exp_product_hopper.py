"""The kernel of exp_product.py for Hopper, in Gluon, Triton's experimental language of layouts and warp roles.

A file of its own, imported on first use only: on any other device, and without Gluon, nothing here is read.

One program a multiprocessor works through (128, 256) tiles. One warp loads by TMA into four stages; two groups of four
warps hold (64, 256) fp32 of the tile each and share each stage of the weight. A tile leaves in four parts of 64
columns: exponentials, sums, bf16 into shared memory, TMA to E, whose box clips what lies outside. With LEAD the second
group starts a tile only once the first has issued LEAD steps of it, so that while one is busy with exponentials the
other keeps the tensor cores busy; measured, that pays where rows are long.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ligermodels.kernels._launch import cdiv, multiprocessors, on_device_of

LOG2E = gl.constexpr(1.4426950408889634)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
ROWS, BN, BK = gl.constexpr(64), gl.constexpr(256), gl.constexpr(64)  # of a group; of a tile; of a step
STAGES, BUFFERS = gl.constexpr(4), gl.constexpr(2)
STRIP = gl.constexpr(52)  # row tiles that share their columns of the weight through L2


@gluon.jit
def _place(index, tiles_m, tiles_n):
    """Tile ``index`` in strips of STRIP row tiles, rows first."""
    strip = index // (STRIP * tiles_n)
    first = strip * STRIP
    height = gl.minimum(tiles_m - first, STRIP)
    within = index - strip * (STRIP * tiles_n)
    return first + within % height, within // height


@gluon.jit
def _halves(x):
    """(M, N) as its left and right (M, N / 2)."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def _load(x_desc, w_desc, x_smem, w_smem, full, empty, tiles_m, tiles_n, steps):
    slot = 0
    phase = 1
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = _place(index, tiles_m, tiles_n)
        for k in range(steps):
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, (2 * ROWS + BN) * BK * 2)
            for g in gl.static_range(2):
                place = [(pid_m * 2 + g) * ROWS, k * BK]
                tma.async_copy_global_to_shared(x_desc, place, bar, x_smem.index(slot * 2 + g))
            tma.async_copy_global_to_shared(w_desc, [pid_n * BN, k * BK], bar, w_smem.index(slot))
            last = slot == STAGES - 1
            slot = gl.where(last, 0, slot + 1)
            phase = gl.where(last, phase ^ 1, phase)


@gluon.jit
def _leave(z, m2, columns, total, buffer, e_desc, row, col, TAIL: gl.constexpr):
    """One part of a tile: z to E, and its sums added to ``total``."""
    e = gl.exp2(z * LOG2E - m2[:, None])
    if TAIL:
        here = gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout)) < columns - col
        e = gl.where(here[None, :], e, 0.0)
    total += gl.sum(e, 1)
    tma.store_wait(BUFFERS - 1)
    buffer.store(e.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(e_desc, [row, col], buffer)
    return total


@gluon.jit
def _finish(acc, m2, columns, out_smem, e_desc, row, col, g: gl.constexpr, TAIL: gl.constexpr, NARROW: gl.constexpr):
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, NARROW))
    m2 = gl.convert_layout(m2, gl.SliceLayout(1, NARROW))
    left, right = _halves(acc)
    a, b = _halves(left)
    c, d = _halves(right)
    parts = (a, b, c, d)
    for i in gl.static_range(4):
        z = gl.convert_layout(parts[i], NARROW)
        buffer = out_smem.index(g * BUFFERS + i % BUFFERS)
        total = _leave(z, m2, columns, total, buffer, e_desc, row, col + i * 64, TAIL)
    return total


@gluon.jit
def _multiply(e_desc, m2_ptr, sums_ptr, buffers, bars, tiles, g: gl.constexpr, LEAD: gl.constexpr):
    """What group ``g`` of warps does: rows 64 * g.. of each tile."""
    out_smem, x_smem, w_smem = buffers
    full, empty, lead = bars
    tiles_m, tiles_n, steps, rows_padded, columns = tiles
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    slot = 0
    phase = 0
    turn = 0
    before = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = _place(index, tiles_m, tiles_n)
        row = (pid_m * 2 + g) * ROWS
        m2 = gl.load(m2_ptr + row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
        if LEAD > 0 and g > 0:
            mbarrier.wait(lead, turn)
            turn ^= 1
        acc = gl.zeros([ROWS, BN], gl.float32, LAYOUT)
        for k in range(steps):
            mbarrier.wait(full.index(slot), phase)
            x_tile = x_smem.index(slot * 2 + g)
            acc = warpgroup_mma(x_tile, w_smem.index(slot).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            if LEAD > 0 and g == 0:
                mbarrier.arrive(lead, pred=k == LEAD - 1)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), pred=k > 0)
            before = slot
            last = slot == STAGES - 1
            slot = gl.where(last, 0, slot + 1)
            phase = gl.where(last, phase ^ 1, phase)
        z = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before))
        col = pid_n * BN
        if col + BN > columns:
            total = _finish(z, m2, columns, out_smem, e_desc, row, col, g, True, NARROW)
        else:
            total = _finish(z, m2, columns, out_smem, e_desc, row, col, g, False, NARROW)
        places = row + gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
        gl.store(sums_ptr + pid_n.to(gl.int64) * rows_padded + places, total)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows_padded", "columns", "tiles_m", "tiles_n", "steps"])
def _exp_product_kernel(
    x_desc, w_desc, e_desc, m2_ptr, sums_ptr, rows_padded, columns, tiles_m, tiles_n, steps, LEAD: gl.constexpr
):
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, ROWS, BK], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w_desc.layout)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS * 2, ROWS, 64], e_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lead, count=1)
    bars = (full, empty, lead)
    tiles = (tiles_m, tiles_n, steps, rows_padded, columns)
    buffers = (out_smem, x_smem, w_smem)
    gl.warp_specialize(
        [
            (_multiply, (e_desc, m2_ptr, sums_ptr, buffers, bars, tiles, FIRST, LEAD)),
            (_multiply, (e_desc, m2_ptr, sums_ptr, buffers, bars, tiles, SECOND, LEAD)),
            (_load, (x_desc, w_desc, x_smem, w_smem, full, empty, tiles_m, tiles_n, steps)),
        ],
        [4, 1],  # warps of the second and the third
        [232, 24],  # and their registers
    )


def launch(x: torch.Tensor, weight: torch.Tensor, m2: torch.Tensor, e: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill ``e`` (N, V) and ``sums``; see exp_product for the arguments, which must be as it checks them."""
    (rows, dim), classes = x.shape, weight.shape[0]
    operand, stage = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 2)
    with on_device_of(x):
        _exp_product_kernel[(multiprocessors(x.device),)](
            TensorDescriptor.from_tensor(x, [ROWS.value, BK.value], operand),
            TensorDescriptor.from_tensor(weight, [BN.value, BK.value], operand),
            TensorDescriptor.from_tensor(e, [ROWS.value, 64], stage),
            m2, sums, sums.stride(0), classes, cdiv(rows, 2 * ROWS.value), cdiv(classes, BN.value),
            cdiv(dim, BK.value), LEAD=2 if dim >= 3072 else 0, num_warps=4, maxnreg=168,
        )  # fmt: skip
