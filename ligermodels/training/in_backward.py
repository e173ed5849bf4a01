"""The optimiser inside the backward: a parameter is updated as soon as its gradient is there, which is then freed.

No gradients are kept: 2 bytes a parameter less in bf16 (15 GiB for Llama-3-8B), at the same arithmetic and speed. After
Lv et al. 2023 (LOMO), with AdamW's moments. What needs all gradients at once cannot go with it: clipping by their norm,
and adding them up over micro-batches.

On CUDA the updates, which only move memory, run beside the backward's products, which only compute: on a stream of
their own, and within ``with optimizer.ahead():`` behind everything else, in the gaps that a product leaves when its
last tiles do not fill the GPU. Llama-3-8B on an H200: a step of 1,346 ms in place of 1,354, of which AdamW alone is 44.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import Variable

from ligermodels.errors import LigerError

WAITING = 1 / 16  # of all gradients' bytes may wait for their update beside the backward, but one always may


def waiting_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """The most bytes of gradients that wait for their update on CUDA while the next ones are computed."""
    sizes = [p.nbytes for p in parameters if p.requires_grad]
    return max(int(sum(sizes) * WAITING), max(sizes, default=0))


class _Beside:
    """The updates of one CUDA device, on a stream of their own beside its backward."""

    def __init__(self, device: torch.device, parameters: Iterable[torch.Tensor]):
        self.device, self.most = device, waiting_bytes(parameters)
        self.updates = torch.cuda.Stream(device)
        self.first = torch.cuda.Stream(device, priority=-1)  # for forward and backward, see ``ahead``
        self.waiting: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # empty only where all is joined
        self.bytes = 0

    def run(self, update: Callable[[], Any], grad: torch.Tensor) -> None:
        """``update()`` behind what is enqueued now, which makes ``grad`` and reads the weight. The gradient's memory is
        the backward's again once that waits for the update: in an order that no allocator's timing changes."""
        if not self.waiting:
            Variable._execution_engine.queue_callback(self.join)  # with the caller's stream as the current one
        backward = torch.cuda.current_stream(self.device)
        self.updates.wait_stream(backward)
        with torch.cuda.stream(self.updates):
            update()
            self.waiting.append((grad, self.updates.record_event()))
        self.bytes += grad.nbytes
        while len(self.waiting) > 1 and self.bytes > self.most:
            first, done = self.waiting.popleft()
            backward.wait_event(done)
            self.bytes -= first.nbytes

    def join(self) -> None:
        """What the current stream does from here on finds all updates done."""
        if self.waiting:
            torch.cuda.current_stream(self.device).wait_stream(self.updates)
            self.waiting.clear()
            self.bytes = 0


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group, those that torch's AdamW over one parameter takes."""
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "capturable")
    return {"fused": True} | {name: group[name] for name in names if name in group}


