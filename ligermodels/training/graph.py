"""A whole training step as one CUDA graph: forward, backward, clipping and update without a launch from the host.

A small model's step is hundreds of kernels of a few microseconds, and the host cannot launch them that fast. Captured
once, they are replayed by a single call. Shapes must stay as they were, and nothing in the step may wait for the
device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ligermodels.errors import LigerError


class GraphedStep:
    """``loss = step(input_ids=ids, labels=labels)``: one update of ``model`` by ``optimizer``; loss () on the device.

    The first ``warmup`` calls run eagerly (on a stream of their own, as capture wants it) and are real updates; the
    next call captures, and from then on steps are replayed, with the bits of eager steps whose rates are fp32 tensors.

    optimizer: ``capturable=True`` (torch.optim.AdamW(fused=True, capturable=True), AdamWInBackward). Its learning rates
        become tensors on the device, which schedulers of torch and ``set_lr`` write to; a rate that is a plain number
        would be frozen in the graph.
    clip: largest norm of the gradients, or None. backward: runs forward and backward of the batch's tensors and returns
        the loss, by default of ``model(**batch).loss``; it may cut the batch into micro-batches.

    Not for layers that are offloaded: their last copies are joined by nothing inside a step.

    Raises LigerError without CUDA, for an optimiser that cannot be captured, and for a batch of other names or shapes
    than the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        warmup: int = 3,
        backward: Callable[..., torch.Tensor] | None = None,
    ):
        self.parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if not self.parameters or not self.parameters[0].is_cuda:
            raise LigerError("a step can be captured as a graph on a CUDA device only; move the model there first")
        inner = getattr(optimizer, "_each", {0: optimizer}).values()
        if not all(group.get("capturable", False) for each in inner for group in each.param_groups):
            raise LigerError("the optimiser counts its steps on the host: make it with capturable=True")
        if warmup < 1:
            raise LigerError(f"warmup must be at least 1: the first step makes the optimiser's states, found {warmup}")
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), device=self.parameters[0].device)
        self.optimizer, self.clip, self.eager_left = optimizer, clip, warmup
        self.backward = backward or functools.partial(_backward, model)
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: dict[str, torch.Tensor] | None = None

    def set_lr(self, lr: float) -> None:
        """The learning rate of all groups, from the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)

    def __call__(self, **batch: torch.Tensor) -> torch.Tensor:
        self._take(batch)
        if self.eager_left:
            self.eager_left -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self._step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.graph is None:
            torch.cuda.empty_cache()  # what the eager steps left: a graph has memory of its own
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.loss = self._step()
        self.graph.replay()
        return self.loss.clone()

    def _take(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Copy into the tensors that the graph reads."""
        if self.batch is None:
            self.batch = {name: t.to(self.parameters[0].device, copy=True) for name, t in batch.items()}
            return
        found, expected = ({n: (tuple(t.shape), t.dtype) for n, t in b.items()} for b in (batch, self.batch))
        if found != expected:
            raise LigerError(f"a captured step takes the same names, shapes and dtypes each time: expected {expected}, "
                             f"found {found}")  # fmt: skip
        for name, t in batch.items():
            self.batch[name].copy_(t, non_blocking=True)

    def _step(self) -> torch.Tensor:
        loss = self.backward(**self.batch)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _backward(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss
