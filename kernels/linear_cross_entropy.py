"""Linear layer and cross-entropy in one operation that never builds the N x V logits.

    logits = input @ linear_weight.T + linear_bias;  loss = cross_entropy(logits, target)

Work: three products of 2 * N * D * V FLOP (logits, gradient of input, gradient of weight), four with recomputation.

memory="fast": tokens in chunks of C. One buffer (C, V) is reused: the product writes logits into it, a row kernel turns
them into their gradient in place (cross_entropy.py), two more products consume it. Gradients are thus finished in the
forward, in which the weight gradient adds up in fp32 over all chunks; the backward multiplies by the incoming gradient,
read on the device, and rounds once. Saved: both gradients (N * D and, fp32, V * D), and neither is ever overwritten,
so a second backward is right. Where the gradient of all logits is not larger than the weight's in fp32, it is kept in
its place, and the weight's product moves to the backward. Chunks are sized so that the product with the fewest tiles,
C x D, fills whole waves of multiprocessors. On Hopper in bf16 the plain loss of many tokens skips the row kernel: the
first product itself writes exponentials, and the rest of the softmax is a factor of each row (exp_product.py).

memory="lean": the vocabulary in slices of S. The forward keeps running row statistics (16 bytes a token); the backward
computes each slice (N, S) of logits again, adds up the gradient of input in fp32 and writes each slice of the weight
gradient once. reduction="none" recomputes in both modes, as gradients arrive per token.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ligermodels.errors import LigerError
from ligermodels.kernels._dispatch import register, tl, triton, use_triton
from ligermodels.kernels._launch import multiprocessors, no_second_derivative, on_device_of
from ligermodels.kernels.cross_entropy import (
    FLOATS,
    Extras,
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
from ligermodels.kernels.exp_product import (
    FEWEST_LOGITS,
    Workspace,
    add_label_rest,
    bytes_a_token,
    can_use,
    exp_step,
    scale_rows,
)

__all__ = ["LossOutput", "linear_cross_entropy", "linear_logprob"]

# bytes of logits at once, or of exponentials and what goes with them; with V * D * 4 for dW this keeps 256,000 x 2304
# under 2.5 GiB
FAST_BUFFER = 1416 * 2**20
MAIN_GRAD_BUFFER = 1008 * 2**20  # the same where dW goes into a given buffer: all there is beside the gradients
LEAN_BUFFER = 256 * 2**20  # bytes of logits at once
CPU_ELEMENTS = 2**23  # logits at once on CPU, where the row step needs a few fp32 copies of them


def linear_cross_entropy_reference(input, linear_weight, target, *, linear_bias=None, **options):
    """The two steps in plain differentiable torch operations: for tests and reading."""
    return cross_entropy_reference(torch.nn.functional.linear(input, linear_weight, linear_bias), target, **options)


def linear_logprob_reference(
    input, linear_weight, target, *, linear_bias=None, softcap=None, temperature=1.0, ignore_index=-100
):
    """(log-probability of each target, entropy) in plain differentiable torch operations: for tests and reading."""
    x = torch.nn.functional.linear(input, linear_weight, linear_bias)
    z = (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature
    logp = torch.log_softmax(z, -1)
    valid = target != ignore_index
    chosen = logp.gather(-1, torch.where(valid, target, 0).long().unsqueeze(-1)).squeeze(-1)
    return torch.where(valid, chosen, 0), torch.where(valid, -(logp.exp() * logp).sum(-1), 0)


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
    """Rows a chunk out of ``total``, at most about ``largest``: the cheapest of equal divisions.

    In multiples of 256 (H200, D 896: the three products take 41.5 ms in chunks of 4,608 and 43.3 in chunks of 4,736).
    Cost of a chunk, in units of FLOP / (D * V): two well-filled products and one (rows, cols) that suffers from wave
    quantisation, plus the fp32 accumulator's traffic, about half hidden. The smallest within 1 % of the best is taken.
    """
    largest = max(256, largest // 256 * 256)
    if total <= 128:
        return max(total, 1)

    def cost(rows: int) -> float:
        return 2.0 * rows * (2.0 + 1.0 / wave_efficiency(rows, cols, processors)) + 656.0

    costs = {}
    least = math.ceil(total / largest)
    for chunks in range(least, least + min(least, 1024) + 3):  # a planner may ask about any number of tokens
        rows = min(largest, math.ceil(total / chunks / 256) * 256)
        full, rest = divmod(total, rows)
        costs[rows] = full * cost(rows) + (cost(rest) if rest else 0.0)
    best = min(costs.values())
    return min(total, *(rows for rows, value in costs.items() if value <= 1.01 * best))


def _token_chunk(
    n: int, dim: int, classes: int, dtype: torch.dtype, device: torch.device,
    limit: int = FAST_BUFFER, each: int | None = None,
) -> int:  # fmt: skip
    """Tokens a chunk of at most ``limit`` bytes, ``each`` of them a token (by default its logits)."""
    if device.type != "cuda":
        return max(1, min(n, CPU_ELEMENTS // classes))
    return chunk_size(n, dim, limit // (each or classes * dtype.itemsize), multiprocessors(device))


def fast_buffer_bytes(tokens: int, dim: int, classes: int, size: int, processors: int) -> int:
    """What memory="fast" takes for one chunk on a CUDA device, elements of ``size`` bytes.

    The larger of both ways where exponentials may take the place of logits: softcap, bias and device decide about that.
    """
    padded = _padded(classes)
    ways = [(classes * size, padded * size)]  # bytes a token: by which chunks are sized, and that they take
    if size == 2 and tokens * classes >= FEWEST_LOGITS:
        ways.append((bytes_a_token(dim, classes), bytes_a_token(dim, padded)))
    return max(chunk_size(tokens, dim, FAST_BUFFER // each, processors) * taken for each, taken in ways)


def _lean_shape(n, dim, classes, dtype, device, step: int, tokens: int) -> tuple[int, int]:
    """Classes and tokens of lean's buffer of logits: as given, or chosen here where 0.

    Measured on an H200: of the buffers of LEAN_BUFFER bytes, those of 16,384 tokens are fastest for wide heads (D 4096)
    and those of 8,192 for narrow ones (D 896).
    """
    if device.type != "cuda":
        return min(step or max(1, CPU_ELEMENTS // max(n, 1)), classes), max(1, min(tokens or n, n))
    tokens = max(1, min(tokens or min(max(8192, 4 * dim), 16384), n))
    return min(step or LEAN_BUFFER // (tokens * dtype.itemsize) // 128 * 128, classes), tokens


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
    """(rows, cols and more): rows of a multiple of 16 elements, as an odd vocabulary would make every product slow.

    On a CPU with AMX torch's bf16 products (2.13, oneDNN 3.12) read what lies behind a row's end and multiply it by 0,
    so there must be no NaN.
    """
    new = torch.zeros if device.type == "cpu" else torch.empty
    return new(rows, _padded(cols), dtype=dtype, device=device)


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
    extras=None, main_grad=None,
):  # fmt: skip
    """Loss of each token, and the gradients wanted: of input in its dtype, of weight and bias in fp32.

    ``kept`` is the buffer of a single chunk, which is left with the gradient of the logits; ``main_grad`` is what the
    gradient of the weight is added to. In fp16 without ``upstream`` the gradients lack the factor ``ce`` (1 / count),
    under which the small ones would vanish.
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
    dw = make((terms.classes, dim) if need_weight else (0,), **f32) if main_grad is None else main_grad
    db = torch.zeros((terms.classes,) if need_bias else (0,), **f32)
    gradients = need_x or need_weight or need_bias or kept is not None
    plain = bias is None and extras is None and not (terms.label_smoothing or terms.softcap)
    exponentials = plain and kept is None and (need_x or need_weight) and can_use(x, w)
    if kept is None:
        limit = FAST_BUFFER if main_grad is None else MAIN_GRAD_BUFFER
        each = bytes_a_token(dim, terms.classes) if exponentials else None
        step = chunk or _token_chunk(n, dim, terms.classes, dtype, device, limit, each)
        buffer = _buffer(min(step, n), terms.classes, dtype, device)[:, : terms.classes]
    else:
        step, buffer = max(n, 1), kept[:, : terms.classes]
    if exponentials:
        space = Workspace.empty(min(step, n), dim, terms.classes, device)
        factors = torch.empty(2, n, **f32)
    state = torch.empty(4, 0 if gradients else buffer.shape[0], **f32)
    with _no_autocast(device):
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            z = buffer[: part.stop - start]
            if exponentials:
                own = None if upstream is None else upstream[part]
                found = factors[:, part]
                exp_step(x[part], w, labels[part], weight, scales, terms, z, space, loss[part], found, own)
                wide = space.wide[: len(z)]
                if need_x:
                    _product(z, w, wide)
                    scale_rows(wide, found[0], dx[part])
                if need_weight:
                    scaled = wide.view(dtype).view(-1, dim)[: len(z)]  # in its first half
                    scale_rows(x[part], found[0], scaled)
                    _product(z.t(), scaled, dw, add=start > 0 or main_grad is not None)
                continue
            _logits(x[part], w, bias, z)
            given = (z, labels[part], weight, scales, terms)
            also = None if extras is None else extras.part(part)
            if not gradients:
                row_forward(*given, state[:, : z.shape[0]], loss[part], extras=also)
                continue
            row_fused(*given, loss[part], None if upstream is None else upstream[part], also)
            if need_x:
                _product(z, w, dx[part])
            if need_weight:
                _product(z.t(), x[part], dw, add=start > 0 or main_grad is not None)
            if need_bias:
                db += z.sum(0, dtype=torch.float32)
    if exponentials and need_weight and n:
        add_label_rest(x, labels, factors, dw, terms)
    if deferred:
        loss *= ce
    return loss, dx.view(input.shape) if need_x else dx, dw, db


