"""Linears that share an input, as one node of the graph.

The products are nn.Linear's, the weights stay where and what they are. What is saved are passes over memory: the
gradient of the shared input adds up inside the products (their beta is 1), where autograd would add up results in
passes of their own. For N tokens of width H that is 2·N·H elements less to move for each Linear after the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ligermodels.kernels._launch import no_second_derivative


def plain(x: torch.Tensor, *linears: nn.Module) -> bool:
    """Whether nothing but their weights has a say in what these modules compute of ``x``: no subclass (adapters,
    quantisation), no hooks (FSDP by module), no sharded weight, no autocast, no compiler."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    return all(
        type(m) is nn.Linear
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
        and type(m.weight) in (nn.Parameter, torch.Tensor)
        and m.weight.dtype == x.dtype
        for m in linears
    )


def linears(x: torch.Tensor, *modules: nn.Module) -> tuple[torch.Tensor, ...]:
    """``tuple(m(x) for m in modules)``: x (..., in), results (..., out of each). Modules that are more than a plain
    nn.Linear are called as usual."""
    if not torch.is_grad_enabled() or not plain(x, *modules):
        return tuple(m(x) for m in modules)
    return _Linears.apply(x, *(m.weight for m in modules), *(m.bias for m in modules))


class _Refuse(torch.autograd.Function):
    """Passes ``count`` tensors on; a derivative of them raises, where leaving out a part would be silently wrong."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    backward = staticmethod(no_second_derivative)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd.Function that gives (gradients, the tensors that it has used)."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            found, used = backward(ctx, *grads)
        return _Refuse.apply(len(found), *found, *used, *grads) if torch.is_grad_enabled() else found

    return wrapped


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.count = len(parameters) // 2
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        need_x = any(ctx.needs_input_grad[1 : ctx.count + 1])
        ctx.save_for_backward(x if need_x else None, *weights)
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return tuple(nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[tuple, tuple]:
        x, *weights = ctx.saved_tensors
        need_x, *needs = ctx.needs_input_grad
        rows = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
        dx, dweights, dbiases = None, [], []
        for i, (g, w) in enumerate(zip(rows, weights, strict=True)):
            if need_x and g is not None:
                dx = g @ w if dx is None else dx.addmm_(g, w)
            dweights.append(g.t() @ x.reshape(-1, x.shape[-1]) if needs[i] and g is not None else None)
            dbiases.append(g.sum(0) if needs[ctx.count + i] and g is not None else None)
        return (None if dx is None else dx.view(ctx.shape), *dweights, *dbiases), (x, *weights)
