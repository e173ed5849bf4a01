"""Mixture of experts: every token goes through the k of E gated MLPs that its router scores highest.

    route:  p = softmax(logits) over all E, fp32; the k largest; weights p_j, or p_j / Σ of the chosen
    mlp:    out[t] = Σ_j weights[t, j] · down[e]·(silu(gate[e]·x[t]) · (up[e]·x[t]))     with e = experts[t, j]

Shazeer et al. 2017; Jiang et al. 2024 (Mixtral). Nothing is dropped and no expert has a capacity.

The M = N·k pairs of token and expert are sorted by expert (stable, by counting, on the device), so that each expert's
rows lie together; the products are those of grouped_mm.py. Forward: the rows of x in sorted order, gate and up in one
product, swiglu, down, and every token adds its k rows, which it finds through the inverse order, in fp32: no atomics,
the same bits in every run. The first three steps are one kernel for few tokens without a gradient, and for many where
``use_tma`` says so (but for large I the rows are sorted before). The host never waits for the device.

Saved for backward: x and the (M, 2I) gate and up. Not saved, but built again: x in sorted order, the swiglu, and the
(M, D) results of down, which only the gradient of the weights would need: with da = down[e]ᵀ·dout[t], unweighted,
    dweights[t, j] = dout[t] · (down[e]·a) = da · a          and the gradient of a is weights[t, j] · da
so one pass over (M, I) gives the weights' gradient, the gradient of gate and up, and weights·a, all that the product
for down's gradient needs.

FLOPs: forward 6·M·D·I, backward 12·M·D·I. Bytes that move beside the products, s bytes an element: forward
2·(N + M)·D·s [sort, add up] + 3·M·I·s [swiglu, unless it is in the product]; backward 3·(N + M)·D·s + 6·M·I·s. For
Mixtral 8x7B and 16,384 tokens that is 11.5 and 23.1 TFLOP beside 3.6 (0.8) and 6.8 GB: 16.7 and 33.5 ms of products at
690 TFLOP/s, 0.9 (0.2) and 1.6 ms of bytes.
Decoding one token must read k·3·I·D·s bytes of weights.
"""

from __future__ import annotations

import torch

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import cdiv, no_second_derivative, on_device_of, power_of_two
from ligermodels.kernels.glu import _activation, _exp, swiglu_packed
from ligermodels.kernels.grouped_mm import rows_by_group, tma_rows, use_tma, use_torch, weight_grad

_PAIRS = 16384  # comparisons of a program of the sort: pairs of a chunk times experts
_BLOCK = 1024  # columns of a program that moves rows
_NARROW = 1536  # I up to which gathering within the product costs less than gathering before it


# ------------------------------------------------------------------------------------------------------------ routing