def _fast(*args):
    *inputs, dtype, need_x, need_weight, need_bias, defer, stats, chunk = args
    input, linear_weight = inputs[:2]
    n = input.numel() // input.shape[-1]
    kept = _buffer(n, len(linear_weight), dtype, input.device) if defer else input.new_empty(0, dtype=dtype)
    needs = (need_x, need_weight and not defer, need_bias)
    extras = Extras.empty(n if stats else 0, input.device)
    found = _tokens(
        *inputs[:8], None, *inputs[8:], dtype, *needs, chunk, kept if defer else None, extras if stats else None
    )
    return found[0].sum(), *found[1:], kept, *extras


def _fast_fake(input, linear_weight, *args):
    *_, dtype, need_x, need_weight, need_bias, defer, stats, _chunk = args
    rows = (input.numel() // input.shape[-1], _padded(linear_weight.shape[0])) if defer else (0,)
    return (
        input.new_empty((), dtype=torch.float32),
        *_gradients_fake(input, linear_weight, need_x, need_weight and not defer, need_bias, torch.float32),
        input.new_empty(rows, dtype=dtype),
        *Extras.empty(input.numel() // input.shape[-1] if stats else 0, input.device),
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
    *_, dtype, _x, _weight, _bias, ctx.defer, _stats, _chunk = inputs
    ctx.classes = linear_weight.shape[0]
    ctx.dtypes = (input.dtype, linear_weight.dtype, None if linear_bias is None else linear_bias.dtype)
    ctx.save_for_backward(*output[1:5], input if ctx.defer else None, inputs[5] if dtype == torch.float16 else None)
    ctx.mark_non_differentiable(*output[5:])
    # The saved gradients stay differentiable outputs: a second derivative then raises, and is not silently zero.
    ctx.set_materialize_grads(False)


def _fast_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 19
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
    return (*found, *(None,) * 16)


_INPUTS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, "
    "Tensor ce, Tensor zs, Tensor weight_sum"
)
_TERMS = "int ignore_index, float label_smoothing, float z_loss, float softcap, ScalarType dtype"
_NEEDS = "bool need_x, bool need_weight, bool need_bias"

_fast_op = register(
    f"linear_cross_entropy_fast({_INPUTS}, {_TERMS}, {_NEEDS}, bool defer, bool stats, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    ignore_index, label_smoothing, z_loss, softcap, dtype, heat, lean, stats, entropy, step, tokens,
):  # fmt: skip
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, linear_weight.shape[0], heat)
    n, device = target.numel(), input.device
    extras = Extras.empty(n if stats else 0, device)
    if not lean:
        loss, *_ = _tokens(
            input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, None,
            ignore_index, label_smoothing, z_loss, softcap, dtype, False, False, False, step,
            extras=extras if stats else None,
        )  # fmt: skip
        return loss.view(target.shape), loss.new_empty(0), loss.new_empty(4, 0), *extras
    check_labels(target, terms)
    labels = target.reshape(-1).contiguous()
    x = input.reshape(-1, input.shape[-1]).to(dtype).contiguous()
    scales = Scales(ce, zs, weight_sum)
    loss = torch.empty(n, dtype=torch.float32, device=device)
    state = torch.empty(4, n, dtype=torch.float32, device=device)
    step, tokens = _lean_shape(n, x.shape[1], terms.classes, dtype, device, step, tokens)
    buffer = _buffer(tokens, step, dtype, device)[:, :step]
    with _no_autocast(device):
        for part in _slices(terms.classes, step):
            bias = None if linear_bias is None else linear_bias[part].to(dtype)
            w = linear_weight[part].to(dtype).contiguous()
            for some in _slices(n, tokens):
                z = buffer[: some.stop - some.start, : part.stop - part.start]
                _logits(x[some], w, bias, z)
                row_forward(
                    z, labels[some], weight, scales, terms, state[:, some], loss[some], first=part.start,
                    carry=part.start > 0, extras=extras.part(some) if stats else None, entropy=entropy,
                )  # fmt: skip
    if entropy:
        uncertain = torch.where(labels == ignore_index, 0.0, state[1].log() - state[2] / state[1])
    else:
        uncertain = loss.new_empty(0)
    return loss.view(target.shape), uncertain.view(target.shape) if entropy else uncertain, state, *extras


def _rows_fake(input, linear_weight, linear_bias, target, *args):
    *_, lean, stats, entropy, _step, _tokens = args
    f32 = {"dtype": torch.float32}
    return (
        target.new_empty(target.shape, **f32),
        target.new_empty(target.shape if entropy else (0,), **f32),
        target.new_empty((4, target.numel() if lean else 0), **f32),
        *Extras.empty(target.numel() if stats else 0, target.device),
    )


def _rows_backward(
    grad, grad_entropy, input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, state,
    ignore_index, label_smoothing, z_loss, softcap, dtype, heat, lean, _stats, _entropy, step, tokens,
    need_x, need_weight, need_bias, main_grad=None,
):  # fmt: skip
    upstream = grad.reshape(-1)
    if not lean:
        _, dx, dw, db = _tokens(
            input, linear_weight, linear_bias, target, weight, ce, zs, weight_sum, upstream,
            ignore_index, label_smoothing, z_loss, softcap, dtype, need_x, need_weight, need_bias, step,
            main_grad=main_grad,
        )  # fmt: skip
        return dx, dw if main_grad is not None else dw.to(linear_weight.dtype), db.to(linear_weight.dtype)
    terms = Terms(ignore_index, label_smoothing, z_loss, softcap, linear_weight.shape[0], heat)
    scales = Scales(ce, zs, weight_sum)
    labels = target.reshape(-1).contiguous()
    x = input.reshape(-1, input.shape[-1]).to(dtype).contiguous()
    (n, dim), device = x.shape, x.device
    from_entropy = None if grad_entropy is None else grad_entropy.reshape(-1)
    dx = torch.empty((n, dim) if need_x else (0,), dtype=torch.float32, device=device)
    dw = torch.empty(linear_weight.shape if need_weight else (0,), dtype=linear_weight.dtype, device=device)
    if main_grad is not None:
        dw = main_grad
    elif n == 0:
        dw.zero_()
    db = torch.empty((terms.classes,) if need_bias else (0,), dtype=linear_weight.dtype, device=device)
    step, tokens = _lean_shape(n, dim, terms.classes, dtype, device, step, tokens)
    buffer = _buffer(tokens, step, dtype, device)[:, :step]
    # A slice that comes in several parts adds up in fp32, as everything does.
    parts = need_weight and main_grad is None and n > tokens
    total = torch.empty(step, dim, dtype=torch.float32, device=device) if parts else None
    with _no_autocast(device):
        for part in _slices(terms.classes, step):
            bias = None if linear_bias is None else linear_bias[part].to(dtype)
            w = linear_weight[part].to(dtype).contiguous()
            sum_w = total[: len(w)] if parts else dw[part]
            sum_b = torch.zeros(len(w), dtype=torch.float32, device=device) if need_bias else None
            for some in _slices(n, tokens):
                z = buffer[: some.stop - some.start, : len(w)]
                _logits(x[some], w, bias, z)
                row_backward(
                    z, z, labels[some], weight, scales, terms, state[:, some], upstream[some], first=part.start,
                    entropy=None if from_entropy is None else from_entropy[some],
                )  # fmt: skip
                if need_x:
                    _product(z, w, dx[some], add=part.start > 0)
                if need_weight:
                    _product(z.t(), x[some], sum_w, add=some.start > 0 or main_grad is not None)
                if need_bias:
                    sum_b += z.sum(0, dtype=torch.float32)
            if parts:
                dw[part] = sum_w
            if need_bias:
                db[part] = sum_b
    buffer = z = total = None  # before the gradient of input is there twice
    return dx.to(input.dtype).view(input.shape) if need_x else dx.to(input.dtype), dw, db


def _rows_backward_fake(grad, grad_entropy, input, linear_weight, *args):
    return _gradients_fake(input, linear_weight, *args[-3:], linear_weight.dtype)


_ROWS = "float heat, bool lean, bool stats, bool entropy, int step, int tokens"

_rows_backward_op = register(
    f"linear_cross_entropy_rows_backward(Tensor grad, Tensor? grad_entropy, {_INPUTS}, Tensor state, {_TERMS}, "
    f"{_ROWS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
    _rows_backward,
    _rows_backward_fake,
    backward=no_second_derivative,
)


def _rows_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], output[2])
    ctx.options = inputs[8:]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _rows_autograd(ctx, grad, grad_entropy, *_):
    if grad is None and grad_entropy is None:
        return (None,) * 19
    grad = torch.zeros_like(grad_entropy) if grad is None else grad
    needs = ctx.needs_input_grad[:3]
    found = _rows_backward_op(grad, grad_entropy, *ctx.saved_tensors, *ctx.options, *needs)
    return (*(g if needed else None for g, needed in zip(found, needs, strict=True)), *(None,) * 16)


