"""AdamW with fp32 master weights, fp32 accumulation of gradients, and clipping: what a bf16 model needs to learn.

A bf16 number has 8 bits of precision: an update below 1/256 of a weight is rounded away, and small updates are most.
So the optimiser works on an fp32 copy of each half-precision parameter, and the model gets the copy rounded. Gradients
of micro-batches are added up in fp32 too, as each comes out of backward (Micikevicius et al. 2018).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ligermodels.errors import LigerError


class AdamW:
    """torch's fused AdamW over the parameters of ``model`` that require a gradient.

    master: keep fp32 copies of half-precision parameters (8 bytes a parameter more than pure bf16: copy and gradient,
        and moments in fp32). Without it the optimiser works on the parameters in their own dtype.
    weight_decay: of matrices only; norms and biases are never decayed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        master: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}  # a tied one once
        if not self.parameters:
            raise LigerError("the model has no parameter that requires a gradient: nothing would be trained")
        self.masters = dict(self.parameters)
        for name, p in self.parameters.items():
            if master and p.dtype in (torch.bfloat16, torch.float16):
                self.masters[name] = copy = p.detach().float().requires_grad_()
                p.register_post_accumulate_grad_hook(functools.partial(_collect, copy))
        groups = [
            {"params": [m for m in alike if (m.dim() > 1) == matrix], "weight_decay": weight_decay * matrix}
            for alike in _by_mesh(self.masters.values())
            for matrix in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self.inner = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def step(self, lr: float, clip: float | None = None) -> torch.Tensor:
        """Update at the learning rate ``lr``; returns the norm () of the gradient before it was clipped to ``clip``.

        The norm stays on the device: nothing waits for it. Gradients are dropped.
        """
        norm = _clip([m for m in self.masters.values() if m.grad is not None], clip)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        self._write_back()
        return norm

    @torch.no_grad()
    def _write_back(self) -> None:
        copied = [(p, self.masters[name]) for name, p in self.parameters.items() if self.masters[name] is not p]
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Weights in the precision of training, by name, and torch's optimiser state."""
        return {"weights": {n: m.detach() for n, m in self.masters.items()}, "inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Weights (the model's too) and moments as they were. Raises LigerError if they are of another model."""
        weights = state["weights"]
        found, expected = ({n: tuple(t.shape) for n, t in of.items()} for of in (weights, self.masters))
        if found != expected:
            wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
            raise LigerError(
                f"the checkpoint trains other parameters than this model: {wrong[0]} is {found.get(wrong[0], 'absent')}"
                f" there and {expected.get(wrong[0], 'absent')} here, {len(wrong)} differ"
            )
        for name, master in self.masters.items():
            if weights[name].dtype != master.dtype:
                raise LigerError(f"the checkpoint trains {name} in {weights[name].dtype}, this run in {master.dtype}")
            master.copy_(weights[name])
        self.inner.load_state_dict(state["inner"])
        self._write_back()


def _collect(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Move a gradient that just arrived to the fp32 copy, and free it."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def _by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Shards (DTensors) apart from whole tensors, and from those of another mesh: no operation takes them together."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return list(groups.values())


def _clip(parameters: list[torch.Tensor], clip: float | None) -> torch.Tensor:
    """The norm () over all gradients, and over all ranks where these have shards; scales them to ``clip``."""
    groups = _by_mesh(parameters)
    norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    total = whole[0] if len(whole) == 1 else torch.stack(whole).norm()
    if clip is not None:
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, clip, _on_mesh(total, group[0]))
    return total


def _on_mesh(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``value``, which all ranks have, as what an operation takes together with ``like``."""
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import DTensor, Replicate  # a second to import, for several processes only

    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