def moe_route_reference(logits: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``moe_route`` in plain differentiable PyTorch."""
    p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    weights, experts = torch.topk(p, k, -1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.to(torch.int32)


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, n_rows, n_experts, logits_row,
    K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = tl.arange(0, BLOCK_E)
    mask = (rows < n_rows)[:, None] & (ids < n_experts)[None, :]
    x = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * logits_row + ids[None, :], mask=mask, other=0.0)
    x = tl.where((ids < n_experts)[None, :], x.to(tl.float32), -float("inf"))
    largest = tl.max(x, axis=1)
    # the weights are fp32 whatever the logits are: the hardware's fast exponential and division would be seen
    total = tl.sum(_exp(x - largest[:, None], True), axis=1)
    # What is taken ranks below all else, also below −∞ and NaN: k different experts are chosen whatever comes.
    rank = tl.where(x == x, tl.maximum(x, -3e38), -3e38)
    rank = tl.where((ids < n_experts)[None, :], rank, -float("inf"))
    slots = tl.arange(0, BLOCK_K)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    experts = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for j in tl.static_range(K):
        best = tl.max(rank, axis=1)
        chosen = tl.min(tl.where(rank == best[:, None], ids[None, :], BLOCK_E), axis=1)  # of equals the first
        weight = tl.div_rn(_exp(best - largest, True), total)
        weights = tl.where((slots == j)[None, :], weight[:, None], weights)
        experts = tl.where((slots == j)[None, :], chosen[:, None], experts)
        rank = tl.where(ids[None, :] == chosen[:, None], -float("inf"), rank)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.sum(weights, axis=1)[:, None])
    out = rows[:, None] * K + slots[None, :]
    mask = (rows < n_rows)[:, None] & (slots < K)[None, :]
    tl.store(weights_ptr + out, weights, mask=mask)
    tl.store(experts_ptr + out, experts, mask=mask)


@triton.jit
def _route_backward_kernel(
    dweights_ptr, logits_ptr, weights_ptr, experts_ptr, dlogits_ptr, n_rows, n_experts, logits_row,
    K: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids = tl.arange(0, BLOCK_E)
    known = rows < n_rows
    mask = known[:, None] & (ids < n_experts)[None, :]
    x = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * logits_row + ids[None, :], mask=mask, other=0.0)
    given = tl.zeros([ROWS, BLOCK_E], tl.float32)  # dweights at the chosen experts, 0 elsewhere
    chosen = tl.zeros([ROWS, BLOCK_E], tl.float32)  # their weights
    for j in tl.static_range(K):
        here = ids[None, :] == tl.load(experts_ptr + rows * K + j, mask=known, other=-1)[:, None]
        given = tl.where(here, tl.load(dweights_ptr + rows * K + j, mask=known, other=0.0)[:, None], given)
        chosen = tl.where(here, tl.load(weights_ptr + rows * K + j, mask=known, other=0.0)[:, None], chosen)
    mean = tl.sum(given * chosen, axis=1)[:, None]
    if NORMALISE:  # a softmax over the chosen alone
        d = chosen * (given - mean)
    else:
        x = tl.where((ids < n_experts)[None, :], x.to(tl.float32), -float("inf"))
        p = _exp(x - tl.max(x, axis=1)[:, None], True)
        d = tl.div_rn(p, tl.sum(p, axis=1)[:, None]) * (given - mean)
    out = dlogits_ptr + rows.to(tl.int64)[:, None] * n_experts + ids[None, :]
    tl.store(out, d.to(dlogits_ptr.dtype.element_ty), mask=mask)


def _route_shape(n_experts: int) -> dict[str, int]:
    block = power_of_two(max(n_experts, 2))
    return {"ROWS": max(2048 // block, 1), "BLOCK_E": block, "num_warps": 4}


def _route(logits: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n_experts = logits.shape
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        shape = _route_shape(n_experts)
        with on_device_of(logits):
            _route_kernel[(cdiv(rows, shape["ROWS"]),)](
                logits, weights, experts, rows, n_experts, logits.stride(0),
                K=k, NORMALISE=normalise, BLOCK_K=power_of_two(max(k, 2)), **shape,
            )  # fmt: skip
    return weights, experts


def _route_backward(
    dweights: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, normalise: bool
) -> torch.Tensor:
    rows, n_experts = logits.shape
    dlogits = torch.empty(rows, n_experts, dtype=logits.dtype, device=logits.device)
    if rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        shape = _route_shape(n_experts)
        with on_device_of(logits):
            _route_backward_kernel[(cdiv(rows, shape["ROWS"]),)](
                dweights.contiguous(), logits, weights, experts, dlogits, rows, n_experts, logits.stride(0),
                K=experts.shape[1], NORMALISE=normalise, **shape,
            )  # fmt: skip
    return dlogits


# ------------------------------------------------------------------------------------------------------------ sorting


@triton.jit(do_not_specialize=["n_pairs", "n_chunks"])
def _count_kernel(experts_ptr, counts_ptr, n_pairs, n_experts, n_chunks, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.arange(0, BLOCK_E)
    experts = tl.load(experts_ptr + at, mask=at < n_pairs, other=-1)
    counts = tl.sum((experts[:, None] == ids[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + ids * n_chunks + chunk, counts, mask=ids < n_experts)


@triton.jit(do_not_specialize=["n_pairs", "n_chunks"])
def _place_kernel(
    experts_ptr, upto_ptr, order_ptr, position_ptr, ends_ptr, n_pairs, n_experts, n_chunks,
    SINGLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    here = tl.arange(0, CHUNK)
    at = chunk * CHUNK + here
    mask = at < n_pairs
    ids = tl.arange(0, BLOCK_E)
    experts = tl.load(experts_ptr + at, mask=mask, other=-1)
    others = tl.load(experts_ptr + chunk * CHUNK + here, mask=mask, other=-1)
    earlier = (others[None, :] == experts[:, None]) & (here[None, :] < here[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    if SINGLE:
        counts = tl.sum((experts[:, None] == ids[None, :]).to(tl.int32), axis=0)
        start = tl.sum(tl.where(ids[None, :] < experts[:, None], counts[None, :], 0), axis=1)
        ends = tl.cumsum(counts, 0)
    else:  # upto counts along all chunks of the first expert, then of the second …
        cell = experts * n_chunks + chunk
        start = tl.load(upto_ptr + cell - 1, mask=mask & (cell > 0), other=0)
        ends = tl.load(upto_ptr + ids * n_chunks + n_chunks - 1, mask=ids < n_experts, other=0)
    tl.store(position_ptr + at, start + rank, mask=mask)
    tl.store(order_ptr + start + rank, at, mask=mask)
    if chunk == 0:
        tl.store(ends_ptr + ids, ends, mask=ids < n_experts)


def sort_by_expert(experts: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A stable sort of the pairs (token, slot) by their expert, without waiting for the device.

    experts: (N, k) int32, contiguous. Returns int32 (order (M,), position (M,), ends (E,)) with M = N·k: pair order[i]
    stands at place i, pair p stands at place position[p], and expert e's pairs end before place ends[e].
    """
    pairs, device = experts.numel(), experts.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    if not use_triton(experts):
        keys, found = torch.sort(experts.reshape(-1), stable=True)
        order.copy_(found)
        position = torch.empty_like(order)
        position[found] = torch.arange(pairs, dtype=torch.int32, device=device)
        ends = torch.searchsorted(keys, torch.arange(n_experts, device=device, dtype=keys.dtype), right=True)
        return order, position, ends.to(torch.int32)
    position = torch.empty_like(order)
    ends = torch.empty(n_experts, dtype=torch.int32, device=device)
    block = power_of_two(max(n_experts, 2))
    chunk = min(max(_PAIRS // block, 16), 128)
    n_chunks = max(cdiv(pairs, chunk), 1)
    with on_device_of(experts):
        upto = ends
        if n_chunks > 1:
            counts = torch.empty(n_experts * n_chunks, dtype=torch.int32, device=device)
            _count_kernel[(n_chunks,)](
                experts, counts, pairs, n_experts, n_chunks, CHUNK=chunk, BLOCK_E=block, num_warps=4
            )
            upto = torch.cumsum(counts, 0, dtype=torch.int32)
        _place_kernel[(n_chunks,)](
            experts, upto, order, position, ends, pairs, n_experts, n_chunks,
            SINGLE=n_chunks == 1, CHUNK=chunk, BLOCK_E=block, num_warps=4,
        )  # fmt: skip
    return order, position, ends


# ------------------------------------------------------------------------------------------------------- moving rows


@triton.jit
def _gather_kernel(x_ptr, position_ptr, out_ptr, n_cols, x_row, K: tl.constexpr, BLOCK: tl.constexpr):
    """Token by token: its row is read once and stored at its K places."""
    tiles = tl.cdiv(n_cols, BLOCK)
    token = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + token.to(tl.int64) * x_row + cols, mask=cols < n_cols)
    for j in tl.static_range(K):
        row = tl.load(position_ptr + token * K + j).to(tl.int64)
        tl.store(out_ptr + row * n_cols + cols, values, mask=cols < n_cols)


@triton.jit
def _combine_kernel(
    y_ptr, weights_ptr, position_ptr, out_ptr, n_cols, HAS_WEIGHTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    tiles = tl.cdiv(n_cols, BLOCK)
    token = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(position_ptr + token * K + j).to(tl.int64)
        value = tl.load(y_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights_ptr + token * K + j)
        total += value
    tl.store(out_ptr + token.to(tl.int64) * n_cols + cols, total.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def _glu_backward_kernel(
    da_ptr, gate_up_ptr, weights_ptr, order_ptr, dgate_up_ptr, product_ptr, dweights_ptr, n_cols,
    PRECISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + pair)
    dtype = da_ptr.dtype.element_ty
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        da = tl.load(da_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + 2 * row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + (2 * row + 1) * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        value, slope = _activation(gate, 0, PRECISE)
        sums += da * value * up
        out = dgate_up_ptr + 2 * row * n_cols + cols
        tl.store(out, (weight * da * up * slope).to(dtype), mask=mask)
        tl.store(out + n_cols, (weight * da * value).to(dtype), mask=mask)
        tl.store(product_ptr + row * n_cols + cols, (weight * value * up).to(dtype), mask=mask)
    tl.store(dweights_ptr + pair, tl.sum(sums, axis=0))


def _columns(n_cols: int) -> dict[str, int]:
    block = min(power_of_two(n_cols), _BLOCK)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}


def _gather(x: torch.Tensor, position: torch.Tensor, k: int) -> torch.Tensor:
    """(M, D): the rows of x (N, D) in sorted order, each k times."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, n_cols = x.shape
    out = torch.empty(position.shape[0], n_cols, dtype=x.dtype, device=x.device)
    shape = _columns(n_cols)
    with on_device_of(x):
        _gather_kernel[(tokens * cdiv(n_cols, shape["BLOCK"]),)](x, position, out, n_cols, x.stride(0), K=k, **shape)
    return out


def _combine(y: torch.Tensor, weights: torch.Tensor | None, position: torch.Tensor, k: int) -> torch.Tensor:
    """(N, D): each token's k rows of y (M, D), weighted, added in fp32."""
    tokens, n_cols = y.shape[0] // k, y.shape[1]
    out = torch.empty(tokens, n_cols, dtype=y.dtype, device=y.device)
    shape = _columns(n_cols)
    with on_device_of(y):
        _combine_kernel[(tokens * cdiv(n_cols, shape["BLOCK"]),)](
            y, position if weights is None else weights, position, out, n_cols,
            HAS_WEIGHTS=weights is not None, K=k, **shape,
        )  # fmt: skip
    return out


def _glu_backward(
    da: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate_up (M, 2I), dweights (N, k) fp32, and weights · silu(gate)·up, which takes the place of ``da`` (M, I)."""
    dgate_up, dweights = torch.empty_like(gate_up), torch.empty_like(weights)
    n_cols = da.shape[1]
    block = min(n_cols & -n_cols, 2048)  # the largest power of two that divides the columns: no lane is idle
    block = block if block >= 128 else min(power_of_two(n_cols), 2048)
    with on_device_of(da):
        _glu_backward_kernel[(da.shape[0],)](
            da, gate_up, weights, order, dgate_up, da, dweights, n_cols,
            PRECISE=da.dtype == torch.float32, BLOCK=block, num_warps=max(block // 256, 1),
        )  # fmt: skip
    return dgate_up, dweights, da


# --------------------------------------------------------------------------------------------------------------- MLP


def moe_mlp_reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """``moe_mlp`` in plain differentiable PyTorch, expert by expert; reads on the host where each one's rows end."""
    n_experts, k = len(gate_up), experts.shape[1]
    order, position, ends = sort_by_expert(experts.to(torch.int32), n_experts)
    rows = x[order.long() // k]  # (M, D)
    parts, start = [], 0
    # unbind, as the gradient of gate_up[e] would be a tensor of all experts, for each of them
    for end, first, second in zip(ends.tolist(), gate_up.unbind(), down.unbind(), strict=True):
        if end > start or end == len(rows) == 0:
            parts.append(swiglu_packed(rows[start:end] @ first.t()) @ second.t())
        start = end
    y = torch.cat(parts)[position.long()].view(*experts.shape, x.shape[1])  # (N, k, D)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = (y.to(wide) * weights.to(wide)[..., None]).sum(1)
    return out.to(x.dtype)


def _mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out (N, D), gate and up (M, 2I) if kept, else empty, order, position, ends)."""
    k, (n_experts, two_i, _) = experts.shape[1], gate_up.shape
    gate_up, down = gate_up.contiguous(), down.contiguous()
    order, position, ends = sort_by_expert(experts, n_experts)
    none = x.new_empty(0, two_i)
    if order.shape[0] == 0:
        return x.new_zeros(x.shape), none, order, position, ends
    if use_tma(order.shape[0], gate_up, glu=True):
        if two_i <= 2 * _NARROW:
            product, both = tma_rows(x, gate_up, ends, order=order, times=k, glu=True, keep=keep)
        else:
            product, both = tma_rows(_gather(x, position, k), gate_up, ends, glu=True, keep=keep)
    elif keep or use_torch(order.shape[0], gate_up):
        both = rows_by_group(_gather(x, position, k), gate_up, ends)  # (M, 2I)
        product, both = swiglu_packed(both), both if keep else none
    else:
        x = x if x.stride(1) == 1 else x.contiguous()
        product, both = rows_by_group(x, gate_up, ends, order=order, times=k, glu=True), none
    y = rows_by_group(product, down, ends)  # (M, D)
    return _combine(y, weights, position, k), both, order, position, ends


def _mlp_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    both: torch.Tensor,
    order: torch.Tensor,
    position: torch.Tensor,
    ends: torch.Tensor,
    need: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gate_up, down, weights; one that is not needed is empty."""
    k = weights.shape[1]
    gate_up, down = gate_up.contiguous(), down.contiguous()
    none = x.new_empty(0)
    if order.shape[0] == 0:
        return tuple(torch.zeros_like(t) if n else none for n, t in zip(need, (x, gate_up, down, weights), strict=True))
    need_x, need_gate_up, need_down, _ = need
    dout = _gather(dout, position, k)  # (M, D)
    da = rows_by_group(dout, down.transpose(1, 2), ends)  # (M, I)
    rows = None
    if both.shape[0] == 0:  # not kept
        rows = _gather(x, position, k)
        both = rows_by_group(rows, gate_up, ends)
    dboth, dweights, product = _glu_backward(da, both, weights, order)
    ddown = weight_grad(dout, product, ends) if need_down else none
    del dout, da, product, both
    dgate_up = weight_grad(dboth, _gather(x, position, k) if rows is None else rows, ends) if need_gate_up else none
    dx = _combine(rows_by_group(dboth, gate_up.transpose(1, 2), ends), None, position, k) if need_x else none
    return dx, dgate_up, ddown, dweights


def _fake_mlp(x, gate_up, down, weights, experts, keep):
    pairs = experts.numel()
    order = experts.new_empty(pairs)
    both = x.new_empty(pairs if keep else 0, gate_up.shape[1])
    return x.new_empty(x.shape), both, order, order.new_empty(pairs), order.new_empty(gate_up.shape[0])


def _fake_mlp_backward(dout, x, gate_up, down, weights, both, order, position, ends, need):
    tensors = (x, gate_up, down, weights)
    return tuple(t.new_empty(t.shape) if n else x.new_empty(0) for n, t in zip(need, tensors, strict=True))


def _setup_route(ctx, inputs, output):
    ctx.normalise = inputs[2]
    ctx.save_for_backward(inputs[0], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_route(ctx, dweights, _):
    return None if dweights is None else _route_backward_op(dweights, *ctx.saved_tensors, ctx.normalise), None, None


def _setup_mlp(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_mlp(ctx, dout, *_):
    if dout is None:
        return (None,) * 6
    need = list(ctx.needs_input_grad[:4])
    grads = _mlp_backward_op(dout, *ctx.saved_tensors, need)
    return *(g if n else None for n, g in zip(need, grads, strict=True)), None, None


_route_op = register(
    "moe_route(Tensor logits, int k, bool normalise) -> (Tensor, Tensor)",
    _route,
    lambda logits, k, normalise: (
        logits.new_empty((logits.shape[0], k), dtype=torch.float32),
        logits.new_empty((logits.shape[0], k), dtype=torch.int32),
    ),
    setup_context=_setup_route,
    backward=_backward_route,
)
_route_backward_op = register(
    "moe_route_backward(Tensor dweights, Tensor logits, Tensor weights, Tensor experts, bool normalise) -> Tensor",
    _route_backward,
    lambda dweights, logits, weights, experts, normalise: logits.new_empty(logits.shape),
    backward=no_second_derivative,
)
_mlp_op = register(
    "moe_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor experts, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _mlp,
    _fake_mlp,
    setup_context=_setup_mlp,
    backward=_backward_mlp,
)
_mlp_backward_op = register(
    "moe_mlp_backward(Tensor dout, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor both, Tensor order,"
    " Tensor position, Tensor ends, bool[] need) -> (Tensor, Tensor, Tensor, Tensor)",
    _mlp_backward,
    _fake_mlp_backward,
    backward=no_second_derivative,
)


def moe_route(logits: torch.Tensor, k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in fp32, then the k largest of each token: (weights (N, k) fp32, experts (N, k) int32).

    logits: (N, E), fp32, bf16 or fp16. ``normalise`` divides a token's weights by their sum. The weights fall along k;
    of equal ones the expert with the lower number comes first (on a CPU: as torch.topk has it). Differentiable once.
    Raises LigerError for a wrong shape or k.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise LigerError(f"moe_route: logits must be (N, E) and k 1 … E, found {tuple(logits.shape)} and k = {k}")
    if use_triton(logits) and logits.dtype != torch.float64:
        return _route_op(logits, k, normalise)
    return moe_route_reference(logits, k, normalise)


def moe_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    keep_gates: bool = True,
) -> torch.Tensor:
    """Each token through its experts' gated MLPs, weighted: (N, D).

    x (N, D); gate_up (E, 2I, D), in each expert gate first; down (E, D, I), all of one dtype of fp32, bf16, fp16;
    weights (N, k) fp32; experts (N, k) int32, k different ones a token, within 0 … E − 1 (not checked on CUDA).
    Returns x's dtype. An expert without tokens gets a gradient of zeros. Differentiable once, in all but experts.
    Without ``keep_gates`` backward computes gate and up again: 4·M·D·I FLOP more, 2·M·I elements less kept.

    Raises LigerError where shapes or dtypes do not fit together.
    """
    n_experts, two_i, d = gate_up.shape if gate_up.dim() == 3 else (0, 0, 0)
    fits = x.dim() == 2 and x.shape[1] == d and two_i % 2 == 0 and down.shape == (n_experts, d, two_i // 2)
    if not fits or experts.shape != weights.shape or experts.shape[:1] != x.shape[:1] or experts.dim() != 2:
        raise LigerError(
            f"moe_mlp: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}, weights "
            f"{tuple(weights.shape)}, experts {tuple(experts.shape)} do not fit: expected (N, D), (E, 2I, D), "
            "(E, D, I), (N, k), (N, k)"
        )
    if not x.dtype == gate_up.dtype == down.dtype or experts.dtype != torch.int32:
        raise LigerError(
            f"moe_mlp: x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}, experts {experts.dtype}; expected "
            "one dtype for the first three and int32 for experts"
        )
    if not use_triton(x) or x.dtype == torch.float64:
        return moe_mlp_reference(x, gate_up, down, weights, experts)
    weights = weights.float().contiguous()
    keep = keep_gates and torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate_up, down, weights))
    return _mlp_op(x, gate_up, down, weights, experts.contiguous(), keep)[0]