_rows_op = register(
    f"linear_cross_entropy_rows({_INPUTS}, {_TERMS}, {_ROWS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rows,
    _rows_fake,
    setup_context=_rows_setup,
    backward=_rows_autograd,
)


# --- The gradient of the weight added to a given buffer ---------------------------------------------------------------


class _IntoMainGrad(torch.autograd.Function):
    """(loss, of one or of each token, *extras), and no gradient of the weight.

    Not an operator, as torch.library knows none that both writes into an argument and has a gradient.
    """

    @staticmethod
    def forward(ctx, main_grad, scale, chunked, options, *inputs):
        input, _, linear_bias, target = inputs[:4]
        ctx.chunked, ctx.options, ctx.done = chunked, options, False
        ctx.dtypes = (input.dtype, None if linear_bias is None else linear_bias.dtype)
        needs = ctx.needs_input_grad[4], True, ctx.needs_input_grad[6]
        if chunked:  # the gradients are finished here, for the incoming gradient that is announced
            stats = options[-4]
            extras = Extras.empty(target.numel() if stats else 0, input.device)
            loss, dx, _, db = _tokens(
                *inputs, scale.expand(target.numel()), *options[:5], *needs, 0,
                extras=extras if stats else None, main_grad=main_grad,
            )  # fmt: skip
            ctx.save_for_backward(scale, dx, db)
            ctx.mark_non_differentiable(*extras)
            return loss.sum(), *extras
        loss, _, state, *extras = _rows(*inputs, *options)
        ctx.main_grad = main_grad
        ctx.save_for_backward(*inputs, state)
        ctx.mark_non_differentiable(*extras)
        return loss, *extras

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        none = (None,) * 5
        if not ctx.chunked:
            needs = ctx.needs_input_grad[4], True, ctx.needs_input_grad[6]
            dx, _, db = _rows_backward(grad, None, *ctx.saved_tensors, *ctx.options, *needs, main_grad=ctx.main_grad)
            return *none[:4], dx if needs[0] else None, None, db if needs[2] else None, *none
        if ctx.done:
            raise LigerError(
                "a second backward with main_grad: the forward added the gradient of linear_weight once; "
                "use memory='lean', which adds it in each backward"
            )
        ctx.done = True
        scale, dx, db = ctx.saved_tensors
        right = torch.where(grad == scale, 1.0, float("nan"))  # main_grad cannot be put right any more: be loud
        dx = _scale(dx, right, ctx.dtypes[0]) if ctx.needs_input_grad[4] else None
        db = _scale(db, right, ctx.dtypes[1]) if ctx.needs_input_grad[6] else None
        return *none[:4], dx, None, db, *none


