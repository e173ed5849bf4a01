"""Rows of a table by their ids, with a weight gradient that is the same bits in every run.

    out[t] = weight[ids[t]]          dweight[v] = Σ over the tokens t with ids[t] = v of dout[t]

The ids are sorted (stable) in backward, so equal ids become one segment of neighbours. A program sums one chunk of a
segment in fp32 registers; segments of one chunk, nearly all of them, go straight into the zero-filled gradient. The
chunks of longer segments leave fp32 partial sums, which a second kernel adds in order. Nothing is atomic, and an id
that occurs everywhere is shared out over N / 64 programs.

Bytes that must move for N tokens, V rows of D elements of s bytes: forward 2·N·D·s, backward (N + V)·D·s, most of it
the zeros of the rows that did not occur. Saved for backward: ids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import as_rows, cdiv, no_second_derivative, on_device_of, power_of_two

_CHUNK = 64  # tokens of one segment that a program adds
_BLOCK = 1024  # columns of a program


def embedding_reference(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """``embedding`` in plain differentiable PyTorch."""
    return F.embedding(ids, weight, padding_idx)


@triton.jit
def _forward_kernel(ids_ptr, weight_ptr, out_ptr, n_rows, n_cols, weight_row, BLOCK: tl.constexpr):
    tiles = tl.cdiv(n_cols, BLOCK)
    token = tl.program_id(0).to(tl.int64) // tiles
    cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    mask = cols < n_cols
    known = (row >= 0) & (row < n_rows)
    values = tl.load(weight_ptr + row * weight_row + cols, mask=mask & known, other=float("nan"))
    tl.store(out_ptr + token * n_cols + cols, values, mask=mask)


@triton.jit(do_not_specialize=["n_tokens"])
def _chunks_kernel(
    dout_ptr, keys_ptr, order_ptr, starts_ptr, dweight_ptr, partial_ptr, n_tokens, n_rows, n_cols, dout_row,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_cols, BLOCK)
    first = tl.program_id(0).to(tl.int64) // tiles
    key = tl.load(keys_ptr + first)
    start = tl.load(starts_ptr + first)
    if (key < n_rows) & ((first - start) % CHUNK == 0):
        cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        position = first + tl.arange(0, CHUNK)
        same = tl.load(keys_ptr + position, mask=position < n_tokens, other=-1) == key
        count = tl.sum(same.to(tl.int32), axis=0)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for done in range(0, count, ROWS):
            ahead = done + tl.arange(0, ROWS)
            token = tl.load(order_ptr + first + ahead, mask=ahead < count, other=0)
            mask = (ahead < count)[:, None] & (cols < n_cols)[None, :]
            total += tl.load(dout_ptr + token[:, None] * dout_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        row = tl.sum(total, axis=0)
        beyond = tl.load(keys_ptr + first + CHUNK, mask=first + CHUNK < n_tokens, other=-1)
        if (first > start) | (beyond == key):  # one of several chunks; see _long_segments_kernel for its place
            slot = 2 * (first // CHUNK) + (first > start).to(tl.int64)
            tl.store(partial_ptr + slot * n_cols + cols, row, mask=cols < n_cols)
        else:
            out = dweight_ptr + key.to(tl.int64) * n_cols + cols
            tl.store(out, row.to(dweight_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_tokens"])
def _long_segments_kernel(
    keys_ptr, starts_ptr, dweight_ptr, partial_ptr, n_tokens, n_rows, n_cols,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Of the segments longer than a chunk at most one starts in a window of CHUNK positions, and at most one of their
    # later chunks does: so two places for each window are enough.
    tiles = tl.cdiv(n_cols, BLOCK)
    window = tl.program_id(0).to(tl.int64) // tiles
    position = window * CHUNK + tl.arange(0, CHUNK)
    keys = tl.load(keys_ptr + position, mask=position < n_tokens, other=n_rows)
    starts = tl.load(starts_ptr + position, mask=position < n_tokens, other=-1)
    beyond = tl.load(keys_ptr + position + CHUNK, mask=position + CHUNK < n_tokens, other=-1)
    head = tl.max(tl.where((starts == position) & (beyond == keys) & (keys < n_rows), position, -1), axis=0)
    if head >= 0:
        cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + head)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        done = tl.zeros([], tl.int64)
        more = done == 0
        while more:
            chunk = done + tl.arange(0, ROWS)
            at = head + chunk * CHUNK
            same = tl.load(keys_ptr + at, mask=at < n_tokens, other=-1) == key
            slot = 2 * (window + chunk) + (chunk > 0).to(tl.int64)
            mask = same[:, None] & (cols < n_cols)[None, :]
            total += tl.load(partial_ptr + slot[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
            done += ROWS
            more = tl.sum(same.to(tl.int32), axis=0) == ROWS
        out = dweight_ptr + key.to(tl.int64) * n_cols + cols
        tl.store(out, tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty), mask=cols < n_cols)


def _embedding(ids: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    n_rows, n_cols = weight.shape
    out = torch.empty((*ids.shape, n_cols), dtype=weight.dtype, device=weight.device)
    if out.numel():
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        block = min(power_of_two(n_cols), _BLOCK)
        with on_device_of(weight):
            _forward_kernel[(ids.numel() * cdiv(n_cols, block),)](
                ids.contiguous(), weight, out, n_rows, n_cols, weight.stride(0), BLOCK=block, num_warps=4
            )
    return out


def _embedding_backward(dout: torch.Tensor, ids: torch.Tensor, n_rows: int, padding: int) -> torch.Tensor:
    n_cols, n_tokens = dout.shape[-1], ids.numel()
    dweight = torch.zeros(n_rows, n_cols, dtype=dout.dtype, device=dout.device)
    if n_tokens == 0 or dweight.numel() == 0:
        return dweight
    dout = as_rows(dout)
    dout = dout if dout.stride(1) == 1 else dout.contiguous()
    ids = ids.reshape(-1)
    # what gets no gradient is sorted behind the last row
    keys = torch.where((ids < 0) | (ids >= n_rows) | (ids == padding), n_rows, ids).to(torch.int32)
    keys, order = torch.sort(keys, stable=True)
    starts = torch.searchsorted(keys, keys, out_int32=True)
    partial = torch.empty(2 * cdiv(n_tokens, _CHUNK), n_cols, dtype=torch.float32, device=dout.device)
    block = min(power_of_two(n_cols), _BLOCK)
    narrow = min(block, 128)
    with on_device_of(dout):
        _chunks_kernel[(n_tokens * cdiv(n_cols, block),)](
            dout, keys, order, starts, dweight, partial, n_tokens, n_rows, n_cols, dout.stride(0),
            CHUNK=_CHUNK, ROWS=4, BLOCK=block, num_warps=4,
        )  # fmt: skip
        if n_tokens > _CHUNK:
            _long_segments_kernel[(cdiv(n_tokens, _CHUNK) * cdiv(n_cols, narrow),)](
                keys, starts, dweight, partial, n_tokens, n_rows, n_cols,
                CHUNK=_CHUNK, ROWS=16, BLOCK=narrow, num_warps=4,
            )  # fmt: skip
    return dweight


def _setup(ctx, inputs, output):
    ids, weight, ctx.padding = inputs
    ctx.n_rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx, dout):
    needed = ctx.needs_input_grad[1]
    return None, _backward_op(dout, *ctx.saved_tensors, ctx.n_rows, ctx.padding) if needed else None, None


_op = register(
    "embedding(Tensor ids, Tensor weight, int padding) -> Tensor",
    _embedding,
    lambda ids, weight, padding: weight.new_empty((*ids.shape, weight.shape[1])),
    setup_context=_setup,
    backward=_backward,
)
_backward_op = register(
    "embedding_backward(Tensor dout, Tensor ids, SymInt n_rows, int padding) -> Tensor",
    _embedding_backward,
    lambda dout, ids, n_rows, padding: dout.new_empty((n_rows, dout.shape[-1])),
    backward=no_second_derivative,
)


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The rows of weight that ids name: ``torch.nn.functional.embedding`` with an exact, reproducible gradient.

    ids: any shape, int32 or int64. weight: (V, D), fp32, bf16 or fp16. Returns (*ids.shape, D) in weight's dtype. The
    weight's gradient is summed in fp32 in a fixed order and rounded once; row padding_idx (negative: from the end)
    gets none. Differentiable once.

    Raises LigerError for a wrong dtype or shape, and on the CPU for ids outside 0 … V − 1. On CUDA that would have to
    wait for the device: there such an id gives a row of NaN and no gradient, and no memory is read out of bounds.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise LigerError(f"embedding: ids are {ids.dtype}; expected int32 or int64")
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise LigerError(f"embedding: weight is {weight.dtype} {tuple(weight.shape)}; expected floating point (V, D)")
    n_rows = weight.shape[0]
    if padding_idx is not None and not -n_rows <= padding_idx < n_rows:
        raise LigerError(f"embedding: padding_idx is {padding_idx}, but the weight has {n_rows} rows")
    if use_triton(weight) and weight.dtype != torch.float64:
        return _op(ids, weight, -1 if padding_idx is None else padding_idx % n_rows)
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_ids(ids, n_rows)
    return embedding_reference(ids, weight, padding_idx)


def _check_ids(ids: torch.Tensor, n_rows: int) -> None:
    outside = (ids < 0) | (ids >= n_rows)
    if type(outside) is torch.Tensor and outside.any():
        raise LigerError(f"embedding: id {int(ids[outside][0])} is outside 0 … {n_rows - 1}, the rows of the weight")