class AdamWInBackward(torch.optim.Optimizer):
    """torch's fused AdamW, one parameter at a time, from hooks that run while ``loss.backward()`` does.

    Use as any optimiser: ``backward()``, ``step()``, ``zero_grad()``. ``step()`` only marks that a step is over;
    learning rates may be changed before the next backward, by a scheduler too. ``state_dict`` has the layout of torch's
    AdamW, and the two read each other's.

    params: as torch.optim.AdamW, groups with options of their own too, and frozen ones, which move once they are not
        frozen any more; lr, betas, eps, weight_decay: its too. capturable: for CUDA graphs.
    clip, accumulation: only to be refused: LigerError unless None and 1.

    On CUDA the stream that calls ``backward()`` waits for the updates at its end: weights and states may be read then.

    Raises LigerError in a second backward without a ``step()`` between: the first has already moved the weights, so
    gradients of micro-batches cannot add up.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        capturable: bool = False,
        clip: float | None = None,
        accumulation: int = 1,
    ):
        if clip is not None:
            raise LigerError(
                "clipping needs the norm of all gradients before the first update, but the optimiser in backward keeps "
                "none: use torch.optim.AdamW, or do without clipping"
            )
        if accumulation != 1:
            raise LigerError(
                f"accumulation {accumulation}: the optimiser in backward updates after each micro-batch, so their "
                "gradients cannot add up: use torch.optim.AdamW, or one larger batch (model.fit_memory makes room)"
            )
        self._each: dict[torch.Tensor, torch.optim.AdamW] = {}
        self._group_of: dict[torch.Tensor, int] = {}
        self._seen: set[torch.Tensor] = set()
        self._handles = []
        self._besides: dict[torch.device, _Beside] = {}
        torchs = torch.optim.AdamW([torch.empty(0)], lr, betas, eps, weight_decay, fused=True, capturable=capturable)
        super().__init__(params, torchs.defaults)  # all of its options, so that a state that torch reads says "fused"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters are updated in the backward from now on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self._group_of[p] = len(self.param_groups) - 1
            self._each[p] = torch.optim.AdamW([p], **_options(group))
            trained = p.requires_grad
            p.requires_grad_()  # else torch takes no hook; a frozen parameter's waits until there is a gradient
            self._handles.append(p.register_post_accumulate_grad_hook(self._update))
            p.requires_grad_(trained)

    def __getstate__(self) -> Any:
        raise LigerError(
            "the optimiser in backward cannot be copied or pickled, as its hooks are on the parameters: save its "
            "state_dict(), and make another for a copy of the model"
        )

    @torch.no_grad()
    def _update(self, p: torch.Tensor) -> None:
        if p in self._seen:
            raise LigerError(
                "a second backward before step(): the optimiser in backward has moved the weights already, so "
                "gradients of several micro-batches cannot add up"
            )
        self._seen.add(p)
        inner = self._each[p]
        inner.param_groups[0].update(_options(self.param_groups[self._group_of[p]]))
        beside = self._beside(p.device)
        if beside is None:
            inner.step()
        else:
            beside.run(inner.step, p.grad)
        self.state[p] = inner.state[p]
        p.grad = None

    def _beside(self, device: torch.device) -> _Beside | None:
        """None where updates run like anything else."""
        if device.type == "cuda" and device not in self._besides:
            self._besides[device] = _Beside(device, [p for p in self._each if p.device == device])
        return self._besides.get(device)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """``with optimizer.ahead():`` around forward and backward: updates then take only what those leave idle.

        On CUDA a stream of high priority is the current one inside; the one outside waits for it at the end. Else
        nothing happens. Not in the capture of a graph, which has a stream of its own.
        """
        beside = next((self._beside(p.device) for p in self._each), None)
        if beside is None:
            yield
            return
        outside, first = torch.cuda.current_stream(beside.device), beside.first
        first.wait_stream(outside)
        try:
            with torch.cuda.stream(first):
                yield
        finally:
            outside.wait_stream(first)

    def step(self, closure: Any = None) -> None:
        """The step is over: the next backward may update again."""
        if closure is not None:
            raise LigerError("the optimiser in backward has no closure: its updates happen in backward()")
        for beside in self._besides.values():
            beside.join()  # of a backward that an error ended; others have joined
        self._seen.clear()

    def load_state_dict(self, state_dict: Any) -> None:
        """From a state of this class or of torch's AdamW over the same parameters."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # how the updates run is not the state's to say
            group.update(fused=True, foreach=None, capturable=self.defaults["capturable"])
        for p, inner in self._each.items():
            inner.state.clear()
            if p in self.state:
                state = inner.state[p] = self.state[p]
                if "step" in state:  # torch's AdamW has it on the host unless it is fused, too
                    state["step"] = torch.as_tensor(state["step"]).to(p.device, torch.float32)

    def remove(self) -> None:
        """Take the hooks off: gradients are kept again."""
        for handle in self._handles:
            handle.remove()
