"""A mixture of experts in place of an MLP, and the loss that keeps its experts equally busy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ligermodels.kernels import moe_mlp, moe_route


class Routing(NamedTuple):
    """What the router of one layer decided: ``logits`` (B·S, E) and the chosen ``experts`` (B·S, k) int32."""

    logits: torch.Tensor
    experts: torch.Tensor


class Experts(nn.Module):
    """E gated MLPs as two stacked parameters, named as transformers 5 has them in memory; in each, gate before up.

    ``keep`` says what backward finds of gate and up: them, or with "input" only what they are computed from.
    """

    keep = "gates"

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x (N, H), each row through its k experts (N, k), added with their weights (N, k): (N, H)."""
        keep_gates = self.keep != "input"
        return moe_mlp(x, self.gate_up_proj, self.down_proj, weights, experts, keep_gates=keep_gates)

    def extra_repr(self) -> str:
        return "{}, {} -> {}".format(*self.down_proj.shape)


class SparseMoe(nn.Module):
    """Router (``gate``) and ``experts``: (B, S, H) -> (B, S, H) and the routing.

    ``normalise``: the weights of a token's experts add up to 1. ``jitter`` j > 0: in training the input is multiplied
    by noise from 1 − j to 1 + j (Fedus et al. 2022).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalise: bool = True,
        jitter: float = 0.0,
    ):
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(hidden_size, intermediate_size, num_experts)
        self.top_k, self.normalise, self.jitter = top_k, normalise, jitter

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        if self.training and self.jitter > 0:
            h = h * torch.empty_like(h).uniform_(1 - self.jitter, 1 + self.jitter)
        x = h.reshape(-1, h.shape[-1])  # (B, S, H) -> (B·S, H)
        logits = self.gate(x)  # (B·S, E)
        weights, experts = moe_route(logits, self.top_k, normalise=self.normalise)
        return self.experts(x, weights, experts).view(h.shape), Routing(logits, experts)


def load_balancing_loss(routings: list[Routing], mask: torch.Tensor | None = None) -> torch.Tensor:
    """E · Σ_e f_e · P_e over the tokens of all layers together, fp32 (): Fedus et al. 2022, equations 4 to 6.

    f_e is how often a token chose expert e (Σ f = k), P_e the mean of its probability, through which the gradient goes.
    ``mask`` (B, S) or (B·S,), nonzero = keep, leaves padding out. At its least, k, for equally busy experts.
    """
    n_experts = routings[0].logits.shape[1]
    chosen = probability = count = 0
    for logits, experts in routings:
        keep = torch.ones_like(logits[:, 0], dtype=torch.float32) if mask is None else (mask.reshape(-1) != 0).float()
        # whole numbers: exact in any order
        hits = keep[:, None].expand(experts.shape).reshape(-1)
        chosen = chosen + hits.new_zeros(n_experts).index_add(0, experts.reshape(-1), hits)
        probability = probability + keep @ torch.softmax(logits.float(), -1)
        count = count + keep.sum()
    return n_experts * (chosen * probability).sum() / count.clamp(min=1) ** 2  # of nothing but padding: 0
