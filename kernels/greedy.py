"""The likeliest token of every row, and what follows from it for the next step of decoding, in one launch.

    best = max(logits)     token = the first index of best, −1 if best is not finite, the pad id if the row has ended
    fed = max(token, 0)    ended = ended or token is one of the eos ids

A NaN anywhere makes a row's best not finite. Each program takes a chunk of a row, for a row alone would leave the GPU
idle; the last to finish (an atomic counter tells) compares the chunks' bests in their order. V·s bytes a row.
"""

from __future__ import annotations

import torch

from ligermodels.kernels._dispatch import tl, triton, use_triton
from ligermodels.kernels._launch import cdiv, on_device_of, power_of_two

_BLOCK = 4096


def choose_greedily_reference(
    logits: torch.Tensor, token: torch.Tensor, fed: torch.Tensor, ended: torch.Tensor, eos: torch.Tensor, pad_id: int
) -> None:
    """``choose_greedily`` in plain PyTorch."""
    usable = logits.amax(-1).isfinite()  # NaN when any is NaN, −inf when all are
    chosen = logits.argmax(-1).masked_fill(~usable, -1).masked_fill(ended, pad_id)
    token.copy_(chosen)
    fed.copy_(chosen.clamp(min=0))
    ended.logical_or_((chosen[:, None] == eos).any(-1))  # torch.isin sorts long lists, and waits for that


@triton.jit
def _kernel(
    logits_ptr, token_ptr, fed_ptr, ended_ptr, eos_ptr, best_ptr, index_ptr, count_ptr, V, row_stride, pad_id,
    EOS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * row_stride + cols
    x = tl.load(logits_ptr + offsets, mask=cols < V, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, axis=0)
    index = tl.min(tl.where(x == best, cols, V), axis=0)
    best = tl.where(has_nan, float("inf"), best)
    tl.store(best_ptr + row * CHUNKS + chunk, best)
    tl.store(index_ptr + row * CHUNKS + chunk, index)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + row, 1) == CHUNKS - 1:
        tl.store(count_ptr + row, 0)  # for the next launch
        chunks = tl.arange(0, BLOCK_C)
        mine = row * CHUNKS + chunks
        bests = tl.load(best_ptr + mine, mask=chunks < CHUNKS, other=float("-inf"), cache_modifier=".cg")
        indices = tl.load(index_ptr + mine, mask=chunks < CHUNKS, other=V, cache_modifier=".cg")
        best = tl.max(bests, axis=0)
        token = tl.min(tl.where(bests == best, indices, V), axis=0).to(tl.int64)
        token = tl.where(tl.abs(best) < float("inf"), token, -1)
        ended = tl.load(ended_ptr + row) != 0
        token = tl.where(ended, pad_id, token)
        tl.store(token_ptr + row, token)
        tl.store(fed_ptr + row, tl.maximum(token, 0))
        for i in range(EOS):
            ended = ended | (token == tl.load(eos_ptr + i))
        tl.store(ended_ptr + row, ended.to(tl.int8))


def choose_greedily(
    logits: torch.Tensor,
    token: torch.Tensor,
    fed: torch.Tensor,
    ended: torch.Tensor,
    eos: torch.Tensor,
    pad_id: int,
    counters: torch.Tensor | None = None,
) -> None:
    """Write the likeliest token of each row of logits (B, V) to ``token``, and update ``fed`` and ``ended``.

    token, fed: (B,) int64; ended: (B,) bool; eos: (E,) int64, E may be 0. ``counters``: B int32 zeros, left as zeros.
    """
    if not use_triton(logits) or logits.dtype == torch.float64:
        choose_greedily_reference(logits, token, fed, ended, eos, pad_id)
        return
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chunks = cdiv(vocab, _BLOCK)
    best = torch.empty(rows * chunks, dtype=torch.float32, device=logits.device)
    index = torch.empty(rows * chunks, dtype=torch.int32, device=logits.device)
    if counters is None:
        counters = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        _kernel[(rows * chunks,)](
            logits, token, fed, ended.view(torch.int8), eos if len(eos) else token, best, index, counters, vocab,
            logits.stride(0), pad_id, EOS=len(eos), CHUNKS=chunks, BLOCK=_BLOCK, BLOCK_C=power_of_two(chunks),
            num_warps=4,
        )  # fmt: skip
