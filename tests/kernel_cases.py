"""What every fused operation must obey, whatever it computes; the test_kernels_* files say for which operations.

An operation is a function of tensors. It is compared with `exact`, its formula in float64, and with `eager`, what
people write in plain PyTorch: it may not be further from the truth than 1.25 times eager in the same dtype, or than
1.25 times the truth rounded to that dtype.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from ligermodels.kernels._dispatch import INTERPRETED

INTERPRETER = pytest.param(
    "cpu",
    id="interpreter",
    marks=[pytest.mark.interpret, pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")],
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", INTERPRETER, CUDA]
FUSED_DEVICES = [INTERPRETER, CUDA]
# the interpreter truncates to bf16 where hardware rounds, so half precision means fp16 there
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# and it sums in numpy's order, whose error in fp32 is not the hardware's
FLOOR = 2**-21 if INTERPRETED else 2**-24
# The fp32 errors of a few values are luck, ours and eager's: where a result has fewer than MANY, it may be off by
# 1.25 · 2^-22 of its root mean square (about two units in the last place; a gradient is a difference of larger terms),
# and twice that where it has fewer than FEW: a weight gradient of 10 values once came out at 2^-21.7 on an H200.
# The rule without this allowance is kept by the real sizes on the GPU.
MANY, FEW, FEW_FLOOR = 1000, 100, 2**-22


def tensor(*shape: int, like: tuple = (torch.float32, "cpu"), seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Standard normal values, the same on every device."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))
    return values.to(dtype=like[0], device=like[1]).requires_grad_(grad)


def run(function, inputs, grads=None) -> tuple[torch.Tensor, ...]:
    """The outputs of function, then the gradients of the inputs that want one; nothing given may change."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if grads is None:
        grads = [tensor(*y.shape, like=(y.dtype, y.device), seed=100 + i, grad=False) for i, y in enumerate(outputs)]
    before = [x.detach().clone() for x in (*leaves, *grads)]
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, grads, allow_unused=True) if wanted else ()
    for now, then in zip((*leaves, *grads), before, strict=True):
        assert torch.equal(now, then), "an input or an incoming gradient was written to"
    return *(y.detach() for y in outputs), *gradients


def check_exact(function, eager, exact, inputs, worst: int = 1) -> None:
    """Outputs and gradients are as near to the float64 truth as eager's, in the root mean square and at worst.

    The worst is one error, or the root mean square of the ``worst`` largest.
    """

    def at_worst(x):
        return _rms(x.flatten().topk(min(worst, x.numel())).values)

    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    ours, theirs, truth = run(function, inputs), run(eager, inputs), None
    n = len(ours) - sum(x.requires_grad for x in inputs)
    grads = [
        tensor(*y.shape, like=(y.dtype, y.device), seed=100 + i, grad=False).double() for i, y in enumerate(ours[:n])
    ]
    truth = run(exact, wide, grads)
    for i, (a, b, t) in enumerate(zip(ours, theirs, truth, strict=True)):
        assert a.shape == t.shape and a.dtype == b.dtype, f"result {i}: {a.dtype} {a.shape}"
        if t.numel() == 0:
            continue
        error, eager_error, rounding = (
            (a.double() - t).abs(),
            (b.double() - t).abs(),
            (t.to(a.dtype).double() - t).abs(),
        )
        floor = FLOOR if t.numel() >= MANY else max(FLOOR, FEW_FLOOR * (2 if t.numel() < FEW else 1))
        measures = {"rms": (_rms, 1.25), "max": (at_worst, 1.25 if a.dtype != torch.float32 else 2.0)}
        if t.numel() < FEW:  # the largest of a few errors is luck
            del measures["max"]
        for name, (measure, factor) in measures.items():
            bound = factor * max(measure(eager_error), measure(rounding), floor * measure(t.abs()))
            assert measure(error) <= bound, f"result {i}: {name} error {measure(error):.3g} > {bound:.3g}"


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()


def check_strides(function, inputs) -> None:
    """Any strides, in inputs and incoming gradients, give the bits of contiguous ones."""
    outputs = run(function, [x.detach() for x in inputs])
    grads = [tensor(*y.shape[-1:], like=(y.dtype, y.device), seed=9, grad=False).expand(y.shape) for y in outputs]
    expected = run(function, inputs, [g.contiguous() for g in grads])
    for layout in (spread, transposed):
        views = [layout(x.detach()).requires_grad_(x.requires_grad) for x in inputs]
        for given in (grads, [layout(g) for g in grads]):
            for a, b in zip(run(function, views, given), expected, strict=True):
                assert torch.equal(a, b)


def spread(x: torch.Tensor) -> torch.Tensor:
    """x with gaps between the elements, and not at the start of its storage."""
    return x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)[..., 1::2].copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """x with its first dimension innermost in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def check_repeatable(function, inputs) -> None:
    """The same bits in every run, and from a second backward pass over a retained graph."""
    first = run(function, inputs)
    for _ in range(2):
        assert all(map(torch.equal, run(function, inputs), first))
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [x for x in leaves if x.requires_grad]
    twice = [torch.autograd.grad(outputs, wanted, list(map(torch.ones_like, outputs)), retain_graph=True) for _ in "ab"]
    assert all(map(torch.equal, *twice))


def check_compiles(function, inputs_of_length, device: str) -> None:
    """torch.compile sees one graph, forward and backward, and at most two of them over four lengths."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in (2, 3, 4, 5) if INTERPRETED else (7, 8, 9, 33):
        inputs = inputs_of_length(length)
        assert all(map(torch.equal, run(compiled, inputs), run(function, inputs)))
    assert counter.frame_count <= 2


def capture(step):
    """What a CUDA graph of ``step`` gives when it is replayed, and what ``step`` itself gives (on a stream of its own,
    as capture wants its first run). Capture fails if anything waits for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still fill the tensors
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    return captured, expected


def check_captures(function, inputs) -> None:
    """A CUDA graph of forward and backward gives the eager bits: nothing waits for the host."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]

    def step():
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *torch.autograd.grad(outputs, wanted, list(map(torch.ones_like, outputs)))

    captured, expected = capture(step)
    assert all(map(torch.equal, captured, expected))


def check_tail(function, inputs, dim: int = 0, keep: int = 3) -> None:
    """The last rows of a huge problem come out as they do alone."""
    total = inputs[0].shape[dim]
    is_cut = [x.shape[dim] == total for x in inputs]

    def tail(x):
        return x.detach().narrow(dim, total - keep, keep).clone()

    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.ones(1, dtype=y.dtype, device=y.device).expand(y.shape) for y in outputs]
    cut = [x for x, c in zip(leaves, is_cut, strict=True) if c and x.requires_grad]
    whole = *outputs, *torch.autograd.grad(outputs, cut, grads)
    alone = [tail(x).requires_grad_(x.requires_grad) if c else x.detach() for x, c in zip(inputs, is_cut, strict=True)]
    few = run(function, alone, [tail(g) for g in grads])
    assert all(torch.equal(tail(a), b) for a, b in zip(whole, few, strict=True))
