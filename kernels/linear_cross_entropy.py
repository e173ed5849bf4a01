"""Linear layer and cross-entropy in one operation that never builds the N x V logits.

    logits = input @ linear_weight.T + linear_bias;  loss = cross_entropy(logits, target)

Work: three products of 2 * N * D * V FLOP (logits, gradient of input, gradient of weight), four with recomputation.

memory="fast": tokens in chunks of C. One buffer (C, V) is reused: the product writes logits into it, a row kernel turns
them into their gradient in place (cross_entropy.py), two more products consume it. Gradients are thus finished in the
forward, in which the weight gradient adds up in fp32 over all chunks; the backward multiplies by the incoming gradient,
read on the device, and rounds once. Saved: both gradients (N * D and, fp32, V * D), and neither is ever overwritten,
so a second backward is right. Where one chunk holds all tokens, its gradient is kept in place of the weight's,
whose product moves to the backward. Chunks are sized so that the product with the fewest tiles, C x D, fills whole
waves of multiprocessors.

memory="lean": the vocabulary in slices of S. The forward keeps running row statistics (16 bytes a token); the backward
computes each slice (N, S) of logits again, adds up the gradient of input in fp32 and writes each slice of the weight
gradient once. reduction="none" recomputes in both modes, as gradients arrive per token.
"""

from __future__ import annotations

import functools
import math

import torch

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import multiprocessors, no_second_derivative, on_device_of
from ligermodels.kernels.cross_entropy import (
    FLOATS,
    Scales,
    Terms,
    check_labels,
    check_terms,
    cross_entropy_reference,
    make_scales,
    row_backward,
    row_forward,
    row_fused,
)

__all__ = ["linear_cross_entropy"]

FAST_BUFFER = 1408 * 2**20  # bytes of logits at once; with V * D * 4 for dW this keeps 256,000 x 2304 under 2.5 GiB
LEAN_TOTAL = 384 * 2**20  # bytes of logits and fp32 gradient of input together
CPU_ELEMENTS = 2**23  # logits at once on CPU, where the row step needs a few fp32 copies of them


def linear_cross_entropy_reference(input, linear_weight, target, *, linear_bias=None, **options):
    """The two steps in plain differentiable torch operations: for tests and reading."""
    return cross_entropy_reference(torch.nn.functional.linear(input, linear_weight, linear_bias), target, **options)


# --- How large a chunk ----------------------------------------------------------------------------------------------


def wave_efficiency(rows: int, cols: int, processors: int) -> float:
    """Share of the multiprocessors' time that a (rows, cols) product can use, over the tile shapes of cuBLAS."""
    best = 0.0
    for height, width, rate in ((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.97), (192, 128, 0.97), (128, 128, 0.93)):
        tiles = math.ceil(rows / height) * math.ceil(cols / width)
        waves = math.ceil(tiles / processors)
        best = max(best, rate * rows * cols / (height * width * waves * processors))
    return best