def _defers(input: torch.Tensor, linear_weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all tokens are one chunk whose gradient is kept, and the product of the weight waits for the backward."""
    classes, dim = linear_weight.shape
    n = input.numel() // dim
    return keeps_logits(n, dim, dtype) and (input.is_cuda or n * classes <= CPU_ELEMENTS)


def keeps_logits(tokens: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether memory="fast" keeps the gradient of all logits on a CUDA device, where the weight has a gradient.

    Where it is not larger than the fp32 gradient of the weight, which is then never made: the backward writes that
    gradient once in its own dtype. The incoming gradient goes into ``input``, so not in fp16, where it might vanish.
    """
    return tokens * dtype.itemsize <= 4 * dim and dtype != torch.float16


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


class LossOutput(NamedTuple):
    """What linear_cross_entropy gives with return_stats=True. Only ``loss`` is differentiable.

    loss: as without. token_loss: fp32, shape of target, the loss of reduction="none". logsumexp: fp32, of each token's
    (soft-capped) logits. argmax: int64, the likeliest class of each token, so (argmax == target) is its accuracy. For
    ignored tokens token_loss is 0; the other two are theirs all the same.
    """

    loss: torch.Tensor
    token_loss: torch.Tensor
    logsumexp: torch.Tensor
    argmax: torch.Tensor


def _check_main_grad(main_grad: torch.Tensor, linear_weight: torch.Tensor) -> None:
    wanted = torch.float32, linear_weight.shape, linear_weight.device
    if (main_grad.dtype, main_grad.shape, main_grad.device) != wanted or not main_grad.is_contiguous():
        raise LigerError(
            f"main_grad must be a contiguous float32 tensor {tuple(linear_weight.shape)} on {linear_weight.device}, "
            f"got {main_grad.dtype} {tuple(main_grad.shape)} on {main_grad.device}, strides {main_grad.stride()}"
        )
    if main_grad.requires_grad:
        raise LigerError("main_grad requires a gradient itself: pass a plain buffer, such as main_grad.detach()")
    if torch.compiler.is_compiling():
        raise LigerError("main_grad is not supported under torch.compile: leave it out, or call the loss eagerly")


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
    return_stats: bool = False,
    main_grad: torch.Tensor | None = None,
    main_grad_scale: float | torch.Tensor = 1.0,
) -> torch.Tensor | LossOutput:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias`` with ``target``, without the (tokens, V) logits.

    Args:
        input: hidden states (..., D), fp32, bf16 or fp16, any strides.
        linear_weight: head (V, D) in input's dtype (any under autocast); only read.
        target: labels (...), int64 or int32, in [0, V) or ``ignore_index``.
        linear_bias: (V,) or None.
        weight, ignore_index, label_smoothing, z_loss, softcap, reduction: as in ``cross_entropy``.
        memory: "fast" (three products; holds an fp32 gradient of the weight until backward, or that of the logits where
            it is no larger) or "lean" (four products; under 0.4 GiB beyond the gradients). Both are exact.
        return_stats: return a ``LossOutput`` instead, at no extra pass.
        main_grad: fp32 (V, D), contiguous: the gradient of linear_weight is added to it in fp32 and linear_weight
            itself gets none (hooks on its gradient do not run). At most 1 GiB is then held beyond the gradients. Left
            alone where linear_weight needs no gradient. Not under torch.compile.
        main_grad_scale: with main_grad, "fast", and reduction "mean" or "sum" only, where the gradient is finished in
            the forward: the incoming gradient that the loss will get, such as 1 / accumulation steps (a number, or a
            scalar tensor on the device). If another one arrives, the gradient of input is NaN; a forward without
            backward has added to main_grad all the same.

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
    inputs = (input, linear_weight, linear_bias, target, weight, *scales)
    options = (*terms[:4], dtype)
    chunked = memory == "fast" and reduction != "none"
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs[:3]]
    rows = (1.0, memory == "lean", return_stats, False, 0, 0)
    if main_grad is not None:
        _check_main_grad(main_grad, linear_weight)
    if main_grad is not None and needs[1]:
        if isinstance(main_grad_scale, torch.Tensor):
            scale = main_grad_scale.detach().to(input.device, torch.float32)
        else:  # filled on the device: a copy from the host would make it wait
            scale = torch.full((), main_grad_scale, dtype=torch.float32, device=input.device)
        loss, *extras = _IntoMainGrad.apply(main_grad, scale, chunked, (*options, *rows), *inputs)
    elif chunked:
        defer = needs[1] and _defers(input, linear_weight, dtype)
        loss, _, _, _, _, *extras = _fast_op(*inputs, *options, *needs, defer, return_stats, 0)
    else:
        loss, _, _, *extras = _rows_op(*inputs, *options, *rows)
    if reduction != "none" and not chunked:
        loss = loss.sum()
    return LossOutput(loss, *(t.view(target.shape) for t in extras)) if return_stats else loss


