"""The gated MLP, down(act(gate(h)) · up(h)), as one node of the graph: what is kept of it, and how long rows are cut.

Bytes saved per token against separate modules, s bytes an element, I wide inside: the activation's backward also emits
the product that the gradient of ``down`` needs (it is neither kept nor rebuilt in a pass of its own: 2·I·s), the
gradient of h adds up inside the products (2·H·s), and its buffers are used twice.

Long rows are cut into tiles where gate and up are not kept: a tile of T tokens needs 3·T·I·s bytes in place of
3·N·I·s. Values are exact; the weights' gradients add up over the tiles in fp32, 12·H·I bytes while a layer's backward
runs. Llama-3-8B at N = 262,144: 1.5 GiB and 0.7 GiB in place of 21 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ligermodels.kernels.glu import glu, glu_backward_into
from ligermodels.layers.linear import differentiable_once, linears, plain
from ligermodels.layers.memory import draws, recompute

TILE = 2**29  # bytes of gate in one tile
WHOLE = 2**31  # up to here gate is not cut


class GatedMLP(nn.Module):
    """Base of the families' MLPs, which own the Linears and say how they are joined.

    ``keep`` says what backward finds: "product" (all), "gates" (the product is rebuilt) or "input" (gate and up too).
    ``replaying``: the layer runs again for its backward, so nobody looks at the values this gives.
    """

    keep = "gates"
    replaying = False

    def gated(self, h: torch.Tensor, gate_up: tuple[nn.Module, ...], down: nn.Module, activation: str) -> torch.Tensor:
        """h (..., H) -> (..., H). ``gate_up``: the two Linears of gate and up, or one with rows [gate | up]."""
        everything = (*gate_up, down)
        if torch.is_grad_enabled() and plain(h, *everything) and all(m.bias is None for m in everything):
            weights = (down.weight, *(m.weight for m in gate_up))
            return _GatedMLP.apply(h, activation, self.keep, self.replaying, *weights)

        def project(h: torch.Tensor) -> Any:
            return gate_up[0](h) if len(gate_up) == 1 else linears(h, *gate_up)

        def multiply(*parts: torch.Tensor) -> torch.Tensor:
            return glu(*_halves(parts), activation)

        parts = project(h)
        parts = parts if isinstance(parts, tuple) else (parts,)
        again = self.keep == "input" and not draws(self)  # a dropout would drop others the second time
        with recompute(parts, project, h, enabled=again):
            product = multiply(*parts)
            with recompute(product, multiply, *parts, enabled=self.keep != "product"):
                return down(product)


def _halves(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """gate and up: as they are, or the halves of the one that holds both."""
    return parts if len(parts) == 2 else parts[0].chunk(2, -1)


def tile_rows(rows: int, row_bytes: int) -> int:
    """Rows of a tile, so that all are equal but for the last: a multiple of 128 of at most about TILE bytes."""
    if rows * row_bytes <= WHOLE:
        return max(rows, 1)
    tiles = -(-rows * row_bytes // TILE)
    return -(-rows // tiles // 128) * 128


def _tiles(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        activation: str,
        keep: str,
        replaying: bool,
        down: torch.Tensor,
        *gate_up: torch.Tensor,
    ) -> torch.Tensor:
        x = h.reshape(-1, h.shape[-1])
        ctx.activation, ctx.keep, ctx.shape = activation, keep, h.shape
        ctx.tile = tile_rows(len(x), down.shape[1] * x.element_size()) if keep == "input" else max(len(x), 1)
        out = x.new_empty(len(x), down.shape[0])
        parts: tuple[torch.Tensor, ...] = ()
        product = None
        if not (replaying and keep == "input"):
            for some in _tiles(len(x), ctx.tile):
                parts = tuple(x[some] @ w.t() for w in gate_up)
                product = glu(*_halves(parts), activation)
                torch.mm(product, down.t(), out=out[some])
        need_h = keep == "input" or any(ctx.needs_input_grad[5:])
        kept = {"product": (*parts, product), "gates": parts, "input": ()}[keep]
        ctx.save_for_backward(h if need_h else None, down, *gate_up, *kept)
        ctx.projections = len(gate_up)
        return out.view(*h.shape[:-1], down.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[tuple, tuple]:
        h, down, *rest = ctx.saved_tensors
        gate_up, kept = rest[: ctx.projections], rest[ctx.projections :]
        need_h, _, _, _, need_down, *need_gate_up = ctx.needs_input_grad
        dy = grad.reshape(-1, grad.shape[-1])
        rows = len(dy)
        x = None if h is None else h.reshape(rows, h.shape[-1])
        single = ctx.tile >= rows
        dx = None
        sums = [
            _Sum(w, single) if needed else None
            for w, needed in zip((down, *gate_up), (need_down, *need_gate_up), strict=True)
        ]
        for some in _tiles(rows, ctx.tile):
            if ctx.keep == "input":
                parts = [x[some] @ w.t() for w in gate_up]
                slopes = parts  # our own: they become their gradients
            else:
                parts = list(kept[: ctx.projections])
                slopes = [torch.empty_like(p) for p in parts]
            product = dy[some] @ down
            (gate, up), (dgate, dup) = _halves(tuple(parts)), _halves(tuple(slopes))
            emit = need_down and ctx.keep != "product"
            glu_backward_into(
                product, gate, up, ctx.activation, dgate=dgate, dup=dup, product=product if emit else None
            )  # fmt: skip
            del gate, up, dgate, dup
            parts = None
            if need_down:
                sums[0].add(dy[some], product if emit else kept[-1])
            del product
            if need_h and dx is None:  # not before: the peak is above
                dx = dy.new_empty(rows, gate_up[0].shape[1])
            for i, (w, slope) in enumerate(zip(gate_up, slopes, strict=True)):
                if need_h and i == 0:
                    torch.mm(slope, w, out=dx[some])
                elif need_h:
                    dx[some].addmm_(slope, w)
                if need_gate_up[i]:
                    sums[1 + i].add(slope, x[some])
        if need_h and dx is None:
            dx = dy.new_zeros(rows, gate_up[0].shape[1])
        found = [None if s is None else s.value() for s in sums]
        return (None if dx is None else dx.view(ctx.shape), None, None, None, *found), (h, down, *gate_up)


class _Sum:
    """The gradient of a weight (out, in): one product in its own dtype, or several added in fp32 and rounded once."""

    def __init__(self, weight: torch.Tensor, single: bool):
        self.weight, self.single, self.total = weight, single, None

    def add(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """grad (N, out), x (N, in)."""
        if self.single or x.dtype == torch.float32:
            self.total = grad.t() @ x if self.total is None else self.total.addmm_(grad.t(), x)
            return
        if not x.is_cuda:
            grad, x = grad.float(), x.float()
            self.total = grad.t() @ x if self.total is None else self.total.addmm_(grad.t(), x)
        elif self.total is None:
            self.total = torch.mm(grad.t(), x, out_dtype=torch.float32)
        else:
            torch.addmm(self.total, grad.t(), x, out_dtype=torch.float32, out=self.total)

    def value(self) -> torch.Tensor:
        if self.total is None:  # no rows
            return torch.zeros_like(self.weight)
        return self.total.to(self.weight.dtype)