@functools.lru_cache(maxsize=1024)
def chunk_size(total: int, cols: int, largest: int, processors: int) -> int:
    """Rows a chunk out of ``total``, at most about ``largest``: the cheapest of equal divisions, in multiples of 128.

    Cost of a chunk, in units of FLOP / (D * V): two well-filled products and one (rows, cols) that suffers from wave
    quantisation, plus the fp32 accumulator's traffic, about half hidden. The smallest within 1 % of the best is taken.
    """
    largest = max(128, largest // 128 * 128)
    if total <= 128:
        return max(total, 1)

    def cost(rows: int) -> float:
        return 2.0 * rows * (2.0 + 1.0 / wave_efficiency(rows, cols, processors)) + 656.0

    costs = {}
    least = math.ceil(total / largest)
    for chunks in range(least, 2 * least + 3):
        rows = min(largest, math.ceil(total / chunks / 128) * 128)
        full, rest = divmod(total, rows)
        costs[rows] = full * cost(rows) + (cost(rest) if rest else 0.0)
    best = min(costs.values())
    return min(total, *(rows for rows, value in costs.items() if value <= 1.01 * best))


def _token_chunk(n: int, dim: int, classes: int, dtype: torch.dtype, device: torch.device) -> int:
    if device.type != "cuda":
        return max(1, min(n, CPU_ELEMENTS // classes))
    return chunk_size(n, dim, FAST_BUFFER // (classes * dtype.itemsize), multiprocessors(device))


def _vocabulary_slice(n: int, dim: int, classes: int, dtype: torch.dtype, device: torch.device) -> int:
    n = max(n, 1)
    if device.type != "cuda":
        return max(1, min(classes, CPU_ELEMENTS // n))
    room = min(max(LEAN_TOTAL - 4 * n * dim, 64 * 2**20), 256 * 2**20)
    return chunk_size(classes, dim, max(2048, room // (n * dtype.itemsize)), multiprocessors(device))


# --- Matrix products -------------------------------------------------------------------------------------------------


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    """out (+)= a @ b. An fp32 ``out`` of bf16 or fp16 factors is rounded nowhere (cuBLAS accumulates in fp32)."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda:
        if add:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif out.dtype == torch.float32:
        out.addmm_(a.float(), b.float(), beta=1 if add else 0)
    else:  # autocast between two 16-bit dtypes
        out.add_(a @ b) if add else out.copy_(a @ b)


def _buffer(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(rows, cols) whose rows start at multiples of 16 elements, as an odd vocabulary would make every product slow."""
    return torch.empty(rows, _padded(cols), dtype=dtype, device=device)[:, :cols]


def _padded(cols: int) -> int:
    return (cols + 15) // 16 * 16


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@triton.jit
def _scale_kernel(source, scale, out, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = offsets < count
    value = tl.load(source + offsets, mask=keep, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=keep)


def _scale(source: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not use_triton(source):
        return (source.float() * scale).to(dtype)
    out = torch.empty(source.shape, dtype=dtype, device=source.device)
    if source.numel():
        with on_device_of(source):
            _scale_kernel[(triton.cdiv(source.numel(), 4096),)](
                source, scale, out, source.numel(), BLOCK=4096, num_warps=8
            )
    return out


_scale_op = register(
    "scale_gradient(Tensor source, Tensor scale, ScalarType dtype) -> Tensor",
    _scale,
    lambda source, scale, dtype: torch.empty_like(source, dtype=dtype),
    backward=no_second_derivative,
)


# --- Fast: chunks of tokens, gradients in the forward ----------------------------------------------------------------


def _operands(input, linear_weight, linear_bias, target, dtype):
    x = input.reshape(-1, input.shape[-1]).to(dtype).contiguous()
    bias = None if linear_bias is None else linear_bias.to(dtype).contiguous()
    return x, linear_weight.to(dtype).contiguous(), bias, target.reshape(-1).contiguous()


def _no_autocast(device: torch.device):
    return torch.autocast(device.type, enabled=False)


def _tokens(
    input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, upstream,
    ignore_index, label_smoothing, z_loss, softcap, dtype, need_x, need_weight, need_bias, chunk, kept=None,
):  # fmt: skip
    """Loss of each token, and the gradients wanted: of input in its dtype, of weight and bias in fp32.

    ``kept`` is the buffer of a single chunk, which is left with the gradient of the logits. In fp16 the gradients lack
    the factor ``ce`` (1 / count), under which the small ones would vanish.
    """
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, linear_weight.shape[0])
    check_labels(target, terms)
    x, w, bias, labels = _operands(input, linear_weight, linear_bias, target, dtype)
    n, dim = x.shape
    device = x.device
    f32 = {"dtype": torch.float32, "device": device}
    deferred = dtype == torch.float16 and upstream is None
    scales = Scales(torch.ones_like(ce), zs / ce, weight_sum) if deferred else Scales(ce, zs, weight_sum)
    make = torch.empty if n else torch.zeros
    loss = torch.empty(n, **f32)
    dx = torch.empty((n, dim) if need_x else (0,), dtype=input.dtype, device=device)
    dw = make((terms.classes, dim) if need_weight else (0,), **f32)
    db = torch.zeros((terms.classes,) if need_bias else (0,), **f32)
    gradients = need_x or need_weight or need_bias or kept is not None
    if kept is None:
        step = chunk or _token_chunk(n, dim, terms.classes, dtype, device)
        buffer = _buffer(min(step, n), terms.classes, dtype, device)
    else:
        step, buffer = max(n, 1), kept[:, : terms.classes]
    state = torch.empty(4, 0 if gradients else buffer.shape[0], **f32)
    with _no_autocast(device):
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            z = buffer[: part.stop - start]
            _logits(x[part], w, bias, z)
            if not gradients:
                row_forward(z, labels[part], weight, scales, terms, state[:, : z.shape[0]], loss[part])
                continue
            row_fused(z, labels[part], weight, scales, terms, loss[part], None if upstream is None else upstream[part])
            if need_x:
                _product(z, w, dx[part])
            if need_weight:
                _product(z.t(), x[part], dw, add=start > 0)
            if need_bias:
                db += z.sum(0, dtype=torch.float32)
    if deferred:
        loss *= ce
    return loss, dx.view(input.shape) if need_x else dx, dw, db


def _fast(*args):
    *inputs, dtype, need_x, need_weight, need_bias, defer, chunk = args
    input, linear_weight = inputs[:2]
    n = input.numel() // input.shape[-1]
    kept = torch.empty((n, _padded(linear_weight.shape[0])) if defer else (0,), dtype=dtype, device=input.device)
    needs = (need_x, need_weight and not defer, need_bias)
    found = _tokens(*inputs[:8], None, *inputs[8:], dtype, *needs, chunk, kept if defer else None)
    return found[0].sum(), *found[1:], kept


def _fast_fake(input, linear_weight, *args):
    *_, dtype, need_x, need_weight, need_bias, defer, _chunk = args
    rows = (input.numel() // input.shape[-1], _padded(linear_weight.shape[0])) if defer else (0,)
    return (
        input.new_empty((), dtype=torch.float32),
        *_gradients_fake(input, linear_weight, need_x, need_weight and not defer, need_bias, torch.float32),
        input.new_empty(rows, dtype=dtype),
    )


def _gradients_fake(input, linear_weight, need_x, need_weight, need_bias, weight_dtype):
    return (
        torch.empty(input.shape if need_x else (0,), dtype=input.dtype, device=input.device),
        input.new_empty(linear_weight.shape if need_weight else (0,), dtype=weight_dtype),
        input.new_empty(linear_weight.shape[:1] if need_bias else (0,), dtype=weight_dtype),
    )


def _head_gradient(kept, input, scale, classes, dtype):
    x = _scale(input.reshape(-1, input.shape[-1]).contiguous(), scale, kept.dtype)
    out = torch.empty(classes, x.shape[1], dtype=dtype, device=x.device)
    with _no_autocast(x.device):
        _product(kept[:, :classes].t(), x, out)
    return out


_head_gradient_op = register(
    "linear_cross_entropy_head_gradient(Tensor kept, Tensor input, Tensor scale, SymInt classes, ScalarType dtype)"
    " -> Tensor",
    _head_gradient,
    lambda kept, input, scale, classes, dtype: input.new_empty((classes, input.shape[-1]), dtype=dtype),
    backward=no_second_derivative,
)


def _fast_setup(ctx, inputs, output):
    input, linear_weight, linear_bias = inputs[:3]
    *_, dtype, _x, _weight, _bias, ctx.defer, _chunk = inputs
    ctx.classes = linear_weight.shape[0]
    ctx.dtypes = (input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
    ctx.save_for_backward(*output[1:], input if ctx.defer else None, inputs[5] if dtype == torch.float16 else None)
    # The saved gradients stay differentiable outputs: a second derivative then raises, and is not silently zero.
    ctx.set_materialize_grads(False)


def _fast_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 18
    *saved, kept, input, unit = ctx.saved_tensors
    scale = grad if unit is None else grad * unit
    needs = list(ctx.needs_input_grad[:3])
    needs[1] = needs[1] and not ctx.defer
    found = [
        _scale_op(tensor, scale, dtype) if needed else None
        for tensor, dtype, needed in zip(saved, ctx.dtypes, needs, strict=True)
    ]
    if ctx.defer:
        found[1] = _head_gradient_op(kept, input, scale, ctx.classes, ctx.dtypes[1])
    return (*found, *(None,) * 15)


_INPUTS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, "
    "Tensor ce, Tensor zs, Tensor weight_sum"
)
_TERMS = "int ignore_index, float label_smoothing, float z_loss, float softcap, ScalarType dtype"
_NEEDS = "bool need_x, bool need_weight, bool need_bias"

_fast_op = register(
    f"linear_cross_entropy_fast({_INPUTS}, {_TERMS}, {_NEEDS}, bool defer, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fast,
    _fast_fake,
    setup_context=_fast_setup,
    backward=_fast_backward,
)


# --- Loss of each token, gradients by recomputation ------------------------------------------------------------------


def _slices(classes: int, step: int):
    return (slice(start, min(start + step, classes)) for start in range(0, classes, step))


def _rows(
    input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum,
    ignore_index, label_smoothing, z_loss, softcap, dtype, lean, chunk,
):  # fmt: skip
    if not lean:
        loss, *_ = _tokens(
            input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, None,
            ignore_index, label_smoothing, z_loss, softcap, dtype, False, False, False, chunk,
        )  # fmt: skip
        return loss.view(target.shape), loss.new_empty(4, 0)
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, linear_weight.shape[0])
    check_labels(target, terms)
    labels = target.reshape(-1).contiguous()
    x = input.reshape(-1, input.shape[-1]).to(dtype).contiguous()
    n, device = x.shape[0], x.device
    scales = Scales(ce, zs, weight_sum)
    loss = torch.empty(n, dtype=torch.float32, device=device)
    state = torch.empty(4, n, dtype=torch.float32, device=device)
    step = chunk or _vocabulary_slice(n, x.shape[1], terms.classes, dtype, device)
    buffer = _buffer(n, min(step, terms.classes), dtype, device)
    with _no_autocast(device):
        for part in _slices(terms.classes, step):
            z = buffer[:, : part.stop - part.start]
            bias = None if linear_bias is None else linear_bias[part].to(dtype)
            _logits(x, linear_weight[part].to(dtype).contiguous(), bias, z)
            row_forward(z, labels, weight, scales, terms, state, loss, first=part.start, carry=part.start > 0)
    return loss.view(target.shape), state


def _rows_fake(input, linear_weight, linear_bias, target, *args):
    lean = args[-2]
    return (
        target.new_empty(target.shape, dtype=torch.float32),
        target.new_empty((4, target.numel() if lean else 0), dtype=torch.float32),
    )


def _rows_backward(
    grad, input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, state,
    ignore_index, label_smoothing, z_loss, softcap, dtype, lean, chunk, need_x, need_weight, need_bias,
):  # fmt: skip
    upstream = grad.reshape(-1)
    if not lean:
        _, dx, dw, db = _tokens(
            input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, upstream,
            ignore_index, label_smoothing, z_loss, softcap, dtype, need_x, need_weight, need_bias, chunk,
        )  # fmt: skip
        return dx, dw.to(linear_weight.dtype), db.to(linear_weight.dtype)
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, linear_weight.shape[0])
    scales = Scales(ce, zs, weight_sum)
    labels = target.reshape(-1).contiguous()
    x = input.reshape(-1, input.shape[-1]).to(dtype).contiguous()
    (n, dim), device = x.shape, x.device
    dx = torch.empty((n, dim) if need_x else (0,), dtype=torch.float32, device=device)
    dw = torch.empty(linear_weight.shape if need_weight else (0,), dtype=linear_weight.dtype, device=device)
    db = torch.empty((terms.classes,) if need_bias else (0,), dtype=linear_weight.dtype, device=device)
    step = chunk or _vocabulary_slice(n, dim, terms.classes, dtype, device)
    buffer = _buffer(n, min(step, terms.classes), dtype, device)
    with _no_autocast(device):
        for part in _slices(terms.classes, step):
            z = buffer[:, : part.stop - part.start]
            w = linear_weight[part].to(dtype).contiguous()
            _logits(x, w, None if linear_bias is None else linear_bias[part].to(dtype), z)
            row_backward(z, z, labels, weight, scales, terms, state, upstream, first=part.start)
            if need_x:
                _product(z, w, dx, add=part.start > 0)
            if need_weight:
                _product(z.t(), x, dw[part])
            if need_bias:
                db[part] = z.sum(0, dtype=torch.float32)
    return dx.to(input.dtype).view(input.shape) if need_x else dx.to(input.dtype), dw, db


def _rows_backward_fake(grad, input, linear_weight, *args):
    return _gradients_fake(input, linear_weight, *args[-3:], linear_weight.dtype)


_rows_backward_op = register(
    f"linear_cross_entropy_rows_backward(Tensor grad, {_INPUTS}, Tensor state, {_TERMS}, bool lean, int chunk, "
    f"{_NEEDS}) -> (Tensor, Tensor, Tensor)",
    _rows_backward,
    _rows_backward_fake,
    backward=no_second_derivative,
)


def _rows_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], output[1])
    ctx.options = inputs[8:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rows_autograd(ctx, grad, _state):
    if grad is None:
        return (None,) * 15
    needs = ctx.needs_input_grad[:3]
    found = _rows_backward_op(grad, *ctx.saved_tensors, *ctx.options, *needs)
    return (*(g if needed else None for g, needed in zip(found, needs, strict=True)), *(None,) * 12)


_rows_op = register(
    f"linear_cross_entropy_rows({_INPUTS}, {_TERMS}, bool lean, int chunk) -> (Tensor, Tensor)",
    _rows,
    _rows_fake,
    setup_context=_rows_setup,
    backward=_rows_autograd,
)


def _defers(input: torch.Tensor, linear_weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether one chunk holds all tokens, and its gradient is smaller than the fp32 gradient of the weight.

    Then that gradient is kept and the weight's product waits for the backward, which writes it once in its own dtype:
    a few hundred tokens need not pay for an fp32 (V, D). The incoming gradient goes into ``input``, so not in fp16,
    where it might vanish.
    """
    classes, dim = linear_weight.shape
    n = input.numel() // dim
    small = n * dtype.itemsize <= 4 * dim and n * classes * dtype.itemsize <= FAST_BUFFER
    return small and dtype != torch.float16 and (input.is_cuda or n * classes <= CPU_ELEMENTS)


# --- Public ---------------------------------------------------------------------------------------------------------


def _check(input, linear_weight, target, linear_bias) -> torch.dtype:
    """Validate shapes and dtypes; return the dtype of the products (autocast's, if it is on)."""
    if linear_weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise LigerError(
            f"input must be (..., D) and linear_weight (V, D), got input {tuple(input.shape)} and linear_weight "
            f"{tuple(linear_weight.shape)}"
        )
    if input.shape[:-1] != target.shape:
        raise LigerError(
            f"input must be (..., D) and target (...) with equal leading shape, got input {tuple(input.shape)} and "
            f"target {tuple(target.shape)}"
        )
    if linear_weight.numel() == 0:
        raise LigerError(
            f"linear_weight is empty, shape {tuple(linear_weight.shape)}: gather a sharded head before the loss"
        )
    if hasattr(linear_weight, "full_tensor"):
        raise LigerError("linear_weight is a DTensor: the loss reads the whole head, pass linear_weight.full_tensor()")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise LigerError(
            f"linear_bias must be {tuple(linear_weight.shape[:1])} for linear_weight {tuple(linear_weight.shape)}, "
            f"got {tuple(linear_bias.shape)}"
        )
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise LigerError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.device != input.device:
            raise LigerError(f"{name} is on {tensor.device}, input on {input.device}: move one of them")
    if torch.is_autocast_enabled(input.device.type):
        return torch.get_autocast_dtype(input.device.type)
    if any(tensor.dtype != input.dtype for tensor in tensors.values()):
        listed = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise LigerError(f"dtypes must be equal outside of autocast, got {listed}: cast, or use torch.autocast")
    return input.dtype


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    memory: str = "fast",
) -> torch.Tensor:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias`` with ``target``, without the (tokens, V) logits.

    Args:
        input: hidden states (..., D), fp32, bf16 or fp16, any strides.
        linear_weight: head (V, D) in input's dtype (any under autocast); only read.
        target: labels (...), int64 or int32, in [0, V) or ``ignore_index``.
        linear_bias: (V,) or None.
        weight, ignore_index, label_smoothing, z_loss, softcap, reduction: as in ``cross_entropy``.
        memory: "fast" (three products; holds an fp32 gradient of the weight until backward) or "lean" (four products;
            under 0.4 GiB beyond the gradients). Both are exact.

    Returns:
        fp32 loss, () or, for reduction="none", the shape of ``target``. Gradients have each input's own dtype. For
        gradient accumulation divide reduction="sum" by the token count of the whole batch: the incoming gradient is
        applied in fp32, so the parts add up to the full batch's gradient.

    Raises:
        LigerError (a ValueError): shapes, dtypes or options that do not fit; on CPU also a label that is no class (on
            CUDA the loss and the gradients become NaN instead, as looking for it would wait for the device).
        LigerError: also when differentiated twice.
    """
    dtype = _check(input, linear_weight, target, linear_bias)
    if memory not in ("fast", "lean"):
        raise LigerError(f"memory must be 'fast' or 'lean', got {memory!r}")
    terms, weight = check_terms(
        linear_weight.shape[0], input.device, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction
    )
    scales = make_scales(target, weight, terms, reduction)
    inputs = (input, linear_weight, linear_bias, target, weight, *scales, *terms[:4], dtype)
    if memory == "lean" or reduction == "none":
        loss, _ = _rows_op(*inputs, memory == "lean", 0)
        return loss if reduction == "none" else loss.sum()
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)]
    return _fast_op(*inputs, *needs, needs[1] and _defers(input, linear_weight, dtype), 0)[0]