def linear_logprob(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target token, as reinforcement learning and distillation need it.

    z = softcap * tanh(logits / softcap) / temperature with logits = input @ linear_weight.T + linear_bias;
    log p = z[target] - logsumexp(z), entropy = -sum_v p_v * log p_v. The (tokens, V) logits are never held: one product
    in the forward and three in the backward, over slices of the vocabulary (memory="lean" of linear_cross_entropy).

    Args:
        input, linear_weight, target, linear_bias: as in ``linear_cross_entropy``.
        temperature: positive; 1.0 is the model's own distribution.
        ignore_index: tokens with this target get 0 (both) and no gradient.
        return_entropy: return (log-probabilities, entropies), both differentiable, of the same two passes.

    Returns:
        fp32 log-probabilities, shape of ``target``; or the pair.

    Raises:
        LigerError (a ValueError): as in ``linear_cross_entropy``, or a temperature that is not positive.
    """
    dtype = _check(input, linear_weight, target, linear_bias)
    if not temperature > 0.0:
        raise LigerError(f"temperature must be positive, got {temperature} (for temperature 0 take the argmax)")
    terms, _ = check_terms(linear_weight.shape[0], input.device, target, None, ignore_index, 0.0, 0.0, softcap, "none")
    scales = make_scales(target, None, terms, "none")
    inputs = (input, linear_weight, linear_bias, target, None, *scales, *terms[:4], dtype)
    loss, entropy, *_ = _rows_op(*inputs, 1.0 / float(temperature), True, False, return_entropy, 0, 0)
    return (-loss, entropy) if return_entropy else -loss
